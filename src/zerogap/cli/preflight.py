"""Everything about a run that can be refused before anything heavy loads: model folder, task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerogap.cli.errors import BadInput
from zerogap.config import Recipe, Task

LARGEST_LISTED_FOLDER = 5


def check_recipe_inputs(recipe: Recipe) -> None:
    """BadInput when the recipe's model folder, its task, or the task's worked solutions cannot exist; RecipeError when
    its KV cache holds no answer."""
    if recipe.model.path is not None:
        check_model(Path(recipe.model.path), key="model.path")
    if recipe.rollout.kv_cache_mb is not None:
        from zerogap.cli.model_size import ModelSize

        ModelSize.from_recipe(recipe).kv_budget(recipe)
    check_task(recipe.task, solutions=recipe.warm_start is not None)
    if recipe.evaluation.every and recipe.evaluation.task is not None:
        check_task(recipe.evaluation.task)


def read_model_config(folder: Path, key: str) -> dict[str, Any]:
    """config.json of a Hugging Face folder; BadInput says what is missing."""
    if not folder.is_dir():
        raise BadInput(f"{key}: model folder {folder} does not exist")
    path = folder / "config.json"
    if not path.is_file():
        from zerogap.model.adapter import adapter_refusal

        if (refusal := adapter_refusal(folder)) is not None:
            raise BadInput(f"{key}: {refusal}")
        names = sorted(p.name for p in folder.iterdir())[:LARGEST_LISTED_FOLDER]
        raise BadInput(
            f"{key}: {folder} has no config.json, so it is not a Hugging Face model folder "
            f"(it holds: {', '.join(names) or 'nothing'})"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{key}: {path} is not valid JSON: {error}") from error
    if not list(folder.glob("*.safetensors")):
        raise BadInput(f"{key}: {folder} has no *.safetensors; other weight formats (pickle) are never read")
    if not isinstance(config, dict):
        raise BadInput(f"{key}: {path} must hold a mapping")
    return config


def check_model(folder: Path, key: str) -> None:
    """BadInput unless the folder holds a model that the decoder computes, by its headers, and a tokenizer."""
    read_model_config(folder, key)
    from zerogap.model.checkpoint import CheckpointError, check_folder, check_tokenizer
    from zerogap.model.config import UnsupportedModel

    try:
        check_folder(folder)
        check_tokenizer(folder)
    except UnsupportedModel as error:
        raise BadInput(f"{key}: {folder}: {error}") from error
    except CheckpointError as error:
        raise BadInput(f"{key}: {error}") from error


def check_task(settings: Task, solutions: bool = False) -> None:
    """BadInput for a file that is missing, a dataset that reasoning-gym does not have (or not so), or, with
    `solutions`, a task whose first example has no worked solution."""
    if settings.jsonl is not None and not Path(settings.jsonl).is_file():
        raise BadInput(f"task.jsonl: no such file {settings.jsonl}")
    from zerogap.env.python_tool import check_tools
    from zerogap.env.task import TaskError, make_task
    from zerogap.env.tools.interface import SandboxUnavailable

    try:
        check_tools(settings)
        task = make_task(settings)
        if solutions:
            task.solution(task.example(0))
    except (TaskError, SandboxUnavailable) as error:
        raise BadInput(str(error)) from error
