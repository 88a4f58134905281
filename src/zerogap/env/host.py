"""Where environments run, seen from a rollout worker: calls go in, answers come out, nothing blocks in between."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from zerogap.env.environment import Environment, EpisodeError, Step
from zerogap.env.task import Example
from zerogap.trajectory import Message

Episode = tuple[int, int, int]  # group_id, sample_index, attempt

MakeEnvironment = Callable[[], Environment]  # called once for each episode
# Called once for each host (process): loads the task, imports the file. What the episodes share and has to be closed is
# put on the stack; the host closes it after the episodes.
Load = Callable[[AsyncExitStack], MakeEnvironment]


class HostError(RuntimeError):
    """The host cannot go on: its environments do not load, or its process dies again and again."""


@dataclass(frozen=True)
class Answer:
    """To a reset (`messages`) or a step (`step`); on failure both are None and `error` says why.

    seconds: wall time of the call, in the host.
    """

    episode: Episode
    seconds: float
    messages: list[Message] | None = None
    step: Step | None = None
    error: EpisodeError | None = None


def over_limit(seconds: float) -> str:
    """The message of a timeout."""
    return f"the call was over its limit of {seconds:g} s (task.call_timeout_s)"


class Host(Protocol):
    """Runs many episodes at once. One call at a time per episode; each call gets one answer, in any order.

    After an error the episode is over; close it, and try again under another attempt. Raises HostError, from any of
    these, when it cannot go on; ValueError where the caller breaks the order of calls.
    """

    def reset(self, episode: Episode, example: Example) -> None:
        """Begin an episode that the host does not know yet."""
        ...

    def step(self, episode: Episode, action: str) -> None:
        """The policy's turn in an episode whose last call was answered without an error."""
        ...

    def close_episode(self, episode: Episode) -> None:
        """Forget the episode; a running call is cancelled. No answer follows; unknown ids are ignored."""
        ...

    def results(self, timeout_s: float) -> list[Answer]:
        """Answers since the last call; waits up to timeout_s seconds for the first (0: does not wait)."""
        ...

    def close(self) -> None:
        """End everything; calls still running get no answer. May be called again."""
        ...
