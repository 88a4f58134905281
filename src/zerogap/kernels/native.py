"""Loads the C++ kernels: one library per instruction set, the best that this CPU runs. All have the same bits."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch  # noqa: F401  (first: torch's OpenMP runtime then serves our libraries too, and its thread setting rules)

from zerogap.kernels import _native


def variants() -> list[str]:
    """Built variants, from the most general to the fastest; this CPU may not run all of them."""
    return list(_native.built())


def runnable() -> list[str]:
    """Built variants that this CPU can run."""
    return [name for name in variants() if _native.cpu_runs(name)]


@cache
def load_variant(name: str) -> Any:
    """The kernel table of one variant: `variant.linear(dtype, ...)` and so on, see csrc/table.h."""
    if name not in variants():
        raise ValueError(f"kernels: variant {name!r} was not built; built are {', '.join(variants())}")
    return _native.load(name)


@cache
def load_best() -> Any:
    """The fastest runnable variant, or the one that the environment variable ZEROGAP_ISA names."""
    return load_variant(os.environ.get("ZEROGAP_ISA") or runnable()[-1])
