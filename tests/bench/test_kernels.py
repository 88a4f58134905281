"""Kernel cases: ours and every stock call compute the same thing; the table takes the fastest stock kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers import tiny_config
from zerogap.bench.kernel_cases import build, measure
from zerogap.bench.kernel_list import (
    OPS,
    ROWS,
    SMOLLM2,
    Case,
    KernelShapes,
    KernelsSetting,
    cases,
    model_shapes,
    sizes_text,
)
from zerogap.bench.kernels import _row

HEADS = {"q_heads": 6, "kv_heads": 2, "head_dim": 32}
SPLIT = [HEADS["q_heads"], HEADS["kv_heads"], HEADS["kv_heads"]]
SMALL: list[Case] = [
    {"op": "linear", "k": 96, "n": 80, "rows": 4},
    {"op": "linear", "k": 96, "n": 80, "rows": 256},
    {"op": "logprobs", "k": 96, "n": 80, "rows": 6},
    {"op": "logprobs backward", "k": 96, "n": 80, "rows": 6},
    {"op": "rms_norm", "k": 96, "rows": 3},
    {"op": "silu_mul", "k": 96, "rows": 3},
    {"op": "head_norm", "rows": 3} | HEADS,
    {"op": "attention", "sequences": 2, "length": 9} | HEADS,
    {"op": "attention backward", "sequences": 2, "length": 9} | HEADS,
]
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of the largest value


def flat(op: str, name: str, result: Any) -> list[torch.Tensor]:
    """Comparable tensors: attention of ours is [rows, heads * dim], and fused qkv rows are one tensor."""
    if op == "rms_norm":
        result = result[0] if name == "ours" else result
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if op == "head_norm" and name == "ours":
        parts = list(parts[0].unflatten(1, (-1, HEADS["head_dim"])).split(SPLIT, dim=1))[:2]
    if op.startswith("attention") and name == "ours":
        heads = [parts[0].unflatten(1, (-1, HEADS["head_dim"]))]
        if op == "attention backward":
            heads = list(heads[0].split(SPLIT, dim=1))
        parts = [head.unflatten(0, (2, 9)).transpose(1, 2) for head in heads]
    return [part.detach().flatten().float() for part in parts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case['op']}-{case.get('rows', 'T')}")
def test_all_calls_compute_the_same(case: Case, dtype: str) -> None:
    torch.manual_seed(0)
    calls = build(**case, dtype=dtype)
    ours, *others = ([*flat(case["op"], name, call())] for name, call in calls.items())
    assert others
    for other in others:
        for a, b in zip(ours, other, strict=True):
            assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()


def test_decode_case_runs() -> None:
    for call in build("attention decode", "float32", sequences=2, length=64, **HEADS).values():
        assert torch.isfinite(call()).all()  # type: ignore[arg-type]


def test_measure_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    order: list[str] = []
    times = measure({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    runs = [name for index, name in enumerate(order) if index == 0 or order[index - 1] != name]
    assert runs == ["a", "b"] * 3  # the warm-up, then two rounds


def every_case(shapes: KernelShapes) -> list[Case]:
    return cases(KernelsSetting(shapes, ("float32", "bfloat16"), OPS, ROWS, threads=1, rounds=1))


def test_every_linear_case_of_the_table() -> None:
    found = every_case(SMOLLM2)
    linear = {(c["dtype"], c["k"], c["n"], c["rows"]) for c in found if c["op"] == "linear"}
    assert len(linear) == (4 + 3) * 8
    assert {("float32", 576, 49152, 4096), ("bfloat16", 2048, 2048, 1), ("float32", 256, 1024, 64)} < linear
    assert {c["op"] for c in found} == {
        "linear",
        "attention",
        "attention backward",
        "attention decode",
        "logprobs",
        "logprobs backward",
        "rms_norm",
        "silu_mul",
    }


def test_cases_of_a_model() -> None:
    config = tiny_config(head_dim=16)  # hidden 32, four query heads: the attention output is 64 wide
    found = every_case(model_shapes(config, "tiny"))
    for dtype in ("float32", "bfloat16"):
        linear = {(c["k"], c["n"]) for c in found if c["op"] == "linear" and c["dtype"] == dtype}
        assert linear == {(32, 128), (64, 32), (32, 160), (80, 32), (32, 61)}
    assert {c["k"] for c in found if c["op"] == "rms_norm"} == {32} != {c["k"] for c in found if c["op"] == "silu_mul"}
    assert {(c["k"], c["n"]) for c in found if "logprobs" in c["op"]} == {(32, 61)}
    attention = [c for c in found if "attention" in c["op"]]
    assert {sizes_text(c) for c in attention} == {"8 x 512, 4/2 heads of 16", "32 x 512, 4/2 heads of 16"}
    assert "head_norm" not in {c["op"] for c in found}


def test_qk_norm_of_a_model_that_has_it() -> None:
    found = every_case(model_shapes(replace(tiny_config(), architecture="qwen3", qk_norm=True), "tiny"))
    assert {sizes_text(c) for c in found if c["op"] == "head_norm"} == {"M=32 4/2 heads of 8", "M=4096 4/2 heads of 8"}


def test_equal_products_of_a_model_are_measured_once() -> None:
    config = tiny_config(
        num_heads=4, num_kv_heads=4, intermediate_size=16
    )  # attention output: 32 x 32, like gate and up
    assert model_shapes(config, "tiny").linear["float32"] == ((32, 96), (32, 32), (16, 32), (32, 61))


class FakeSide:
    def __init__(self, times: dict[str, list[float]]) -> None:
        self.times = times

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert request["rounds"] == 3
        return {"times": self.times, "cpu_share": 0.9}


def test_the_fastest_stock_kernel_is_the_peer() -> None:
    case = {"op": "linear", "dtype": "float32", "k": 1000, "n": 1000, "rows": 8}
    times = {"ours": [2.0, 1.0, 9.0], "F.linear": [4.0] * 3, "oneDNN": [3.0, 5.0, 1.0], "oneDNN packed": [1.0] * 3}
    row = _row(case, FakeSide(times), 3, peak_gflops=1.0)  # type: ignore[arg-type]
    assert row["peer"] == "oneDNN" and row["ratio"] == 2.0 / 3.0 and row["bar"] == "<= 1.00"
    assert row["packed_ratio"] == 2.0 and "share" not in row
    assert row["ours_gflops"] == pytest.approx(0.008) and row["peer_gflops"] == pytest.approx(0.016 / 3)


def test_learner_products_have_their_share_of_the_peak() -> None:
    case = {"op": "linear", "dtype": "float32", "k": 1000, "n": 1000, "rows": 1024}
    row = _row(case, FakeSide({"ours": [1.0] * 3, "F.linear": [2.0] * 3}), 3, peak_gflops=4.096)  # type: ignore[arg-type]
    assert row["share"] == pytest.approx(0.5) and row["share_bar"] == ">= 0.90" and "packed_ratio" not in row
