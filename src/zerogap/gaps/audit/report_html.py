"""An audit's report as one HTML file that needs no network: bars are drawn as SVG by hand, since five bar charts do not
earn four megabytes of plotting library in every file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.verdict{background:#eef3f8;padding:1rem;border-radius:6px}
table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #dde3e9}
td.text,th.text{text-align:left;font-family:ui-monospace,monospace;white-space:pre-wrap}svg text{font-size:12px}"""
WIDTH, LABEL, BAR = 700, 150, 18  # pixels: of a chart, of its labels, height of a bar with its gap


def to_html(answer: Mapping[str, Any]) -> str:
    """answer: what `zerogap audit --json` prints."""
    facts = {
        "rollouts": answer["rollouts"],
        "tokens": answer["checked"],
        "unequal as bits": answer["unequal"],
        "without a finite log-probability": len(answer["non_finite"]),
        "left out: the weights that sampled them have gone": answer["tokens_without_weights"],
        "without LAG: the weights that were trained on them have gone": answer["without_lag"],
        "scored with": f"{answer['kernels']} {answer['dtype']}",
    }
    if answer["engine"] is not None:
        facts |= {"sampled with": answer["engine"], "aligned": "yes" if answer["aligned"] else "no"}
    title = f"Audit of {escape(str(answer['source']))}"
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="verdict">{escape(answer["verdict"])}</p>',
        _table(("", ""), facts.items()),
        "<h2>Statistics</h2>",
        _table(("name", "value"), ((name, f"{value:.6g}") for name, value in sorted(answer["statistics"].items()))),
    ]
    if answer["findings"]:
        rows = ((f["cause"], f"{f['explained']:.1%}", f["evidence"]) for f in answer["findings"])
        parts += ["<h2>Possible causes of KERNEL</h2>", _table(("cause", "explained", "evidence"), rows)]
    if answer["located"]:
        parts += _located(answer["located"])
    for by, rows in answer["tables"].items():
        parts += [f"<h2>Mean |log-ratio| by {escape(by)}</h2>", _chart(rows)]
    if answer["worst"]:
        heads = ("line", "position", "context", "token", "recorded", "rescored", "log-ratio")
        worst = (
            (
                t["line"],
                t["position"],
                t["context"],
                t["text"],
                *(f"{t[k]:.6g}" for k in ("recorded", "rescored", "log_ratio")),
            )
            for t in answer["worst"]
        )
        parts += ["<h2>Worst tokens</h2>", _table(heads, worst)]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _located(located: Mapping[str, Any]) -> list[str]:
    """Every stage of the forward pass, where any differs."""
    parts = ["<h2>Where the numbers part</h2>", f"<p>{escape(located['sentence'])}</p>"]
    if located["first"] is None:
        return parts
    numbers = ("unequal", "largest", "relative")
    modes = ("cumulative", "isolated")
    heads = ("layer", "stage", "values", *(f"{mode}: {name}" for mode in modes for name in numbers))
    rows = (
        (
            "" if stage["layer"] is None else stage["layer"],
            stage["name"],
            stage["values"],
            *(float(f"{stage[mode][name]:.3g}") for mode in modes for name in numbers),
        )
        for stage in located["stages"]
    )
    return [*parts, _table(heads, rows)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Text is aligned to the left, numbers to the right."""

    def cell(value: Any) -> str:
        kind = ' class="text"' if isinstance(value, str) else ""
        return f"<td{kind}>{escape(str(value))}</td>"

    head = "".join(f'<th class="text">{escape(name)}</th>' for name in heads)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each row: its full length is the gap (none where it was not measured), the dark part of it KERNEL."""
    largest = max((max(row["gap"] or 0.0, row["kernel"]) for row in rows), default=0.0) or 1.0
    room = WIDTH - LABEL - 250
    bars = []
    for index, row in enumerate(rows):
        y, gap, kernel = index * BAR, room * (row["gap"] or 0.0) / largest, room * row["kernel"] / largest
        size = "KERNEL only" if row["gap"] is None else f"{row['gap']:.3g}"
        note = f"{size}, {row['unequal']:,} of {row['tokens']:,} unequal"
        bars.append(
            f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(row["group"])}</text>'
            f'<rect x="{LABEL}" y="{y + 2}" width="{gap:.1f}" height="{BAR - 4}" fill="#9dbcd8"/>'
            f'<rect x="{LABEL}" y="{y + 6}" width="{kernel:.1f}" height="{BAR - 12}" fill="#b3452c"/>'
            f'<text x="{LABEL + max(gap, kernel) + 8:.1f}" y="{y + 13}">{escape(note)}</text>'
        )
    legend = "<p>light: total, dark: KERNEL</p>"
    return f'{legend}<svg width="{WIDTH}" height="{len(rows) * BAR}">{"".join(bars)}</svg>'
