"""Statistics from raw log-ratios; what was not measured is absent."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.learner.builders import make_trajectory
from zerogap.learner.episodes import Episode
from zerogap.learner.statistics import (
    effective_sample_size,
    gradient_weight_statistics,
    mark_statistics,
    ratio_statistics,
    sample_statistics,
    sequence_statistics,
)


def measure(log_ratios: list[float], lags: list[int] | None = None) -> dict[str, float]:
    return ratio_statistics(torch.tensor(log_ratios), torch.tensor(lags or [0] * len(log_ratios), dtype=torch.int64))


def test_signed_and_unsigned_kl() -> None:
    """Field case 45: [+0.1, -0.1] gives k1 = 0 and k3 = 0.0050042."""
    statistics = measure([0.1, -0.1])
    assert statistics["kl/k1"] == 0.0
    assert statistics["kl/k3"] == pytest.approx(0.0050042, abs=5e-8)
    assert measure([-0.2, -0.2])["kl/k1"] == pytest.approx(0.2)  # behaviour more sure than learner: KL(mu || pi) > 0


def test_maximum_is_of_the_raw_ratio() -> None:
    """Field case 45: [0, 0, 5] has maximum 148.41."""
    statistics = measure([0.0, 0.0, 5.0])
    assert statistics["ratio/max"] == pytest.approx(148.41, abs=0.005)
    assert statistics["ratio/min"] == 1.0
    assert statistics["ratio/mean"] == pytest.approx((2 + math.exp(5)) / 3)
    assert statistics["ratio/dev"] == pytest.approx((math.exp(5) - 1) / 3)
    assert statistics["ratio/chi2"] == pytest.approx((math.exp(5) - 1) ** 2 / 3)


def test_nothing_measured_is_absent() -> None:
    """Field case 45: no token, no field (not 0)."""
    nothing = torch.empty(0)
    assert measure([]) == {} and sequence_statistics(nothing, nothing.long()) == {}
    assert gradient_weight_statistics(nothing, nothing) == mark_statistics({}, nothing.long()) == {}
    assert sample_statistics([]) == {"errors/ungraded": 0.0}
    ungraded = Episode([make_trajectory([1], [2], reward=None, error="grader")])
    assert sample_statistics([[ungraded]]) == {"errors/ungraded": 1.0}


def test_lag_is_per_token() -> None:
    """Reserve case R6: tokens of v3, v3, v4 trained at v5 have mean 5/3 and maximum 2."""
    statistics = measure([0.0, 0.0, 0.0], [5 - 3, 5 - 3, 5 - 4])
    assert statistics["lag/mean"] == pytest.approx(5 / 3)
    assert statistics["lag/max"] == 2.0


def test_effective_sample_size_by_age() -> None:
    statistics = measure([0.0, 0.0, math.log(3.0), 0.0], [0, 0, 2, 2])
    assert statistics["ess/age_0"] == 1.0
    assert statistics["ess/age_2"] == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert statistics["ess/all"] == pytest.approx(6**2 / (4 * 12))
    assert "ess/age_1" not in statistics


def test_token_mean_and_sequence_mean_have_different_names() -> None:
    """Field case 45: one token at log-ratio 0.1 and 99 at 0: 0.001 by token, 0.05 by sequence (signs of k1 turned)."""
    log_ratios, owners = [0.1] + [0.0] * 99, [3] + [8] * 99
    by_token = measure(log_ratios)
    by_sequence = sequence_statistics(torch.tensor(log_ratios), torch.tensor(owners))
    assert by_token["kl/k1"] == pytest.approx(-0.001) and by_sequence["kl_sequence/k1"] == pytest.approx(-0.05)
    k3 = math.exp(0.1) - 1 - 0.1
    assert by_token["kl/k3"] == pytest.approx(k3 / 100, rel=1e-5)
    assert by_sequence["kl_sequence/k3"] == pytest.approx(k3 / 2, rel=1e-5)


def test_share_of_the_heaviest_tokens() -> None:
    """201 tokens: the top 1% are 3. Ratios 5, 4, 3 and 198 times 1, advantages -1 and +1: 12 / 210."""
    log_ratios_N = torch.tensor([math.log(5), math.log(4), math.log(3)] + [0.0] * 198)
    advantages_N = torch.tensor([-1.0, 1.0, -1.0] + [1.0, -1.0] * 99)
    assert gradient_weight_statistics(log_ratios_N, advantages_N)["weight/top1_share"] == pytest.approx(12 / 210)
    assert gradient_weight_statistics(log_ratios_N[:3], advantages_N[:3])["weight/top1_share"] == pytest.approx(5 / 12)
    assert gradient_weight_statistics(log_ratios_N, torch.zeros(201)) == {}


def test_marks_are_shares_of_tokens_and_of_sequences() -> None:
    """2 of 5 tokens, in 1 of 3 sequences."""
    marked_N, owners_N = torch.tensor([True, True, False, False, False]), torch.tensor([4, 4, 4, 6, 9])
    assert mark_statistics({"masked": marked_N, "rejected": ~marked_N | marked_N}, owners_N) == {
        "masked/tokens": 0.4,
        "masked/sequences": pytest.approx(1 / 3),
        "rejected/tokens": 1.0,
        "rejected/sequences": 1.0,
    }


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=50))
def test_bounds(log_ratios: list[float]) -> None:
    size = effective_sample_size(torch.tensor(log_ratios, dtype=torch.float64).exp())
    assert 1 / len(log_ratios) - 1e-9 <= size <= 1 + 1e-9
    assert measure(log_ratios)["kl/k3"] >= 0


def test_rewards_and_lengths() -> None:
    groups = [
        [Episode([make_trajectory([1, 2], [3] * n, reward=r, finish_reason=f)]) for n, r, f in group]
        for group in (
            [(1, 1.0, "eos"), (3, 0.0, "length"), (5, None, "eos")],
            [(2, 0.5, "eos"), (2, 0.5, "context")],
        )
    ]
    assert sample_statistics(groups) == {
        "errors/ungraded": 1.0,
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/zero_variance_groups": 1.0,
        "length/mean": 2.0,
        "length/max": 3.0,
        "turns/mean": 1.0,
        "turns/max": 1.0,
        "truncated/share": 0.5,
    }
