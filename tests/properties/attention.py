"""Attention and the whole decoder: any schedule of chunks over any pages gives the bits of whole, packed sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from tests.properties.rows import shapes
from tests.properties.values import KINDS, Comparison, dtypes, operand, seeds
from tests.properties.ways import OTHERS, kernels, threads, variants
from zerogap.kernels import AttentionShape, Kernels, RowBatch
from zerogap.kernels.aligned_cache import PAGE_SIZES

LARGEST_QUERIES = 300_000  # positions x query row; keeps a case short on the slowest instruction set
Turns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Schedule:
    """lengths: rows of each sequence, of which the first `shared` are one common prefix, computed once.
    turns: (bit mask of the sequences that advance, by how many rows), repeated until all are done."""

    lengths: tuple[int, ...]
    shared: int
    turns: Turns
    page_size: int
    seed: int

    def walk(self) -> Iterator[list[tuple[int, int, int]]]:
        """Forwards, each a list of (sequence, first row, rows)."""
        done = [self.shared] * len(self.lengths)
        turn = 0
        while open_ones := [i for i, n in enumerate(self.lengths) if done[i] < n]:
            mask, chunk = self.turns[turn % len(self.turns)]
            turn += 1
            chosen = [i for i in open_ones if mask >> i & 1] or open_ones
            spans = [(i, done[i], min(chunk, self.lengths[i] - done[i])) for i in chosen]
            for i, _, rows in spans:
                done[i] += rows
            yield spans


class Pages:
    """Shuffled pages of a poisoned cache (a slot that is read before it is written shows as NaN), with the tables of
    all sequences. Full pages of the shared prefix are shared, its last partial page is copied."""

    def __init__(self, schedule: Schedule, family: Kernels, layers: int, shape: AttentionShape, dtype: torch.dtype):
        size = schedule.page_size
        self.schedule, self.family = schedule, family
        self.full, self.partial = divmod(schedule.shared, size)
        needed = [-(-n // size) for n in schedule.lengths]
        pages = list(range(sum(needed) + self.full + 3))
        self.cache: list[Any] = family.new_cache(layers, len(pages), size, shape, dtype)
        for layer in self.cache:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        random.Random(schedule.seed).shuffle(pages)
        self.prefix = [pages.pop() for _ in range(-(-schedule.shared // size))]
        self.tables = [self.prefix[: self.full] + [pages.pop() for _ in range(n - self.full)] for n in needed]

    def fork(self) -> None:
        """The prefix has been computed: give each sequence its copy of the partial page."""
        if self.partial:
            for table in self.tables:
                self.family.copy_page(self.cache, self.prefix[self.full], table[self.full])

    def rows(self, spans: Sequence[tuple[int, int, int]]) -> RowBatch:
        return RowBatch.paged([s[1:] for s in spans], [self.tables[s[0]] for s in spans], self.schedule.page_size)

    def prefix_rows(self) -> RowBatch:
        return RowBatch.paged([(0, self.schedule.shared)], [self.prefix], self.schedule.page_size)


@st.composite
def schedules(draw: st.DrawFn, longest: int = 200) -> Schedule:
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=4))
    chunks = st.sampled_from([1, 1, 2, 13, 60]) | st.integers(1, longest)
    return Schedule(
        lengths=tuple(lengths),
        shared=draw(st.just(0) | st.integers(0, min(lengths) - 1)),
        turns=tuple(draw(st.lists(st.tuples(st.integers(1, 15), chunks), min_size=1, max_size=6))),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        seed=draw(seeds),
    )


@dataclass(frozen=True)
class AttentionCase:
    """kind: of the values of the first sequence, company: of the others. variant, threads: of the paged side.

    A sequence with NaN or infinity in it is only company: its own rows are not compared, because a broken value may
    reach the rows before it that share its chunk (0 * NaN)."""

    schedule: Schedule
    shape: AttentionShape
    dtype: str
    kind: str
    company: str
    variant: str
    threads: int


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    shape = draw(shapes())
    return AttentionCase(
        schedule=draw(schedules(longest=min(200, LARGEST_QUERIES // shape.q_size))),
        shape=shape,
        dtype=draw(dtypes),
        kind=draw(st.sampled_from(KINDS)),
        company=draw(st.sampled_from(KINDS)),
        variant=draw(variants),
        threads=draw(st.sampled_from([1, 2])),
    )


def check_attention(case: AttentionCase) -> int:
    """Every row of every sequence, computed on pages in any chunks and company, against the sequence alone in one
    packed forward; and all of them packed together, the prefix once or once for each, on two threads and on every
    instruction set."""
    schedule, shape, comparison = case.schedule, case.shape, Comparison()
    kinds = [case.kind] + [case.company] * (len(schedule.lengths) - 1)
    sequences = [
        operand(n, shape.qkv_size, dtype=case.dtype, kind=kind, seed=schedule.seed + i)
        for i, (n, kind) in enumerate(zip(schedule.lengths, kinds, strict=True))
    ]
    for qkv in sequences[1:]:
        qkv[: schedule.shared] = sequences[0][: schedule.shared]
    best = kernels()
    whole = [best.attention(qkv, RowBatch.pack([len(qkv)]), None, shape) for qkv in sequences]

    finite = [bool(qkv.isfinite().all()) for qkv in sequences]

    def same(way: str, outputs: Sequence[torch.Tensor], spans: Sequence[tuple[int, int, int]]) -> None:
        for (i, first, n), output in zip(spans, outputs, strict=True):
            if finite[i]:
                where = f"{way}, rows {first} to {first + n} of sequence {i}"
                comparison.same(where, output, whole[i][first : first + n])

    for shared in {0, schedule.shared}:
        spans = [(i, shared if i else 0, n - (shared if i else 0)) for i, n in enumerate(schedule.lengths)]
        rows = RowBatch.pack([n for _, _, n in spans], [first for _, first, _ in spans])
        packed = torch.cat([sequences[i][first:] for i, first, _ in spans])
        with threads(2):
            outputs = best.attention(packed, rows, None, shape)
        same(f"packed, {shared} rows shared, two threads", outputs.split(rows.lengths), spans)
        for name in OTHERS:
            outputs = kernels(name).attention(packed, rows, None, shape)
            same(f"packed, {shared} rows shared, {name}", outputs.split(rows.lengths), spans)

    family = kernels(case.variant)
    pages = Pages(schedule, family, 1, shape, sequences[0].dtype)
    (cache,) = pages.cache
    with threads(case.threads):
        if schedule.shared:
            prefix = family.attention(sequences[0][: schedule.shared], pages.prefix_rows(), cache, shape)
            same("shared prefix", [prefix], [(0, 0, schedule.shared)])
            pages.fork()
        for spans in schedule.walk():
            qkv = torch.cat([sequences[i][first : first + rows] for i, first, rows in spans])
            outputs = family.attention(qkv, pages.rows(spans), cache, shape).split([rows for _, _, rows in spans])
            same("on pages", outputs, spans)
    return comparison.values
