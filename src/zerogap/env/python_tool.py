"""Any gradeable task with a Python tool: the policy runs code for some turns, then answers.

Variables live from call to call. What the code does wrong is shown to the policy; what the sandbox cannot do is an
error.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from zerogap import config
from zerogap.config.tools import MOST_CALLS, Tools
from zerogap.env.environment import Step
from zerogap.env.host import MakeEnvironment
from zerogap.env.task import Example, Grade
from zerogap.env.tool_calls import PYTHON_SCHEMA, ToolCall, tool_calls
from zerogap.env.tools.interface import Limits, PythonBackend, PythonSession
from zerogap.trajectory import Message

NOTHING_PRINTED = "(no output)"
TOO_MANY = f"(not run: at most {MOST_CALLS} calls in a turn)"


class PythonTool:
    """See zerogap.env.environment.Environment. A turn with calls is answered with one tool message per call; one
    without is the answer, which is graded. The turn after `turns` - 1 turns with calls has to answer."""

    def __init__(self, grade: Grade, backend: PythonBackend, settings: Tools, turns: int) -> None:
        self._grade = grade
        self._backend = backend
        self._format = settings.format
        self._limits = Limits(settings.seconds, settings.memory_mb, settings.output_chars)
        self._turns_left = turns
        self._session: PythonSession | None = None
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def reset(self, example: Example) -> list[Message]:
        self._example = example
        return example.messages

    async def step(self, action: str) -> Step:
        self._turns_left -= 1
        calls = tool_calls(action, self._format)
        if not calls:
            return Step([], self._grade(self._example, action), True, False, self._info())
        if not self._turns_left:
            return Step([], 0.0, False, True, self._info())
        seen = [await self._run(call) for call in calls[:MOST_CALLS]]
        seen += [{"role": "tool", "content": TOO_MANY} for _ in calls[MOST_CALLS:]]
        return Step(seen, 0.0, False, False, self._info())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _run(self, call: ToolCall) -> Message:
        self._counts["calls"] += 1
        if call.code is None:
            self._counts["unreadable"] += 1
            return {"role": "tool", "content": call.problem}
        if self._session is None:
            self._session = await self._backend.open(self._limits)
        result = await self._session.run(call.code)
        self._seconds += result.seconds
        if result.error is not None:
            self._counts[result.error] += 1
        return {"role": "tool", "content": result.text.rstrip("\n") or NOTHING_PRINTED}

    def _info(self) -> dict[str, Any]:
        return {"tool": dict(self._counts), "tool_s": round(self._seconds, 6)} if self._counts else {}


def with_python_tool(grade: Grade, settings: config.Task, shared: AsyncExitStack) -> MakeEnvironment:
    """Environments of a graded task with its tool, whose back-end `shared` closes. Raises SandboxUnavailable, as
    check_tools does."""
    assert settings.tools is not None
    tools, turns = settings.tools, settings.turn_limit
    backend = _backend(tools.backend)
    shared.push_async_callback(backend.close)
    return lambda: PythonTool(grade, backend, tools, turns)


def tool_schemas(settings: config.Task) -> list[dict[str, Any]]:
    """What the chat template is to describe to the policy."""
    return [PYTHON_SCHEMA] if settings.tools is not None and settings.tools.format == "tool_call" else []


def check_tools(settings: config.Task) -> None:
    """Raises SandboxUnavailable where the tool's back-end lacks what it needs on this machine."""
    if settings.tools is not None:
        _backend(settings.tools.backend)


def _backend(name: str) -> PythonBackend:
    """Imported here: a run without the tool loads neither."""
    if name == "monty":
        from zerogap.env.tools.monty import MontyBackend

        return MontyBackend()
    from zerogap.env.tools import bubblewrap
    from zerogap.env.tools.cpython import CPythonBackend

    bubblewrap.command(0)  # raises where it could not start, before the first episode does
    return CPythonBackend()
