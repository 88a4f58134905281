"""Plain text of one step and of the end of a run; no terminal codes, no state.

A metric that was not measured is absent from the line, never shown as 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
# Shares of the trained tokens that an objective did something to; in the step line where there are any.
OBJECTIVE_MARKS = (
    ("clipped", "clipped/tokens"),
    ("truncated", "truncated_weight/tokens"),
    ("masked", "masked/tokens"),
    ("rejected", "rejected/tokens"),
)


def step_line(metrics: Mapping[str, Any], total: int | None, aligned: bool) -> str:
    """`step 12/300  reward 0.412  loss -0.0132  grad 0.81  lag 1.5/2  kl k1 +1e-05 k3 2e-05  bitwise 96/96  ...`"""
    step = int(metrics["step"])
    width = len(str(total)) if total else 1
    parts = [f"step {step:>{width}}/{total}" if total else f"step {step}"]
    for label, key, form in (
        ("reward", "reward/mean", ".3f"),
        ("loss", "loss/policy", "+.4f"),
        ("grad", "grad_norm", ".3g"),
    ):
        if key in metrics:
            parts.append(f"{label} {metrics[key]:{form}}")
    if "lag/mean" in metrics and "lag/max" in metrics:
        parts.append(f"lag {metrics['lag/mean']:.1f}/{metrics['lag/max']:.0f}")
    if "kl/k1" in metrics and "kl/k3" in metrics:
        parts.append(f"kl k1 {metrics['kl/k1'] + 0.0:+.1e} k3 {metrics['kl/k3']:.1e}")
    if "ess/all" in metrics:
        parts.append(f"ess {metrics['ess/all']:.2f}")
    for label, key in OBJECTIVE_MARKS:
        if metrics.get(key):
            parts.append(f"{label} {metrics[key]:.1%}")
    parts.append(verdict(metrics, aligned))
    if metrics.get("bitwise/unequal") and "gap/lag/abs_mean" in metrics:
        parts.append(f"gap lag {metrics['gap/lag/abs_mean']:.1e} kernel {metrics['gap/kernel/abs_mean']:.1e}")
    if "eval/reward" in metrics:
        parts.append(f"eval {metrics['eval/reward']:.3f} of version {metrics['eval/version']}")
    if "throughput/engine_tokens_per_s" in metrics:
        parts.append(f"{metrics['throughput/engine_tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def verdict(metrics: Mapping[str, Any], aligned: bool) -> str:
    """`bitwise equal/checked` of this step's audited tokens; a run whose bits are not claimed is marked as such."""
    checked = int(metrics.get("bitwise/checked", 0))
    mark = "" if aligned else "aligned: no"
    if not checked:
        return mark or "bitwise not checked"
    equal = checked - int(metrics["bitwise/unequal"])
    counts = f"bitwise {equal:,}/{checked:,}"
    return f"{counts} ({mark})" if mark else counts


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole history in at most `width` bars, each the mean of its stretch, scaled between least and largest."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(int((m - low) / span * len(BARS)), len(BARS) - 1)] for m in means)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) for the table at the end of a run, from the keys of summary.json; absent or null: no row."""
    rows: list[tuple[str, str]] = []
    not_aligned = "" if summary.get("aligned", True) else "; aligned: no"
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        rows.append(("reward, first 10% to last 10%", f"{first:.3f} to {last:.3f}"))
    for label, key, form in (
        ("updates", "updates", ",d"),
        ("tokens trained", "tokens_trained", ",d"),
        ("bits checked (tokens)", "bits_checked", ",d"),
        (f"bits unequal (tokens{not_aligned})", "bits_unequal", ",d"),
        ("largest lag (updates)", "lag_max", ",d"),
        ("ratio dev, peak over median", "ratio_dev_peak", ",.1f"),
        ("ratio chi2, peak over median", "ratio_chi2_peak", ",.1f"),
        ("dropped", "dropped", ",d"),
        ("engine tokens/s", "engine_tokens_per_s", ",.0f"),
        ("learner tokens/s", "learner_tokens_per_s", ",.0f"),
        ("seconds", "seconds", ",.0f"),
    ):
        value = summary.get(key)
        if value is not None:
            rows.append((label, format(value, form)))
    if summary.get("eval_reward") is not None:
        rows.append(("reward of the last evaluation", f"{summary['eval_reward']:.3f}"))
    for label, key in (
        ("prompts skipped (too long)", "prompts_skipped"),
        ("samples not graded", "errors"),
        ("evaluations missing", "evaluations_missing"),
    ):
        if summary.get(key):
            rows.append((label, format(summary[key], ",d")))
    for label, key in (("model", "final_model"), ("run folder", "run_dir")):
        if summary.get(key) is not None:
            rows.append((label, str(summary[key])))
    return rows
