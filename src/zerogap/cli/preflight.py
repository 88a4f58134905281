"""Everything about a run that can be refused before anything heavy loads: model folder, task, output folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerogap.cli.errors import BadInput
from zerogap.config import Recipe, Task

LARGEST_LISTED_FOLDER = 5


def check_recipe_inputs(recipe: Recipe) -> None:
    """BadInput when the recipe's model folder or task cannot exist."""
    if recipe.model.path is not None:
        check_model(Path(recipe.model.path), key="model.path")
    check_task(recipe.task)


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """BadInput when a new run would land in a used folder, or a resumed one has nothing to go on from."""
    if run_dir.exists() and not run_dir.is_dir():
        raise BadInput(f"output directory {run_dir} is a file; give another --output-dir")
    used = run_dir.is_dir() and any(run_dir.iterdir())
    if used and not resume:
        raise BadInput(
            f"output directory {run_dir} already holds a run; add --resume to go on with it, "
            "or give another --output-dir"
        )
    if resume and not used:
        raise BadInput(f"--resume: {run_dir} holds no run; leave --resume out, or give the run's --output-dir")


def read_model_config(folder: Path, key: str) -> dict[str, Any]:
    """config.json of a Hugging Face folder; BadInput says what is missing."""
    if not folder.is_dir():
        raise BadInput(f"{key}: model folder {folder} does not exist")
    path = folder / "config.json"
    if not path.is_file():
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
    """BadInput unless the folder holds a model that the decoder computes."""
    config = read_model_config(folder, key)
    from zerogap.model.config import DecoderConfig, UnsupportedModel

    try:
        DecoderConfig.from_hf(config)
    except UnsupportedModel as error:
        raise BadInput(f"{key}: {folder}: {error}") from error
    except KeyError as error:
        raise BadInput(f"{key}: {folder / 'config.json'} lacks the key {error}") from error


def check_task(task: Task) -> None:
    """BadInput for a file that is missing, or a dataset that reasoning-gym does not have (or not so)."""
    if task.jsonl is not None and not Path(task.jsonl).is_file():
        raise BadInput(f"task.jsonl: no such file {task.jsonl}")
    from zerogap.env.task import TaskError, make_task

    try:
        make_task(task)
    except TaskError as error:
        raise BadInput(str(error)) from error
