"""A run in stages: means over ranges of its updates, and the largest ratio in each. From its metrics.jsonl.

python benchmarks/stages.py runs/tiny-001 60 200 400 540 600 > table.md
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

from zerogap.runtime.records import read_metrics

MEANS = {
    "reward/mean": ("mean reward", ".3f"),
    "kl/k3": ("KL k3", ".4f"),
    "ess/all": ("ESS", ".3f"),
    "grad_norm": ("gradient norm", ".2f"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("last", type=int, nargs="+", help="last update of each stage, ascending")
    args = parser.parse_args()
    lines = read_metrics(args.run)
    header = ["updates", *(title for title, _ in MEANS.values()), "largest ratio"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for before, last in itertools.pairwise([0, *args.last]):
        print(f"| {before + 1}-{last} | {' | '.join(cells(lines[before:last]))} |")


def cells(lines: list[dict[str, Any]]) -> list[str]:
    """An update without a trained token has no ratio, nor what follows from it."""

    def values(name: str) -> list[float]:
        return [line[name] for line in lines if name in line]

    means = [format(statistics.fmean(values(name)), form) for name, (_, form) in MEANS.items()]
    return [*means, f"{max(values('ratio/max')):.2f}"]


if __name__ == "__main__":
    main()
