"""What the sessions of every back-end do alike: a call is timed, and with a lost interpreter its variables go."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from zerogap.env.tools.interface import ErrorClass, Limits, ToolResult
from zerogap.env.tools.text import clean_source, tool_result


class Session(ABC):
    """See zerogap.env.tools.interface.PythonSession."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._restarted = False

    async def run(self, code: str) -> ToolResult:
        await self._start()
        restarted, self._restarted = self._restarted, False
        started = time.perf_counter()
        try:
            written, error, lost = await self._execute(clean_source(code))
        except asyncio.CancelledError:
            await self.close()
            self._restarted = True
            raise
        seconds = time.perf_counter() - started
        if lost:
            await self.close()
        return tool_result(written, error, seconds=seconds, limits=self._limits, lost=lost, restarted=restarted)

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _start(self) -> None:
        """Start the interpreter, unless it lives."""

    @abstractmethod
    async def _execute(self, code: str) -> tuple[str, ErrorClass | None, bool]:
        """What the code printed and its traceback, how it ended, and whether the interpreter is lost."""
