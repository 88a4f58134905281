"""A whole RL step: the recipe on the inline driver with aligned kernels and with stock torch, update by update in turn.

Timed: one update of the real loop (sampling, grading, audit, forward, backward, optimizer, publication, records). The
recipe's model and warm start are made once before; both sides begin with the same weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.bench.machine import describe
from zerogap.bench.report import CPU_SHARE, Report, bar_text
from zerogap.bench.serve import Channel, Watch
from zerogap.bench.sides import Progress, by_turns, cpu_share, median, python_command, running
from zerogap.config import Recipe, load_recipe
from zerogap.runtime.observer import Observer
from zerogap.runtime.prepare import prepare_model

BAR = 1.00  # seconds of the aligned run / seconds of the standard run
ROOM = 1000  # updates that the recipe is given; the benchmark ends long before


@dataclass(frozen=True)
class StepSetting:
    """model: starts the run in place of the recipe's own model and warm start. recipes: files. overrides: of every
    recipe, `a.b.c=value`. rounds: updates measured after the warm-up."""

    model: str | None
    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    dtypes: tuple[str, ...]
    threads: int
    rounds: int


def compare(setting: StepSetting, progress: Progress) -> Report:
    """Median seconds per update of both sides, for every recipe and dtype."""
    machine = describe(setting.threads, progress)
    rows = []
    for path in setting.recipes:
        with _start_model(path, setting, progress) as start:
            for dtype in setting.dtypes:
                progress(f"step, {path}, {dtype}")
                commands = {}
                for kernels in ("aligned", "standard"):
                    recipe = step_recipe(path, start, setting, dtype, kernels).model_dump(mode="json")
                    commands[kernels] = python_command("step:serve_run", recipe=recipe)
                with running(commands, setting.threads, progress) as sides:
                    answers = by_turns(sides, setting.rounds, lambda _: {}, progress)
                rows.append({"recipe": Path(path).stem, "dtype": dtype} | _row(answers))
    return Report(f"step: seconds per update, median of {setting.rounds} updates", machine, COLUMNS, rows, NOTES)


COLUMNS = (
    ("recipe", "recipe", ""),
    ("dtype", "dtype", ""),
    ("aligned_seconds", "aligned s", ".3f"),
    ("standard_seconds", "standard s", ".3f"),
    ("ratio", "ratio of times", ".2f"),
    ("bar", "bar", ""),
    CPU_SHARE,
    ("aligned_rollout_s", "rollout: aligned s", ".3f"),
    ("standard_rollout_s", "standard s", ".3f"),
    ("aligned_learner_s", "learner: aligned s", ".3f"),
    ("standard_learner_s", "standard s", ".3f"),
    ("aligned_rows", "learner rows: aligned", ",.0f"),
    ("standard_rows", "standard", ",.0f"),
)
NOTES = [
    "The two kernel families draw different tokens from the same seed, so the number of rows differs a little. rollout "
    "is the time inside the engine, learner that of forward, backward and optimizer; audit, grading and records are in "
    "the whole only."
]


def step_recipe(path: str, start: Path, setting: StepSetting, dtype: str, kernels: str) -> Recipe:
    """The recipe as it is timed: from the model `start`, one inline worker, no checkpoints, this dtype and kernels."""
    changes = [
        f"model.path={start}",
        "model.create=null",
        "model.fetch=null",
        "runtime.driver=inline",
        "rollout.workers=1",
        f"rollout.threads={setting.threads}",
        f"learner.threads={setting.threads}",
        f"train.updates={ROOM}",
        "warm_start=null",
        "checkpoint.every=0",
        "logging.tensorboard=false",
        f"model.dtype={dtype}",
        f"model.kernels={kernels}",
        "rollout.dtype=null",
        "rollout.kernels=null",
    ]
    if setting.model is None:  # `start` was made with these
        changes += ["model.max_position_embeddings=null", "model.rope_scaling=null"]
    return load_recipe(path, [*setting.overrides, *changes])


def _row(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {
        f"{kernels}_{key}": median(several, key)
        for kernels, several in answers.items()
        for key in ("seconds", "rollout_s", "learner_s", "rows")
    }
    ratio = row["aligned_seconds"] / row["standard_seconds"]
    return row | {"ratio": ratio, "bar": bar_text(BAR, at_least=False), "cpu_share": cpu_share(answers)}


@contextmanager
def _start_model(path: str, setting: StepSetting, progress: Progress) -> Iterator[Path]:
    """The recipe's model after its warm start, or setting.model; made folders go with the block."""
    if setting.model is not None:
        yield Path(setting.model).absolute()
        return
    with tempfile.TemporaryDirectory() as scratch:
        progress(f"model and warm start of {path}")
        yield prepare_model(load_recipe(path, list(setting.overrides)), scratch, Observer()).absolute()


class Enough(Exception):
    """The parent wants no more updates."""


class Paced(Observer):
    """Lets a run make one update per request. The first lag + 1 updates, which fill the window, are the warm-up."""

    def __init__(self, channel: Channel, warm_up: int) -> None:
        self._channel = channel
        self._warm_up = warm_up
        self._watch = Watch()

    def step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] < self._warm_up:
            return
        if metrics["step"] == self._warm_up:
            self._channel.send({})
        else:
            turn = self._watch.read()
            # The run itself measures wall time.
            scale = turn["cpu_share"] if self._watch.threads == 1 else 1.0
            sampled = metrics.get("tokens/sampled", 0)  # none where the engines had worked ahead
            rollout_s = sampled / metrics["throughput/engine_tokens_per_s"] if sampled else 0.0
            parts = {"rollout_s": scale * rollout_s, "learner_s": scale * metrics["time/update_s"]}
            self._channel.send(turn | parts | {"rows": metrics.get("tokens/learner_rows", 0)})
        if self._channel.receive() is None:
            raise Enough
        self._watch.start()


def serve_run(channel: Channel, recipe: dict[str, Any]) -> None:
    from zerogap.runtime.train import train

    parsed = Recipe.model_validate(recipe)
    with tempfile.TemporaryDirectory() as folder, suppress(Enough):
        train(parsed, Path(folder) / "run", observer=Paced(channel, parsed.train.lag + 1))
