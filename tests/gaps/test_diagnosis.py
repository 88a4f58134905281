"""A fault that leaves a trace in the numbers is named by the audit; a cause that it does not know is not made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gaps.faults import FAULTS, Fault, Scene, play
from zerogap.gaps.audit.analysis import Report, analyse
from zerogap.gaps.audit.diagnosis import Finding, diagnose
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.schema import Rollout
from zerogap.gaps.audit.verdict import verdict
from zerogap.gaps.split import split_tokens
from zerogap.trajectory import Trajectory


def rescored(scene: Scene, trajectories: list[Trajectory] | None = None) -> Rescored:
    chosen = scene.trajectories if trajectories is None else trajectories
    split = split_tokens(scene.decoder, scene.snapshots, chosen, scene.version, 512)
    version = int(split.versions_N.mode().values)
    rollouts = [Rollout(line, trajectory) for line, trajectory in enumerate(chosen, 1)]
    lagged_N = torch.ones(split.checked, dtype=torch.bool)
    return Rescored(rollouts, split, True, lagged_N, scene.decoder.view(scene.snapshots[version]), version)


def audit(found: Rescored) -> tuple[Report, list[Finding], str]:
    report, findings = analyse(found, None), diagnose(found)
    return report, findings, verdict(report, findings)


@pytest.fixture(scope="module")
def healthy() -> Scene:
    return play(Fault())


def test_all_of_the_gap_is_lag(healthy: Scene) -> None:
    report, findings, text = audit(rescored(healthy))
    assert (report.unequal, findings) == (0, [])
    assert report.checked > 50 and report.statistics["gap/lag/max"] > 0
    assert text.startswith("All of the gap is weight lag")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("temperature 0.6 on one side", "temperature 1 instead of 0.6"),
        ("top-p 0.9 on one side", "truncated sampling (top-p 0.9)"),
        ("rows paired with another prompt", "rows paired with another prompt"),
        ("EOS logprob replaced by 0", "end mark without its log-probability"),
    ],
)
def test_faults_are_named(fault: str, cause: str) -> None:
    _, findings, text = audit(rescored(play(FAULTS[fault])))
    assert findings[0].cause == cause
    assert findings[0].explained > 0.9
    assert cause in text


@pytest.mark.parametrize("fault", ["undelivered weights", "half of the tensors delivered"])
def test_an_unknown_cause_is_not_made_up(fault: str) -> None:
    report, findings, text = audit(rescored(play(FAULTS[fault])))
    assert report.unequal > 0
    assert all(finding.explained < 0.9 for finding in findings)
    assert "no known cause" in text or "cause unknown" in text


@pytest.mark.parametrize("by", [1, -1])
def test_shifted_logprobs_are_named(healthy: Scene, by: int) -> None:
    def shift(t: Trajectory) -> Trajectory:
        sampled = [p for p, m in enumerate(t.loss_mask) if m]
        values = [t.logprobs[p] for p in sampled]
        moved = values[1:] + values[-1:] if by == -1 else values[:1] + values[:-1]
        logprobs = list(t.logprobs)
        for position, value in zip(sampled, moved, strict=True):
            logprobs[position] = value
        return replace(t, logprobs=logprobs)

    _, findings, text = audit(rescored(healthy, [shift(t) for t in healthy.trajectories]))
    assert findings[0].cause == f"log-probabilities one token too {'early' if by == -1 else 'late'}"
    assert findings[0].cause in text


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_narrowed_logprobs_are_named(healthy: Scene, name: str, dtype: torch.dtype) -> None:
    rounded = [replace(t, logprobs=torch.tensor(t.logprobs).to(dtype).tolist()) for t in healthy.trajectories]
    _, findings, text = audit(rescored(healthy, rounded))
    assert findings[0].cause == f"log-probabilities rounded to {name}"
    assert findings[0].explained == 1.0
    assert findings[0].cause in text


def test_non_finite_logprobs_are_named_by_line_and_are_in_no_mean(healthy: Scene) -> None:
    clean, _, _ = audit(rescored(healthy))
    first = healthy.trajectories[1]
    position = first.loss_mask.index(1)
    broken = [float("nan") if p == position else value for p, value in enumerate(first.logprobs)]
    trajectories = [replace(t, logprobs=broken) if t is first else t for t in healthy.trajectories]
    report, findings, text = audit(rescored(healthy, trajectories))
    assert report.non_finite == [(2, position)]
    assert (report.checked, findings) == (clean.checked, [])
    assert all(value == value for value in report.statistics.values())
    assert "line 2" in text and "All of the gap is weight lag" in text
