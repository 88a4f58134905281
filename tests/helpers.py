"""Tiny random models shared by the tests."""

from __future__ import annotations

import math
from typing import Any

import torch

from zerogap.kernels import Weight, get_kernels
from zerogap.model.checkpoint import hf_names
from zerogap.model.config import DecoderConfig
from zerogap.model.decoder import Decoder


def tiny_config(**changes: Any) -> DecoderConfig:
    values: dict[str, Any] = {
        "architecture": "llama",
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 61,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    }
    return DecoderConfig(**(values | changes))


def tiny_decoder(
    kernels: str = "aligned",
    dtype: torch.dtype = torch.float32,
    trainable: bool = False,
    seed: int = 0,
    eos: tuple[int, ...] = (1,),
    **changes: Any,
) -> Decoder:
    """Random weights; the same seed gives the same weights for every family and dtype (rounded)."""
    config = tiny_config(**changes)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    h, shape = config.hidden_size, config.shape
    sizes = {
        "embed": (config.vocab_size, h),
        "head": (config.vocab_size, h),
        "qkv": (shape.qkv_size, h),
        "o": (h, shape.q_size),
        "gate_up": (2 * config.intermediate_size, h),
        "down": (h, config.intermediate_size),
        "qkv_bias": (shape.qkv_size,),
        "o_bias": (h,),
        "gate_up_bias": (2 * config.intermediate_size,),
        "down_bias": (h,),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    weights = {}
    for name in hf_names(config):
        size = sizes.get(name.rsplit(".", 1)[-1], (h,))
        if len(size) == 2:
            value = matrix(*size) * (2.0 if name in ("embed", "head") else 1.0)
        elif name.endswith("bias"):
            value = 0.1 * torch.randn(size, generator=generator)
        else:
            value = 1 + 0.1 * torch.randn(size, generator=generator)
        weights[name] = Weight(value.to(dtype), trainable)
    return Decoder(config, get_kernels(kernels), weights, eos_token_ids=eos)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bit patterns (fp32 or bf16)."""
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(view[a.dtype]), b.view(view[b.dtype]))
