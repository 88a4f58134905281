"""Which tokens of an audit are looked at more closely: rollouts reduced to them, and even spreads."""

from __future__ import annotations

from dataclasses import replace

import torch

from zerogap.gaps.split import Split
from zerogap.trajectory import Trajectory

ROWS = 2048  # per forward over a selection: memory, not bits


def reduced(split: Split, chosen_N: torch.Tensor) -> list[Trajectory]:
    """The rollouts of these tokens, in order; no other token of theirs counts as sampled. chosen_N: bool."""
    trajectories = []
    for owner in split.owners_N[chosen_N].unique().tolist():
        trajectory = split.trajectories[owner]
        positions = set(split.positions_N[chosen_N & (split.owners_N == owner)].tolist())
        mask = [int(position in positions) for position in range(len(trajectory.token_ids))]
        trajectories.append(replace(trajectory, loss_mask=mask))
    return trajectories


def spread(values: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many of them, evenly spread, each once."""
    count = min(most, values.numel())
    return values[torch.arange(count) * values.numel() // max(count, 1)]
