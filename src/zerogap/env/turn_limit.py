"""The limit of turns around any environment: task.max_turns."""

from __future__ import annotations

from zerogap.env.environment import Environment, Step, checked_step
from zerogap.env.task import Example
from zerogap.trajectory import Message


class TurnLimit:
    """See zerogap.env.environment.Environment. Truncates the episode that would go on after `limit` turns."""

    def __init__(self, environment: Environment, limit: int) -> None:
        self._environment = environment
        self._left = limit

    async def reset(self, example: Example) -> list[Message]:
        return await self._environment.reset(example)

    async def step(self, action: str) -> Step:
        self._left -= 1
        if self._left > 0:
            return await self._environment.step(action)
        step = await checked_step(self._environment, action)
        return step if step.terminated else step._replace(observation=[], truncated=True)

    async def close(self) -> None:
        await self._environment.close()
