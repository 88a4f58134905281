"""What a benchmark found: the machine, the setting, rows; as a markdown table or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

CPU_SHARE = ("cpu_share", "CPU share", ".2f")  # a column of every table, see sides.cpu_share


@dataclass(frozen=True)
class Report:
    """rows: one dict per line, values raw. columns: (key of a row, header, format of its values); a value that is
    absent or None leaves its cell empty. notes: sentences under the table."""

    title: str
    machine: dict[str, Any]
    columns: tuple[tuple[str, str, str], ...]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Everything but the layout of the table."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "columns"}, indent=2)

    def to_markdown(self) -> str:
        lines = [
            f"**{self.title}**",
            "",
            machine_line(self.machine),
            "",
            "| " + " | ".join(header for _, header, _ in self.columns) + " |",
            "|" + "---|" * len(self.columns),
        ]
        for row in self.rows:
            cells = (_cell(row.get(key), form) for key, _, form in self.columns)
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])


def machine_line(machine: dict[str, Any]) -> str:
    peaks = ", ".join(f"{name} {value:.0f}" for name, value in machine["peak_gflops"].items())
    threads = machine["threads"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "vllm") if name in machine)
    return (
        f"{machine['cpu']}, {threads} thread{'s' if threads > 1 else ''} of {machine['cores']} cores, kernels "
        f"{machine['variant']}; peak GFLOP/s: {peaks}; memory read {machine['dram_gb_s']:.0f} GB/s; {versions}"
    )


def bar_text(value: float, at_least: bool) -> str:
    return f"{'>=' if at_least else '<='} {value:.2f}"


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
