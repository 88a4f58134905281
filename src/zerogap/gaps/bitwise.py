"""The audit: does the learner, on the weights of a token's own version, reproduce the recorded logprob bit for bit?

Whatever lies between engine and learner and is not lag shows up here: other kernels, undelivered or torn weights, a
stale cache, a wrong temperature, tokens paired with the wrong rows (field cases 16, 20, 21, 22).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch

from zerogap.learner.packing import score
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory


class Snapshots(Protocol):
    """Weights by version (runtime/weight_store.py)."""

    def get(self, version: int) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Mismatch:
    """One token whose two logprobs differ as bits. position: index into the trajectory's token ids."""

    group_id: int
    prompt_id: int
    sample_index: int
    position: int
    version: int
    engine: float
    learner: float

    def __str__(self) -> str:
        return (
            f"group {self.group_id} prompt {self.prompt_id} sample {self.sample_index} position {self.position} "
            f"version {self.version}: engine {self.engine!r}, learner {self.learner!r}"
        )


@dataclass(frozen=True)
class BitsReport:
    """checked: sampled tokens compared; unequal: those with other bits; first: the first such token."""

    checked: int
    unequal: int
    first: Mismatch | None


def choose_groups(group_ids: Sequence[int], share: float) -> set[int]:
    """Which groups of a batch are audited: ceil(share * groups) of them, evenly spread, another phase in each batch
    (so that no place in a batch is never looked at). Whole groups, so that shared prefixes are part of the audit."""
    count = ceil(share * len(group_ids))
    if count == 0:
        return set()
    phase = group_ids[0] // len(group_ids)
    return {group_ids[(i * len(group_ids) // count + phase) % len(group_ids)] for i in range(count)}


def check_bits(
    decoder: Decoder, snapshots: Snapshots, trajectories: Sequence[Trajectory], token_budget: int
) -> BitsReport:
    """Score every sampled token with the learner's packed forward on the weights of the version it names.

    decoder: the learner's; its own weights are not used. token_budget: rows per forward (memory, not bits).
    A trajectory over several versions is scored once with each. KeyError when a version is not kept any more.
    """
    checked = unequal = 0
    first: Mismatch | None = None
    positions = [[p for p, sampled in enumerate(t.loss_mask) if sampled] for t in trajectories]
    versions = sorted({t.versions[p] for t, mine in zip(trajectories, positions, strict=True) for p in mine})
    for version in versions:
        members = [
            (t, mine)
            for t, mine in zip(trajectories, positions, strict=True)
            if any(t.versions[p] == version for p in mine)
        ]
        learner = decoder.view(dict(snapshots.get(version)))
        scores = score(learner, [trajectory for trajectory, _ in members], token_budget)
        for (trajectory, mine), scores_N in zip(members, scores, strict=True):
            named_N = torch.tensor([trajectory.versions[p] == version for p in mine])
            recorded_N = torch.tensor([trajectory.logprobs[p] for p in mine], dtype=torch.float32)
            differs_N = (scores_N.view(torch.int32) != recorded_N.view(torch.int32)) & named_N
            checked += int(named_N.sum())
            unequal += int(differs_N.sum())
            if first is None and bool(differs_N.any()):
                place = int(differs_N.nonzero()[0, 0])
                first = Mismatch(
                    trajectory.group_id,
                    trajectory.prompt_id,
                    trajectory.sample_index,
                    mine[place],
                    version,
                    float(recorded_N[place]),
                    float(scores_N[place]),
                )
    return BitsReport(checked, unequal, first)
