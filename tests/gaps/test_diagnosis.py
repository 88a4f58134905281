"""Each fault is named by the audit, and by its whole name; where it cannot know the cause, none is made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.gaps.faults import FAULTS, Fault, Scene, play
from zerogap.gaps.audit.analysis import Report, analyse
from zerogap.gaps.audit.candidates import Candidates
from zerogap.gaps.audit.diagnosis import diagnose
from zerogap.gaps.audit.finding import Finding
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.schema import Rollout
from zerogap.gaps.audit.verdict import verdict
from zerogap.gaps.split import only_version, split_tokens
from zerogap.learner.packing import score, trained_positions
from zerogap.trajectory import Trajectory


def rescored(scene: Scene, trajectories: list[Trajectory] | None = None) -> Rescored:
    chosen = scene.trajectories if trajectories is None else trajectories
    split = split_tokens(scene.decoder, scene.snapshots, chosen, scene.version, 512)
    version = int(split.versions_N.mode().values)
    rollouts = [Rollout(line, trajectory) for line, trajectory in enumerate(chosen, 1)]
    lagged_N = torch.ones(split.checked, dtype=torch.bool)
    return Rescored(rollouts, split, True, lagged_N, scene.decoder.view(scene.snapshots[version]), version)


def audit(
    scene: Scene, trajectories: list[Trajectory] | None = None, candidates: Sequence[int] | None = None
) -> tuple[Report, list[Finding], str]:
    """candidates: None for all versions of the run."""
    found = rescored(scene, trajectories)
    report = analyse(found, None)
    versions = list(scene.snapshots) if candidates is None else candidates
    findings = diagnose(found, Candidates(scene.snapshots, versions), lambda hundredths: None)
    return report, findings, verdict(report, findings)


def recorded_on(scene: Scene, trajectories: list[Trajectory], age: int) -> list[Trajectory]:
    """What an engine records whose weights are `age` updates older than it says."""
    changed = []
    for t in trajectories:
        logprobs = list(t.logprobs)
        for version in {v for v, m in zip(t.versions, t.loss_mask, strict=True) if m}:
            named = only_version(t, version)
            scores = score(scene.decoder.view(scene.snapshots[version - age]), [named], 512)[0].tolist()
            for position, value in zip(trained_positions(named), scores, strict=True):
                logprobs[position] = value
        changed.append(replace(t, logprobs=logprobs))
    return changed


@pytest.fixture(scope="module")
def healthy() -> Scene:
    return play(Fault())


def test_all_of_the_gap_is_lag(healthy: Scene) -> None:
    report, findings, text = audit(healthy)
    assert (report.unequal, findings) == (0, [])
    assert report.checked > 50 and report.statistics["gap/lag/max"] > 0
    assert text.startswith("All of the gap is weight lag")


CAUSES = {
    "undelivered weights": "weights of version 1, 2 updates older than the file says",
    "stale prefix cache": "stale prefix cache: keys and values of version 2, 1 update older than the file says",
    "tied head not updated": "tied head (apart from its embedding) of version 0, 3 updates older than the file says",
    "half of the tensors delivered": "tensors from layers.0.down to layers.1.down of version 2, "
    "1 update older than the file says",
    "one tensor narrowed to bf16": "layers.1.down narrowed to bf16",
    "temperature 0.6 on one side": "temperature 1 instead of 0.6",
    "top-p 0.9 on one side": "truncated sampling (top-p 0.9)",
    "rows paired with another prompt": "rows paired with another prompt",
    "EOS logprob replaced by 0": "end mark without its log-probability",
    "weights narrowed to bf16": "weights narrowed to bf16",
    "engine in bf16": "engine in bf16",
    "logits rounded to bf16": "logits rounded to bf16",
}
BY_BITS = [
    "undelivered weights",
    "stale prefix cache",
    "tied head not updated",
    "half of the tensors delivered",
    "one tensor narrowed to bf16",
    "weights narrowed to bf16",
    "engine in bf16",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_named(fault: str) -> None:
    report, findings, text = audit(play(FAULTS[fault]))
    assert report.unequal > 0
    assert findings[0].cause == CAUSES[fault]
    assert findings[0].explained > 0.99
    assert f"Cause: {CAUSES[fault]}. It explains" in text
    if fault in BY_BITS:
        assert findings[0].explained == 1 and "tokens fit as bits" in text
    assert [finding.cause for finding in findings if finding.explained > 0.9] == [findings[0].cause]


NEED_OTHER_WEIGHTS = ["undelivered weights", "stale prefix cache", "tied head not updated"]


@pytest.mark.parametrize("fault", [*NEED_OTHER_WEIGHTS, "half of the tensors delivered"])
def test_without_the_other_weights_no_cause_is_made_up(fault: str) -> None:
    report, findings, text = audit(play(FAULTS[fault]), candidates=[])
    assert report.unequal > 0
    assert all(finding.explained < 0.9 for finding in findings)
    assert "no known cause" in text or "cause unknown" in text


def test_the_nearest_candidate_that_is_not_it_is_not_named() -> None:
    """Two updates are missing and only the weights of one before are given."""
    scene = play(FAULTS["undelivered weights"])
    _, findings, _ = audit(scene, candidates=[scene.version - 2])
    assert all(finding.explained < 0.9 for finding in findings)


def test_other_kernels_are_no_cause_in_weights() -> None:
    """A healthy engine of stock torch kernels, every version at hand: the gap is its rounding, and nothing is named."""
    report, findings, text = audit(play(Fault(engine_kernels="standard")))
    assert report.unequal > 0 and report.statistics["gap/kernel/max"] < 1e-4
    assert findings == [] and "no known cause" in text


@pytest.mark.parametrize("fault", [*NEED_OTHER_WEIGHTS, "half of the tensors delivered", "one tensor narrowed to bf16"])
def test_named_without_equal_bits(fault: str) -> None:
    """The engine has stock torch kernels besides: no token fits as bits, the share that is explained tells."""
    _, findings, _ = audit(play(replace(FAULTS[fault], engine_kernels="standard")))
    assert findings[0].cause == CAUSES[fault]
    assert 0.99 < findings[0].explained < 1


def test_one_engine_of_two_is_stale(healthy: Scene) -> None:
    """Rollouts that do not differ do not blur what is wrong with the others."""
    half = len(healthy.trajectories) // 2
    mixture = healthy.trajectories[:half] + recorded_on(healthy, healthy.trajectories[half:], 1)
    report, findings, text = audit(healthy, mixture)
    assert 0 < report.unequal < report.checked
    assert findings[0].explained == 1 and "weights of version" in text and "1 update older" in text


def test_weights_newer_than_said(healthy: Scene) -> None:
    _, findings, _ = audit(healthy, recorded_on(healthy, healthy.trajectories, -1))
    assert findings[0].cause == f"weights of version {healthy.version}, 1 update newer than the file says"
    assert findings[0].explained == 1


def test_a_few_tokens_are_too_few(healthy: Scene) -> None:
    """Anything fits one token somehow."""
    few = [replace(t, loss_mask=[*t.loss_mask[:9], *[0] * (len(t.loss_mask) - 9)]) for t in healthy.trajectories[:2]]
    _, findings, _ = audit(healthy, recorded_on(healthy, few, 1))
    assert not any("version" in finding.cause for finding in findings)


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

    _, findings, text = audit(healthy, [shift(t) for t in healthy.trajectories])
    assert findings[0].cause == f"log-probabilities one token too {'early' if by == -1 else 'late'}"
    assert findings[0].cause in text


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_narrowed_logprobs_are_named(healthy: Scene, name: str, dtype: torch.dtype) -> None:
    rounded = [replace(t, logprobs=torch.tensor(t.logprobs).to(dtype).tolist()) for t in healthy.trajectories]
    _, findings, text = audit(healthy, rounded)
    assert findings[0].cause == f"log-probabilities rounded to {name}"
    assert findings[0].explained == 1.0
    assert findings[0].cause in text


def test_non_finite_logprobs_are_named_by_line_and_are_in_no_mean(healthy: Scene) -> None:
    clean, _, _ = audit(healthy)
    first = healthy.trajectories[1]
    position = first.loss_mask.index(1)
    broken = [float("nan") if p == position else value for p, value in enumerate(first.logprobs)]
    trajectories = [replace(t, logprobs=broken) if t is first else t for t in healthy.trajectories]
    report, findings, text = audit(healthy, trajectories)
    assert report.non_finite == [(2, position)]
    assert (report.checked, findings) == (clean.checked, [])
    assert all(value == value for value in report.statistics.values())
    assert "line 2" in text and "All of the gap is weight lag" in text
