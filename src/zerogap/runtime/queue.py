"""Finished groups, waiting for their update. Consumption is in order of admission, so nothing is ever dropped."""

from __future__ import annotations

from zerogap.runtime.backend import FinishedGroup
from zerogap.trajectory import NOT_SAMPLED


class TrajectoryQueue:
    """Holds groups that finished out of order until the next `groups_per_update` in line are all there."""

    def __init__(self, groups_per_update: int, first_group: int) -> None:
        self._groups_per_update = groups_per_update
        self._first_group = first_group
        self._finished: dict[int, FinishedGroup] = {}
        self._versions: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._finished)

    def put(self, group: FinishedGroup) -> None:
        """ValueError for a group that was already put or already trained."""
        if group.group_id in self._finished or group.group_id < self._first_group:
            raise ValueError(f"group {group.group_id} arrived twice; a group is trained exactly once")
        self._finished[group.group_id] = group
        named = {version for trajectory in group.trajectories for version in trajectory.versions}
        self._versions[group.group_id] = named - {NOT_SAMPLED}

    def versions(self) -> frozenset[int]:
        """Weight versions that the tokens of waiting groups name."""
        return frozenset().union(*self._versions.values())

    def missing(self) -> list[int]:
        """Groups that the next update still waits for."""
        return [g for g in self._next_batch() if g not in self._finished]

    @property
    def ready(self) -> bool:
        return not self.missing()

    def take(self) -> list[FinishedGroup]:
        """The next batch, in order of admission; only when `ready`."""
        batch = [self._finished.pop(g) for g in self._next_batch()]
        for group in batch:
            del self._versions[group.group_id]
        self._first_group += self._groups_per_update
        return batch

    def _next_batch(self) -> range:
        return range(self._first_group, self._first_group + self._groups_per_update)
