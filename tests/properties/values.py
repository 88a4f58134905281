"""Operands by kind and seed, and the comparison in which every property ends."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
FINITE_KINDS = ("normal", "zeros", "tiny", "edge", "mixed", "huge")
KINDS = (*FINITE_KINDS, "bits")

dtypes = st.sampled_from(tuple(DTYPES))
seeds = st.integers(0, 2**32 - 1)


def examples(count: int) -> settings:
    """So many cases in a test run; ZEROGAP_EXAMPLES multiplies it."""
    wanted = count * int(os.environ.get("ZEROGAP_EXAMPLES", "1"))
    return settings(max_examples=wanted, deadline=None, suppress_health_check=list(HealthCheck))


def operand(*size: int, dtype: str, kind: str, seed: int) -> torch.Tensor:
    """Random values of one kind.

    zeros: half of them zero, of both signs. tiny: denormals. edge: a product of two of them is near the smallest
    normal number. mixed: every exponent. huge: up to the largest finite number. bits: any bit pattern, so also NaN
    and infinity.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        integers = INTEGERS[DTYPES[dtype]]
        limit = torch.iinfo(integers)
        drawn = torch.randint(limit.min, limit.max + 1, size, generator=generator)
        return drawn.to(integers).view(DTYPES[dtype])
    normal = torch.randn(*size, generator=generator)
    if kind == "zeros":
        normal *= torch.randint(0, 2, size, generator=generator)
    elif kind == "tiny":
        normal *= 1e-39
    elif kind == "edge":
        normal *= 2.0**-63
    elif kind == "mixed":
        normal = torch.ldexp(normal.clamp(-3.9, 3.9), torch.randint(-149, 126, size, generator=generator))
    elif kind == "huge":
        normal = normal.clamp(-3, 3) * 1e38
    return normal.to(DTYPES[dtype])


class Comparison:
    """Compares as bits and counts. values: compared so far."""

    def __init__(self) -> None:
        self.values = 0

    def same(self, way: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        """Any NaN equals any other: its sign and payload follow the order of operands in an instruction, which no
        compiler fixes, and nothing reads them. All other values must have the same bits."""
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), way
        self.values += got.numel()
        if got.dtype in INTEGERS:
            integers = INTEGERS[got.dtype]
            differs = got.contiguous().view(integers) != expected.contiguous().view(integers)
            differs &= ~(got.isnan() & expected.isnan())
        else:
            differs = got != expected
        if differs.any():
            place = tuple(int(i) for i in differs.nonzero()[0])
            raise AssertionError(
                f"{way}: {int(differs.sum())} of {got.numel()} values differ; "
                f"at {list(place)} of {list(got.shape)}: {got[place].item()!r}, expected {expected[place].item()!r}"
            )
