"""Whole updates on a tiny decoder: what is trained, by which denominator, and what stops a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers import same_bits
from tests.learner.builders import gradients, make_batch, make_learner, make_trajectory, masters, on_policy
from zerogap.learner.learner import NonFiniteUpdate
from zerogap.learner.packing import pack
from zerogap.trajectory import NOT_SAMPLED, Trajectory

FAMILIES = pytest.mark.parametrize("kernels", ["standard", "aligned"])


def unchanged(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return all(same_bits(before[name], after[name]) for name in before)


def truncated_groups() -> list[Trajectory]:
    """Field case 29: rewards [1, 0, 0, 1] and [1, 1, 0, 0], third sample of the first group truncated."""
    batch = []
    for group, rewards in enumerate([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]]):
        for sample, reward in enumerate(rewards):
            cut = (group, sample) == (0, 2)
            batch.append(
                make_trajectory(
                    [3, 4 + group],
                    [7 + sample] * (sample + 1),
                    reward,
                    group,
                    sample,
                    finish_reason="length" if cut else "eos",
                )
            )
    return batch


@FAMILIES
def test_an_update_raises_the_probability_of_rewarded_tokens(kernels: str) -> None:
    learner = make_learner(kernels, learning_rate=1e-2)
    good, bad = make_trajectory([3, 4], [5, 6], 1.0, sample=0), make_trajectory([3, 4], [7, 8], 0.0, sample=1)
    on_policy(learner.decoder, [good, bad])
    metrics = learner.step([good, bad])
    assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["learning_rate"] == 1e-2 and metrics["grad_norm"] > 0 and metrics["tokens/trained"] == 4
    assert metrics["throughput/learner_tokens_per_s"] > 0
    assert metrics["tokens/learner_rows"] == 2 + 2 * 1  # the prompt once; the last token of a sample predicts nothing
    assert metrics["tokens/shared_rows"] == 2
    assert learner.version == 1
    before = [sum(good.logprobs), sum(bad.logprobs)]
    on_policy(learner.decoder, [good, bad])
    assert sum(good.logprobs) > before[0] and sum(bad.logprobs) < before[1]


@FAMILIES
def test_the_gradient_does_not_depend_on_the_cut(kernels: str) -> None:
    """Field case 30: 8 samples of 1 to 8 tokens (31 rows, 3 of them the shared prompt) in 1, 2, 4 and 7 micro-batches;
    in the last the sample of 1 token, which needs the prompt's rows only, finds them there."""
    samples = [
        make_trajectory([3, 4, 5], [6 + i + k for k in range(i + 1)], float(i % 3), 0, i, logprobs=[-4.0] * (i + 1))
        for i in range(8)
    ]
    losses, flat = [], []
    for budget, cuts in [(31, 1), (25, 2), (13, 4), (1, 7)]:
        learner = make_learner(kernels, micro_batch_tokens=budget)
        forwards = count_forwards(learner.decoder)
        output = learner.backward(learner.batch(samples))
        assert len(forwards) == cuts
        losses.append(output.loss)
        flat.append(gradients(learner))
    for loss, gradient in zip(losses[1:], flat[1:], strict=True):
        assert float((gradient - flat[0]).norm() / flat[0].norm()) <= 1e-6
        assert loss == losses[0] if kernels == "aligned" else loss == pytest.approx(losses[0], rel=1e-6)


def count_forwards(decoder: Any) -> list[int]:
    """Rows of each forward pass from now on."""
    rows: list[int] = []
    original = decoder.hidden

    def hidden(tokens_T: torch.Tensor, *arguments: Any) -> torch.Tensor:
        rows.append(len(tokens_T))
        hidden_TH: torch.Tensor = original(tokens_T, *arguments)
        return hidden_TH

    decoder.hidden = hidden
    return rows


@FAMILIES
def test_the_gradient_is_that_of_the_stated_loss(kernels: str) -> None:
    """Sum over trained tokens of - ratio * advantage * logprob, over the number of trained tokens of the step."""
    batch = make_batch()
    learner = make_learner(kernels, micro_batch_tokens=20)
    output = learner.backward(learner.batch(batch))
    tokens = sum(t.num_sampled for t in batch)
    expected = torch.zeros(())
    reference = make_learner("standard").decoder
    for trajectory in batch:
        (micro_batch,) = pack([trajectory], 64)
        logprobs_N = micro_batch.logprobs(reference, 1.0)
        ratio_N = (logprobs_N.detach() + 1.0).exp()
        advantage = (trajectory.reward or 0.0) - 0.5
        expected = expected - (ratio_N * advantage * logprobs_N).sum() / tokens
    expected.backward()
    target = torch.cat([w.master.grad.flatten() for w in reference.weights.values()])  # type: ignore[union-attr]
    assert output.loss == pytest.approx(expected.item(), rel=1e-5)
    assert float((gradients(learner) - target).norm() / target.norm()) <= 1e-5


def test_unsampled_tokens_are_context_only() -> None:
    """Field case 7: an appended end mark (mask 0) adds nothing to loss, gradient or denominator."""
    results = []
    for tail in (None, 1, 9):
        batch = [make_trajectory([3, 4], [5, 6 + i], float(i), sample=i) for i in range(2)]
        if tail is not None:
            for trajectory in batch:
                trajectory.token_ids.append(tail)
                trajectory.loss_mask.append(0)
                trajectory.logprobs.append(0.0)
                trajectory.versions.append(NOT_SAMPLED)
        learner = make_learner()
        prepared = learner.batch(batch)
        results.append((prepared.tokens, learner.backward(prepared).loss, gradients(learner)))
    assert [tokens for tokens, _, _ in results] == [4, 4, 4]
    assert results[0][1] == results[1][1] == results[2][1]
    assert same_bits(results[0][2], results[1][2]) and same_bits(results[0][2], results[2][2])


def test_one_empty_sample() -> None:
    """Field case 15: it keeps its place in the mean and adds no token."""
    learner = make_learner()
    group = [make_trajectory([3, 4], [5] * n, reward, sample=n) for n, reward in enumerate([0.0, 1.0, 1.0, 0.0])]
    batch = learner.batch(group)
    assert batch.tokens == 6
    assert [float(batch.advantages_N[batch.owners_N == i][0]) for i in range(3)] == [0.5, 0.5, -0.5]
    metrics = learner.step(group)
    assert metrics["length/mean"] == 1.5 and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("case", ["empty", "masked", "ungraded", "no trajectories"])
def test_a_step_without_trained_tokens(case: str) -> None:
    """Field case 15: loss exactly 0, weights and moments untouched, the step counted, no NaN."""
    learner = make_learner(mask_truncated=True, weight_decay=0.1)
    learner.step(on_policy(learner.decoder, make_batch()))  # moments are not zero from here on
    before = {name: tensor.clone() for name, tensor in learner.state()[0].items()}
    reward = {"empty": 1.0, "masked": 1.0, "ungraded": None, "no trajectories": 1.0}[case]
    sampled = [] if case == "empty" else [5, 6]
    size = 0 if case == "no trajectories" else 4
    metrics = learner.step(
        [make_trajectory([3, 4], sampled, reward, sample=i, finish_reason="length") for i in range(size)]
    )
    assert metrics["loss/policy"] == 0.0 and metrics["grad_norm"] == 0.0
    assert metrics["update/skipped"] == 1.0 and metrics["tokens/trained"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert not any(
        name.startswith(("ratio/", "kl", "ess/", "lag/", "weight/", "rejected/", "learning_rate", "throughput/"))
        for name in metrics
    )
    assert learner.version == 2
    assert unchanged(before, learner.state()[0])


@pytest.mark.parametrize("reward", [0.35, 0.0, 1.0])
@FAMILIES
def test_equal_rewards_change_nothing(kernels: str, reward: float) -> None:
    """Field case 26: gradient exactly 0; the tokens are still measured and counted."""
    learner = make_learner(kernels)
    before = masters(learner)
    group = [make_trajectory([3, 4], [5, 6 + i], reward, sample=i) for i in range(8)]
    metrics = learner.step(group)
    assert metrics["grad_norm"] == 0.0 and metrics["loss/policy"] == 0.0
    assert metrics["reward/zero_variance_groups"] == 1.0
    assert metrics["tokens/trained"] == 16 and "ess/all" in metrics
    assert unchanged(before, masters(learner))


def test_masked_truncated_samples_keep_their_place() -> None:
    """Field case 29: group 1 from all four rewards [.5, -.5, masked, .5], group 2 [.5, .5, -.5, -.5]."""
    learner = make_learner(mask_truncated=True)
    samples = truncated_groups()
    batch = learner.batch(samples)
    pairs = {(t.group_id, t.sample_index): i for i, t in enumerate(batch.trajectories)}
    advantages = {key: set(batch.advantages_N[batch.owners_N == i].tolist()) for key, i in pairs.items()}
    assert advantages == {
        (0, 0): {0.5},
        (0, 1): {-0.5},
        (0, 3): {0.5},
        (1, 0): {0.5},
        (1, 1): {0.5},
        (1, 2): {-0.5},
        (1, 3): {-0.5},
    }
    assert batch.tokens == 2 * (1 + 2 + 3 + 4) - 3
    metrics = learner.step(samples)
    assert metrics["tokens/trained"] == 17 and metrics["truncated/share"] == 1 / 8
    assert metrics["length/mean"] * 8 - 3 == metrics["tokens/trained"]
    assert make_learner().batch(samples).tokens == 20  # mask_truncated off: trained like any other


def test_rejected_tokens_are_not_in_the_denominator() -> None:
    """Reserve case R17 (5 tokens, 3 masked: divide by 2) and field case 29: loss over the trained ones alone."""
    trained = make_trajectory([3, 4], [5, 6], 1.0, sample=0)
    cut = make_trajectory([3, 4], [7, 8, 9], 0.0, sample=1, finish_reason="context")
    learner = make_learner(mask_truncated=True)
    batch = learner.batch([trained, cut])
    output = learner.backward(batch)
    logprobs_N = output.log_ratios_N - 1.0
    assert batch.tokens == 2
    assert output.loss == pytest.approx(float(-(output.log_ratios_N.exp() * 0.5 * logprobs_N).sum() / 2), rel=1e-5)


def test_ungraded_samples_are_left_out() -> None:
    """Reserve case R9: a failed grader is neither reward 0 nor part of the mean."""
    learner = make_learner()
    rewards = [1.0, None, 0.0, 0.5]
    group = [make_trajectory([3, 4], [5, 6], r, sample=i) for i, r in enumerate(rewards)]
    batch = learner.batch(group)
    assert [t.sample_index for t in batch.trajectories] == [0, 2, 3]
    assert batch.advantages_N[::2].tolist() == [0.5, -0.5, 0.0]
    assert learner.step(group)["errors/ungraded"] == 1.0


def test_lag_of_each_token() -> None:
    """Reserve case R6: tokens of v3, v3, v4 trained at v5 have mean 5/3 and maximum 2; ESS per age."""
    learner = make_learner()
    learner.version = 5
    metrics = learner.step([make_trajectory([3, 4], [5, 6, 7], 1.0, versions=[3, 3, 4])])
    assert metrics["lag/mean"] == pytest.approx(5 / 3) and metrics["lag/max"] == 2.0
    assert {name for name in metrics if name.startswith("ess/")} == {"ess/all", "ess/age_1", "ess/age_2"}
    assert learner.version == 6


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_non_finite_logprob_stops_before_the_update(bad: float) -> None:
    """Field case 5: the error names step and trajectory; nothing was changed, and the next step works."""
    learner = make_learner(micro_batch_tokens=12)
    before = masters(learner)
    batch = on_policy(learner.decoder, make_batch())
    victim = batch[5]
    good = victim.logprobs[-1]
    victim.logprobs[-1] = bad
    with pytest.raises(
        NonFiniteUpdate, match=r"step 0: the loss .* prompt 1 group 1 sample 1 segment 0, sampled token"
    ):
        learner.step(batch)
    assert unchanged(before, masters(learner)) and learner.version == 0
    victim.logprobs[-1] = good
    assert learner.step(batch)["update/skipped"] == 0.0


def test_a_non_finite_gradient_stops_before_the_update() -> None:
    """The loss is finite, the gradient overflows: the trajectory is found by running each alone."""
    learner = make_learner()
    before = masters(learner)
    batch = make_batch(groups=1) + [
        make_trajectory([3, 4], [5, 6], reward, 1, i) for i, reward in enumerate([0.0, 0.0, 1e36])
    ]
    with pytest.raises(NonFiniteUpdate, match=r"step 0: the gradient .* prompt 1 group 1 sample 0"):
        learner.step(batch)
    assert unchanged(before, masters(learner)) and learner.version == 0


def test_unusable_trajectories_are_refused() -> None:
    learner = make_learner()
    with pytest.raises(ValueError, match=r"temperature 0.6, the learner scores at 1.0"):
        learner.step([make_trajectory([3], [4], temperature=0.6)])
    with pytest.raises(ValueError, match="token of version 1, but the learner is at version 0"):
        learner.step([make_trajectory([3], [4], versions=[1])])
    with pytest.raises(ValueError, match="reward nan"):
        learner.step([make_trajectory([3], [4], float("nan"))])
    assert learner.version == 0
