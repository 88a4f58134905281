"""What any rollout engine can do, seen from the runtime; and the error that no engine may swallow.

The embedded engine lives in rollout/embedded/. Nothing here needs torch at run time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from zerogap.trajectory import GroupRequest, Trajectory

if TYPE_CHECKING:
    import torch


class NonFiniteLogprob(RuntimeError):
    """A sampled token came with a NaN or infinite logprob: the forward pass that made it is broken."""


class Engine(Protocol):
    """Samples groups of trajectories. One thread drives it; weights change only between two steps."""

    @property
    def version(self) -> int:
        """Version of the weights that the next sampled token will come from."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Raises ValueError for a request that can never be served; nothing is queued then."""
        ...

    def step(self) -> list[Trajectory]:
        """One forward pass; returns the trajectories that ended with it (reward None)."""
        ...

    def has_work(self) -> bool:
        """True when `step` would do something now. Groups held for newer weights are no work (see `pending`)."""
        ...

    def pending(self) -> list[tuple[int, int]]:
        """(group_id, sample_index) of every unfinished trajectory, in order of arrival, held ones included."""
        ...

    def abort(self, group_ids: Iterable[int]) -> None:
        """Forget these groups; no trajectory of theirs is returned any more. Unknown ids are ignored."""
        ...

    def load_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Deliver a complete set of weights. Raises and stays on the old ones when the set is not right."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters since the start and the state of the queues now."""
        ...
