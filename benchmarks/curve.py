"""A run's reward, KL and effective sample size as one SVG picture, from its metrics.jsonl.

python benchmarks/curve.py runs/tiny-001 > docs/tiny.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zerogap.runtime.records import read_metrics

WIDTH, HEIGHT, MARGIN = 640, 150, 46
MOST_DOTS = 600  # of a panel; the moving mean is of all updates
PANELS = (
    ("reward/mean", "mean reward"),
    ("kl/k3", "KL k3, behaviour to learner"),
    ("ess/all", "effective sample size"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--window", type=int, default=10, help="updates in the moving mean (default 10)")
    args = parser.parse_args()
    lines = read_metrics(args.run)
    height = HEIGHT * len(PANELS) + 20
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">')
    print(f'<rect width="{WIDTH}" height="{height}" fill="white"/>')
    for index, (name, title) in enumerate(PANELS):
        print(panel(lines, name, title, args.window, index * HEIGHT))
    print(f'<text x="{WIDTH - 8}" y="{height - 6}" font-size="11" text-anchor="end">update</text></svg>')


def panel(lines: list[dict[str, Any]], name: str, title: str, window: int, top: int) -> str:
    points = [(line["step"], line[name]) for line in lines if name in line]
    low, high = min(0.0, min(y for _, y in points)), max(y for _, y in points) or 1.0
    last = max(x for x, _ in points)

    def place(x: float, y: float) -> str:
        across = MARGIN + (WIDTH - MARGIN - 10) * x / last
        return f"{across:.1f},{top + HEIGHT - 14 - (HEIGHT - 40) * (y - low) / (high - low):.1f}"

    means = []
    for i, (x, _) in enumerate(points):
        part = points[max(0, i - window + 1) : i + 1]
        means.append((x, sum(y for _, y in part) / len(part)))
    shown = points[:: -(-len(points) // MOST_DOTS)]
    dots = "".join(f'<circle cx="{p[0]}" cy="{p[1]}" r="1.1"/>' for p in (place(*q).split(",") for q in shown))
    line = " ".join(place(*point) for point in means)
    floor, ceiling = top + HEIGHT - 14, top + 26
    return (
        f'<text x="{MARGIN}" y="{top + 18}" font-size="12" font-weight="bold">{title} ({name})</text>'
        f'<path d="M{MARGIN},{ceiling} V{floor} H{WIDTH - 10}" fill="none" stroke="#888"/>'
        f'<text x="{MARGIN - 4}" y="{ceiling + 4}" font-size="11" text-anchor="end">{high:.3g}</text>'
        f'<text x="{MARGIN - 4}" y="{floor}" font-size="11" text-anchor="end">{low:.3g}</text>'
        f'<text x="{WIDTH - 10}" y="{floor + 12}" font-size="11" text-anchor="end">{last}</text>'
        f'<g fill="#9ecae1">{dots}</g><polyline points="{line}" fill="none" stroke="#08519c" stroke-width="1.8"/>'
    )


if __name__ == "__main__":
    main()
