"""Trajectories put together as what was graded: an episode is one sample of its group, however many segments it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerogap.trajectory import Trajectory


@dataclass(frozen=True)
class Episode:
    """segments: at least one, in order. All carry its reward; the last one says how it ended."""

    segments: list[Trajectory]

    @property
    def reward(self) -> float | None:
        return self.segments[-1].reward

    @property
    def error(self) -> str | None:
        return self.segments[-1].error

    @property
    def truncated(self) -> bool:
        return self.segments[-1].truncated

    @property
    def num_sampled(self) -> int:
        return sum(segment.num_sampled for segment in self.segments)

    @property
    def turns(self) -> int:
        return sum(segment.turns for segment in self.segments)


def grouped_episodes(trajectories: Iterable[Trajectory]) -> list[list[Episode]]:
    """The episodes of each group; groups and episodes in the order in which they first appear.

    Raises ValueError where segments of an episode are not 0, 1, 2, ... or their rewards differ.
    """
    groups: dict[int, dict[int, list[Trajectory]]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, {}).setdefault(trajectory.sample_index, []).append(trajectory)
    return [[_episode(segments) for segments in samples.values()] for samples in groups.values()]


def _episode(segments: list[Trajectory]) -> Episode:
    segments = sorted(segments, key=lambda trajectory: trajectory.segment)
    numbers, rewards = [t.segment for t in segments], [t.reward for t in segments]
    if numbers != list(range(len(segments))) or len(set(rewards)) > 1:
        raise ValueError(
            f"group {segments[0].group_id} sample {segments[0].sample_index} has segments {numbers} with rewards "
            f"{rewards}; an episode has segments 0, 1, 2, ..., each once, and all of them carry its one reward"
        )
    return Episode(segments)
