"""Circumstances that must not matter: instruction set, threads, and the floating-point mode of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_best, load_variant, runnable

BEST = load_best().name
VARIANTS = tuple(runnable())
OTHERS = tuple(name for name in VARIANTS if name != BEST)

variants = st.sampled_from(VARIANTS[::-1])


def kernels(variant: str = BEST) -> AlignedKernels:
    return AlignedKernels(load_variant(variant))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """As if some library had set flush-to-zero; afterwards it must still be set (the kernels give it back)."""
    assert torch.set_flush_denormal(True), "this CPU cannot flush denormals"
    try:
        yield
        assert not (torch.tensor([1e-39]) * 1.0).any(), "a kernel changed the caller's floating-point mode"
    finally:
        torch.set_flush_denormal(False)
