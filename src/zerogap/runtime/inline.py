"""The whole run in one process, in a fixed order: tests, replay, debugging, and runs at an exact lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerogap.runtime.backend import EngineStats, Events, FinishedGroup, Item, RunSetup, Update, Weights
from zerogap.runtime.identity import check_identities
from zerogap.runtime.learner_worker import LearnerWorker
from zerogap.runtime.living import Living
from zerogap.runtime.rollout_worker import RolloutWorker, build_rollout_worker


class InlineBackend:
    """Virtual time: engines and learner take turns.

    engine_steps_per_update: None: engines finish all they were given before each update, so every token is trained
    exactly `train.lag` updates after the weights that sampled it (fewer at the start). A number n: each engine makes
    n steps beside each update, with the weights before it, and otherwise runs only until the next batch is complete;
    weights then change in the middle of trajectories, as they do on Ray, but the same way in every run.
    """

    def __init__(
        self, workers: Sequence[RolloutWorker], learner: LearnerWorker, engine_steps_per_update: int | None = None
    ) -> None:
        self.workers = list(workers)
        self.learner = learner
        self._engine_steps = engine_steps_per_update
        self._finished: list[FinishedGroup] = []
        self._update: Update | None = None

    def submit(self, items: Sequence[Item]) -> None:
        for request, example in items:
            self.workers[request.group_id % len(self.workers)].submit([(request, example)])

    def train(self, groups: list[FinishedGroup], living: Living) -> None:
        if self._engine_steps is None:
            self._drain()
        else:
            for _ in range(self._engine_steps):
                self._step_all()
        self._update = self.learner.update(groups, living)

    def wait(self, timeout_s: float) -> Events:
        """timeout_s has no meaning here: nothing to do is a deadlock at once (empty events)."""
        if self._update is None:
            if self._engine_steps is None:
                self._drain()
            while not self._finished and self._has_work():
                self._step_all()
        events = Events(self._finished, self._update)
        self._finished, self._update = [], None
        return events

    def publish(self, weights: Weights) -> None:
        for worker in self.workers:
            worker.publish(weights)

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        return self.learner.save_checkpoint(run_dir, record, keep)

    def save_model(self, folder: Path) -> None:
        self.learner.save_model(folder)

    def stats(self) -> EngineStats:
        return sum((worker.stats() for worker in self.workers), EngineStats())

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers = []

    def _has_work(self) -> bool:
        return any(worker.has_work() for worker in self.workers)

    def _step_all(self) -> None:
        for worker in self.workers:
            if worker.has_work():
                self._finished += worker.step()

    def _drain(self) -> None:
        while self._has_work():
            self._step_all()


def build_inline_backend(setup: RunSetup, engine_steps_per_update: int | None = None) -> InlineBackend:
    """Load everything in this process. RunFailed when an engine does not match the learner."""
    built = [build_rollout_worker(setup) for _ in range(setup.recipe.rollout.workers)]
    learner = LearnerWorker(setup)
    check_identities(setup.recipe, learner.identity(), [identity for _, identity in built])
    return InlineBackend([worker for worker, _ in built], learner, engine_steps_per_update)
