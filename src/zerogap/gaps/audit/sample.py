"""Tokens of a few rollouts on which assumptions about the weights are tried, one packed forward each.

Only rollouts that differ are in a sample (one engine of several may be the faulty one), each up to a few tokens after
its first unequal one: the equal tokens before it are evidence, too, that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerogap.gaps.audit.finding import LISTED, Finding
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.selection import ROWS, reduced, spread
from zerogap.learner.packing import pack, pack_by_temperature, score
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory

LEAST_TOKENS = 8  # fewer fit something by chance
QUICK_TOKENS, QUICK_AFTER = 16, 24  # of the sample for a search; tokens of a rollout after its first unequal one
WITNESSES, WITNESS_AFTER = 8, 32  # rollouts of the sample that a finding is measured on

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Fit:
    """Recorded log-probabilities against those of an assumption. before, after: mean |log-ratio| without and with it.
    equal: how many of the tokens are equal as bits with it."""

    before: float
    after: float
    equal: int
    tokens: int

    @property
    def explained(self) -> float:
        return 1 - self.after / self.before if self.before else 0.0

    @property
    def exact(self) -> bool:
        return self.equal == self.tokens

    def __str__(self) -> str:
        bits = f"{self.equal} of {self.tokens} tokens fit as bits"
        return bits if self.exact else f"mean gap {self.before:.2e}, with it {self.after:.2e}; {bits}"


@dataclass(frozen=True)
class Sample:
    """S tokens, those of mask 1. recorded_S: fp32, the engine's. own_S: fp32, of the weights that it names.
    rows: what one forward runs."""

    trajectories: Sequence[Trajectory]
    recorded_S: torch.Tensor
    own_S: torch.Tensor
    rows: int

    def score(self, model: Decoder) -> torch.Tensor:
        """fp32 [S]."""
        return torch.cat(score(model, self.trajectories, ROWS))

    def backward(self, model: Decoder, weights_S: torch.Tensor) -> None:
        """Add to the gradients of a trainable model those of the weighted sum of the tokens' log-probabilities."""
        for batch, temperature in pack_by_temperature(self.trajectories, ROWS):
            (batch.logprobs(model, temperature) * weights_S[batch.trained_N]).sum().backward()

    def fit(self, logprobs_S: torch.Tensor) -> Fit:
        before, after = ((x_S.double() - self.recorded_S.double()).abs() for x_S in (self.own_S, logprobs_S))
        equal_S = logprobs_S.view(torch.int32) == self.recorded_S.view(torch.int32)
        return Fit(float(before.mean()), float(after.mean()), int(equal_S.sum()), equal_S.numel())


@dataclass(frozen=True)
class Case:
    """model: on the weights that the tokens name. version: which (None: the file's versions are not used).
    quick: a small sample, to look for a cause; witness: a larger one, to measure it."""

    model: Decoder
    version: int | None
    quick: Sample
    witness: Sample

    def tried(self, cause: str, assume: Callable[[Sample], torch.Tensor]) -> Finding | None:
        """assume: a sample to its log-probabilities if the cause is the cause. None where it explains too little."""
        if self.quick.fit(assume(self.quick)).explained < LISTED:
            return None
        fit = self.witness.fit(assume(self.witness))
        return Finding(cause, fit.explained, str(fit))

    def tried_model(self, cause: str, model: Decoder) -> Finding | None:
        """The cause: all was computed by this model."""
        return self.tried(cause, lambda sample: sample.score(model))

    def named(self, version: int) -> str:
        """Another version, beside the one that the tokens name."""
        if self.version is None:
            return f"version {version}"
        updates = abs(self.version - version)
        side = "older" if version < self.version else "newer"
        return f"version {version}, {updates} update{'s' * (updates != 1)} {side} than the file says"


def take_case(rescored: Rescored) -> Case | None:
    """None where too few tokens differ or stand beside one that does."""
    split = rescored.split
    unequal_N = split.unequal_N & rescored.of_behaviour_N
    first: dict[int, int] = {}
    for owner, position in zip(split.owners_N[unequal_N].tolist(), split.positions_N[unequal_N].tolist(), strict=True):
        first.setdefault(owner, position)
    owners = sorted(first, key=lambda owner: (first[owner], owner))
    count = 1
    quick = _sample(rescored, first, owners[:count], QUICK_AFTER)
    while quick.recorded_S.numel() < QUICK_TOKENS and count < len(owners):
        count += 1
        quick = _sample(rescored, first, owners[:count], QUICK_AFTER)
    if quick.recorded_S.numel() < LEAST_TOKENS:
        return None
    witness = _sample(rescored, first, spread(torch.tensor(sorted(first)), WITNESSES).tolist(), WITNESS_AFTER)
    return Case(rescored.behaviour, rescored.behaviour_version, quick, witness)


def _sample(rescored: Rescored, first: Mapping[int, int], owners: Sequence[int], after: int) -> Sample:
    split, wanted_N = rescored.split, torch.zeros(rescored.split.checked, dtype=torch.bool)
    for owner in owners:
        wanted_N |= (split.owners_N == owner) & (split.positions_N < first[owner] + after)
    wanted_N &= rescored.of_behaviour_N
    trajectories = reduced(split, wanted_N)
    rows = sum(batch.rows.num_rows for batch in pack(trajectories, ROWS))
    return Sample(trajectories, split.recorded_N[wanted_N], split.own_N[wanted_N], rows)
