"""Packing: each trained token once, predicted by the row before it, nothing taken from a neighbour."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import same_bits, tiny_decoder
from tests.learner.builders import make_trajectory
from zerogap.learner.packing import pack, score
from zerogap.trajectory import NOT_SAMPLED, Trajectory

SPAN = 1000  # token id = sequence * SPAN + position, so that every row can be traced back


@dataclass(frozen=True)
class Sequence:
    token_ids: list[int]
    loss_mask: list[int]


@given(
    masks=st.lists(st.lists(st.integers(0, 1), max_size=12).map(lambda tail: [0, *tail]), max_size=10),
    budget=st.integers(1, 40),
)
def test_every_trained_token_exactly_once(masks: list[list[int]], budget: int) -> None:
    """Field cases 7 and 8, any masks (several turns, empty samples) and any budget."""
    sequences = [Sequence([i * SPAN + p for p in range(len(mask))], mask) for i, mask in enumerate(masks)]
    expected = [t for s in sequences for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    found: dict[int, int] = {}
    for micro_batch in pack(sequences, budget):
        assert micro_batch.rows.num_rows == len(micro_batch.tokens_T)
        assert micro_batch.rows.num_rows <= budget or len(micro_batch.rows.lengths) == 1
        assert torch.equal(micro_batch.tokens_T[micro_batch.rows_N] + 1, micro_batch.targets_N)
        assert torch.equal(micro_batch.tokens_T % SPAN, micro_batch.rows.positions_T.long())
        for place, target in zip(micro_batch.trained_N.tolist(), micro_batch.targets_N.tolist(), strict=True):
            assert place not in found
            found[place] = target
    assert [found[place] for place in sorted(found)] == expected
    assert sorted(found) == list(range(len(expected)))


@given(
    token_lists=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=12),
    mask=st.lists(st.integers(0, 1), min_size=8, max_size=8),
    budget=st.integers(1, 40) | st.just(1000),
)
def test_a_common_prefix_is_packed_once(token_lists: list[list[int]], mask: list[int], budget: int) -> None:
    """Each trained token is predicted from its own prefix, whoever shares it; in a micro-batch no prefix is twice."""
    sequences = [Sequence(tokens, [0, *mask][: len(tokens)]) for tokens in token_lists]
    trained = [(s.token_ids[:p], s.token_ids[p]) for s in sequences for p, m in enumerate(s.loss_mask) if m]
    micro_batches = pack(sequences, budget)
    places = [place for micro_batch in micro_batches for place in micro_batch.trained_N.tolist()]
    assert sorted(places) == list(range(len(trained)))
    for micro_batch in micro_batches:
        rows, tokens = micro_batch.rows, micro_batch.tokens_T
        ends = rows.key_ends_T.tolist()
        prefixes = [[int(tokens[key]) for key in range(row + 1) if ends[key] > row] for row in range(rows.num_rows)]
        assert len({tuple(prefix) for prefix in prefixes}) == len(prefixes)
        assert [len(prefix) - 1 for prefix in prefixes] == rows.positions_T.tolist()
        assert rows.num_rows <= budget or len(rows.lengths) == 1
        found = zip(micro_batch.rows_N.tolist(), micro_batch.targets_N.tolist(), strict=True)
        assert [(prefixes[row], target) for row, target in found] == [
            trained[place] for place in micro_batch.trained_N.tolist()
        ]
    whole = [len(s.token_ids[: max(p for p, m in enumerate(s.loss_mask) if m)]) for s in sequences if any(s.loss_mask)]
    assert sum(m.rows.num_rows + m.shared_rows for m in micro_batches) == sum(whole)


def test_a_group_has_its_prompt_once() -> None:
    """A prompt of 45 tokens and 8 samples of 4: 45 + 8 x 3 rows, the last token of a sample predicts nothing."""
    prompt = list(range(45))
    group = [make_trajectory(prompt, [50 + i, 7, 8, 9], sample=i) for i in range(8)]
    (micro_batch,) = pack(group, 4096)
    assert micro_batch.rows.num_rows == 45 + 8 * 3 and micro_batch.shared_rows == 7 * 45
    assert micro_batch.rows_N.tolist().count(44) == 8
    first, second = pack(group, 45 + 4 * 3)
    assert first.rows.num_rows == second.rows.num_rows == 45 + 4 * 3  # cut, so the prompt is in both


def test_packing_is_the_same_every_time() -> None:
    lengths = (5, 9, 2, 9, 3, 7)
    sequences = [Sequence([i * SPAN + p for p in range(n)], [0] + [1] * (n - 1)) for i, n in enumerate(lengths)]
    first, second = pack(sequences, 12), pack(sequences, 12)
    assert [m.tokens_T.tolist() for m in first] == [m.tokens_T.tolist() for m in second]
    assert [m.rows.lengths for m in first] == [(6, 2), (8, 1), (8, 4)]


def test_a_token_without_a_row_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="position 0"):
        pack([Sequence([4, 5], [1, 1])], 8)


def test_an_appended_end_mark_is_not_trained() -> None:
    """Field case 7: a sampled EOS counts, an appended one has mask 0."""
    sampled = make_trajectory([5, 6], [7, 1])
    appended = make_trajectory([5, 6], [7])
    appended.token_ids.append(1)
    appended.loss_mask.append(0)
    appended.logprobs.append(0.0)
    appended.versions.append(NOT_SAMPLED)
    (micro_batch,) = pack([sampled], 64)
    assert micro_batch.targets_N.tolist() == [7, 1]
    (micro_batch,) = pack([appended], 64)
    assert micro_batch.targets_N.tolist() == [7]


def test_five_tokens_with_four_logprobs_are_refused() -> None:
    """Field case 7: the engine's reply must have one logprob per token."""
    with pytest.raises(ValueError, match="5 token ids, 5 mask entries, 4 logprobs"):
        make_trajectory([5, 6], [7, 8, 9], logprobs=[-1.0, -1.0])


def layouts(a: Trajectory, b: Trajectory) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores of A and B in four layouts: alone, packed A+B, packed B+A, and cut by a budget too small for both."""
    decoder = tiny_decoder("aligned")
    alone = (score(decoder, [a], 64)[0], score(decoder, [b], 64)[0])
    a_then_b = score(decoder, [a, b], 64)
    b_then_a = score(decoder, [b, a], 64)
    cut = score(decoder, [a, b], 2)
    return [alone, (a_then_b[0], a_then_b[1]), (b_then_a[1], b_then_a[0]), (cut[0], cut[1])]


def test_layouts_are_bit_equal() -> None:
    """Field case 8: A = [10, 11, 12], B = [20, 21]: alone, A+B, B+A, in two micro-batches."""
    a, b = make_trajectory([10], [11, 12]), make_trajectory([20], [21])
    for both in ([a, b], [b, a]):
        assert pack(both, 64)[0].tokens_T.tolist() == [20, 10, 11]
    (first_a, first_b), *others = layouts(a, b)
    assert first_a.shape == (2,) and first_b.shape == (1,)
    for other_a, other_b in others:
        assert same_bits(first_a, other_a) and same_bits(first_b, other_b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [1, 45, 64, 70, 130])
def test_a_group_scores_as_its_samples_alone(dtype: torch.dtype, prompt: int) -> None:
    """Field case 8 with shared rows: samples that part at once, later, never; one that another goes on from."""
    decoder = tiny_decoder("aligned", dtype)
    tokens = torch.randint(2, 61, (prompt + 80,), generator=torch.Generator().manual_seed(prompt)).tolist()
    start, more = tokens[:prompt], tokens[prompt:]
    samples = [more[:3], more[:3], more[:1], [*more[:2], 60, *more[3:9]], more, more[40:], [more[0] - 1, *more[:66]]]
    group = [make_trajectory(start, sampled, sample=i) for i, sampled in enumerate(samples)]
    alone = [score(decoder, [trajectory], 4096)[0] for trajectory in group]
    for budget in (4096, prompt + 100, 1):
        for one, other in zip(score(decoder, group, budget), alone, strict=True):
            assert same_bits(one, other)


def test_a_neighbour_does_not_leak() -> None:
    """Field case 8: changing A's tokens leaves B's bits, and changes A's."""
    b = make_trajectory([20], [21])
    before = layouts(make_trajectory([10], [11, 12]), b)
    after = layouts(make_trajectory([10], [13, 12]), b)
    for (a_before, b_before), (a_after, b_after) in zip(before, after, strict=True):
        assert same_bits(b_before, b_after)
        assert not same_bits(a_before, a_after)


@pytest.mark.parametrize("kernels", ["standard", "aligned"])
def test_scores_follow_each_temperature(kernels: str) -> None:
    """Field case 1: each trajectory is scored at its own temperature, a greedy one at 1."""
    decoder = tiny_decoder(kernels)
    trajectories = [make_trajectory([3, 4], [5, 6, 7], temperature=t) for t in (1.0, 0.5, 0.0)]
    trajectories.append(make_trajectory([3, 4], []))
    warm, cool, greedy, empty = score(decoder, trajectories, 64)
    # Rows of one batch: in stock kernels the same row need not have the same bits at another place of it.
    same = torch.equal if kernels == "aligned" else torch.allclose
    assert same(warm, greedy) and not torch.allclose(warm, cool)
    assert empty.shape == (0,) and empty.dtype == torch.float32
    hidden_TH = decoder.hidden(torch.tensor([3, 4, 5, 6]), pack(trajectories[:1], 64)[0].rows)
    logits_TV = decoder.logits(hidden_TH)[1:]
    expected = torch.log_softmax(logits_TV / 0.5, -1)[torch.arange(3), torch.tensor([5, 6, 7])]
    assert cool.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
