"""Rotary frequencies and tables against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.helpers import same_bits, tiny_config
from zerogap.model.config import DecoderConfig, UnsupportedModel
from zerogap.model.rope import rotary_frequencies

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "yarn": YARN,
    "yarn, no growth": {**YARN, "factor": 1.0},
    "yarn, betas": {**YARN, "factor": 3.7, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, no truncation": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.9},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, empty ramp": {**YARN, "original_max_position_embeddings": 6},
}


def their_config(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> LlamaConfig:
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    shape = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    return LlamaConfig(**shape, max_position_embeddings=16384, rope_parameters=rope)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 100000.0), (128, 1e6), (24, 10000.0)])
def test_frequencies_have_the_bits_of_transformers(name: str, head_dim: int, theta: float) -> None:
    scaling = SCALINGS[name]
    ours_R, our_factor = rotary_frequencies(head_dim, theta, scaling)
    config = their_config(head_dim, theta, scaling)
    if scaling is None:
        theirs_R, their_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        theirs_R, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    assert same_bits(ours_R, theirs_R)
    assert our_factor == their_factor


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers_at_16384_positions(name: str) -> None:
    """Their cos is a vector library's fp32 one, ours is rounded from fp64: a unit in the last place apart at most."""
    config = tiny_config(head_dim=64, rope_theta=1e5, max_position_embeddings=16384, rope_scaling=SCALINGS[name])
    rotary = LlamaRotaryEmbedding(their_config(64, 1e5, SCALINGS[name]))
    theirs = rotary(torch.zeros(1), torch.arange(16384)[None])
    for ours_PR, theirs_1PD in zip(config.rotary_tables(), theirs, strict=True):
        assert ours_PR.shape == (16384, 32) and ours_PR.is_contiguous()
        assert (ours_PR - theirs_1PD[0, :, :32]).abs().max() < 3e-7


def test_a_config_keeps_the_keys_of_its_rope_type() -> None:
    """Legacy spelling (`type`, rope_scaling) and foreign keys in; what both versions of transformers read out."""
    config = tiny_config(rope_scaling=None).to_hf()
    old = {**config, "rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2, "foo": 1}}
    read = DecoderConfig.from_hf(old)
    assert read.rope_scaling == {"rope_type": "linear", "factor": 2}
    assert read.to_hf()["rope_parameters"] == {"rope_type": "linear", "factor": 2, "rope_theta": 10000.0}
    assert DecoderConfig.from_hf(read.to_hf()) == read


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported; supported: default, linear, llama3"),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        DecoderConfig.from_hf({**tiny_config().to_hf(), "rope_parameters": rope})
