"""The model a run starts from: a given, created or fetched folder, then a supervised warm start when asked for.

`zerogap sft` and `zerogap model create` go through the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from zerogap.config import CreateModel, Recipe
from zerogap.env.python_tool import tool_schemas
from zerogap.env.stream import PromptStream
from zerogap.env.task import Task, TaskError, make_task
from zerogap.learner.sft import train_sft
from zerogap.model.chat import load_tokenizer
from zerogap.model.checkpoint import load_decoder, save_decoder
from zerogap.model.context import change_context
from zerogap.model.create import create_model
from zerogap.model.fetch import cached_model, fetch_model
from zerogap.model.turns import ChatTurns, Supervised
from zerogap.runtime.observer import Observer

TOKENIZER_EXAMPLES = 2000  # prompts whose text a new tokenizer is built on
BASE_MODEL, START_MODEL = "base_model", "start_model"  # folders of a run


def prepare_model(recipe: Recipe, run_dir: str | Path, observer: Observer) -> Path:
    """The Hugging Face folder whose weights are version 0. Raises what its parts raise (TaskError, FetchError,
    CheckpointError); each model folder is whole or absent.

    A created model, and a given one with another context, goes to run_dir/base_model, the result of a warm start to
    run_dir/start_model.
    """
    run_dir = Path(run_dir)
    base = _base_model(recipe, run_dir / BASE_MODEL, observer)
    if recipe.warm_start is None:
        return base
    return warm_start(recipe, base, run_dir / START_MODEL, observer)


def prepared_model(recipe: Recipe, run_dir: Path) -> Path | None:
    """Where prepare_model has left the weights of version 0; None when nothing is there any more."""
    model = recipe.model
    if recipe.warm_start is not None:
        folder = run_dir / START_MODEL
    elif model.create is not None or model.changes_context:
        folder = run_dir / BASE_MODEL
    else:
        folder = Path(model.path) if model.path is not None else cached_model(str(model.fetch))
    return folder if folder.is_dir() else None


def create_for_task(spec: CreateModel, task: Task, folder: str | Path, seed: int) -> Path:
    """A new model whose tokenizer can spell the prompts of the task, and its solutions where it has them."""

    def texts() -> Iterator[str]:
        for index in range(min(len(task), TOKENIZER_EXAMPLES)):
            example = task.example(index)
            yield from (message["content"] for message in example.messages)
            with suppress(TaskError):  # a task without worked solutions: its prompts must do
                solution = task.solution(example)
                yield from [solution] if isinstance(solution, str) else (turn["content"] for turn in solution)

    return create_model(spec, texts(), folder, seed)


def warm_start(recipe: Recipe, base: Path, folder: Path, observer: Observer) -> Path:
    """Train `base` on worked solutions of the recipe's task (recipe.warm_start); the result goes to `folder`."""
    settings = recipe.warm_start
    if settings is None:
        raise ValueError("the recipe has no warm_start section; add one (steps, examples_per_step, learning_rate)")
    task = make_task(recipe.task)
    tokenizer = load_tokenizer(base)
    decoder = load_decoder(base, recipe.model.kernels, recipe.model.dtype, trainable=True)
    longest = decoder.config.max_position_embeddings
    observer.stage("warm start", settings.steps)
    with _threads(recipe.learner.threads):
        train_sft(
            decoder,
            _batches(task, tokenizer, tool_schemas(recipe.task), settings.examples_per_step, longest, recipe.seed),
            settings.learning_rate,
            settings.warmup_steps,
            settings.steps,
            recipe.learner.micro_batch_tokens,
            lambda done, loss: observer.progress(done, f"loss {loss:.3f}"),
            recipe.learner.activation_checkpointing,
        )
    save_decoder(decoder, folder, base)
    observer.stage_end()
    return folder


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Torch's default, one thread per core, is several times slower than one thread on a small model when the cores are
    shared: threads that wait for each other spin. Aligned kernels give the same bits with any number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _base_model(recipe: Recipe, folder: Path, observer: Observer) -> Path:
    model = recipe.model
    given = None if model.path is None else Path(model.path)
    if model.fetch is not None:
        observer.stage(f"fetch {model.fetch}")
        given = fetch_model(model.fetch, progress=lambda text: observer.progress(0, text))
        observer.stage_end()
    if given is not None:
        if not model.changes_context:
            return given
        scaling = None if model.rope_scaling is None else model.rope_scaling.model_dump(exclude_none=True)
        return change_context(given, folder, model.max_position_embeddings, scaling)
    assert model.create is not None
    observer.stage("create model")
    create_for_task(model.create, make_task(recipe.task), folder, recipe.seed)
    observer.stage_end()
    return folder


def _batches(
    task: Task, tokenizer: Any, schemas: list[dict[str, Any]], size: int, longest: int, seed: int
) -> Iterator[list[Supervised]]:
    """Endless batches of `size` examples in the stream's order; those longer than the model's context are left out."""
    order = PromptStream(len(task), seed)
    turns = ChatTurns(tokenizer, schemas)
    position = skipped = 0
    while True:
        batch: list[Supervised] = []
        taken = 0
        while taken < size:
            example = task.example(order[position])
            position += 1
            segments = turns.solution(example.messages, task.solution(example))
            if all(len(ids) <= longest for ids, _ in segments):
                batch += segments
                taken += 1
                skipped = 0
                continue
            skipped += 1
            if skipped > len(task):
                raise ValueError(
                    f"every worked solution of the task is longer than the model's context of {longest} tokens; "
                    "choose a smaller task or a larger max_position_embeddings"
                )
        yield batch
