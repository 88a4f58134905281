"""How many pages of KV cache a memory budget holds. The layout of a page is known to its kernel family only."""

from __future__ import annotations

import math

import torch

from zerogap.config import Arithmetic, RecipeError, Rollout
from zerogap.kernels import AttentionShape, get_kernels

MEGABYTE = 1_000_000


def page_bytes(engine: Arithmetic, layers: int, shape: AttentionShape, page_size: int) -> int:
    """Bytes of one page over all layers, padding included."""
    cache = get_kernels(engine.kernels).new_cache(layers, 1, page_size, shape, getattr(torch, engine.dtype))
    return sum(layer.nbytes for layer in cache)


def pages_in_budget(rollout: Rollout, bytes_per_page: int) -> int | None:
    """Whole pages in rollout.kv_cache_mb, or None without a budget. RecipeError when not even one answer fits."""
    if rollout.kv_cache_mb is None:
        return None
    pages = int(rollout.kv_cache_mb * MEGABYTE // bytes_per_page)
    needed = -(-(rollout.max_new_tokens + 1) // rollout.page_size)
    if pages < needed:
        least = math.ceil(needed * bytes_per_page / MEGABYTE * 100) / 100
        raise RecipeError(
            f"rollout.kv_cache_mb {rollout.kv_cache_mb:g} has no room for one answer of rollout.max_new_tokens "
            f"{rollout.max_new_tokens}: it holds {pages} pages of {rollout.page_size} tokens "
            f"({bytes_per_page:,} bytes each for this model); raise it to at least {least:g} plus the prompt, or lower "
            "max_new_tokens"
        )
    return pages
