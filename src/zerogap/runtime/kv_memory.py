"""How many pages of KV cache a memory budget holds. The layout of a page is known to its kernel family only."""

from __future__ import annotations

import math

import torch

from zerogap.config import Arithmetic, RecipeError, Rollout
from zerogap.kernels import AttentionShape, get_kernels

MEGABYTE = 1_000_000
USUAL_TURNS = 3  # longer episodes are rare: some may wait, or be prefilled again


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


def default_pages(rollout: Rollout, prompt_tokens: int, context: int, turns: int) -> int:
    """Pages without a budget: room for max_running sequences with such a prompt, and for one of full length up to 8,192
    tokens (an unusually long one then waits for others; it is not refused).

    turns: most turns of an episode. A usual one is taken to have USUAL_TURNS at most; after all but the last, as much
    may be shown to the policy as it says.
    """
    answers = 2 * min(turns, USUAL_TURNS) - 1
    usual = min(prompt_tokens + answers * rollout.max_new_tokens, context)
    usual_pages, full_pages = (-(-tokens // rollout.page_size) for tokens in (usual, min(context, 8192)))
    return max(rollout.max_running * usual_pages, full_pages)
