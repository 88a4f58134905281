"""An audit's report for the eye: verdict first, then numbers, tables and the worst tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerogap.cli.audit_locate import show_located

SHOWN = (
    *(f"gap/{part}/{name}" for part in ("total", "lag", "kernel") for name in ("abs_mean", "max", "k1", "k3")),
    *("ratio/mean", "ratio/min", "ratio/max", "ratio/dev", "ratio/chi2", "kl/k1", "kl/k3"),
)


def show(answer: Mapping[str, Any]) -> None:
    """answer: what --json prints."""
    console = Console(highlight=False)
    console.print(Text(answer["verdict"], style="bold"))
    console.print(f"{answer['unequal']:,} of {answer['checked']:,} tokens unequal, {answer['rollouts']:,} rollouts")
    if answer["aligned"] is False:
        console.print(f"aligned: no (engine {answer['engine']}, scored with {answer['kernels']} {answer['dtype']})")
    if answer["tokens_without_weights"]:
        console.print(f"{answer['tokens_without_weights']:,} more left out: the weights that sampled them have gone")
    if answer["without_lag"]:
        console.print(f"{answer['without_lag']:,} without LAG: the weights that were trained on them have gone")
    for line, position in answer["non_finite"][:20]:
        console.print(f"line {line} position {position}: no finite log-probability")
    for name in SHOWN:
        if name in answer["statistics"]:
            console.print(f"{name:<20}{answer['statistics'][name]:.6g}")
    for finding in answer["findings"]:
        console.print(Text(f"{finding['explained']:.1%} explained by {finding['cause']}: {finding['evidence']}"))
    if answer["located"]:
        show_located(console, answer["located"])
    for by, rows in answer["tables"].items():
        table = Table(by, "tokens", "unequal", "mean |log-ratio|", "KERNEL part", "largest", title=f"by {by}")
        for row in rows:
            numbers = ("" if row[key] is None else f"{row[key]:.3g}" for key in ("gap", "kernel", "worst"))
            table.add_row(row["group"], f"{row['tokens']:,}", f"{row['unequal']:,}", *numbers)
        console.print(table)
    if answer["worst"]:
        table = Table("line", "position", "context", "token", "recorded", "rescored", "log-ratio", title="worst tokens")
        for token in answer["worst"]:
            text = (Text(repr(token["context"])), Text(repr(token["text"])))
            numbers = (f"{token[key]:.6g}" for key in ("recorded", "rescored", "log_ratio"))
            table.add_row(str(token["line"]), str(token["position"]), *text, *numbers)
        console.print(table)
