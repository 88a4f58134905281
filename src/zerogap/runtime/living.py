"""Which weight versions a token may still name: what the weight store keeps, and the proof that it suffices.

The loop asks for update k (of version k) with batch k, and says with it what else is alive: finished groups that wait
for their turn, with the versions of their tokens, and unfinished groups, with the min_version of their requests.

Claim (safety): when update k scores batch k, every version that a token of the batch names is kept.
    Let such a token have version v and group g. Version v was put into the store when it was made, v <= k. Suppose
    update j < k freed it; then v <= j, because an update never frees the version it makes. At the request for update
    j, group g was
    (a) not yet admitted. It was admitted later, so at a published version p > j, and only groups with min_version = p
        become admissible at p (admission.py). So v >= min_version(g) > j: contradiction.
    (b) unfinished. Then v >= min_version(g) >= `since`, so v was not freed.
    (c) finished and waiting. Then v is in `named`, so v was not freed.
    An engine starts no sample below its min_version (scheduler.py), for any delay of messages and after any restart of
    a worker; so nothing is assumed about time. A resumed run begins with an empty store and admits its groups anew.
Claim (bound): at most lag + 1 versions are kept. After update k, every living group has min_version >= k + 1 - lag.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Living:
    """named: versions of the tokens of finished groups that wait for their update.

    since: oldest version that a token of an unfinished group may have, None when engines have no group.
    """

    named: frozenset[int]
    since: int | None

    def names(self, version: int) -> bool:
        return version in self.named or (self.since is not None and version >= self.since)
