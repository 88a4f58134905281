"""Episodes without a reward: counted by the class of their error; too many of them end the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zerogap.learner.episodes import grouped_episodes
from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.trajectory import error_class


def error_statistics(groups: Sequence[FinishedGroup], most: float) -> dict[str, float]:
    """errors/<class> of the episodes of one update, for each class that occurred.

    Raises RunFailed when more than the share `most` of them has an error (task.max_error_share).
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = [episode for group in grouped_episodes(trajectories) for episode in group]
    errors = [episode.error for episode in episodes if episode.error is not None]
    classes = Counter(map(error_class, errors))
    if len(errors) > most * len(episodes):
        counts = ", ".join(f"{count} {kind}" for kind, count in classes.most_common())
        raise RunFailed(
            f"{len(errors)} of {len(episodes)} episodes of this update have no reward ({counts}), more than "
            f"task.max_error_share {most:g} allows; the first: {errors[0]}"
        )
    return {f"errors/{kind}": float(count) for kind, count in sorted(classes.items())}
