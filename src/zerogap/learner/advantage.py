"""The advantage of REINFORCE Zero: reward minus the mean reward of its group. No standard deviation, no filter."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Advantages of the samples of one prompt, in the same order (float64).

    rewards: finite; None marks a sample that could not be graded; it is left out of the mean and its advantage is None.
    Equal rewards give exactly 0.0: decided by comparing the rewards, never by the size of a rounding residue.
    """
    graded = [reward for reward in rewards if reward is not None]
    if not graded:
        return [None] * len(rewards)
    mean = graded[0] if len(set(graded)) == 1 else math.fsum(graded) / len(graded)
    return [None if reward is None else reward - mean for reward in rewards]
