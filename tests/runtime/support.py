"""A tiny recipe that runs in seconds, other ways to drive it, and comparisons of what runs leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers import same_bits
from zerogap.config import Recipe, parse_recipe
from zerogap.runtime.backend import RunSetup
from zerogap.runtime.inline import InlineBackend, build_inline_backend
from zerogap.runtime.observer import Observer

TASK: dict[str, Any] = {
    "name": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 40,
}


def tiny_recipe(model: Path, **changes: Any) -> Recipe:
    """Changes are given as section__key=value."""
    values: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(model)},
        "task": dict(TASK),
        "rollout": {"group_size": 4, "max_new_tokens": 10, "max_running": 8, "page_size": 8, "kv_cache_mb": 0.2},
        "learner": {"learning_rate": 1e-2, "micro_batch_tokens": 512},
        "train": {"updates": 5, "groups_per_update": 3, "lag": 0, "min_ess": 0.0},
        "audit": {"share": 1.0},
        "logging": {"tensorboard": False},
        "runtime": {"driver": "inline", "timeout_s": 120},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return parse_recipe(values)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trajectories(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "trajectories.jsonl").read_text().splitlines()]


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(run_dir / "final_model" / "model.safetensors")
    return tensors


def same_weights(a: Path, b: Path) -> bool:
    """Bitwise the same final model."""
    left, right = final_weights(a), final_weights(b)
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)


class Recorder(Observer):
    """Keeps what it hears; on_step may act in the middle of a run."""

    def __init__(self, on_step: Any = None) -> None:
        self.warnings: list[str] = []
        self.summaries: list[dict[str, Any]] = []
        self._on_step = on_step

    def step(self, metrics: dict[str, Any]) -> None:
        if self._on_step is not None:
            self._on_step(metrics)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def summary(self, values: dict[str, Any]) -> None:
        self.summaries.append(values)


def mid_flight(setup: RunSetup) -> InlineBackend:
    """Weights change in the middle of trajectories."""
    return build_inline_backend(setup, engine_steps_per_update=3)


class StaleBackend(InlineBackend):
    """Claims every version but delivers weights only once (field case 20, W3): the engine stays at version 1."""

    def publish(self, weights: Any) -> None:
        for worker in self.workers:
            engine: Any = worker.engine
            if engine.version >= 1:
                engine._version = weights.version  # the lie
            else:
                worker.publish(weights)


def stale(setup: RunSetup) -> StaleBackend:
    honest = build_inline_backend(setup)
    return StaleBackend(honest.workers, honest.learner)
