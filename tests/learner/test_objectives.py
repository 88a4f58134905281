"""The objective on paper-sized examples."""

from __future__ import annotations

import math

import pytest
import torch

from zerogap.learner.objective import LossOutput, reinforce_zero


def two_way(log_ratio: float, advantage: float = 1.0, denominator: int = 1) -> tuple[LossOutput, torch.Tensor]:
    """Loss and its gradient at the logits of a two-way softmax with p(token 0) = 0.6."""
    logits = torch.tensor([0.6, 0.4]).log().requires_grad_(True)
    logprob_N = torch.log_softmax(logits, -1)[:1]
    output = reinforce_zero(logprob_N, logprob_N.detach() - log_ratio, torch.tensor([advantage]), denominator)
    output.loss.backward()
    assert logits.grad is not None
    return output, logits.grad


def test_ratio_is_a_constant_weight() -> None:
    """Field case 31: p = 0.6, behaviour 0.4, advantage 1: d loss / d logit = -0.6, not -0.2935."""
    output, gradient = two_way(math.log(1.5))
    assert gradient.tolist() == pytest.approx([-0.6, 0.6], abs=1e-6)
    assert output.log_ratios_N.tolist() == pytest.approx([math.log(1.5)], abs=1e-6)
    assert output.loss.item() == pytest.approx(-1.5 * math.log(0.6), abs=1e-6)


@pytest.mark.parametrize(("log_ratio", "scale"), [(5.0, 148.413), (20.0, 4.85165e8), (-5.0, 0.0067379)])
def test_nothing_is_clipped(log_ratio: float, scale: float) -> None:
    """Field case 31: at log-ratio 5 the gradient scales by 148.4."""
    _, unit = two_way(0.0)
    _, scaled = two_way(log_ratio)
    assert (scaled / unit).tolist() == pytest.approx([scale, scale], rel=1e-4)


def test_advantage_and_denominator_scale_the_gradient() -> None:
    _, unit = two_way(0.3)
    _, scaled = two_way(0.3, advantage=-2.0, denominator=8)
    assert scaled.tolist() == pytest.approx((unit * -0.25).tolist(), rel=1e-6)


def test_zero_advantage_gives_exactly_zero() -> None:
    """Field case 26."""
    output, gradient = two_way(3.0, advantage=0.0)
    assert output.loss.item() == 0.0
    assert gradient.tolist() == [0.0, 0.0]
