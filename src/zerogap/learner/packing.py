"""Whole sequences laid back to back under a token budget, and the rows whose output predicts a trained token.

A row is run only if a trained token follows it: what comes after the last trained token changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from zerogap.kernels.rows import RowBatch
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory


class MaskedTokens(Protocol):
    """What packing reads of a trajectory or of a supervised example. loss_mask: 1 = this token is trained."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def loss_mask(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class MicroBatch:
    """T rows of whole sequences, of which N predict a trained token.

    tokens_T: int64. rows: where each sequence starts, positions from 0.
    rows_N: int64, the rows that go through the head. targets_N: int64, the token that each must predict.
    trained_N: int64, the place of each target among all trained tokens of the packed list, in list order.
    """

    tokens_T: torch.Tensor
    rows: RowBatch
    rows_N: torch.Tensor
    targets_N: torch.Tensor
    trained_N: torch.Tensor

    def logprobs(self, decoder: Decoder, temperature: float) -> torch.Tensor:
        """(grad) fp32 [N] logprob of each trained token. Only its rows pass the head."""
        hidden_TH = decoder.hidden(self.tokens_T, self.rows, None)
        return decoder.logprobs(hidden_TH.index_select(0, self.rows_N), self.targets_N, temperature)


def trained_positions(sequence: MaskedTokens) -> list[int]:
    """Positions of the trained tokens. Raises ValueError when position 0 is one: no row predicts it."""
    positions = [position for position, trained in enumerate(sequence.loss_mask) if trained]
    if positions and positions[0] == 0:
        raise ValueError("loss_mask is 1 at position 0, but nothing precedes that token; a prompt has at least 1 token")
    return positions


def pack(sequences: Sequence[MaskedTokens], token_budget: int) -> list[MicroBatch]:
    """Cut a list into micro-batches of at most token_budget rows, each sequence whole, in a fixed order.

    First-fit, longest first. A sequence longer than the budget gets a micro-batch of its own; one without a trained
    token is in none.
    """
    positions = [trained_positions(sequence) for sequence in sequences]
    first_trained = [0, *accumulate(len(p) for p in positions)]
    lengths = [p[-1] if p else 0 for p in positions]
    return [
        _micro_batch(sequences, positions, first_trained, sorted(members)) for members in _fill(lengths, token_budget)
    ]


def _fill(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        length = lengths[index]
        target = next((b for b, free in enumerate(room) if free >= length), None)
        if target is None:
            bins.append([index])
            room.append(token_budget - length)
        else:
            bins[target].append(index)
            room[target] -= length
    return bins


def _micro_batch(
    sequences: Sequence[MaskedTokens],
    positions: Sequence[Sequence[int]],
    first_trained: Sequence[int],
    members: Sequence[int],
) -> MicroBatch:
    tokens: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    trained: list[int] = []
    for index in members:
        start = len(tokens)
        token_ids = sequences[index].token_ids
        tokens.extend(token_ids[: positions[index][-1]])
        rows.extend(start + position - 1 for position in positions[index])
        targets.extend(token_ids[position] for position in positions[index])
        trained.extend(range(first_trained[index], first_trained[index + 1]))
    return MicroBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        rows=RowBatch.pack([positions[index][-1] for index in members]),
        rows_N=torch.tensor(rows, dtype=torch.int64),
        targets_N=torch.tensor(targets, dtype=torch.int64),
        trained_N=torch.tensor(trained, dtype=torch.int64),
    )


@torch.no_grad()
def score(decoder: Decoder, trajectories: Sequence[Trajectory], token_budget: int) -> list[torch.Tensor]:
    """The learner's packed forward: for each trajectory fp32 [sampled tokens], the logprob of each sampled token.

    Each trajectory is scored at the temperature it was sampled at (a greedy one at 1, as the engine records it).
    """
    scores: list[torch.Tensor] = [torch.empty(0)] * len(trajectories)
    temperatures = [trajectory.sampling.temperature or 1.0 for trajectory in trajectories]
    for temperature in sorted(set(temperatures)):
        members = [index for index, value in enumerate(temperatures) if value == temperature]
        counts = [trajectories[index].num_sampled for index in members]
        logprobs_N = torch.empty(sum(counts))
        for micro_batch in pack([trajectories[index] for index in members], token_budget):
            logprobs_N[micro_batch.trained_N] = micro_batch.logprobs(decoder, temperature)
        for index, part in zip(members, torch.split(logprobs_N, counts), strict=True):
            scores[index] = part
    return scores
