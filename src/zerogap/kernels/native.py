"""Loads the C++ kernels: one library per instruction set, the best that this CPU runs. All have the same bits."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch  # before our libraries: its OpenMP runtime then serves them too, and its thread setting rules

from zerogap.kernels import _native

LAYOUT_PACKED, LAYOUT_ROWS = 0, 1  # how a weight lies in memory
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


def dtype_code(tensor: torch.Tensor) -> int:
    code = DTYPE_CODES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"kernels: dtype {tensor.dtype} is unknown to `aligned`; use float32 or bfloat16")
    return code


def inverse_temperature(temperature: float) -> float:
    """1 / temperature; 1 for greedy decoding (0), whose logprobs are reported at temperature 1."""
    return 1.0 / temperature if temperature > 0 else 1.0


def sampler_inverse_temperature(temperature: float) -> float:
    """What the sampler's kernel wants: 1 / temperature; -1 asks for greedy decoding."""
    return 1.0 / temperature if temperature > 0 else -1.0


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


def keep_memory() -> None:
    """From now on this process keeps memory that it frees, for its next buffers of the same size.

    For a learner, whose every step frees and asks for gigabytes: with glibc's default each fresh page faults again,
    9% of a step of SmolLM2-135M (4,096 rows, fp32). The process stays at its peak size; no effect without glibc.
    """
    _native.keep_memory()
