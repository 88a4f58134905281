"""A Hugging Face folder with another context: config.json and the tokenizer's limit rewritten, the rest linked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerogap.model.checkpoint import read_json, replace_folder

REWRITTEN = ("config.json", "tokenizer_config.json")


def change_context(
    source: str | Path, folder: str | Path, max_position_embeddings: int | None, rope_scaling: dict[str, Any] | None
) -> Path:
    """Write `source` to `folder` with these values in its config.json (None keeps what is there); returns `folder`.

    rope_scaling: rope_type and its keys; for the types that need original_max_position_embeddings it defaults to the
    one of `source`, if that is scaled already, else to the context of `source`. The folder appears whole or not at
    all; weights are symbolic links into `source`.
    """
    source, folder = Path(source).resolve(), Path(folder)
    config = changed_config(read_json(source, "config.json"), max_position_embeddings, rope_scaling)
    with replace_folder(folder) as temporary:
        for path in source.iterdir():
            if path.name not in REWRITTEN:
                (temporary / path.name).symlink_to(path)
        _write_json(temporary / "config.json", config)
        if (source / "tokenizer_config.json").is_file():
            tokenizer = read_json(source, "tokenizer_config.json")
            _write_json(
                temporary / "tokenizer_config.json", tokenizer | {"model_max_length": config["max_position_embeddings"]}
            )
    return folder


def changed_config(
    config: dict[str, Any], max_position_embeddings: int | None, rope_scaling: dict[str, Any] | None
) -> dict[str, Any]:
    """A config.json with another context, in the spellings of transformers 4 and 5."""
    changed = dict(config)
    if max_position_embeddings is not None:
        changed["max_position_embeddings"] = max_position_embeddings
    if rope_scaling is not None:
        before = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = before.get("rope_theta", config.get("rope_theta", 10000.0))
        trained = before.get("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
        scaling = dict(rope_scaling)
        if scaling["rope_type"] != "linear":
            scaling.setdefault("original_max_position_embeddings", trained)
        changed["rope_scaling"] = scaling
        changed["rope_parameters"] = {**scaling, "rope_theta": theta}
    return changed


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
