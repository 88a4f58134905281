"""Small environments for the tests of hosts; a host's process imports them by name."""

from __future__ import annotations

import asyncio
from typing import Any

from zerogap.env.environment import Step
from zerogap.env.host import MakeEnvironment
from zerogap.env.task import Example, Message


def example(payload: Any = None, prompt_id: int = 0) -> Example:
    return Example(prompt_id, [{"role": "user", "content": "go"}], payload)


class Scripted:
    """Does what the action says: `+0.5` gives that reward and goes on, `end 1` ends with it; other words misbehave."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, example: Example) -> list[Message]:
        self.example = example
        if example.payload == "raise":
            raise LookupError("no such thing")
        if example.payload == "other":
            return [{"role": "user", "content": "other"}]
        return example.messages

    async def step(self, action: str) -> Step:
        self.turns += 1
        word, _, argument = action.partition(" ")
        if word == "end":
            return Step([], float(argument), True, False, {"turns": self.turns})
        if word == "raise":
            raise ZeroDivisionError(argument)
        if word == "sleep":
            await asyncio.sleep(float(argument))
        return Step([{"role": "tool", "content": f"{self.turns}"}], float(word), False, False, {})

    async def close(self) -> None:
        if self.example.payload == "close raises":
            raise OSError("cannot close")


def scripted() -> MakeEnvironment:
    return Scripted


class Returns:
    """Its step returns what the example's payload holds."""

    async def reset(self, example: Example) -> list[Message]:
        self.value = example.payload
        return example.messages

    async def step(self, action: str) -> Step:
        return self.value

    async def close(self) -> None: ...


def returns() -> MakeEnvironment:
    return Returns
