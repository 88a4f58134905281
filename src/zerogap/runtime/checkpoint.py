"""Checkpoints: run_dir/checkpoints/step-000123/ is a Hugging Face folder plus what a resumed run needs.

trainer.safetensors: fp32 masters and moments. trainer.json: version, stream position, counters, the recipe. A folder
is written beside its place, synced, and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from zerogap.config import Recipe
from zerogap.learner.learner import Learner
from zerogap.model.checkpoint import CheckpointError, read_json, replace_folder, save_decoder

TENSORS, RECORD = "trainer.safetensors", "trainer.json"
_NAME = re.compile(r"step-(\d{6,})")

# Keys and whole sections that a resumed run cannot change: what the numbering of groups and the optimizer's state mean,
# and what the weights come from (a resume reads them from the checkpoint, so another value would have no effect).
# So is the engines' arithmetic: a run is one arm from its first update to its last.
FIXED_KEYS = (
    "seed",
    "model",
    "rollout.kernels",
    "rollout.dtype",
    "task",
    "warm_start",
    "train.groups_per_update",
)


def save_checkpoint(run_dir: Path, learner: Learner, start_folder: Path, record: dict[str, Any], keep: int) -> Path:
    """Write the learner's state with `record`; remove all but the newest `keep` checkpoints.

    start_folder: the model folder that this run started from. The tokenizer is copied from it, and it is not removed:
    an engine that dies is started again from there.
    """
    folder = run_dir / "checkpoints" / f"step-{learner.version:06d}"
    tensors, state = learner.state()
    with replace_folder(folder) as temporary:
        save_decoder(learner.decoder, temporary, start_folder)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, temporary / TENSORS)
        text = json.dumps({**record, "learner": state, "version": learner.version}, indent=2)
        (temporary / RECORD).write_text(text + "\n", encoding="utf-8")
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
    _sync(folder.parent)
    for old in checkpoints(run_dir)[:-keep]:
        if old != start_folder:
            shutil.rmtree(old)
    return folder


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. Leftovers of an interrupted save have other names and are not among them."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted((f for f in folders if _NAME.fullmatch(f.name)), key=lambda f: int(f.name.removeprefix("step-")))


def recorded_version(folder: Path) -> int:
    """The version of the weights in a model folder: a checkpoint's own, 0 where the folder is none."""
    return int(read_json(folder, RECORD)["version"]) if (folder / RECORD).is_file() else 0


def remove_leftovers(run_dir: Path) -> None:
    """Remove what a process that died while it saved left (see replace_folder). No other run may use run_dir."""
    for torn in [*run_dir.glob("checkpoints/.step-*.partial"), *run_dir.glob(".final_model.*.partial")]:
        shutil.rmtree(torn)


def load_record(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """trainer.json; CheckpointError when the recipe has changed in a key that a resumed run cannot change."""
    record = read_json(folder, RECORD)
    old, new = (_written_out(values) for values in (record["recipe"], recipe.model_dump(mode="json")))
    lines = [line for key in FIXED_KEYS for line in _changes(key, _at(old, key), _at(new, key))]
    if lines:
        raise CheckpointError(f"{folder} cannot be resumed with this recipe; change back:\n" + "\n".join(lines))
    return record


def load_trainer(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """What Learner.load_state takes."""
    state: dict[str, int] = read_json(folder, RECORD)["learner"]
    return load_file(folder / TENSORS), state


def _written_out(values: dict[str, Any]) -> dict[str, Any]:
    """With what the engines have from the model by default."""
    inherited = {key: values["rollout"].get(key) or values["model"][key] for key in ("kernels", "dtype")}
    return values | {"rollout": values["rollout"] | inherited}


def _at(values: dict[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node[part]
    return node


def _changes(key: str, old: Any, new: Any) -> list[str]:
    """A line for each key below `key` whose values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [line for name in names for line in _changes(f"{key}.{name}", old.get(name), new.get(name))]
    return [] if old == new else [f"  {key}: {old!r} in the checkpoint, {new!r} in the recipe"]


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
