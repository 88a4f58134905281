"""`train`: one call from a recipe to a finished run folder. Builds everything, runs the loop, keeps the records."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from zerogap.config import Recipe
from zerogap.env.task import make_task
from zerogap.runtime.admission import Admission
from zerogap.runtime.backend import Backend, FinishedGroup, RunSetup, Weights
from zerogap.runtime.checkpoint import checkpoints, remove_leftovers
from zerogap.runtime.evaluation.plan import Plan
from zerogap.runtime.evaluation.training import Evaluations, Evaluator, InlineEvaluator, Outcome, prepare_evaluation
from zerogap.runtime.folder import new_run_folder
from zerogap.runtime.loop import run_loop
from zerogap.runtime.observer import Observer
from zerogap.runtime.prompts import PromptSource
from zerogap.runtime.records import SUMMARY, Records, summarize, write_atomically
from zerogap.runtime.start import Start, absolute_paths, fresh_start, prepare_prompts, resumed_start
from zerogap.runtime.weight_store import remove_stored_weights

BuildBackend = Callable[[RunSetup], Backend]

log = logging.getLogger("zerogap")


def train(
    recipe: Recipe,
    run_dir: str | Path,
    resume: bool = False,
    max_steps: int | None = None,
    observer: Observer | None = None,
    build_backend: BuildBackend | None = None,
) -> dict[str, Any]:
    """Train and return the figures of summary.json.

    resume: go on from the newest checkpoint in run_dir. max_steps: end after this many updates in all (schedules keep
    their length), with a checkpoint to go on from. build_backend: default by recipe.runtime.driver.
    Raises RunFailed, CheckpointError, TaskError, RecipeError; KeyboardInterrupt on Ctrl-C and on SIGTERM. Whatever
    happens, no process of the run is left behind, and no folder by a new run that ends before its first update.
    """
    run_dir, observer = Path(run_dir).absolute(), observer or Observer()
    recipe = absolute_paths(recipe)
    started = time.monotonic()
    updates = min(recipe.train.updates, max_steps or recipe.train.updates)
    task = make_task(recipe.task)
    with _interruptible() as interrupted, nullcontext() if resume else new_run_folder(run_dir):
        start = resumed_start(recipe, run_dir) if resume else fresh_start(recipe, run_dir, observer)
        if resume:
            remove_leftovers(run_dir)
            remove_stored_weights(run_dir)
        with _driver_log(run_dir):
            prompts, setup = prepare_prompts(recipe, run_dir, task, start, observer)
            evaluation = prepare_evaluation(setup) if recipe.evaluation.every else None
            if not recipe.aligned:
                observer.warning(_not_aligned(recipe))
            observer.stage("starting engines and learner")
            backend = (build_backend or _default_backend(recipe))(setup)
            evaluator = None
            try:
                evaluator = None if evaluation is None else _evaluator(*evaluation)
                observer.stage_end()
                return _Run(setup, start, backend, evaluator, prompts, observer, started, interrupted).run(updates)
            except KeyboardInterrupt:
                observer.warning(_how_to_go_on(recipe, run_dir))
                raise
            finally:
                if evaluator is not None:
                    evaluator.close()
                backend.close()
                remove_stored_weights(run_dir)


class _Run:
    """The record keeping around the loop."""

    def __init__(
        self,
        setup: RunSetup,
        start: Start,
        backend: Backend,
        evaluator: Evaluator | None,
        prompts: PromptSource,
        observer: Observer,
        started: float,
        interrupted: threading.Event,
    ) -> None:
        self._recipe, self._run_dir = setup.recipe, setup.run_dir
        self._start, self._started = start, started
        self._interrupted = interrupted
        self._backend, self._prompts, self._observer = backend, prompts, observer
        self._evaluator = evaluator
        self._evaluations: Evaluations | None = None
        self._warned_ages: set[str] = set()
        self._restarts = 0
        self._updates = 0

    def run(self, updates: int) -> dict[str, Any]:
        recipe, start = self._recipe, self._start
        self._updates = updates
        groups_per_update = recipe.train.groups_per_update
        self._records = Records(
            self._run_dir,
            start.version,
            start.version * groups_per_update,
            recipe.logging.tensorboard,
            recipe.logging.trajectories_mb,
        )
        final_model = self._run_dir / "final_model"
        if self._evaluator is not None:
            every = recipe.evaluation.every
            self._evaluations = Evaluations(self._evaluator, every, updates, self._on_evaluation)
        try:
            run_loop(
                self._backend,
                self._prompts,
                Admission(groups_per_update, recipe.train.lag, start.version, updates),
                start.version,
                updates,
                recipe.runtime.timeout_s,
                self._on_update,
                recipe.train.hold_lag,
            )
            self._backend.save_model(final_model)
            if self._evaluations is not None:
                self._observer.stage("last evaluation")
                self._evaluations.finish(recipe.runtime.timeout_s)
                self._observer.stage_end()
        finally:
            self._records.close()
        summary = summarize(self._run_dir, self._seconds(), final_model, recipe)
        write_atomically(self._run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        self._observer.summary(summary)
        return summary

    def _on_update(self, weights: Weights, metrics: dict[str, Any], groups: list[FinishedGroup]) -> None:
        version = weights.version
        line = {"step": version, "version": version} | metrics
        if self._evaluations is not None:
            line |= self._evaluations.after_update(weights)
        self._records.step(line, groups)
        self._observer.step(line)
        self._warn(line)
        # Asked after each update, saved or not: the source forgets what is consumed.
        cursor = self._prompts.cursor(version * self._recipe.train.groups_per_update)
        every = self._recipe.checkpoint.every
        if version == self._updates or (every and version % every == 0):
            self._save(*cursor)
        if self._interrupted.is_set():
            raise KeyboardInterrupt

    def _on_evaluation(self, outcome: Outcome) -> None:
        self._records.evaluation(outcome.line(), outcome.metrics())
        if outcome.figures is None:
            self._observer.warning(f"the evaluation of version {outcome.version} is missing: {outcome.missing}")

    def _save(self, position: int, skipped: int) -> None:
        record = {
            "position": position,
            "prompts_skipped": skipped,
            "seconds": self._seconds(),
            "recipe": self._recipe.model_dump(mode="json"),
        }
        self._backend.save_checkpoint(self._run_dir, record, self._recipe.checkpoint.keep)

    def _seconds(self) -> float:
        return self._start.seconds + time.monotonic() - self._started

    def _warn(self, line: dict[str, Any]) -> None:
        if line["queue/restarts"] > self._restarts:
            self._restarts = line["queue/restarts"]
            self._observer.warning(
                f"step {line['step']}: a rollout worker died and was started again ({self._restarts} so far); its "
                "unfinished groups are sampled anew; see logs/driver.log"
            )
        if line["aligned"] and line.get("bitwise/unequal"):
            self._observer.warning(
                f"step {line['step']}: bits differ in an aligned run: {line['bitwise/first_unequal']}"
            )
        limit = self._recipe.train.min_ess
        for key, value in line.items():
            if key.startswith("ess/age_") and value < limit and key not in self._warned_ages:
                self._warned_ages.add(key)
                age = key.removeprefix("ess/age_")
                self._observer.warning(
                    f"step {line['step']}: effective sample size of tokens {age} update(s) old is {value:.2f}, below "
                    f"train.min_ess {limit:g}: the policy moves too far within the lag window; lower "
                    f"learner.learning_rate ({self._recipe.learner.learning_rate:g}) or train.lag "
                    f"({self._recipe.train.lag})"
                )


def _not_aligned(recipe: Recipe) -> str:
    """The rule for audit.on_unequal, whose default would stop such a run at once."""
    return (
        f"aligned: no (engine {recipe.engine_arithmetic}, learner {recipe.model.arithmetic}): unequal bits are "
        "expected; the audit counts them and never stops the run, whatever audit.on_unequal says"
    )


def _how_to_go_on(recipe: Recipe, run_dir: Path) -> str:
    """What an interrupted run can be resumed from."""
    found = checkpoints(run_dir)
    if found:
        return f"interrupted; --resume goes on from {found[-1]}"
    return (
        "interrupted before the first checkpoint, so --resume has nothing to go on from; "
        f"checkpoint.every={recipe.checkpoint.every} is the number of updates between two (0: only one at the end)"
    )


def _default_backend(recipe: Recipe) -> BuildBackend:
    """Imported here: an inline run does not load Ray."""
    if recipe.runtime.driver == "inline":
        from zerogap.runtime.inline import build_inline_backend

        return build_inline_backend
    from zerogap.runtime.ray_backend import RayBackend

    return RayBackend


def _evaluator(setup: RunSetup, plan: Plan) -> Evaluator:
    """On Ray, which runs by now, in another process; imported here as the backend is."""
    if setup.recipe.runtime.driver == "inline":
        return InlineEvaluator(setup, plan)
    from zerogap.runtime.evaluation.on_ray import RayEvaluator

    return RayEvaluator(setup, plan)


@contextmanager
def _driver_log(run_dir: Path) -> Iterator[None]:
    """logs/driver.log holds what this process logs, and the error that ended the run."""
    (run_dir / "logs").mkdir(exist_ok=True)
    handler = logging.FileHandler(run_dir / "logs" / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        log.info("process %d", os.getpid())
        yield
    except BaseException as error:
        log.error("the run ended: %s: %s", type(error).__name__, error)
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """SIGTERM ends a run as Ctrl-C does, with every process closed. Only the main thread may set handlers.

    The event is set beside the KeyboardInterrupt: Python drops an exception that a signal raises inside a destructor
    or a library's callback, and the run asks for the event after each update so that no request to end is lost.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        requested.set()
        raise KeyboardInterrupt(f"signal {number}")

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
