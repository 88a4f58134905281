"""The model that both sides load: a given folder, or random weights of a known shape."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 256,
    },
}


@dataclass(frozen=True)
class ModelSetting:
    """What a measurement on a whole model is told. model: a folder, or None for random weights of SHAPES[shape].
    threads, rounds (turns): of each side."""

    model: str | None
    shape: str
    dtypes: tuple[str, ...]
    threads: int
    rounds: int


@contextmanager
def model_folder(setting: ModelSetting) -> Iterator[Path]:
    """The folder of the setting; random weights lie in one that goes with the block."""
    if setting.model is not None:
        yield Path(setting.model)
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield _random_model(SHAPES[setting.shape], Path(scratch))


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def is_smollm2(folder: Path) -> bool:
    """Whether the model has the shape for which the bars of rollout and learner are set."""
    config = read_config(folder)
    return all(config.get(key) == value for key, value in SHAPES["smollm2"].items())


def _random_model(shape: dict[str, int], folder: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    values = {"tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_parameters": rope}
    LlamaForCausalLM(LlamaConfig.from_dict(shape | values)).save_pretrained(folder)
    return folder
