"""Rollouts of two turns with a tool's answer between them: what the audit scores is what the engine had before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.helpers import tiny_decoder
from tests.rollout.builders import drain, request
from zerogap.gaps.split import Split, split_tokens
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.trajectory import NOT_SAMPLED, Trajectory

PROMPT, TOOL = [3, 4, 5, 6], [9, 8, 7, 9, 8, 7, 9]
WORD = 10  # a token id: what a tokenizer makes of text that the engine spelled in two pieces


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder()


def turn(decoder: Decoder, prompt: list[int], tokens: int) -> Trajectory:
    engine = EmbeddedEngine(decoder, None, EngineConfig(page_size=8, max_batched_tokens=16))
    engine.submit(request(0, prompt, new=tokens))
    (trajectory,) = drain(engine)
    return trajectory


def joined(first: Trajectory, between: list[int], second: Trajectory) -> Trajectory:
    """One append-only stream: the second turn was sampled behind all of the first and `between`."""
    sampled = len(second.token_ids) - second.num_sampled
    assert second.token_ids[:sampled] == first.token_ids + between
    return replace(
        second,
        loss_mask=first.loss_mask + [0] * len(between) + second.loss_mask[sampled:],
        logprobs=first.logprobs + [0.0] * len(between) + second.logprobs[sampled:],
        versions=first.versions + [NOT_SAMPLED] * len(between) + second.versions[sampled:],
    )


def split_of(decoder: Decoder, *trajectories: Trajectory) -> Split:
    return split_tokens(decoder, {0: decoder.snapshot()}, trajectories, 0, 64)


def spelling(pieces: list[int]) -> Tokenizer:
    """A tokenizer whose WORD reads as the two pieces do."""
    return Tokenizer(BPE({"a": pieces[0], "b": pieces[1], "ab": WORD}, [("a", "b")]))


def test_tool_tokens_are_context_only(decoder: Decoder) -> None:
    """Field case 13: as many checked as were sampled, each with its bits, whatever the tool wrote in between."""
    first = turn(decoder, PROMPT, 6)
    rollout = joined(first, TOOL, turn(decoder, first.token_ids + TOOL, 6))
    assert len(rollout.loss_mask) == len(rollout.token_ids) and sum(rollout.loss_mask) == 12
    split = split_of(decoder, rollout)
    assert (split.checked, split.unequal) == (12, 0)
    assert not set(split.positions_N.tolist()) & set(range(len(first.token_ids), len(first.token_ids) + len(TOOL)))
    other = list(TOOL)
    other[3] += 1
    again = turn(decoder, first.token_ids + other, 6)
    assert split_of(decoder, joined(first, other, again)).unequal == 0


def test_ids_that_went_through_text_are_found(decoder: Decoder) -> None:
    """Field case 10: the engine spelled a word in two pieces where the tokenizer has one. Its own ids are reproduced;
    those of the text are another context, and all of what was sampled behind them differs."""
    first = turn(decoder, PROMPT, 6)
    pieces = first.sampled_token_ids[:2]
    assert pieces[0] != pieces[1] and WORD not in pieces
    tokenizer = spelling(pieces)
    again = tokenizer.encode(tokenizer.decode(pieces).replace(" ", "")).ids
    assert again == [WORD]
    rollout = joined(first, TOOL, turn(decoder, first.token_ids + TOOL, 6))
    assert split_of(decoder, rollout).unequal == 0

    start = len(PROMPT)
    drifted = replace(
        rollout,
        token_ids=rollout.token_ids[:start] + again + rollout.token_ids[start + 2 :],
        loss_mask=rollout.loss_mask[:start] + rollout.loss_mask[start + 1 :],
        logprobs=rollout.logprobs[:start] + rollout.logprobs[start + 1 :],
        versions=rollout.versions[:start] + rollout.versions[start + 1 :],
    )
    split = split_of(decoder, drifted)
    assert (split.checked, split.unequal) == (11, 11)
    assert float(split.lag_N.abs().max()) == 0  # a fault of tokens is never lag


def test_a_template_that_drops_earlier_turns_makes_segments(decoder: Decoder) -> None:
    """Field case 11: the second turn was sampled without the first turn's first three tokens ("thinking"). As one
    stream its context is not what the engine had; as two segments each token has its own."""
    first = turn(decoder, PROMPT, 6)
    rewritten = PROMPT + first.token_ids[len(PROMPT) + 3 :] + TOOL
    second = turn(decoder, rewritten, 6)
    segments = split_of(decoder, first, second)
    assert (segments.checked, segments.unequal) == (12, 0)
    stream = replace(
        second,
        token_ids=first.token_ids + TOOL + second.sampled_token_ids,
        loss_mask=first.loss_mask + [0] * len(TOOL) + [1] * 6,
        logprobs=first.logprobs + [0.0] * len(TOOL) + second.logprobs[-6:],
        versions=first.versions + [NOT_SAMPLED] * len(TOOL) + second.versions[-6:],
    )
    split = split_of(decoder, stream)
    assert split.unequal_N.tolist() == [False] * 6 + [True] * 6
    assert torch.equal(split.own_N[:6].view(torch.int32), segments.own_N[:6].view(torch.int32))
