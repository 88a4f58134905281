"""A task with a grader as an environment: the simplest case, one step that ends the episode."""

from __future__ import annotations

from zerogap.env.environment import Step
from zerogap.env.task import Example, Grade
from zerogap.trajectory import Message


class SingleTurn:
    """See zerogap.env.environment.Environment. The reward is the grade of the first turn."""

    def __init__(self, grade: Grade) -> None:
        self._grade = grade

    async def reset(self, example: Example) -> list[Message]:
        self._example = example
        return example.messages

    async def step(self, action: str) -> Step:
        return Step([], self._grade(self._example, action), terminated=True, truncated=False, info={})

    async def close(self) -> None:
        """Nothing is held."""
