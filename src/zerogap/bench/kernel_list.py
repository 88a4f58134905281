"""Which operations `zerogap bench kernels` measures, at the shapes of SmolLM2-135M. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OPS = ("linear", "attention", "head", "elementwise")
ROWS = (1, 4, 8, 32, 64, 256, 1024, 4096)
LINEAR_SHAPES = {  # K x N
    "float32": ((576, 576), (1536, 576), (576, 49152), (256, 1024)),
    "bfloat16": ((576, 576), (576, 49152), (2048, 2048)),
}

Case = dict[str, Any]  # arguments of kernel_cases.build


@dataclass(frozen=True)
class KernelsSetting:
    """ops: of OPS. rows: of the linear products."""

    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    rows: tuple[int, ...]
    threads: int
    rounds: int


def cases(setting: KernelsSetting) -> list[Case]:
    """What is measured, as arguments of kernel_cases.build."""
    found: list[Case] = []
    for dtype in setting.dtypes:
        if "linear" in setting.ops:
            found += [
                {"op": "linear", "dtype": dtype, "k": k, "n": n, "rows": rows}
                for k, n in LINEAR_SHAPES[dtype]
                for rows in setting.rows
            ]
        if "attention" in setting.ops:
            learner, decode = {"sequences": 8, "length": 512}, {"sequences": 32, "length": 512}
            found += [{"op": op, "dtype": dtype} | learner for op in ("attention", "attention backward")]
            found.append({"op": "attention decode", "dtype": dtype} | decode)
        if "head" in setting.ops:
            head = {"k": 576, "n": 49152, "rows": 1024}
            found += [{"op": op, "dtype": dtype} | head for op in ("logprobs", "logprobs backward")]
        if "elementwise" in setting.ops:
            found += [{"op": "rms_norm", "dtype": dtype, "k": 576, "rows": rows} for rows in (32, 4096)]
            found += [{"op": "silu_mul", "dtype": dtype, "k": 1536, "rows": rows} for rows in (32, 4096)]
    return found


def sizes_text(case: Case) -> str:
    if "length" in case:
        return f"{case['sequences']} x {case['length']}"
    return f"M={case['rows']} {case['k']}" + (f" x {case['n']:,}" if "n" in case else "")
