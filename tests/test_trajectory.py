"""The record: equal lengths or an error, and a round trip through JSON."""

from __future__ import annotations

import pytest

from zerogap.trajectory import SamplingParams, Trajectory


def make(tokens: int = 5, logprobs: int = 5) -> Trajectory:
    return Trajectory(
        token_ids=list(range(tokens)),
        loss_mask=[0, 0, 1, 1, 1],
        logprobs=[-0.1] * logprobs,
        versions=[-1, -1, 3, 3, 4],
        finish_reason="eos",
        prompt_id=7,
        group_id=1,
        sample_index=2,
        sampling=SamplingParams(stop=("\n",)),
    )


def test_round_trip_and_counts() -> None:
    trajectory = make()
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert trajectory.num_sampled == 3
    assert trajectory.sampled_token_ids == [2, 3, 4]
    assert not trajectory.truncated


def test_lengths_must_agree() -> None:
    """Field case 7: five tokens and four logprobs raise instead of being padded."""
    with pytest.raises(ValueError, match="4 logprobs"):
        make(logprobs=4)
