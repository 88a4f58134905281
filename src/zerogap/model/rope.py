"""Rotary frequencies and their scalings for long contexts, with transformers' numbers (modeling_rope_utils)."""

from __future__ import annotations

import math
from typing import Any

import torch

# rope type -> (keys that it needs, keys that it may have), as in a Hugging Face config.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rotary_tables(
    positions: int, head_dim: int, theta: float, scaling: dict[str, Any] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [positions, head_dim / 2]. scaling: rope_type and its keys (ROPE_KEYS), None for the default.

    Angles in fp32 in transformers' order of operations (checkpoints were trained with these); cos and sin are taken in
    fp64 and rounded, so that they hardly depend on a vector library. yarn's attention factor is in both.
    """
    frequencies_R, attention_factor = rotary_frequencies(head_dim, theta, scaling)
    angles_PR = (torch.arange(positions).float()[:, None] * frequencies_R).double()
    cos_PR, sin_PR = angles_PR.cos() * attention_factor, angles_PR.sin() * attention_factor
    return cos_PR.float().contiguous(), sin_PR.float().contiguous()


def rotary_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[torch.Tensor, float]:
    """(radians per position of each pair, fp32 [head_dim / 2]; what cos and sin are multiplied by)."""
    wavelengths_R = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)  # over 2 pi
    if scaling is None:
        return 1.0 / wavelengths_R, 1.0
    if scaling["rope_type"] == "linear":
        return 1.0 / wavelengths_R / scaling["factor"], 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(1.0 / wavelengths_R, scaling), 1.0
    return _yarn(wavelengths_R, head_dim, theta, scaling), _yarn_attention_factor(scaling)


def _llama3(frequencies_R: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a smooth ramp between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths_R = 2 * math.pi / frequencies_R
    smooth_R = ((original / wavelengths_R - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_R) * frequencies_R / factor + smooth_R * frequencies_R


def _yarn(wavelengths_R: torch.Tensor, head_dim: int, theta: float, scaling: dict[str, Any]) -> torch.Tensor:
    """YaRN: pairs that turn more than beta_fast times in the original context are kept, those that turn less than
    beta_slow times are stretched by `factor`, a linear ramp over the index of the pair between."""

    def index(turns: float) -> float:
        """Which pair turns so often in the original context (not a whole number)."""
        original = scaling["original_max_position_embeddings"]
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(scaling.get("beta_fast") or 32), index(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    kept_R = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (scaling["factor"] * wavelengths_R) * (1 - kept_R) + 1.0 / wavelengths_R * kept_R


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    """What cos and sin are multiplied by, so that attention keeps its temperature over the longer context."""

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return growth(scaling["mscale"]) / growth(scaling["mscale_all_dim"])
    return growth(1.0)
