"""What the training loop asks of the machinery below it: one small protocol, implemented inline and on Ray.

The loop knows groups, versions and metrics; a backend knows engines, the learner and how weights travel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from zerogap.config import Recipe
from zerogap.env.task import Example
from zerogap.runtime.living import Living
from zerogap.trajectory import GroupRequest, Trajectory

Item = tuple[GroupRequest, Example]


class RunFailed(RuntimeError):
    """A run that cannot go on; the message says why and what to do. The command exits with a code != 0."""


class BitsUnequal(RunFailed):
    """The audit of an aligned run found a token whose logprob the learner does not reproduce bit for bit."""


@dataclass(frozen=True)
class RunSetup:
    """What every process of a run is built from (picklable).

    model_folder: Hugging Face folder with the weights of `start_version` and the tokenizer.
    trainer_folder: checkpoint that holds the optimizer's state, or None at the start of a run.
    kv_tokens: tokens of KV cache per engine (from the recipe's memory budget or derived from the task).
    """

    recipe: Recipe
    run_dir: Path
    model_folder: Path
    trainer_folder: Path | None = None
    start_version: int = 0
    kv_tokens: int = 4096


@dataclass(frozen=True)
class FinishedGroup:
    """All samples of one prompt, in order of their sample index, graded (reward or error)."""

    group_id: int
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Weights:
    """One version of the weights on its way to the engines.

    tensors: name -> array as made by transfer.to_arrays, or a Ray reference to that.
    digest: model.decoder.snapshot_digest of the tensors, by the learner; every receiver computes it before use.
    """

    version: int
    digest: str
    tensors: Any


@dataclass(frozen=True)
class Update:
    """One optimizer update: the version it made, its metrics, and the new weights."""

    version: int
    metrics: dict[str, Any]
    weights: Weights


@dataclass
class Events:
    """What happened since the last wait."""

    finished: list[FinishedGroup] = field(default_factory=list)
    update: Update | None = None

    def __bool__(self) -> bool:
        return bool(self.finished) or self.update is not None


@dataclass
class EngineStats:
    """Counters since the start of the process, summed over engines.

    busy_s: seconds spent in Engine.step. idle_s: seconds without anything to sample because every episode waited for
    its environment. environment_s: seconds that calls of environments took. retried: episodes begun again, by the class
    of error. kv_pages, kv_bytes: size of the KV caches. workers: engines that the sum covers. restarts: workers started
    again.
    """

    sampled_tokens: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    environment_s: float = 0.0
    retried: Counter[str] = field(default_factory=Counter)
    kv_pages: int = 0
    kv_bytes: int = 0
    workers: int = 0
    restarts: int = 0

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Backend(Protocol):
    def submit(self, items: Sequence[Item]) -> None:
        """Hand groups to the engines. Each comes back exactly once, from `wait`, in any order."""
        ...

    def train(self, groups: list[FinishedGroup], living: Living) -> None:
        """Start one update on these groups; its end arrives from `wait`. Only while no other update runs.

        living: the weight versions that other groups may name (for the audit's weight store).
        """
        ...

    def wait(self, timeout_s: float) -> Events:
        """Return as soon as a group is finished or the update ended; empty events after timeout_s without either."""
        ...

    def publish(self, weights: Weights) -> None:
        """Send weights to every engine. Groups submitted later are sampled with these or newer ones."""
        ...

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        """Write model, optimizer and `record`; only while no update runs."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the current weights as a Hugging Face folder; only while no update runs."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """End every process and free every resource; may be called twice."""
        ...
