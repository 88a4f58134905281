"""Group advantages: exact zeros, exact pairs, errored samples left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zerogap.learner.advantage import group_advantages


@given(st.floats(-1e30, 1e30), st.integers(1, 64))
@example(0.35, 8)
@example(1 / 49, 49)  # 49 times this, divided by 49, is not this
def test_equal_rewards_are_exactly_zero(reward: float, size: int) -> None:
    """Field case 26: [0.35] x 8, [0, 0, 0, 0], [1, 1, 1, 1] and any other equal group."""
    assert group_advantages([reward] * size) == [0.0] * size
    assert group_advantages([reward] * size, normalize_std=True) == [0.0] * size


def test_no_standard_deviation() -> None:
    """Field case 26: [0.35] x 7 + [0.95] gives -0.075 seven times and +0.525."""
    advantages = group_advantages([0.35] * 7 + [0.95])
    assert advantages == pytest.approx([-0.075] * 7 + [0.525], abs=1e-12)
    assert abs(math.fsum(a for a in advantages if a is not None)) <= 1e-6


def test_nearly_equal_rewards_stay_tiny() -> None:
    """Field case 26: a rounding residue is not blown up."""
    assert group_advantages([0.1 + 0.2, 0.3]) == pytest.approx([0.0, 0.0], abs=1e-15)
    assert group_advantages([0.1 + 0.2, 0.3]) != [0.0, 0.0]


def test_division_by_the_standard_deviation() -> None:
    """Rewards 1, 2, 3, 6: mean 3, deviation sqrt(14 / 3) = 2.160247, and 1e-4 on top. Ungraded ones count nowhere."""
    expected = [-2 / 2.160347, -1 / 2.160347, 0.0, 3 / 2.160347]
    assert group_advantages([1.0, 2.0, 3.0, 6.0], normalize_std=True) == pytest.approx(expected, rel=1e-6)
    assert group_advantages([1.0, None, 3.0], normalize_std=True) == pytest.approx(
        [-0.707057, None, 0.707057], abs=1e-6
    )
    assert group_advantages([2.0, None], normalize_std=True) == [0.0, None]


def test_a_rounding_residue_is_not_divided_by_itself() -> None:
    """Field case 26: rewards that are equal but for rounding stay without effect."""
    assert group_advantages([0.1 + 0.2, 0.3], normalize_std=True) == pytest.approx([0.0, 0.0], abs=1e-11)


def test_ungraded_samples_are_not_in_the_mean() -> None:
    assert group_advantages([1.0, None, 0.0, None]) == [0.5, None, -0.5, None]
    assert group_advantages([None, None]) == [None, None]
    assert group_advantages([]) == []


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=16))
def test_advantages_sum_to_zero(rewards: list[float | None]) -> None:
    advantages = group_advantages(rewards)
    assert [a is None for a in advantages] == [r is None for r in rewards]
    assert abs(math.fsum(a for a in advantages if a is not None)) <= 1e-6
