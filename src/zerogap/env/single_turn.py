"""A task with a grader as an environment: the simplest case, one step that ends the episode."""

from __future__ import annotations

from zerogap.env.environment import Step
from zerogap.env.task import Example, Task
from zerogap.trajectory import Message


class SingleTurn:
    """See zerogap.env.environment.Environment. The reward is the task's grade of the first turn."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def reset(self, example: Example) -> list[Message]:
        self._example = example
        return example.messages

    async def step(self, action: str) -> Step:
        return Step([], self._task.grade(self._example, action), terminated=True, truncated=False, info={})

    async def close(self) -> None:
        """Nothing is held."""
