"""The advantage of a sample: its reward minus the mean reward of its group, over the group's deviation if asked to."""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_OFFSET = 1e-4  # added to the standard deviation, so that rewards that differ by rounding only stay without effect


def group_advantages(rewards: Sequence[float | None], normalize_std: bool = False) -> list[float | None]:
    """Advantages of the samples of one prompt, in the same order (float64).

    rewards: finite; None marks a sample that could not be graded; it is left out of mean and deviation, and its
    advantage is None. normalize_std: divide by (sample standard deviation, n - 1, + STD_OFFSET), as GRPO's
    implementations do.
    Equal rewards give exactly 0.0: decided by comparing the rewards, never by the size of a rounding residue.
    """
    graded = [reward for reward in rewards if reward is not None]
    if len(set(graded)) <= 1:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(graded) / len(graded)
    scale = 1.0
    if normalize_std:
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in graded) / (len(graded) - 1)) + STD_OFFSET
    return [None if reward is None else (reward - mean) / scale for reward in rewards]
