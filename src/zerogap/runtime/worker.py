"""The two Ray actors: a rollout worker with its own engine thread, and the learner. Thin shells around the classes
that also run inline; what is here is threads, queues, the log file and the object store.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch

from zerogap.runtime.backend import EngineStats, FinishedGroup, Item, RunSetup, Update, Weights
from zerogap.runtime.identity import Identity
from zerogap.runtime.living import Living

POLL_S = 1.0  # a poll without news returns after this long, so that a lost worker is noticed

log = logging.getLogger("zerogap")


@dataclass(frozen=True)
class Report:
    """What a rollout worker tells the driver: groups finished since the last report, counters since its start."""

    finished: list[FinishedGroup]
    stats: EngineStats


class RolloutActor:
    """Commands (default concurrency group, in the order sent) only fill a queue; one thread owns the engine and takes
    them between two steps; reports come from a concurrency group of their own."""

    def __init__(self, setup: RunSetup, index: int) -> None:
        start_process_log(setup.run_dir, f"rollout-{index}")
        from zerogap.runtime.rollout_worker import build_rollout_worker  # here: the learner needs none of it

        self._worker, self._identity = build_rollout_worker(setup)
        self._threads = setup.recipe.rollout.threads
        self._commands: queue.Queue[Weights | list[Item]] = queue.Queue()
        self._reports: queue.Queue[Report | Exception] = queue.Queue()
        self._stats = self._worker.stats()  # from now on written by the engine thread only
        threading.Thread(target=self._drive, name="engine", daemon=True).start()

    def identity(self) -> Identity:
        return self._identity

    def submit(self, items: Sequence[Item]) -> None:
        self._commands.put(list(items))

    def publish(self, weights: Weights, arrays: Any) -> None:
        """arrays: weights.tensors; apart, so that Ray maps it into this process before the call."""
        self._commands.put(replace(weights, tensors=arrays))

    @ray.method(concurrency_group="reports")
    def report(self) -> Report:
        """The groups finished since the last call; waits up to POLL_S for the first. Raises what ended the engine."""
        try:
            reports = [self._reports.get(timeout=POLL_S)]
        except queue.Empty:
            return Report([], self._stats)
        while not self._reports.empty():
            reports.append(self._reports.get())
        for report in reports:
            if isinstance(report, Exception):
                raise report
        good = [report for report in reports if isinstance(report, Report)]
        return Report([group for report in good for group in report.finished], good[-1].stats)

    def _drive(self) -> None:
        torch.set_num_threads(self._threads)  # the setting belongs to the thread that computes
        try:
            while True:
                self._take_commands(block=not self._worker.has_work())
                finished = self._worker.step()
                self._stats = self._worker.stats()  # here: counting walks through what a step changes
                if finished:
                    self._reports.put(Report(finished, self._stats))
        except Exception as error:
            log.exception("the engine ended")
            self._reports.put(error)

    def _take_commands(self, block: bool) -> None:
        """All commands that wait. Of several versions only the newest is loaded: a worker that was busy does not work
        through those that it missed (field case 40)."""
        commands = [self._commands.get()] if block else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        versions = [command for command in commands if isinstance(command, Weights)]
        if versions:
            self._worker.publish(versions[-1])
            log.info("weights of version %d", versions[-1].version)
        for command in commands:
            if not isinstance(command, Weights):
                self._worker.submit(command)


class LearnerActor:
    """New weights go into the object store once; every engine maps the same copy."""

    def __init__(self, setup: RunSetup) -> None:
        start_process_log(setup.run_dir, "learner")
        from zerogap.runtime.learner_worker import LearnerWorker

        self._worker = LearnerWorker(setup)

    def identity(self) -> Identity:
        return self._worker.identity()

    def update(self, groups: list[FinishedGroup], living: Living) -> Update:
        try:
            update = self._worker.update(groups, living)
        except Exception:
            log.exception("the update failed")
            raise
        return replace(update, weights=replace(update.weights, tensors=ray.put(update.weights.tensors)))

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        return self._worker.save_checkpoint(run_dir, record, keep)

    def save_model(self, folder: Path) -> None:
        self._worker.save_model(folder)


def start_process_log(run_dir: Path, name: str) -> None:
    """Everything this process prints or logs, from C++ too, goes to run_dir/logs/<name>.log."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    log.info("process %d", os.getpid())
