"""What any rollout engine can do, seen from the runtime; and the error that no engine may swallow.

The embedded engine lives in rollout/embedded/. Nothing here needs torch at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from zerogap.trajectory import GroupRequest, Trajectory

if TYPE_CHECKING:
    import torch


class NonFiniteLogprob(RuntimeError):
    """A sampled token came with a NaN or infinite logprob: the forward pass that made it is broken."""


class ContextFull(ValueError):
    """The tokens leave no room for one that is sampled: the episode has to end here."""


class Engine(Protocol):
    """Samples groups of trajectories. One thread drives it; weights change only between two steps.

    A sample of an interactive request is an episode: at the end of each turn `step` hands it out, and then it is parked
    until its caller says with `extend`, `restart` or `end` how it goes on.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next sampled token will come from."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a group. Raises ValueError for a request that can never be served; nothing is queued then."""
        ...

    def step(self) -> list[Trajectory]:
        """One forward pass; returns the trajectories that ended with it (reward None). Of an interactive request: those
        whose turn ended, as they are so far; finish_reason says why the turn ended."""
        ...

    def extend(self, group_id: int, sample_index: int, token_ids: Sequence[int]) -> None:
        """Append tokens that were not sampled to a parked sample (at least one); its next turn is sampled after them.

        Raises ContextFull where nothing could be sampled after them, ValueError for ids outside the vocabulary or a
        sample that is not parked; nothing has changed then.
        """
        ...

    def restart(self, group_id: int, sample_index: int, prompt_token_ids: Sequence[int], segment: int) -> None:
        """Begin again with a parked sample, from this prompt: its next segment, or one again whose environment failed.

        The same segment on the same prompt and weights samples the same tokens; another segment draws other random
        numbers. Raises ContextFull or another ValueError where such a prompt could not be served, and ValueError for a
        sample that is not parked; nothing has changed then.
        """
        ...

    def end(self, group_id: int, sample_index: int) -> None:
        """Forget a parked sample; its group is gone with the last. Raises ValueError for one that is not parked."""
        ...

    def has_work(self) -> bool:
        """True when `step` would do something now. Groups held for newer weights and parked samples are no work (see
        `pending`)."""
        ...

    def pending(self) -> list[tuple[int, int]]:
        """(group_id, sample_index) of every unfinished sample, in order of arrival, held and parked ones included."""
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
