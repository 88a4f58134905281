"""The audit in a sentence or three, never surer than its numbers."""

from __future__ import annotations

from collections.abc import Sequence

from zerogap.gaps.audit.analysis import Report
from zerogap.gaps.audit.finding import NAMED, Finding


def verdict(report: Report, findings: Sequence[Finding]) -> str:
    """What the gap is made of, and the cause of KERNEL where one explains nearly all of it."""
    parts = []
    if report.non_finite:
        line, position = report.non_finite[0]
        parts.append(
            f"{len(report.non_finite)} recorded log-probabilities are missing or no finite numbers (first: "
            f"line {line}, position {position}): a broken forward in the engine, or a token that its own masks exclude."
        )
    unequal = report.unequal - len(report.non_finite)  # a NaN is never equal
    if report.checked == len(report.non_finite):
        return " ".join([*parts, "Nothing else could be checked."])
    if unequal == 0:
        parts.append(_aligned(report))
    else:
        parts.append(_mismatch(report, unequal, findings))
    return " ".join(parts)


def _aligned(report: Report) -> str:
    count = report.checked - len(report.non_finite)
    if not report.lag_measured:
        return f"No KERNEL gap: all {count:,} log-probabilities equal the learner's as bits."
    if not report.statistics["gap/lag/max"]:
        return f"No gap: all {count:,} log-probabilities equal the learner's as bits, on both models."
    return (
        f"All of the gap is weight lag (mean {report.statistics['gap/lag/abs_mean']:.2e}): on the weights that sampled "
        f"them all {count:,} log-probabilities equal the learner's as bits."
    )


def _mismatch(report: Report, unequal: int, findings: Sequence[Finding]) -> str:
    kernel = report.statistics["gap/kernel/abs_mean"]
    size = f"KERNEL: {unequal:,} of {report.checked:,} log-probabilities differ, by {kernel:.2e} on average"
    if report.lag_measured:
        size += f" (LAG: {report.statistics['gap/lag/abs_mean']:.2e})"
    best = findings[0] if findings else None
    if best is None:
        return f"{size}; no known cause explains it."
    if best.explained < NAMED:
        return f"{size}; cause unknown (nearest: {best.cause}, which explains {best.explained:.0%}: {best.evidence})."
    return f"{size}. Cause: {best.cause}. It explains {best.explained:.1%}: {best.evidence}."
