"""The lag bound, kept by admission: which groups may be given to the engines, and the proof that it suffices.

Groups are numbered 0, 1, 2, ... in order of admission. B = groups per update, L = the bound (updates). Update k
(k = 0, 1, ...) turns weights of version k into version k + 1 and consumes exactly the groups kB .. (k+1)B - 1,
however long each of them took: first in, first out, so slow prompts are trained as often as quick ones.

Claim 1 (bound): every sampled token that update k trains has version >= k - L.
    A token that update k trains belongs to a group g with g // B = k, so min_version(g) = max(0, k - L).
    (a) An engine starts no sample of g before its own version is >= min_version(g) (rollout/embedded/scheduler.py).
    (b) An engine's version only grows, and a token is stamped with the version of the weights that made its logits.
    So each token of g has version >= min_version(g) >= k - L. This holds for any delay of groups or weights on their
    way, and for a worker that is started again: its engine is a new one, and (a) and (b) hold for it too.
Claim 2 (nothing is lost): no step of this scheme throws a group away, and update k takes each of its groups once.
Claim 3 (no deadlock): while the learner waits for batch k, version k is published. Each group g of batch k has
    min_version(g) <= k, so all of them are admitted. Weights are delivered in finite time, so each engine comes to
    version k, at which no admitted group is held back; an engine finishes what it may run (scheduler.py), without any
    further update. Batch k becomes complete, and k grows.
Claim 4 (no surplus): with version p published, at most (L + 1) B groups are admitted and not yet consumed, also after
    a resume, since the count starts from the version and not from 0 (field case R3).
"""

from __future__ import annotations

from collections.abc import Iterable

from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.trajectory import NOT_SAMPLED


class Admission:
    """Counts admitted groups; `updates` is the version at which the run ends, so nothing is sampled in vain."""

    def __init__(self, groups_per_update: int, lag: int, start_version: int, updates: int) -> None:
        self.groups_per_update = groups_per_update
        self.lag = lag
        self.next_group = start_version * groups_per_update
        self._last_group = updates * groups_per_update

    def min_version(self, group_id: int) -> int:
        """Oldest weights that may sample this group."""
        return max(0, group_id // self.groups_per_update - self.lag)

    def admit(self, published: int) -> range:
        """The groups that become admissible now that `published` is out: those with min_version <= published."""
        stop = min((published + self.lag + 1) * self.groups_per_update, self._last_group)
        first = self.next_group
        self.next_group = max(first, stop)
        return range(first, self.next_group)

    def check(self, groups: Iterable[FinishedGroup], version: int) -> None:
        """The claim, verified on what is about to be trained by the update of `version`. RunFailed if it is broken."""
        for group in groups:
            for trajectory in group.trajectories:
                oldest = min((v for v in trajectory.versions if v != NOT_SAMPLED), default=version)
                if version - oldest > self.lag:
                    raise RunFailed(
                        f"group {group.group_id} sample {trajectory.sample_index} holds a token of version {oldest} "
                        f"at version {version}: lag {version - oldest} is over train.lag {self.lag}; an engine sampled "
                        f"it with weights older than its min_version {self.min_version(group.group_id)}"
                    )
