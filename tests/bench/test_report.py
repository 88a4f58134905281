"""Tables and JSON say the same, and an empty cell is never a zero."""

from __future__ import annotations

import json

from zerogap.bench.report import Report, bar_text

MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "threads": 1,
    "variant": "avx2",
    "torch": "2.13",
    "transformers": "5.24",
    "peak_gflops": {"float32": 111.4, "bfloat16": 219.0},
    "dram_gb_s": 23.4,
}
COLUMNS = (("dtype", "dtype", ""), ("ratio", "ratio of times", ".2f"), ("bar", "bar", ""))
ROWS = [
    {"dtype": "float32", "ratio": 0.5, "bar": bar_text(1.0, at_least=False)},
    {"dtype": "bfloat16", "ratio": 1.256},
]


def test_table() -> None:
    lines = Report("title", MACHINE, COLUMNS, ROWS, ["a note."]).to_markdown().splitlines()
    assert lines == [
        "**title**",
        "",
        "Some CPU, 1 thread of 2 cores, kernels avx2; peak GFLOP/s: float32 111, bfloat16 219; memory read 23 GB/s; "
        "torch 2.13, transformers 5.24",
        "",
        "| dtype | ratio of times | bar |",
        "|---|---|---|",
        "| float32 | 0.50 | <= 1.00 |",
        "| bfloat16 | 1.26 |  |",
        "",
        "a note.",
    ]


def test_json_has_raw_values() -> None:
    values = json.loads(Report("title", MACHINE | {"vllm": "0.32.0"}, COLUMNS, ROWS).to_json())
    assert values == {"title": "title", "machine": MACHINE | {"vllm": "0.32.0"}, "rows": ROWS, "notes": []}


def test_bars_name_their_direction() -> None:
    assert bar_text(1.5, at_least=True) == ">= 1.50" and bar_text(1.0, at_least=False) == "<= 1.00"
