"""The tokenizer of a model folder. What is done with its chat template: turns.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from zerogap.model.checkpoint import CheckpointError


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer (transformers), from local files only, never with remote code."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json (a fast tokenizer is needed)")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, use_fast=True)
