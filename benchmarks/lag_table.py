"""Runs at different lags side by side: what the reward came to, and how far the ratios went. From their metrics.jsonl;
docs/tools.md has the commands of such runs.

python benchmarks/lag_table.py runs/lag0-* runs/lag3-* runs/lag64-* > table.md
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from zerogap.config import load_recipe
from zerogap.runtime.records import read_metrics

HEADER = (
    "lag | seed | updates | reward, first 100 | last 100 | KL k3, mean | largest of an update | ESS, mean | smallest | "
    "gradient norm, mean | largest | ratio, largest | bits unequal of checked"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    args = parser.parse_args()
    print(f"| {HEADER} |\n|{'---|' * len(HEADER.split('|'))}")
    for run in args.runs:
        print(row(run))


def row(run: Path) -> str:
    recipe, lines = load_recipe(run / "recipe.yaml"), read_metrics(run)

    def values(name: str, part: list[dict[str, Any]] = lines) -> list[float]:
        return [line[name] for line in part if name in line]

    def mean(name: str, part: list[dict[str, Any]] = lines) -> float:
        return statistics.fmean(values(name, part))

    checked, unequal = sum(values("bitwise/checked")), sum(values("bitwise/unequal"))
    cells = [
        f"{recipe.train.lag}",
        f"{recipe.seed}",
        f"{len(lines)}",
        f"{mean('reward/mean', lines[:100]):.3f}",
        f"{mean('reward/mean', lines[-100:]):.3f}",
        f"{mean('kl/k3'):.1e}",
        f"{max(values('kl/k3')):.1e}",
        f"{mean('ess/all'):.3f}",
        f"{min(values('ess/all')):.2f}",
        f"{mean('grad_norm'):.2f}",
        f"{max(values('grad_norm')):.1f}",
        f"{max(values('ratio/max')):.1f}",
        f"{unequal:,.0f} of {checked:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
