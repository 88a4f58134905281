"""Molt's rollout dump: a list of its Experience objects, read without Molt and without running what the file says.

Format: NVIDIA-NeMo/labs-molt, molt/trainer/algorithm/experience.py (Experience) and molt/trainer/rl_trainer.py
(`--train.rollout_dump_dir` saves rollout_step{N}.pt with torch.save).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerogap.gaps.audit.record_files import Record
from zerogap.gaps.audit.schema import RolloutFileError

CLASS = "molt.trainer.algorithm.experience.Experience"
TENSORS = ("sequences", "attention_mask", "action_mask", "rollout_log_probs")


class Experience:
    """Takes the attributes of Molt's class. Tensors are [B, T], or [B, T - 1] where entry t is of token t + 1."""


def molt_records(path: Path) -> Iterator[tuple[int, Record]]:
    """(sample from 1, its rows as lists) of a .pt file. RolloutFileError when it holds anything else."""
    import torch

    try:
        with torch.serialization.safe_globals([(Experience, CLASS)]):
            samples = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error).split("\n")[0])
        raise RolloutFileError(
            f"{path} is no readable dump of Molt (a list of {CLASS} with tensors and plain data): {reason}"
        ) from error
    if not isinstance(samples, list) or not all(isinstance(sample, Experience) for sample in samples):
        raise RolloutFileError(f"{path} holds a {type(samples).__name__}, not the list of {CLASS} that Molt dumps")
    for number, sample in enumerate(samples, 1):
        yield from ((number, record) for record in _rows(sample, f"{path} sample {number}"))


def _rows(sample: Experience, where: str) -> Iterator[Record]:
    values: dict[str, Any] = vars(sample)
    hints = {
        "sequences": "; newer Molt keeps it behind heavy_ref in other processes: call reload() on each sample first",
        "rollout_log_probs": "; Molt asks its engine for it where algo.advantage.is_correction_level is not off",
    }
    columns = {}
    for name in TENSORS:
        if values.get(name) is None:
            raise RolloutFileError(f"{where}: field {name!r} is missing{hints.get(name, '')}")
        columns[name] = values[name].reshape(-1, values[name].shape[-1]).tolist()
    truncated = values.get("truncated")
    cut = [False] * len(columns["sequences"]) if truncated is None else truncated.reshape(-1).tolist()
    for *row, is_cut in zip(*columns.values(), cut, strict=True):
        yield dict(zip(TENSORS, row, strict=True)) | {"finish_reason": "length" if is_cut else "stop"}
