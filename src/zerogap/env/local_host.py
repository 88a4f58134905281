"""Environments in the caller's own process and thread: for the inline driver, tests and a debugger.

A call runs to its end when it is submitted. Its time limit stops what awaits; code that computes for ever it cannot
stop (ProcessHost can).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import TypeVar

from zerogap.env.environment import Environment, EpisodeError, Step, checked_reset, checked_step
from zerogap.env.host import Answer, Episode, Load, over_limit
from zerogap.env.task import Example
from zerogap.trajectory import Message

T = TypeVar("T")
log = logging.getLogger(__name__)


class LocalHost:
    """See zerogap.env.host.Host. `load` is called at once and raises what it raises. seconds: limit of each call."""

    def __init__(self, load: Load, seconds: float) -> None:
        self._shared = AsyncExitStack()
        self._make = load(self._shared)
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        self._environments: dict[Episode, Environment] = {}
        self._answers: list[Answer] = []

    def reset(self, episode: Episode, example: Example) -> None:
        if episode in self._environments:
            raise ValueError(f"episode {episode} was reset before; each attempt is an episode of its own")

        async def begin() -> list[Message]:
            environment = self._environments[episode] = self._make()
            return await checked_reset(environment, example)

        messages, error, seconds = self._call(begin())
        self._answers.append(Answer(episode, seconds, messages=messages, error=error))

    def step(self, episode: Episode, action: str) -> None:
        if episode not in self._environments:
            raise ValueError(f"episode {episode} is not open; reset it first")
        step: Step | None
        step, error, seconds = self._call(checked_step(self._environments[episode], action))
        self._answers.append(Answer(episode, seconds, step=step, error=error))

    def close_episode(self, episode: Episode) -> None:
        self._answers = [answer for answer in self._answers if answer.episode != episode]
        if (environment := self._environments.pop(episode, None)) is not None:
            _, error, _ = self._call(environment.close())
            if error is not None:
                log.warning("closing the environment of episode %s failed: %s", episode, error)

    def results(self, timeout_s: float) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for episode in list(self._environments):
            self.close_episode(episode)
        _, error, _ = self._call(self._shared.aclose())
        if error is not None:
            log.warning("closing what the episodes share failed: %s", error)
        self._answers = []
        self._loop.close()

    def _call(self, coroutine: Coroutine[None, None, T]) -> tuple[T | None, EpisodeError | None, float]:
        """(value, error, seconds): one of the first two is None."""
        started = time.monotonic()
        value, error = None, None
        try:
            value = self._loop.run_until_complete(asyncio.wait_for(coroutine, self._seconds))
        except TimeoutError as raised:
            # One of the environment's own reaches us as well; only the limit's is a timeout.
            over = time.monotonic() - started >= self._seconds
            error = EpisodeError("timeout", over_limit(self._seconds)) if over else EpisodeError.of(raised)
        except (Exception, asyncio.CancelledError, SystemExit) as raised:  # an environment may cancel or end itself
            error = EpisodeError.of(raised)
        return value, error, time.monotonic() - started
