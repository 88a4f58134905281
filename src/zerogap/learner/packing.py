"""Sequences laid back to back under a token budget, and the rows whose output predicts a trained token.

A row is run only if a trained token follows it: what comes after the last trained token changes nothing. And it is run
once for all sequences of a micro-batch that begin alike up to it: the samples of a group share their prompt's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    """T rows, whose outputs predict N trained tokens.

    tokens_T: int64. rows: how the sequences lie, common prefixes once.
    rows_N: int64, the row that predicts each trained token; a shared row may predict several.
    targets_N: int64, the token that each must predict.
    trained_N: int64, the place of each target among all trained tokens of the packed list, in list order.
    shared_rows: how many more rows there would be if no two sequences shared any.
    """

    tokens_T: torch.Tensor
    rows: RowBatch
    rows_N: torch.Tensor
    targets_N: torch.Tensor
    trained_N: torch.Tensor
    shared_rows: int

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
    """Cut a list into micro-batches of at most token_budget rows, in a fixed order.

    Sequences are taken in descending order of their tokens, so that those with a common prefix are neighbours; a
    prefix whose sequences fall into two micro-batches is in both. A sequence longer than the budget gets a micro-batch
    of its own; one without a trained token is in none.
    """
    positions = [trained_positions(sequence) for sequence in sequences]
    first_trained = [0, *accumulate(len(p) for p in positions)]
    needed = [list(sequence.token_ids[: p[-1]]) if p else [] for sequence, p in zip(sequences, positions, strict=True)]
    packed = [_Rows()]
    for index in sorted((i for i, p in enumerate(positions) if p), key=lambda i: needed[i], reverse=True):
        fresh = packed[-1].fresh(needed[index])
        if packed[-1].tokens and fresh and len(packed[-1].tokens) + len(fresh) > token_budget:
            packed.append(_Rows())
            fresh = needed[index]
        rows = packed[-1]
        rows.add(fresh, len(needed[index]) - len(fresh))
        rows.predicting.extend(rows.path[position - 1] for position in positions[index])
        rows.targets.extend(sequences[index].token_ids[position] for position in positions[index])
        rows.trained.extend(range(first_trained[index], first_trained[index + 1]))
    return [rows.micro_batch() for rows in packed if rows.tokens]


class _Rows:
    """A micro-batch in the making. path: the row of each position of the sequence that was added last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.path: list[int] = []
        self.lengths: list[int] = []
        self.shared: list[int] = []
        self.predicting: list[int] = []
        self.targets: list[int] = []
        self.trained: list[int] = []
        self.shared_rows = 0

    def fresh(self, needed: list[int]) -> list[int]:
        """What a sequence has beyond its common prefix with the one before it."""
        pairs = enumerate(zip(self.path, needed, strict=False))
        shorter = min(len(self.path), len(needed))
        return needed[next((p for p, (row, token) in pairs if self.tokens[row] != token), shorter) :]

    def add(self, fresh: list[int], common: int) -> None:
        """Append rows after the first `common` positions of the sequence before. Nothing fresh: all rows are there."""
        self.shared_rows += common
        if fresh:
            start = len(self.tokens)
            self.tokens.extend(fresh)
            self.path = [*self.path[:common], *range(start, len(self.tokens))]
            self.lengths.append(len(fresh))
            self.shared.append(common)

    def micro_batch(self) -> MicroBatch:
        return MicroBatch(
            tokens_T=torch.tensor(self.tokens, dtype=torch.int64),
            rows=RowBatch.pack(self.lengths, self.shared),
            rows_N=torch.tensor(self.predicting, dtype=torch.int64),
            targets_N=torch.tensor(self.targets, dtype=torch.int64),
            trained_N=torch.tensor(self.trained, dtype=torch.int64),
            shared_rows=self.shared_rows,
        )


def pack_by_temperature(trajectories: Sequence[Trajectory], token_budget: int) -> Iterator[tuple[MicroBatch, float]]:
    """Micro-batches, each with the one temperature at which all its log-probabilities were recorded. trained_N counts
    the sampled tokens of all trajectories."""
    temperatures = [trajectory.sampling.logprob_temperature for trajectory in trajectories]
    places = torch.arange(sum(t.num_sampled for t in trajectories)).split([t.num_sampled for t in trajectories])
    for temperature in sorted(set(temperatures)):
        members = [index for index, value in enumerate(temperatures) if value == temperature]
        places_N = torch.cat([places[index] for index in members])
        for batch in pack([trajectories[index] for index in members], token_budget):
            yield replace(batch, trained_N=places_N[batch.trained_N]), temperature


@torch.no_grad()
def score(decoder: Decoder, trajectories: Sequence[Trajectory], token_budget: int) -> list[torch.Tensor]:
    """The learner's packed forward: for each trajectory fp32 [sampled tokens], the logprob of each sampled token.

    Each trajectory is scored at the temperature it was sampled at (a greedy one at 1, as the engine records it).
    """
    counts = [trajectory.num_sampled for trajectory in trajectories]
    logprobs_N = torch.empty(sum(counts))
    for batch, temperature in pack_by_temperature(trajectories, token_budget):
        logprobs_N[batch.trained_N] = batch.logprobs(decoder, temperature)
    return list(logprobs_N.split(counts))
