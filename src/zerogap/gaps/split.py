"""The split of a sampled token's log-ratio into weight lag and kernel mismatch, at any lag.

For a token of weight version v that is trained at version k, with mu the recorded probability and pi the learner's:

    log pi_k - log mu  =  (log pi_k - log pi_v)  +  (log pi_v - log mu)
         total         =         LAG             +        KERNEL

Whatever lies between engine and learner and is not lag is in KERNEL: other kernels, undelivered or torn weights, a
stale cache, a wrong temperature, tokens paired with the wrong rows (field cases 16, 20, 21, 22). Aligned: no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

import torch

from zerogap.learner.packing import score
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory


class Snapshots(Protocol):
    """Weights by version: a dict, or runtime/weight_store.py."""

    def __getitem__(self, version: int) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Mismatch:
    """One token whose two logprobs (fp32) differ as bits. position: index into the trajectory's token ids."""

    group_id: int
    prompt_id: int
    sample_index: int
    segment: int
    position: int
    version: int
    engine: float
    learner: float

    def __str__(self) -> str:
        return (
            f"group {self.group_id} prompt {self.prompt_id} sample {self.sample_index} segment {self.segment} "
            f"position {self.position} version {self.version}: engine {self.engine!r} ({_bits(self.engine)}), "
            f"learner {self.learner!r} ({_bits(self.learner)})"
        )


@dataclass(frozen=True)
class Split:
    """N sampled tokens, trajectory by trajectory, each with its three log-probabilities (fp32).

    trained_N: int64, k of each token. owners_N, positions_N: int64, index of the trajectory, and of the token in its
    ids. versions_N: int64, v of each token. recorded_N: log mu. own_N: log pi_v. current_N: log pi_k.

    The parts are differences in float64: of fp32 log-probabilities, LAG + KERNEL is the total within one fp32 rounding.
    """

    trajectories: Sequence[Trajectory]
    trained_N: torch.Tensor
    owners_N: torch.Tensor
    positions_N: torch.Tensor
    versions_N: torch.Tensor
    recorded_N: torch.Tensor
    own_N: torch.Tensor
    current_N: torch.Tensor

    @property
    def total_N(self) -> torch.Tensor:
        return self.current_N.double() - self.recorded_N.double()

    @property
    def lag_N(self) -> torch.Tensor:
        return self.current_N.double() - self.own_N.double()

    @property
    def kernel_N(self) -> torch.Tensor:
        return self.own_N.double() - self.recorded_N.double()

    @property
    def ages_N(self) -> torch.Tensor:
        """int64: k - v, in updates."""
        return self.trained_N - self.versions_N

    @property
    def unequal_N(self) -> torch.Tensor:
        """bool: log pi_v and log mu differ as bits."""
        return self.own_N.view(torch.int32) != self.recorded_N.view(torch.int32)

    @property
    def checked(self) -> int:
        return self.owners_N.numel()

    @property
    def unequal(self) -> int:
        return int(self.unequal_N.sum())

    def first_unequal(self) -> Mismatch | None:
        if not self.unequal:
            return None
        place = int(self.unequal_N.nonzero()[0, 0])
        trajectory = self.trajectories[int(self.owners_N[place])]
        return Mismatch(
            trajectory.group_id,
            trajectory.prompt_id,
            trajectory.sample_index,
            trajectory.segment,
            int(self.positions_N[place]),
            int(self.versions_N[place]),
            float(self.recorded_N[place]),
            float(self.own_N[place]),
        )


def choose_groups(group_ids: Sequence[int], share: float) -> set[int]:
    """Which groups of a batch are audited: ceil(share * groups) of them, evenly spread, another phase in each batch
    (so that no place in a batch is never looked at). Whole groups, so that shared prefixes are part of the audit."""
    count = ceil(share * len(group_ids))
    if count == 0:
        return set()
    phase = group_ids[0] // len(group_ids)
    return {group_ids[(i * len(group_ids) // count + phase) % len(group_ids)] for i in range(count)}


def split_tokens(
    decoder: Decoder, snapshots: Snapshots, trajectories: Sequence[Trajectory], version: int, token_budget: int
) -> Split:
    """Score every sampled token with the learner's packed forward on the weights of its own version and of `version`.

    decoder: the learner's; its own weights are not used. token_budget: rows per forward (memory, not bits).
    A trajectory over several versions is scored once with each, up to its last token of that version; a second time
    with `version` only where the two differ, in the same batches, so that LAG is free of kernel noise in any family.
    KeyError when a version is not kept any more.
    """
    places = [(o, p) for o, t in enumerate(trajectories) for p, sampled in enumerate(t.loss_mask) if sampled]
    owners_N, positions_N = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    versions_N = torch.tensor([trajectories[o].versions[p] for o, p in places], dtype=torch.int64)
    recorded_N = torch.tensor([trajectories[o].logprobs[p] for o, p in places], dtype=torch.float32)
    own_N, current_N = torch.empty_like(recorded_N), torch.empty_like(recorded_N)
    current = decoder.view(dict(snapshots[version]))
    for own_version in versions_N.unique().tolist():
        named_N = versions_N == own_version
        members = [only_version(trajectories[o], own_version) for o in owners_N[named_N].unique().tolist()]
        own = current if own_version == version else decoder.view(dict(snapshots[own_version]))
        own_N[named_N] = torch.cat(score(own, members, token_budget))
        current_N[named_N] = (
            own_N[named_N] if own_version == version else torch.cat(score(current, members, token_budget))
        )
    trained_N = torch.full_like(versions_N, version)
    return Split(trajectories, trained_N, owners_N, positions_N, versions_N, recorded_N, own_N, current_N)


def gap_statistics(split: Split) -> dict[str, float]:
    """What a step reports of each part (log-ratios, learner over behaviour): mean, mean and largest absolute value,
    k1 = mean(-x) and k3 = mean(e^x - 1 - x), and the mean absolute value by age in updates. Empty without tokens."""
    statistics: dict[str, float] = {}
    if not split.checked:
        return statistics
    ages_N = split.ages_N
    for name, part_N in (("total", split.total_N), ("lag", split.lag_N), ("kernel", split.kernel_N)):
        statistics |= {
            f"gap/{name}/mean": float(part_N.mean()),
            f"gap/{name}/abs_mean": float(part_N.abs().mean()),
            f"gap/{name}/max": float(part_N.abs().max()),
            f"gap/{name}/k1": float(-part_N.mean()),
            f"gap/{name}/k3": float((part_N.expm1() - part_N).mean()),
        }
        for age in ages_N.unique().tolist():
            statistics[f"gap/{name}/age_{age}"] = float(part_N[ages_N == age].abs().mean())
    return statistics


def only_version(trajectory: Trajectory, version: int) -> Trajectory:
    """The same tokens; only those of this version count as sampled."""
    pairs = zip(trajectory.loss_mask, trajectory.versions, strict=True)
    return replace(trajectory, loss_mask=[int(sampled and v == version) for sampled, v in pairs])


def _bits(logprob: float) -> str:
    return f"bits {int(torch.tensor(logprob, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF:#010x}"
