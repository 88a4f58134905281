"""`train`: one call from a recipe to a finished run folder. Builds everything, runs the loop, keeps the records."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from zerogap.config import Recipe, dump_recipe
from zerogap.env.stream import PromptStream
from zerogap.env.task import Example, Task, make_task
from zerogap.model.chat import load_tokenizer, render_prompt
from zerogap.model.checkpoint import CheckpointError, read_json
from zerogap.model.config import DecoderConfig
from zerogap.runtime.admission import Admission
from zerogap.runtime.backend import Backend, FinishedGroup, RunFailed, RunSetup
from zerogap.runtime.checkpoint import checkpoints, load_record
from zerogap.runtime.loop import run_loop
from zerogap.runtime.observer import Observer
from zerogap.runtime.prepare import prepare_model
from zerogap.runtime.prompts import PromptSource, kv_tokens, max_prompt_tokens
from zerogap.runtime.records import SUMMARY, Records, summarize, write_atomically
from zerogap.trajectory import SamplingParams

BuildBackend = Callable[[RunSetup], Backend]


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
    happens, no process of the run is left behind.
    """
    run_dir, observer = Path(run_dir).absolute(), observer or Observer()
    started = time.monotonic()
    updates = min(recipe.train.updates, max_steps or recipe.train.updates)
    task = make_task(recipe.task)
    with _sigterm_as_interrupt():
        start = _resumed(recipe, run_dir) if resume else _fresh(recipe, run_dir, observer)
        prompts, setup = _prepare_prompts(recipe, run_dir, task, start)
        observer.stage("starting engines and learner", None)
        backend = (build_backend or _default_backend(recipe))(setup)
        try:
            observer.stage_end()
            return _Run(setup, start, backend, prompts, observer, started).run(updates)
        finally:
            backend.close()


@dataclass(frozen=True)
class _Start:
    """Where a run begins: weights, position in the stream of prompts, seconds spent before."""

    model_folder: Path
    trainer_folder: Path | None = None
    version: int = 0
    position: int = 0
    skipped: int = 0
    seconds: float = 0.0


class _Run:
    """The record keeping around the loop."""

    def __init__(
        self,
        setup: RunSetup,
        start: _Start,
        backend: Backend,
        prompts: PromptSource,
        observer: Observer,
        started: float,
    ) -> None:
        self._recipe, self._run_dir = setup.recipe, setup.run_dir
        self._start, self._started = start, started
        self._backend, self._prompts, self._observer = backend, prompts, observer
        self._warned_ages: set[str] = set()
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
        try:
            run_loop(
                self._backend,
                self._prompts,
                Admission(groups_per_update, recipe.train.lag, start.version, updates),
                start.version,
                updates,
                recipe.runtime.timeout_s,
                self._on_update,
            )
        finally:
            self._records.close()
        final_model = self._run_dir / "final_model"
        self._backend.save_model(final_model)
        summary = summarize(self._run_dir, self._seconds(), final_model, recipe.model.kernels, recipe.model.dtype)
        write_atomically(self._run_dir / SUMMARY, json.dumps(summary, indent=2) + "\n")
        self._observer.summary(summary)
        return summary

    def _on_update(self, version: int, metrics: dict[str, Any], groups: list[FinishedGroup]) -> None:
        line = {"step": version, "version": version} | metrics
        self._records.step(line, groups)
        self._observer.step(line)
        self._warn_low_ess(line)
        every = self._recipe.checkpoint.every
        if version == self._updates or (every and version % every == 0):
            self._save(version)

    def _save(self, version: int) -> None:
        position, skipped = self._prompts.cursor(version * self._recipe.train.groups_per_update)
        record = {
            "position": position,
            "prompts_skipped": skipped,
            "seconds": self._seconds(),
            "recipe": self._recipe.model_dump(mode="json"),
        }
        self._backend.save_checkpoint(self._run_dir, record, self._recipe.checkpoint.keep)

    def _seconds(self) -> float:
        return self._start.seconds + time.monotonic() - self._started

    def _warn_low_ess(self, line: dict[str, Any]) -> None:
        """Once per age: the policy moves too far within the lag window for the estimator to be worth much."""
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


def _fresh(recipe: Recipe, run_dir: Path, observer: Observer) -> _Start:
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise RunFailed(
            f"output directory {run_dir} already holds a run; add --resume to go on with it, or give another "
            "--output-dir"
        )
    if recipe.model.path is not None:
        DecoderConfig.from_hf(read_json(Path(recipe.model.path), "config.json"))  # refuse before anything is written
    run_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(run_dir / "recipe.yaml", dump_recipe(recipe))
    return _Start(prepare_model(recipe, run_dir, observer))


def _resumed(recipe: Recipe, run_dir: Path) -> _Start:
    found = checkpoints(run_dir)
    if not found:
        raise CheckpointError(
            f"--resume: {run_dir} holds no checkpoint (checkpoint.every was {recipe.checkpoint.every}); start again "
            "in another --output-dir"
        )
    record = load_record(found[-1], recipe)
    write_atomically(run_dir / "recipe.yaml", dump_recipe(recipe))
    return _Start(
        model_folder=found[-1],
        trainer_folder=found[-1],
        version=record["version"],
        position=record["position"],
        skipped=record["prompts_skipped"],
        seconds=record["seconds"],
    )


def _prepare_prompts(recipe: Recipe, run_dir: Path, task: Task, start: _Start) -> tuple[PromptSource, RunSetup]:
    tokenizer = load_tokenizer(start.model_folder)
    config = DecoderConfig.from_hf(read_json(start.model_folder, "config.json"))

    def render(example: Example) -> list[int]:
        return render_prompt(tokenizer, example.messages)

    rollout = recipe.rollout
    cache = rollout.kv_tokens or kv_tokens(task, render, rollout, config.max_position_embeddings)
    prompts = PromptSource(
        task,
        PromptStream(len(task), recipe.seed),
        render,
        max_prompt_tokens(rollout, config.max_position_embeddings, cache),
        rollout.group_size,
        SamplingParams(rollout.max_new_tokens, rollout.temperature, tuple(rollout.stop), recipe.seed),
        start.position,
        start.skipped,
    )
    return prompts, RunSetup(recipe, run_dir, start.model_folder, start.trainer_folder, start.version, cache)


def _default_backend(recipe: Recipe) -> BuildBackend:
    """Imported here: an inline run does not load Ray."""
    if recipe.runtime.driver == "inline":
        from zerogap.runtime.inline import build_inline_backend

        return build_inline_backend
    from zerogap.runtime.ray_backend import RayBackend

    return RayBackend


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, with every process closed. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

