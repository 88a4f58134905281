"""The machine in numbers: CPU, cores, instruction set, versions, and the peaks that the tables are read against."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from zerogap.bench.serve import Channel, Watch
from zerogap.bench.sides import Progress, cores, python_command, running
from zerogap.kernels import Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_best

# Rows, K, N of products that stay in the second-level cache.
PEAK_SHAPES = ((256, 256, 256), (256, 576, 256), (480, 512, 192))
PEAK_BUDGET_S = 0.15  # per kernel and shape
MEMORY_BYTES = 256 << 20  # read to measure memory; far above any cache


def describe(threads: int, progress: Progress) -> dict[str, Any]:
    """What this machine is and what `threads` of its cores can do, measured in a process of its own.

    peak_gflops: {dtype: GFLOP/s}, the fastest in-cache matrix product of ours and oneDNN. dram_gb_s: GB read per s.
    """
    with running({"machine": python_command("machine:serve_peaks")}, threads, progress) as sides:
        facts = sides["machine"].facts
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "pinned_to": cores(threads),
        "variant": load_best().name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **facts,
    }


def cpu_name() -> str:
    """As Linux has it, or the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def serve_peaks(channel: Channel) -> None:
    """Measures before it is ready; answers nothing else."""
    peaks = {name: peak_gflops(getattr(torch, name)) for name in ("float32", "bfloat16")}
    channel.serve(lambda: {}, peak_gflops=peaks, dram_gb_s=read_rate())


def peak_gflops(dtype: torch.dtype) -> float:
    """GFLOP/s of the fastest product among PEAK_SHAPES, ours on rows and packed, and oneDNN."""
    kernels = AlignedKernels()
    best = 0.0
    for m, k, n in PEAK_SHAPES:
        x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        rows, packed = Weight(w), Weight(w)
        kernels.pack(packed)
        for call in (
            lambda x=x, w=rows: kernels.linear(x, w),
            lambda x=x, w=packed: kernels.linear(x, w),
            lambda x=x, w=w: one_dnn_linear(x, w),
            lambda x=x, w=w: F.linear(x, w),
        ):
            best = max(best, 2e-9 * m * k * n / shortest(call, PEAK_BUDGET_S))
    return best


def read_rate() -> float:
    """GB/s of a sum over memory that no cache holds."""
    values = torch.zeros(MEMORY_BYTES // 4)
    return 1e-9 * MEMORY_BYTES / shortest(lambda: values.sum(), PEAK_BUDGET_S)


def one_dnn_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T by oneDNN in either dtype; stock F.linear takes MKL for fp32. `weight`: as it lies, or reordered."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def shortest(call: Callable[[], object], budget_s: float) -> float:
    """Seconds of the fastest call within the budget, at least two after a first one."""
    call()
    best, started, calls, watch = float("inf"), time.perf_counter(), 0, Watch()
    while calls < 2 or time.perf_counter() - started < budget_s:
        watch.start()
        call()
        best = min(best, watch.read()["seconds"])
        calls += 1
    return best
