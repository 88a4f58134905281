"""The paged KV cache of the aligned kernels: keys transposed inside a page, so that lanes run over positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerogap.kernels.rows import AttentionShape

PAGE_SIZES = (8, 16, 32, 64)
LANES = 16  # of the kernels' fp32 vector


@dataclass(frozen=True)
class LayerCache:
    """Keys [pages, kv_heads, head_dim, page_size], values [pages, kv_heads, page_size, head_dim rounded up to 16]."""

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class PagedCache(list[LayerCache]):
    """One entry per layer; the pages of all layers lie in two tensors, so that two operations copy a page."""

    def __init__(self, keys_LP: torch.Tensor, values_LP: torch.Tensor, page_size: int) -> None:
        super().__init__(LayerCache(*layer, page_size) for layer in zip(keys_LP, values_LP, strict=True))
        self.keys_LP = keys_LP
        self.values_LP = values_LP


def new_cache(layers: int, pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype) -> PagedCache:
    """Uninitialised: a slot is read only after a row has written it."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"kernels: page_size {page_size} is not possible; use one of {PAGE_SIZES}")
    padded_dim = -(-shape.head_dim // LANES) * LANES
    return PagedCache(
        torch.empty(layers, pages, shape.kv_heads, shape.head_dim, page_size, dtype=dtype),
        torch.empty(layers, pages, shape.kv_heads, page_size, padded_dim, dtype=dtype),
        page_size,
    )


def copy_page(cache: PagedCache, source: int, target: int) -> None:
    for pages_LP in (cache.keys_LP, cache.values_LP):
        pages_LP[:, target] = pages_LP[:, source]
