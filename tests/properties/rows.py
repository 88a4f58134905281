"""Operations on rows: a row's result depends on that row and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.properties.values import KINDS, Comparison, dtypes, operand, seeds
from tests.properties.ways import OTHERS, flushed_denormals, kernels, threads
from zerogap.kernels import AttentionShape, Weight
from zerogap.kernels.aligned import AlignedKernels

OPERATIONS = ("linear", "logits", "logprobs", "sample", "rms_norm", "head_norm", "rotary", "silu_mul", "embedding")
LARGEST_PRODUCT = 3_000_000  # rows x width x columns; keeps a case short on the slowest instruction set
Operation = Callable[[AlignedKernels, torch.Tensor, bool], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class RowCase:
    """width: of a row. columns: outputs or vocabulary. kind: of the rows; company: of every third row; weights: of
    the weights. vector: whether there is a bias (linear) or a residual (rms_norm). chunk: rows of a smaller batch."""

    operation: str
    dtype: str
    rows: int
    width: int
    columns: int
    shape: AttentionShape
    kind: str
    company: str
    weights: str
    vector: bool
    temperature: float
    chunk: int
    seed: int


@st.composite
def shapes(draw: st.DrawFn, largest_row: int = 4608) -> AttentionShape:
    """Any supported heads: even head_dim up to 256, 1 to 16 query heads for each key head."""
    head_dim = 2 * draw(st.integers(1, 128))
    kv_heads = draw(st.integers(1, max(1, min(3, largest_row // (3 * head_dim)))))
    group = draw(st.integers(1, max(1, min(16, largest_row // (kv_heads * head_dim) - 2))))
    return AttentionShape(kv_heads * group, kv_heads, head_dim)


@st.composite
def row_cases(draw: st.DrawFn) -> RowCase:
    width = draw(st.integers(1, 200) | st.integers(1, 2600))
    columns = draw(st.integers(1, 200) | st.integers(1, 1300))
    rows = draw(st.integers(0, 130) | st.integers(1, 900))
    rows = min(rows, LARGEST_PRODUCT // (width * columns) + 1)
    return RowCase(
        operation=draw(st.sampled_from(OPERATIONS)),
        dtype=draw(dtypes),
        rows=rows,
        width=width,
        columns=columns,
        shape=draw(shapes()),
        kind=draw(st.sampled_from(KINDS)),
        company=draw(st.sampled_from(KINDS)),
        weights=draw(st.sampled_from(KINDS)),
        vector=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 0.6, 1e-3, 50.0, 0.0])),
        chunk=draw(st.integers(1, max(1, rows))),
        seed=draw(seeds),
    )


def operation(case: RowCase) -> Operation:
    """A function of (kernels, which rows, packed panels) that gives the results of those rows."""
    shape, seed = case.shape, case.seed

    def rows_of(width: int, dtype: str = case.dtype) -> torch.Tensor:
        x = operand(case.rows, width, dtype=dtype, kind=case.kind, seed=seed)
        x[1::3] = operand(case.rows, width, dtype=dtype, kind=case.company, seed=seed + 1)[1::3]
        return x

    def weight(*size: int, number: int = 2) -> torch.Tensor:
        return operand(*size, dtype=case.dtype, kind=case.weights, seed=seed + number)

    def laid_out(kernels: AlignedKernels, data: torch.Tensor, packed: bool) -> Weight:
        matrix = Weight(data)
        if packed:
            kernels.pack(matrix)
        return matrix

    generator = torch.Generator().manual_seed(seed + 9)
    targets = torch.randint(-1, case.columns + 1, (case.rows,), generator=generator)
    match case.operation:
        case "linear":
            x, w = rows_of(case.width), weight(case.columns, case.width)
            bias = Weight(weight(case.columns, number=3)) if case.vector else None
            return lambda k, i, packed: (k.linear(x[i], laid_out(k, w, packed), bias),)
        case "logits":
            x, w = rows_of(case.width), weight(case.columns, case.width)
            return lambda k, i, packed: (k.logits(x[i], laid_out(k, w, packed)),)
        case "logprobs":
            x, w = rows_of(case.width), weight(case.columns + 5, case.width)
            return lambda k, i, packed: (
                k.logprobs(x[i], laid_out(k, w, packed), targets[i], case.temperature, case.columns),
            )
        case "sample":
            logits = rows_of(case.columns + 5, "float32")
            keys = torch.randint(0, 2**62, (case.rows, 4), generator=generator)
            return lambda k, i, packed: k.sample(logits[i], keys[i], case.temperature, case.columns)
        case "rms_norm":
            x, scale = rows_of(case.width), Weight(weight(case.width))
            residual = operand(case.rows, case.width, dtype=case.dtype, kind=case.kind, seed=seed + 4)
            return lambda k, i, packed: k.rms_norm(x[i], scale, 1e-5, residual[i] if case.vector else None)
        case "head_norm":
            x = rows_of(shape.qkv_size)
            q_scale, k_scale = Weight(weight(shape.head_dim)), Weight(weight(shape.head_dim, number=3))
            return lambda k, i, packed: (k.head_norm(x[i], q_scale, k_scale, 1e-6, shape),)
        case "rotary":
            x = rows_of(shape.qkv_size)
            angles = operand(64, shape.head_dim // 2, dtype="float32", kind="normal", seed=seed + 5)
            positions = torch.randint(0, 64, (case.rows,), generator=generator, dtype=torch.int32)
            cos, sin = angles.cos(), angles.sin()
            return lambda k, i, packed: (k.rotary(x[i], cos, sin, positions[i], shape),)
        case "silu_mul":
            x = rows_of(2 * case.width)
            return lambda k, i, packed: (k.silu_mul(x[i]),)
        case "embedding":
            table = Weight(weight(case.columns, case.width))
            return lambda k, i, packed: (k.embedding(targets[i], table),)
    raise ValueError(case.operation)


def check_rows(case: RowCase) -> int:
    """Any order, any smaller batch, packed panels, two threads, a process that flushes denormals, and every
    instruction set: the same bits. Returns the number of values compared."""
    compute, comparison, best = operation(case), Comparison(), kernels()
    everyone = torch.arange(case.rows)
    expected = compute(best, everyone, False)

    def same(way: str, got: tuple[torch.Tensor, ...], i: torch.Tensor) -> None:
        for part, whole in zip(got, expected, strict=True):
            comparison.same(f"{case.operation}, {way}", part, whole[i])

    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(case.seed))
    same("rows in another order", compute(best, order, False), order)
    for part in order.split(case.chunk):
        same(f"{len(part)} rows", compute(best, part, False), part)
    same("packed panels", compute(best, order[: case.chunk], True), order[: case.chunk])
    with threads(2):
        same("two threads", compute(best, everyone, False), everyone)
        same("two threads, packed panels", compute(best, everyone, True), everyone)
    with flushed_denormals():
        flushed = compute(best, everyone, False)
    same("a process that flushes denormals", flushed, everyone)
    for name in OTHERS:
        same(name, compute(kernels(name), everyone, False), everyone)
        same(f"{name}, packed panels", compute(kernels(name), order, True), order)
    return comparison.values
