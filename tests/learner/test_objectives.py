"""Each objective on paper-sized examples: literal weights, gradients and marks, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from zerogap.config.objective import ObjectiveConfig
from zerogap.learner.objectives import policy_loss
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens

ALL = [
    {"name": "reinforce_zero"},
    {"name": "ppo_clip"},
    {"name": "truncated_is"},
    {"name": "masked_is"},
    {"name": "geometric_gate", "low": 0.5, "high": 2.0},
    {"name": "product_gate", "low": 0.5, "high": 2.0},
    {"name": "cispo"},
    {"name": "is_off"},
]
EVERY_OBJECTIVE = pytest.mark.parametrize("objective", ALL, ids=lambda keys: keys["name"])


def evaluate(
    objective: dict[str, Any],
    log_ratios: list[float],
    advantages: list[float],
    owners: list[int] | None = None,
    denominator: int = 1,
) -> tuple[LossOutput, list[float]]:
    """The output, and d loss / d logprob of each token, at learner logprobs of -2."""
    logprobs_N = torch.full((len(log_ratios),), -2.0, requires_grad=True)
    tokens = TrainedTokens(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=logprobs_N.detach() - torch.tensor(log_ratios),
        advantages_N=torch.tensor(advantages),
        owners_N=torch.tensor(owners if owners is not None else range(len(log_ratios))),
        denominator=denominator,
    )
    output = policy_loss(tokens, TypeAdapter(ObjectiveConfig).validate_python(objective))
    output.loss.backward()
    assert logprobs_N.grad is not None and not output.terms_N.requires_grad
    return output, logprobs_N.grad.tolist()


def two_way(objective: dict[str, Any], log_ratio: float, advantage: float = 1.0, denominator: int = 1) -> list[float]:
    """Gradient at the logits of a two-way softmax with p(token 0) = 0.6, recorded p = 0.6 / exp(log_ratio)."""
    logits = torch.tensor([0.6, 0.4]).log().requires_grad_(True)
    logprob_N = torch.log_softmax(logits, -1)[:1]
    tokens = TrainedTokens(
        logprob_N, logprob_N.detach() - log_ratio, torch.tensor([advantage]), torch.tensor([0]), denominator
    )
    policy_loss(tokens, TypeAdapter(ObjectiveConfig).validate_python(objective)).loss.backward()
    assert logits.grad is not None
    return logits.grad.tolist()


def marked(output: LossOutput) -> dict[str, list[int]]:
    """Indices of the marked tokens by mark."""
    return {mark: torch.nonzero(marked_N).flatten().tolist() for mark, marked_N in output.marks.items()}


ONE_AND_A_HALF = math.log(1.5)  # p = 0.6 where 0.4 was recorded


@pytest.mark.parametrize(
    ("objective", "advantage", "expected"),
    [
        ({"name": "reinforce_zero"}, 1.0, -0.6),
        ({"name": "is_off"}, 1.0, -0.4),
        ({"name": "truncated_is", "cap": 2.0}, 1.0, -0.6),
        ({"name": "truncated_is", "cap": 1.25}, 1.0, -0.5),
        ({"name": "masked_is"}, 1.0, -0.6),
        ({"name": "masked_is", "high": 1.4}, 1.0, 0.0),
        ({"name": "cispo", "eps_high": 0.25}, 1.0, -0.5),
        ({"name": "cispo", "eps_high": 0.25}, -1.0, 0.5),
        ({"name": "ppo_clip"}, 1.0, 0.0),
        ({"name": "ppo_clip", "eps_high": 0.6}, 1.0, -0.6),
        ({"name": "ppo_clip"}, -1.0, 0.6),
        ({"name": "geometric_gate", "low": 0.5, "high": 2.0}, 1.0, -0.6),
        ({"name": "product_gate", "low": 0.5, "high": 1.4}, 1.0, 0.0),
    ],
    ids=str,
)
def test_weights_are_constants_under_the_gradient(objective: dict[str, Any], advantage: float, expected: float) -> None:
    """Field case 31: p = 0.6, recorded 0.4, advantage 1: REINFORCE Zero's d loss / d logit is -0.6, not -0.2935."""
    assert two_way(objective, ONE_AND_A_HALF, advantage) == pytest.approx([expected, -expected], abs=1e-6)


@pytest.mark.parametrize(("log_ratio", "scale"), [(5.0, 148.413), (20.0, 4.85165e8), (-5.0, 0.0067379)])
def test_reinforce_zero_clips_nothing(log_ratio: float, scale: float) -> None:
    """Field case 31: at log-ratio 5 the gradient scales by 148.4."""
    zero = {"name": "reinforce_zero"}
    assert two_way(zero, log_ratio)[0] == pytest.approx(scale * two_way(zero, 0.0)[0], rel=1e-4)
    assert marked(evaluate(zero, [log_ratio], [1.0])[0]) == {"rejected": []}


@EVERY_OBJECTIVE
def test_advantage_and_denominator_scale_the_gradient(objective: dict[str, Any]) -> None:
    unit = two_way(objective, 0.1)
    assert two_way(objective, 0.1, advantage=-2.0, denominator=8) == pytest.approx([g * -0.25 for g in unit], rel=1e-6)


@EVERY_OBJECTIVE
def test_zero_advantage_gives_exactly_zero(objective: dict[str, Any]) -> None:
    """Field case 26."""
    output, gradient = evaluate(objective, [3.0, -3.0, 0.0], [0.0] * 3)
    assert output.loss.item() == 0.0 and gradient == [0.0] * 3


@EVERY_OBJECTIVE
def test_terms_sum_to_the_loss_and_log_ratios_stay_raw(objective: dict[str, Any]) -> None:
    output, _ = evaluate(objective, [5.0, -5.0, 0.0], [1.0, -1.0, 0.5])
    assert output.terms_N.sum().item() == output.loss.item()
    assert output.log_ratios_N.tolist() == [5.0, -5.0, 0.0]


def test_token_objectives() -> None:
    """Ratios 3, 0.2, 1 with advantages 1, 1, -1 and logprobs -2: gradient -w A, loss 2 * sum of w A."""
    log_ratios, advantages = [math.log(3.0), math.log(0.2), 0.0], [1.0, 1.0, -1.0]

    def check(objective: dict[str, Any], gradient: list[float], loss: float, marks: dict[str, list[int]]) -> None:
        output, actual = evaluate(objective, log_ratios, advantages)
        assert actual == pytest.approx(gradient, abs=1e-6), objective
        assert output.loss.item() == pytest.approx(loss, abs=1e-5), objective
        assert marked(output) == marks, objective

    check({"name": "reinforce_zero"}, [-3.0, -0.2, 1.0], 4.4, {"rejected": []})
    check({"name": "is_off"}, [-1.0, -1.0, 1.0], 2.0, {})
    check({"name": "truncated_is", "cap": 2.0}, [-2.0, -0.2, 1.0], 2.4, {"truncated_weight": [0]})
    check({"name": "masked_is", "low": 0.5, "high": 5.0}, [-3.0, 0.0, 1.0], 4.0, {"masked": [1]})
    check({"name": "masked_is", "low": 0.0, "high": 2.0}, [0.0, -0.2, 1.0], -1.6, {"masked": [0]})
    check({"name": "cispo", "eps_high": 1.0}, [-2.0, -0.2, 1.0], 2.4, {"clipped": [0]})
    check({"name": "cispo", "eps_low": 0.5, "eps_high": 1.0}, [-2.0, -0.5, 1.0], 3.0, {"clipped": [0, 1]})


def test_clipped_surrogate_takes_the_gradient_away_on_one_side_only() -> None:
    """Bounds 0.8 and 1.28. Losses are -min(r A, clip(r) A): no log-probability in them."""
    ratios = [1.5, 1.5, 0.5, 0.5, 1.25]
    advantages = [1.0, -1.0, 1.0, -1.0, 2.0]
    objective = {"name": "ppo_clip", "eps_low": 0.2, "eps_high": 0.28}
    output, gradient = evaluate(objective, [math.log(r) for r in ratios], advantages)
    assert output.terms_N.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.5], abs=1e-6)
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.5], abs=1e-6)
    assert marked(output) == {"clipped": [0, 3]}


def test_gates_judge_whole_sequences() -> None:
    """Sequence 4: ratios 2, 2 (product 4, mean 2). Sequence 7: 4, 0.25 (1, 1). Sequence 2: 0.3 alone. Interleaved."""
    log_ratios = [math.log(r) for r in [2.0, 4.0, 0.3, 2.0, 0.25]]
    owners, ones = [4, 7, 2, 4, 7], [1.0] * 5
    output, gradient = evaluate({"name": "geometric_gate", "low": 0.5, "high": 2.5}, log_ratios, ones, owners)
    assert gradient == pytest.approx([-2.0, -4.0, 0.0, -2.0, -0.25], abs=1e-6)
    assert marked(output) == {"rejected": [2]}
    output, gradient = evaluate({"name": "product_gate", "low": 0.5, "high": 2.5}, log_ratios, ones, owners)
    assert gradient == pytest.approx([0.0, -4.0, 0.0, 0.0, -0.25], abs=1e-6)
    assert marked(output) == {"rejected": [0, 2, 3]}


def test_the_product_grows_with_length_and_the_geometric_mean_does_not() -> None:
    """Reserve case R18: 0.01 per token is 1.01 as a mean at any length, and 12.9 as a product of 256."""
    short, long = [0.01] * 4, [0.01] * 256
    for log_ratios, rejected in ((short, 0), (long, 256)):
        owners, ones = [0] * len(log_ratios), [1.0] * len(log_ratios)
        output, _ = evaluate({"name": "geometric_gate", "low": 0.98, "high": 1.02}, log_ratios, ones, owners)
        assert marked(output) == {"rejected": []}
        output, _ = evaluate({"name": "product_gate", "low": 0.5, "high": 2.0}, log_ratios, ones, owners)
        assert len(marked(output)["rejected"]) == rejected


@pytest.mark.parametrize("objective", ALL[1:-1], ids=lambda keys: keys["name"])
def test_bounds_hold_where_the_ratio_overflows(objective: dict[str, Any]) -> None:
    """exp(100) is infinite in fp32; what is bounded, masked or rejected stays finite, in loss and gradient."""
    output, gradient = evaluate(objective, [100.0, 0.0], [1.0, 1.0])
    assert math.isfinite(output.loss.item()) and all(math.isfinite(value) for value in gradient)
    assert gradient[1] == -1.0
    assert [index for indices in marked(output).values() for index in indices] == [0]
