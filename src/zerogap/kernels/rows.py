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
    first_positions_S: position of the first row of each sequence (> 0 when earlier keys are cached or shared).
    pages_SP: page table; page of position p of sequence s is pages_SP[s, p // page_size].
    slots_T: pages * page_size + offset where the row's own key and value are written.
    packed: every key is that of a row of this batch (the learner); only then:
    copies_C2: (row, slot): further slots for a row's key and value, where a shared prefix ends within a page.
    key_ends_T: the key of row t is seen by the rows t : key_ends_T[t] and by no other.
    """

    positions_T: torch.Tensor
    starts_Sp1: torch.Tensor
    first_positions_S: torch.Tensor
    pages_SP: torch.Tensor
    slots_T: torch.Tensor
    page_size: int
    packed: bool
    lengths: tuple[int, ...]  # rows per sequence, as Python ints
    copies_C2: torch.Tensor
    key_ends_T: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.positions_T.numel()

    @property
    def context(self) -> int:
        """Positions of the longest sequence, shared and cached ones included."""
        return int(self.positions_T.max()) + 1 if self.num_rows else 0

    @property
    def num_pages(self) -> int:
        """Pages that a scratch cache needs (packed only)."""
        return int(self.pages_SP.max()) + 1 if self.pages_SP.numel() else 0

    def check_cache(self, cache: object | None) -> None:
        """Raises ValueError unless these rows come with a cache, or are packed and come without."""
        if (cache is None) != self.packed:
            raise ValueError(
                "attention: packed rows hold all their keys and take no cache; pass cache=None"
                if self.packed
                else "attention: rows that are not packed need a cache; pass one entry of new_cache"
            )

    @staticmethod
    def paged(spans: Sequence[tuple[int, int]], page_tables: Sequence[Sequence[int]], page_size: int) -> RowBatch:
        """spans: (first position, rows) per sequence; page_tables: the pages of each, in order."""
        return _build(spans, page_tables, page_size, packed=False)

    @staticmethod
    def pack(lengths: Sequence[int], shared: Sequence[int] | None = None) -> RowBatch:
        """Whole sequences back to back, a common prefix once: sequence s is the first shared[s] positions (default 0)
        of sequence s - 1, then lengths[s] rows of its own. Their attention has the bits of the unshared layout.

        Raises ValueError when shared[s] exceeds the positions of sequence s - 1.
        """
        shared = shared or [0] * len(lengths)
        tables: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        key_ends: list[int] = []
        table: list[int] = []
        path: list[int] = []  # the rows of the last sequence, one per position
        pages = 0
        for s, (first, n) in enumerate(zip(shared, lengths, strict=True)):
            if first > len(path):
                raise ValueError(f"shared[{s}] is {first}, but sequence {s - 1} has only {len(path)} positions")
            start = len(key_ends)
            for row in path[first:]:
                key_ends[row] = start
            whole = first // PACKED_PAGE_SIZE  # pages that hold nothing but shared positions
            fresh = -(-(first + n) // PACKED_PAGE_SIZE) - whole
            table = [*table[:whole], *range(pages, pages + fresh)]
            pages += fresh
            copies.extend(
                (row, table[whole] * PACKED_PAGE_SIZE + offset)
                for offset, row in enumerate(path[whole * PACKED_PAGE_SIZE : first])
            )
            path = [*path[:first], *range(start, start + n)]
            key_ends.extend([0] * n)
            tables.append(table)
        for row in path:
            key_ends[row] = len(key_ends)
        return _build(list(zip(shared, lengths, strict=True)), tables, PACKED_PAGE_SIZE, True, copies, key_ends)


def _build(
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    page_size: int,
    packed: bool,
    copies: Sequence[tuple[int, int]] = (),
    key_ends: Sequence[int] = (),
) -> RowBatch:
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for (first, rows), table in zip(spans, tables, strict=True):
        last = first + rows
        positions.extend(range(first, last))
        slots.extend(table[p // page_size] * page_size + p % page_size for p in range(first, last))
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
        copies_C2=torch.tensor(copies, dtype=i32).reshape(-1, 2),
        key_ends_T=torch.tensor(key_ends, dtype=i32),
    )
