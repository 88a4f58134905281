"""Episodes: segments count once in mean and statistics; what was put in between turns is context and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.learner.builders import gradients, make_batch, make_learner, make_trajectory, masters, on_policy
from tests.learner.test_objectives import EVERY_OBJECTIVE
from zerogap.learner.episodes import grouped_episodes
from zerogap.learner.learner import Learner
from zerogap.learner.packing import pack
from zerogap.learner.statistics import sample_statistics
from zerogap.trajectory import NOT_SAMPLED, FinishReason, Trajectory


def segment(sample: int, number: int, sampled: int, reward: float | None, reason: FinishReason = "eos") -> Trajectory:
    prompt = [3, 4, 10 + number]
    return make_trajectory(prompt, [20 + sample] * sampled, reward, sample=sample, segment=number, finish_reason=reason)


def two_turns(sample: int, reward: float, tool: tuple[int, ...] = (30, 31, 32, 33, 34, 35, 36)) -> Trajectory:
    """Prompt of 3, 4 sampled, 7 of a tool, 2 sampled, 7 of a tool that nothing follows (the limit of turns)."""
    turn = make_trajectory([3, 4, 5], [6, 7, 8, 9 + sample], reward, sample=sample, finish_reason="turns")
    for ids, mask in ((tool, 0), ((40 + sample, 41), 1), (tool, 0)):
        turn.token_ids += ids
        turn.loss_mask += [mask] * len(ids)
        turn.logprobs += [-1.5 * mask] * len(ids)
        turn.versions += [0 if mask else NOT_SAMPLED] * len(ids)
    return turn


def test_an_episode_counts_once_in_the_mean_whatever_its_segments() -> None:
    """Field case 11. Rewards 1, 0, 0 of 3, 1 and 2 segments: advantage 2/3 and twice -1/3, for the tokens of every
    segment. By segments it would be 1/2."""
    lengths = {(0, 0): 1, (0, 1): 2, (0, 2): 3, (1, 0): 4, (2, 0): 5, (2, 1): 0}
    trajectories = [segment(s, n, length, float(s == 0)) for (s, n), length in lengths.items()]
    batch = make_learner().batch(trajectories)
    assert batch.tokens == 15
    for advantage, owner in zip(batch.advantages_N.tolist(), batch.owners_N.tolist(), strict=True):
        sample = batch.trajectories[owner].sample_index
        assert advantage == pytest.approx(2 / 3 if sample == 0 else -1 / 3)
    statistics = sample_statistics(batch.groups)
    assert statistics["reward/mean"] == pytest.approx(1 / 3)
    assert (statistics["length/mean"], statistics["length/max"]) == (5.0, 6.0)
    assert (statistics["turns/mean"], statistics["turns/max"]) == ((3 + 1 + 1) / 3, 3.0)


@settings(deadline=None)
@given(
    cuts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=6),
    rewards=st.lists(st.one_of(st.none(), st.integers(0, 3).map(float)), min_size=6, max_size=6),
    normalize_std=st.booleans(),
)
def test_no_cut_into_segments_changes_an_advantage_or_a_reward_statistic(
    cuts: list[list[int]], rewards: list[float | None], normalize_std: bool
) -> None:
    learner = make_learner(objective={"name": "is_off", "normalize_std": normalize_std})

    def trained(trajectories: list[Trajectory]) -> tuple[dict[int, set[float]], int, dict[str, float]]:
        batch = learner.batch(trajectories)
        found: dict[int, set[float]] = {}
        for advantage, owner in zip(batch.advantages_N.tolist(), batch.owners_N.tolist(), strict=True):
            found.setdefault(batch.trajectories[owner].sample_index, set()).add(advantage)
        return found, batch.tokens, sample_statistics(batch.groups)

    whole = [segment(s, 0, sum(lengths), rewards[s]) for s, lengths in enumerate(cuts)]
    cut = [segment(s, n, m, rewards[s]) for s, lengths in enumerate(cuts) for n, m in enumerate(lengths)]
    (by_whole, tokens, statistics), (by_cut, cut_tokens, cut_statistics) = trained(whole), trained(cut[::-1])
    assert by_cut == by_whole and cut_tokens == tokens
    without_turns = {name: value for name, value in cut_statistics.items() if not name.startswith("turns/")}
    assert without_turns.items() <= statistics.items()


def test_the_last_segment_says_whether_the_episode_was_cut_short() -> None:
    """A turn that met max_new_tokens in the middle is no end. `turns` is one, and takes all segments with it."""
    episodes = [
        segment(0, 0, 2, 1.0, "length"),
        segment(0, 1, 2, 1.0),
        segment(1, 0, 3, 0.0),
        segment(1, 1, 3, 0.0, "turns"),
    ]
    assert sample_statistics(grouped_episodes(episodes))["truncated/share"] == 0.5
    assert [t.sample_index for t in make_learner(mask_truncated=True).batch(episodes).trajectories] == [0, 0]
    assert make_learner().batch(episodes).tokens == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"reward": 0.0}, r"rewards \[1.0, 0.0\]"), ({"segment": 0}, r"segments \[0, 0\]"), ({"segment": 2}, r"\[0, 2\]")],
)
def test_segments_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    first, second = segment(0, 0, 2, 1.0), segment(0, 1, 2, 1.0)
    with pytest.raises(ValueError, match=f"group 0 sample 0 .*{message}"):
        make_learner().step([first, replace(second, **changes)])


class OtherTarget(list[int]):
    """Token ids of which one, asked for alone (as a target), is another; in a stretch (what goes in) it is the same."""

    def __init__(self, token_ids: list[int], place: int) -> None:
        super().__init__(token_ids)
        self.place = place

    def __getitem__(self, index: Any) -> Any:
        return 50 if index == self.place else super().__getitem__(index)


def loss_and_gradient(learner: Learner, episodes: list[Trajectory]) -> tuple[float, torch.Tensor]:
    return learner.backward(learner.batch(episodes)).loss, gradients(learner)


@EVERY_OBJECTIVE
@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "aligned"},
        {"kernels": "aligned", "dtype": torch.bfloat16, "activation_checkpointing": True},
        {"kernels": "aligned", "micro_batch_tokens": 1},
        {"kernels": "standard"},
    ],
    ids=["aligned", "bf16-checkpointed", "cut", "standard"],
)
def test_tool_tokens_are_no_targets(objective: dict[str, Any], options: dict[str, Any]) -> None:
    """Field case 13, two turns and a tool that returns 7 tokens: with one tool token's target flipped, and with another
    last tool output (which no sampled token follows), loss and gradient are the same bits."""
    plain = on_policy(make_learner(**options).decoder, [two_turns(0, 1.0), two_turns(1, 0.0)])
    flipped = [replace(t) for t in plain]
    other_end = [replace(t, token_ids=[*t.token_ids[:-7], *range(50, 57)]) for t in flipped]
    for t in flipped:
        assert sum(t.loss_mask) == t.num_sampled == 6 and len(t.loss_mask) == len(t.token_ids) == 23
        t.token_ids = OtherTarget(t.token_ids, 9)
        assert t.loss_mask[9] == 0 and t.token_ids[9] == 50
    loss, gradient = loss_and_gradient(make_learner(objective=objective, **options), plain)
    assert float(gradient.norm()) > 0
    for episodes in (flipped, other_end):
        other_loss, other_gradient = loss_and_gradient(make_learner(objective=objective, **options), episodes)
        assert other_loss == loss and same_bits(other_gradient, gradient)
    sampled_flipped = [replace(t, token_ids=OtherTarget(t.token_ids, 14)) for t in plain]
    assert not same_bits(loss_and_gradient(make_learner(objective=objective, **options), sampled_flipped)[1], gradient)


def test_two_turns_are_trained_behind_their_whole_context() -> None:
    """The prompt and the first turn's start are shared; each sampled token is predicted by the row before it."""
    (micro_batch,) = pack([two_turns(0, 1.0), two_turns(1, 0.0)], 4096)
    assert micro_batch.shared_rows == 6
    assert sorted(micro_batch.targets_N.tolist()) == sorted([6, 7, 8, 9, 40, 41, 6, 7, 8, 10, 41, 41])
    assert micro_batch.rows.num_rows == 15 + 15 - 6  # none behind the last sampled token


def test_segments_are_trained_as_the_same_tokens_of_separate_samples_are() -> None:
    """One update on 2 samples of 2 segments = one on 4 trajectories with the advantages given by hand."""
    whole = make_batch(1, 4)
    by_hand = [replace(t, reward=float(index // 2)) for index, t in enumerate(whole)]  # mean 1/2, as of 2 samples
    cut = [replace(t, sample_index=t.sample_index // 2, segment=t.sample_index % 2) for t in by_hand]
    learners = make_learner("aligned"), make_learner("aligned")
    for learner, trajectories in zip(learners, (by_hand, cut), strict=True):
        learner.step(trajectories)
    for name, master in masters(learners[0]).items():
        assert same_bits(master, masters(learners[1])[name])
