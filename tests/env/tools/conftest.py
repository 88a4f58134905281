"""A back-end of the Python tool per test module, with its event loop, and its processes as seen from outside."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from zerogap.env.tools.cpython import CPythonBackend
from zerogap.env.tools.interface import Limits, PythonBackend, SandboxUnavailable, ToolResult
from zerogap.env.tools.monty import MontyBackend

LIMITS = Limits(seconds=1.0, memory_mb=64, output_chars=2000)
BACKENDS: dict[str, Callable[[], PythonBackend]] = {"monty": MontyBackend, "cpython": CPythonBackend}
SECRET = "the-answer-is-hunter2"
Value = TypeVar("Value")


class Sandbox:
    """A back-end and its event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.backend = BACKENDS[name]()
        self._runner = asyncio.Runner()

    def wait(self, awaitable: Awaitable[Value]) -> Value:
        async def coroutine() -> Value:
            return await awaitable

        return self._runner.run(coroutine())

    def run(self, *codes: str, limits: Limits = LIMITS) -> list[ToolResult]:
        """One session, several calls."""

        async def session() -> list[ToolResult]:
            opened = await self.backend.open(limits)
            try:
                return [await opened.run(code) for code in codes]
            finally:
                await opened.close()

        return self.wait(session())

    def close(self) -> None:
        self.wait(self.backend.close())
        self._runner.close()


def opened(name: str) -> Sandbox:
    """A sandbox that can be used here; skips the test where it cannot."""
    sandbox = Sandbox(name)
    try:
        sandbox.run("1")
    except SandboxUnavailable as reason:
        sandbox.close()
        pytest.skip(str(reason))
    return sandbox


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ZEROGAP_TEST_SECRET", SECRET)
        made = opened(request.param)
        yield made
        made.close()


def descendants() -> dict[int, str]:
    """State ("R" runs, "S" sleeps, ...) of every living process below this one."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state not in "ZX":
            parents[int(folder.name)] = int(parent), state
    below = {os.getpid()}
    while grown := {process for process, (parent, _) in parents.items() if parent in below} - below:
        below |= grown
    return {process: parents[process][1] for process in below - {os.getpid()}}


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether condition becomes true within a second."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
