"""Our decoder against transformers, on folders that one side writes and the other loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.helpers import tiny_decoder
from zerogap.kernels import RowBatch
from zerogap.model import load_decoder, save_decoder
from zerogap.model.fetch import FetchError, fetch_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_tied_bias": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "linear_rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "yarn_rope": ("LlamaConfig", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "yarn_rope_qwen3": ("Qwen3Config", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": False}),
}
LENGTHS = [37, 130, 1]


def our_logits(folder: Path, kernels: str, tokens: list[torch.Tensor]) -> torch.Tensor:
    decoder = load_decoder(folder, kernels, "float32")
    with torch.no_grad():
        return decoder.logits(decoder.hidden(torch.cat(tokens), RowBatch.pack([len(t) for t in tokens])))


def their_logits(folder: Path, tokens: list[torch.Tensor]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(t[None]).logits[0] for t in tokens])


@pytest.mark.parametrize("kernels", ["standard", "aligned"])
@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, kernels: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**COMMON, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start as constants, which would hide a mix-up
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path, max_shard_size="100KB" if case == "llama" else "1GB")
    tokens = [torch.randint(0, 199, (n,)) for n in LENGTHS]
    theirs = their_logits(tmp_path, tokens)
    assert theirs.std() > 0.1
    assert (our_logits(tmp_path, kernels, tokens) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {**YARN, "beta_fast": 16.0, "attention_factor": 1.25, "truncate": False}},
        {"architecture": "qwen2", "qkv_bias": True},
        {"architecture": "qwen3", "qk_norm": True, "head_dim": 12},
    ],
)
def test_transformers_loads_what_we_save(changes: dict[str, Any], tmp_path: Path) -> None:
    decoder = tiny_decoder("standard", **changes)
    save_decoder(decoder, tmp_path / "model")
    tokens = [torch.randint(0, 61, (n,)) for n in LENGTHS]
    theirs = their_logits(tmp_path / "model", tokens)
    assert (our_logits(tmp_path / "model", "standard", tokens) - theirs).abs().max() < 1e-4
    again = load_decoder(tmp_path / "model", "standard", "float32")
    assert again.config == decoder.config
    assert again.digest() == decoder.digest()
    assert again.eos_token_ids == (1,)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["standard", "aligned"])
def test_smollm2_matches_transformers(kernels: str) -> None:
    try:
        folder = fetch_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"SmolLM2 is not to be had here: {error}")
    torch.manual_seed(0)
    tokens = [torch.randint(0, 49152, (n,)) for n in (60, 400)]
    assert (our_logits(folder, kernels, tokens) - their_logits(folder, tokens)).abs().max() < 1e-4
