"""Which rows of a flat batch belong to which sequence, and where their keys and values live.

The engine (paged) and the learner (packed) describe their batches with the same class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PACKED_PAGE_SIZE = 64  # page size of the scratch KV cache behind packed sequences


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer. A fused qkv row is [q heads | k heads | v heads] x head_dim."""

    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class RowBatch:
    """T query rows of S sequences (all int32, CPU, contiguous). Row t of sequence s attends causally
    to the positions 0..positions_T[t] of s.

    positions_T: absolute position of each row.
    starts_Sp1: rows of sequence s are starts_Sp1[s] : starts_Sp1[s+1]; consecutive positions.
    first_positions_S: position of the first row of each sequence (> 0 when earlier keys are cached).
    pages_SP: page table; page of position p of sequence s is pages_SP[s, p // page_size].
    slots_T: pages * page_size + offset where the row's own key and value are written.
    packed: every sequence starts at position 0 and is whole (the learner).
    """

    positions_T: torch.Tensor
    starts_Sp1: torch.Tensor
    first_positions_S: torch.Tensor
    pages_SP: torch.Tensor
    slots_T: torch.Tensor
    page_size: int
    packed: bool
    lengths: tuple[int, ...]  # rows per sequence, as Python ints

    @property
    def num_rows(self) -> int:
        return self.positions_T.numel()

    @staticmethod
    def paged(spans: Sequence[tuple[int, int]], page_tables: Sequence[Sequence[int]], page_size: int) -> RowBatch:
        """spans: (first position, rows) per sequence; page_tables: the pages of each, in order."""
        return _build(spans, page_tables, page_size, packed=False)

    @staticmethod
    def pack(lengths: Sequence[int]) -> RowBatch:
        """Whole sequences back to back, on consecutive scratch pages."""
        tables: list[range] = []
        page = 0
        for n in lengths:
            pages = -(-n // PACKED_PAGE_SIZE)
            tables.append(range(page, page + pages))
            page += pages
        return _build([(0, n) for n in lengths], tables, PACKED_PAGE_SIZE, packed=True)

    @property
    def num_pages(self) -> int:
        """Pages that a scratch cache needs (packed only)."""
        return sum(-(-n // self.page_size) for n in self.lengths)


def _build(spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], page_size: int, packed: bool) -> RowBatch:
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for (first, rows), table in zip(spans, tables, strict=True):
        last = first + rows
        positions.extend(range(first, last))
        for p in range(first, last):
            slots.append(table[p // page_size] * page_size + p % page_size)
        starts.append(starts[-1] + rows)
    width = max((len(t) for t in tables), default=0)
    pages = [list(t) + [0] * (width - len(t)) for t in tables]
    i32 = torch.int32
    return RowBatch(
        positions_T=torch.tensor(positions, dtype=i32),
        starts_Sp1=torch.tensor(starts, dtype=i32),
        first_positions_S=torch.tensor([first for first, _ in spans], dtype=i32),
        pages_SP=torch.tensor(pages, dtype=i32).reshape(len(tables), width),
        slots_T=torch.tensor(slots, dtype=i32),
        page_size=page_size,
        packed=packed,
        lengths=tuple(rows for _, rows in spans),
    )
