"""Where a run begins: a new one from a prepared model, a resumed one from the newest checkpoint of its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap import config
from zerogap.config import Recipe, dump_recipe
from zerogap.env.stream import PromptStream
from zerogap.env.task import Task, TaskError, make_task
from zerogap.model.checkpoint import CheckpointError, check_folder, check_tokenizer
from zerogap.model.turns import CannotRender, ChatTurns
from zerogap.runtime.backend import RunSetup
from zerogap.runtime.checkpoint import checkpoints, load_record
from zerogap.runtime.observer import Observer
from zerogap.runtime.prepare import prepare_model
from zerogap.runtime.prompts import PromptSource, prompt_rules
from zerogap.runtime.records import write_atomically


@dataclass(frozen=True)
class Start:
    """Where a run begins: weights, position in the stream of prompts, seconds spent before."""

    model_folder: Path
    trainer_folder: Path | None = None
    version: int = 0
    position: int = 0
    skipped: int = 0
    seconds: float = 0.0


def absolute_paths(recipe: Recipe) -> Recipe:
    """Worker processes may have another working directory."""
    changes: dict[str, Any] = {"task": _absolute_task(recipe.task)}
    if recipe.evaluation.task is not None:
        task = _absolute_task(recipe.evaluation.task)
        changes["evaluation"] = recipe.evaluation.model_copy(update={"task": task})
    if recipe.model.path is not None:
        changes["model"] = recipe.model.model_copy(update={"path": str(Path(recipe.model.path).absolute())})
    return recipe.model_copy(update=changes)


def _absolute_task(task: config.Task) -> config.Task:
    paths = {
        key: str(Path(getattr(task, key)).absolute()) for key in ("jsonl", "file") if getattr(task, key) is not None
    }
    return task.model_copy(update=paths)


def check_inputs(recipe: Recipe) -> None:
    """What can be refused before anything loads: the model folder by its headers, and a warm start whose task has no
    worked solutions. Raises CheckpointError, UnsupportedModel or TaskError."""
    if recipe.model.path is not None:
        folder = Path(recipe.model.path)
        check_folder(folder)
        check_tokenizer(folder)
    if recipe.warm_start is not None:
        task = make_task(recipe.task)
        task.solution(task.example(0))


def fresh_start(recipe: Recipe, run_dir: Path, observer: Observer) -> Start:
    """run_dir is new (folder.new_run_folder)."""
    check_inputs(recipe)
    write_atomically(run_dir / "recipe.yaml", dump_recipe(recipe))
    return Start(prepare_model(recipe, run_dir, observer))


def resumed_start(recipe: Recipe, run_dir: Path) -> Start:
    found = checkpoints(run_dir)
    if not found:
        raise CheckpointError(
            f"--resume: {run_dir} holds no checkpoint (checkpoint.every was {recipe.checkpoint.every}); start again "
            "in another --output-dir"
        )
    record = load_record(found[-1], recipe)
    write_atomically(run_dir / "recipe.yaml", dump_recipe(recipe))
    return Start(
        model_folder=found[-1],
        trainer_folder=found[-1],
        version=record["version"],
        position=record["position"],
        skipped=record["prompts_skipped"],
        seconds=record["seconds"],
    )


def prepare_prompts(
    recipe: Recipe, run_dir: Path, task: Task, start: Start, observer: Observer
) -> tuple[PromptSource, RunSetup]:
    rules = prompt_rules(recipe, start.model_folder, task)
    _check_template(recipe, rules.turns, observer)
    prompts = PromptSource(
        task,
        PromptStream(len(task), recipe.seed),
        rules.render,
        rules.longest,
        recipe.rollout.group_size,
        rules.sampling,
        start.position,
        start.skipped,
    )
    setup = RunSetup(recipe, run_dir, start.model_folder, start.trainer_folder, start.version, rules.kv_tokens)
    return prompts, setup


def _check_template(recipe: Recipe, turns: ChatTurns, observer: Observer) -> None:
    """Says when episodes will be cut into segments. TaskError where the chat template cannot show an observation."""
    if recipe.task.turn_limit == 1:
        return
    role = "user" if recipe.task.tools is None else "tool"
    try:
        if not turns.append_only(role):
            observer.warning(
                f"the model's chat template rewrites earlier turns once a {role} message follows, so each turn of an "
                "episode becomes a segment with its own prompt (docs/tools.md)"
            )
    except CannotRender as error:
        raise TaskError(f"episodes of several turns need a chat template with {role} messages: {error}") from error
