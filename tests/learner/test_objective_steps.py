"""Objectives in whole updates: independence of the cut, denominators without what is left out, shares reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers import same_bits
from tests.learner.builders import gradients, make_batch, make_learner, make_trajectory, masters, on_policy
from tests.learner.test_objectives import ALL, EVERY_OBJECTIVE
from zerogap.learner.learner import Learner
from zerogap.trajectory import Trajectory


def shifted(learner: Learner, trajectories: list[Trajectory], seed: int = 0) -> list[Trajectory]:
    """On policy, then each recorded logprob moved by up to 1.5 in either direction."""
    generator = torch.Generator().manual_seed(seed)
    for trajectory in on_policy(learner.decoder, trajectories):
        for position, mask in enumerate(trajectory.loss_mask):
            trajectory.logprobs[position] += mask * (float(torch.rand((), generator=generator)) - 0.5) * 3
    return trajectories


@EVERY_OBJECTIVE
def test_the_gradient_does_not_depend_on_the_cut(objective: dict[str, Any]) -> None:
    """Field case 30, also where a gate or a mask changes the denominator of the whole step."""
    results = []
    for budget in (1000, 40, 15, 1):
        learner = make_learner("aligned", micro_batch_tokens=budget, objective=objective)
        output = learner.backward(learner.batch(shifted(learner, make_batch(3))))
        results.append((output, gradients(learner)))
    whole, gradient = results[0]
    for output, other in results[1:]:
        assert output.loss == whole.loss and output.denominator == whole.denominator
        assert float((other - gradient).norm() / gradient.norm()) <= 1e-6
        assert {k: v.tolist() for k, v in output.marks.items()} == {k: v.tolist() for k, v in whole.marks.items()}
    if objective["name"] in ("masked_is", "geometric_gate", "product_gate"):
        assert 0 < whole.denominator < whole.log_ratios_N.numel()
    else:
        assert whole.denominator == whole.log_ratios_N.numel()


def five_tokens(learner: Learner) -> list[Trajectory]:
    """Sample 0: 5 tokens, 3 of them with a ratio outside [0.5, 5]. Sample 1 is empty and only makes the advantage."""
    good = make_trajectory([3, 4], [5, 6, 7, 8, 9], 1.0, sample=0)
    on_policy(learner.decoder, [good])
    for index, log_ratio in enumerate([0.1, -1.5, 1.8, -10.0, 0.3]):
        good.logprobs[2 + index] -= log_ratio
    return [good, make_trajectory([3, 4], [], 0.0, sample=1)]


def test_masked_tokens_leave_the_denominator() -> None:
    """Reserve case R17: 5 tokens, 3 masked: divide by 2."""
    learner = make_learner(objective={"name": "masked_is"})
    batch = learner.batch(five_tokens(learner))
    output = learner.backward(batch)
    kept_N = ~output.marks["masked"]
    assert kept_N.tolist() == [True, False, False, False, True] and output.denominator == 2
    logprobs_N = batch.behaviour_N + output.log_ratios_N
    expected = -float((output.log_ratios_N.exp() * 0.5 * logprobs_N)[kept_N].sum()) / 2
    assert output.loss == pytest.approx(expected, rel=1e-6)
    masked = gradients(learner)
    learner = make_learner()  # REINFORCE Zero on the two kept tokens alone: the same loss, the same gradient
    samples = five_tokens(learner)
    samples[0].loss_mask[3:6] = [0, 0, 0]
    alone = learner.backward(learner.batch(samples))
    assert alone.loss == pytest.approx(output.loss, rel=1e-6) and alone.denominator == 2
    assert float((gradients(learner) - masked).norm() / masked.norm()) <= 1e-6


@pytest.mark.parametrize("name", ["geometric_gate", "product_gate"])
def test_rejected_sequences_leave_the_denominator(name: str) -> None:
    """The step with a rejected sequence is the step of REINFORCE Zero without it, its reward kept in the mean."""
    results = []
    for objective in ({"name": name, "low": 0.5, "high": 2.0}, {"name": "reinforce_zero"}):
        learner = make_learner(objective=objective)
        samples = on_policy(learner.decoder, make_batch(1))
        last = len(samples[2].token_ids) - 1
        samples[2].logprobs[last] += 10.0 * samples[2].num_sampled
        if objective["name"] == "reinforce_zero":
            samples[2].loss_mask = [0] * len(samples[2].loss_mask)
        output = learner.backward(learner.batch(samples))
        results.append((output.loss, output.denominator, gradients(learner)))
    (gated, gated_tokens, gradient), (plain, plain_tokens, expected) = results
    assert gated == pytest.approx(plain, rel=1e-6) and gated_tokens == plain_tokens
    assert float((gradient - expected).norm() / expected.norm()) <= 1e-6


def test_a_step_of_which_everything_is_rejected_changes_nothing() -> None:
    """Weights and moments stay, the update counts as skipped, and nothing is NaN."""
    learner = make_learner(objective={"name": "geometric_gate", "low": 0.9, "high": 1.1}, weight_decay=0.1)
    learner.step(on_policy(learner.decoder, make_batch()))  # moments are not zero from here on
    before = masters(learner)
    batch = make_batch()  # logprobs of -1: far away
    metrics = learner.step(batch)
    assert metrics["update/skipped"] == 1.0 and "learning_rate" not in metrics and learner.version == 2
    assert metrics["rejected/tokens"] == metrics["rejected/sequences"] == 1.0
    assert metrics["loss/policy"] == 0.0 and all(math.isfinite(value) for value in metrics.values())
    assert all(same_bits(before[name], master) for name, master in masters(learner).items())


REPORTED = {
    "reinforce_zero": {"rejected"},
    "ppo_clip": {"clipped"},
    "truncated_is": {"truncated_weight"},
    "masked_is": {"masked"},
    "geometric_gate": {"rejected"},
    "product_gate": {"rejected"},
    "cispo": {"clipped"},
    "is_off": set(),
}


@EVERY_OBJECTIVE
def test_each_reports_what_it_did(objective: dict[str, Any]) -> None:
    learner = make_learner(objective=objective)
    metrics = learner.step(shifted(learner, make_batch(4)))
    marks = {"clipped", "truncated_weight", "masked", "rejected"}
    names = {f"{mark}/{share}" for mark in REPORTED[objective["name"]] for share in ("tokens", "sequences")}
    assert {name for name in metrics if name.split("/")[0] in marks} == names
    for name in names:
        expected_nonzero = objective["name"] not in ("reinforce_zero", "cispo")
        assert 0 <= metrics[name] <= 1 and (metrics[name] > 0) == expected_nonzero, name


@pytest.mark.parametrize("objective", ALL[1:], ids=lambda keys: keys["name"])
def test_standard_deviation_scales_the_advantage(objective: dict[str, Any]) -> None:
    """Rewards 0, 1, 0, 1: deviation 0.57735 (n - 1), so that advantages are 0.5 / 0.57745 = 0.86587."""
    learner = make_learner(objective=objective | {"normalize_std": True})
    batch = learner.batch(make_batch(1))
    assert batch.advantages_N.abs().tolist() == pytest.approx([0.865875] * batch.tokens, abs=1e-6)


@pytest.mark.parametrize("length", [1, 16, 100])
def test_at_lag_zero_the_mean_ratio_is_one_at_any_length(length: int) -> None:
    """Reserve case R18, token level; with aligned kernels the ratio is exactly 1."""
    learner = make_learner("aligned")
    samples = [make_trajectory([3, 4], [5 + i] * length, float(i), sample=i) for i in range(2)]
    metrics = learner.step(on_policy(learner.decoder, samples))
    assert metrics["ratio/mean"] == metrics["ratio/max"] == metrics["ratio/min"] == 1.0
