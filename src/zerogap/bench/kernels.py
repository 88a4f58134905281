"""Single operations: ours against the fastest stock torch kernel, at the shapes of a model."""

from __future__ import annotations

import statistics
from typing import Any

from zerogap.bench.kernel_list import Case, KernelsSetting, cases, sizes_text
from zerogap.bench.machine import describe
from zerogap.bench.report import CPU_SHARE, Report, bar_text
from zerogap.bench.sides import Progress, Side, python_command, running

LEARNER_ROWS = 1024  # from here on a product is one of the learner's, with its share of the peak
BAR = 1.00  # time of ours / time of the peer
SHARE_BAR = 0.90
NO_PEER = "oneDNN packed"
NOTES = [
    "ratio = time of ours / time of the fastest stock kernel that reads the weight as it lies. Ours has packed weights "
    "below 256 rows, as the engine does; there `to packed` is the ratio to oneDNN on reordered weights, which stock "
    "eager torch does not use.",
]


def compare(setting: KernelsSetting, progress: Progress) -> Report:
    """Every case in one process, call by call in turn."""
    machine = describe(setting.threads, progress)
    chosen = cases(setting)
    rows = []
    with running({"kernels": python_command("kernel_cases:serve_cases")}, setting.threads, progress) as sides:
        for number, case in enumerate(chosen):
            progress(f"{number + 1}/{len(chosen)} {case['op']} {case['dtype']} {sizes_text(case)}")
            rows.append(_row(case, sides["kernels"], setting.rounds, machine["peak_gflops"][case["dtype"]]))
    title = f"kernels at the shapes of {setting.shapes.model}: ours against stock torch, medians of {setting.rounds}"
    return Report(title, machine, COLUMNS, rows, NOTES)


COLUMNS = (
    ("op", "operation", ""),
    ("dtype", "dtype", ""),
    ("sizes", "sizes", ""),
    ("ours_us", "ours us", ",.1f"),
    ("peer_us", "peer us", ",.1f"),
    ("peer", "peer", ""),
    ("ours_gflops", "ours GFLOP/s", ",.0f"),
    ("peer_gflops", "peer GFLOP/s", ",.0f"),
    ("ratio", "ratio of times", ".2f"),
    ("bar", "bar", ""),
    ("packed_ratio", "to packed", ".2f"),
    ("share", "share of peak", ".2f"),
    ("share_bar", "its bar", ""),
    CPU_SHARE,
)


def _row(case: Case, side: Side, rounds: int, peak_gflops: float) -> dict[str, Any]:
    answer = side.ask(case | {"rounds": rounds})
    medians = {name: statistics.median(values) for name, values in answer["times"].items()}
    ours = medians.pop("ours")
    packed = medians.pop(NO_PEER, None)
    peer = min(medians, key=lambda name: medians[name])
    row: dict[str, Any] = {
        "op": case["op"],
        "dtype": case["dtype"],
        "sizes": sizes_text(case),
        "ours_us": 1e6 * ours,
        "peer_us": 1e6 * medians[peer],
        "peer": peer,
        "ratio": ours / medians[peer],
        "bar": bar_text(BAR, at_least=False),
        "cpu_share": answer["cpu_share"],
    }
    if packed is not None:
        row["packed_ratio"] = ours / packed
    if case["op"] == "linear":
        gflop = 2e-9 * case["rows"] * case["k"] * case["n"]
        row |= {"ours_gflops": gflop / ours, "peer_gflops": gflop / medians[peer]}
        if case["rows"] >= LEARNER_ROWS:
            row |= {"share": gflop / ours / peak_gflops, "share_bar": bar_text(SHARE_BAR, at_least=True)}
    return row
