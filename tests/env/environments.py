"""Environments that behave and misbehave on command, for the tests of hosts; a host's process imports them by name."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from zerogap.env.environment import Step
from zerogap.env.host import MakeEnvironment
from zerogap.env.task import Example, TaskError
from zerogap.trajectory import Message


def example(payload: Any = None, prompt_id: int = 0) -> Example:
    return Example(prompt_id, [{"role": "user", "content": "go"}], payload)


def spin(_: str = "") -> None:
    while True:
        pass


def spin_natively(_: str = "") -> None:
    """Never lets go of Python's lock: no thread and no signal handler of the process runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


async def in_thread(_: str) -> None:
    await asyncio.to_thread(spin)


async def in_task(_: str) -> None:
    await asyncio.create_task(asyncio.sleep(0.01))

    async def hang() -> None:
        spin()

    await asyncio.gather(hang())


async def uncancelled(_: str) -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def cancels_itself(_: str) -> None:
    raise asyncio.CancelledError


def in_callback(_: str) -> None:
    asyncio.get_running_loop().call_soon(spin)


def leave(code: str) -> None:
    raise SystemExit(int(code))


def child(argument: str) -> None:
    """Start a process that outlives its parent and writes its id into a file."""
    process = subprocess.Popen(["sleep", "300"])
    with open(argument, "w") as file:
        file.write(str(process.pid))


def raise_error(argument: str) -> None:
    raise ZeroDivisionError(argument)


DEEDS: dict[str, Callable[[str], Any]] = {
    "raise": raise_error,
    "sleep": lambda seconds: asyncio.sleep(float(seconds)),
    "compute": lambda seconds: time.sleep(float(seconds)),
    "print": lambda text: print(text * 1000),
    "spin": spin,
    "spin_natively": spin_natively,
    "in_thread": in_thread,
    "in_task": in_task,
    "in_callback": in_callback,
    "uncancelled": uncancelled,
    "cancels_itself": cancels_itself,
    "leave": leave,
    "abort": lambda _: os.abort(),
    "exit": lambda code: os._exit(int(code)),
    "child": child,
}


class Scripted:
    """`turn 0.5` goes on with that reward, `end 1` ends with it, `return` returns what the payload holds, `pid` tells
    the process, and the other words do a deed, then go on."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, example: Example) -> list[Message]:
        self.payload = example.payload
        if self.payload == "raise":
            raise LookupError("no such thing")
        if self.payload == "other":
            return [{"role": "user", "content": "other"}]
        return example.messages

    async def step(self, action: str) -> Any:
        self.turns += 1
        word, _, argument = action.partition(" ")
        if word == "end":
            return Step([], float(argument), True, False, {"turns": self.turns})
        if word == "return":
            return self.payload
        if word == "pid":
            return self._turn(0.0, {"pid": os.getpid(), "threads": threading.active_count()})
        if word == "turn":
            return self._turn(float(argument))
        result = DEEDS[word](argument)
        if result is not None:
            await result
        return self._turn(0.0)

    def _turn(self, reward: float, info: dict[str, Any] | None = None) -> Step:
        return Step([{"role": "tool", "content": str(self.turns)}], reward, False, False, info or {})

    async def close(self) -> None:
        if self.payload == "close raises":
            raise OSError("cannot close")
        if self.payload == "close spins":
            spin()


def scripted(_: AsyncExitStack) -> MakeEnvironment:
    return Scripted


def unloadable(_: AsyncExitStack) -> MakeEnvironment:
    raise TaskError("task.file my.py:3: no luck")


def raising(_: AsyncExitStack) -> MakeEnvironment:
    raise KeyError("missing")


def exiting(_: AsyncExitStack) -> MakeEnvironment:
    os._exit(3)


def endless(_: AsyncExitStack) -> MakeEnvironment:
    spin()
    return Scripted
