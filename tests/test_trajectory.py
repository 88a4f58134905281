"""The record: equal lengths or an error, and a round trip through JSON."""

from __future__ import annotations

import json
from dataclasses import replace

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


def test_a_line_from_before_there_were_segments_is_read() -> None:
    record = json.loads(make().to_json())
    assert record.pop("segment") == 0
    assert Trajectory.from_json(json.dumps(record)) == make()


def test_turns_are_stretches_of_sampled_tokens() -> None:
    """What was put in between two turns and at the end stays in the round trip, with mask 0."""
    episode = replace(
        make(), token_ids=list(range(9)), loss_mask=[0, 1, 1, 0, 0, 1, 0, 1, 0], logprobs=[0.0] * 9, versions=[-1] * 9
    )
    assert (episode.turns, episode.num_sampled, episode.sampled_token_ids) == (3, 4, [1, 2, 5, 7])
    assert replace(episode, loss_mask=[0] * 9).turns == 0
    second = replace(episode, segment=1, finish_reason="turns")
    assert second.truncated and Trajectory.from_json(second.to_json()) == second


def test_lengths_must_agree() -> None:
    """Field case 7: five tokens and four logprobs raise instead of being padded."""
    with pytest.raises(ValueError, match="4 logprobs"):
        make(logprobs=4)
