"""A checkpoint with another context: same weights, new config, readable by transformers, kept by what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers import tiny_decoder
from tests.model.test_transformers_parity import our_logits, their_logits
from zerogap.model import load_decoder, save_decoder
from zerogap.model.checkpoint import CheckpointError
from zerogap.model.context import change_context, changed_config

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save_decoder(tiny_decoder("standard"), tmp_path / "source")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256, "unk_token": "?"}))
    return folder


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}, YARN])
def test_a_longer_context_computes_what_transformers_computes(
    source: Path, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    folder = change_context(source, tmp_path / "long", 512, scaling)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 512
    assert config.rope_parameters["rope_type"] == (scaling or {"rope_type": "default"})["rope_type"]
    tokens = [torch.randint(0, 61, (n,)) for n in (500, 30)]
    ours = our_logits(folder, "standard", tokens)
    assert (ours - their_logits(folder, tokens)).abs().max() < 1e-4
    with pytest.raises(ValueError, match="a sequence of 500 tokens exceeds"):
        our_logits(source, "standard", tokens)
    decoder = load_decoder(folder, "standard", "float32")
    assert decoder.digest() == load_decoder(source, "standard", "float32").digest()
    again = load_decoder(save_decoder(decoder, tmp_path / "again", folder), "standard", "float32")
    assert again.config == decoder.config
    assert json.loads((tmp_path / "again" / "tokenizer_config.json").read_text()) == {
        "model_max_length": 512,
        "unk_token": "?",
    }


def test_original_context_is_the_checkpoints_own_unless_given(source: Path, tmp_path: Path) -> None:
    own = change_context(source, tmp_path / "own", 512, YARN)
    given = change_context(source, tmp_path / "given", 512, YARN | {"original_max_position_embeddings": 128})
    scalings = [load_decoder(folder, "standard", "float32").config.rope_scaling for folder in (own, given)]
    assert scalings == [YARN | {"original_max_position_embeddings": n} for n in (256, 128)]
    theta = json.loads((own / "config.json").read_text())["rope_parameters"]["rope_theta"]
    assert theta == 10000.0


def test_the_weights_are_links_and_nothing_half_made_stays(source: Path, tmp_path: Path) -> None:
    folder = change_context(source, tmp_path / "long", 512, None)
    assert (folder / "model.safetensors").is_symlink() and not (folder / "config.json").is_symlink()
    assert json.loads((source / "config.json").read_text())["max_position_embeddings"] == 256
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match="has no config"):
        change_context(source, tmp_path / "other", 512, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long", "source"]


def test_a_scaled_checkpoint_keeps_the_context_it_was_trained_with() -> None:
    """Scaled once more, the frequencies still start from the original context, not from the stretched one."""
    once = changed_config({"max_position_embeddings": 8192}, 16_384, {"rope_type": "yarn", "factor": 2.0})
    twice = changed_config(once, 32_768, {"rope_type": "yarn", "factor": 4.0})
    for config in (once, twice):
        assert config["rope_scaling"]["original_max_position_embeddings"] == 8192
        assert config["rope_parameters"]["original_max_position_embeddings"] == 8192
