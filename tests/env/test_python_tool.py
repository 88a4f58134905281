"""A task with a Python tool: what the policy is shown, when it is graded, whose fault is whose."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.env.hosts import one
from tests.env.tools.conftest import BACKENDS, descendants, eventually, opened
from zerogap import config
from zerogap.config.tools import MOST_CALLS, Tools
from zerogap.env.environment import Step, checked_step
from zerogap.env.local_host import LocalHost
from zerogap.env.make import make_environments
from zerogap.env.python_tool import NOTHING_PRINTED, TOO_MANY, PythonTool, tool_schemas
from zerogap.env.task import Example
from zerogap.env.tools.interface import Limits, PythonSession, SandboxUnavailable, ToolResult
from zerogap.env.tools.monty import MontyBackend

EXAMPLE = Example(0, [{"role": "user", "content": "6 * 7?"}], "42")


def equals(example: Example, text: str) -> float:
    return float(text.strip() == example.payload)


class Canned:
    """A back-end whose sessions return what they are told, and note what they are asked."""

    def __init__(self, *results: ToolResult | Exception) -> None:
        self.results = list(results)
        self.ran: list[str] = []
        self.opened = self.closed = 0

    async def open(self, limits: Limits) -> PythonSession:
        self.opened += 1
        return self

    async def run(self, code: str) -> ToolResult:
        self.ran.append(code)
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def close(self) -> None:
        self.closed += 1


def play(backend: Any, *actions: str, turns: int = 8, **settings: Any) -> list[Step]:
    async def episode() -> list[Step]:
        tool = PythonTool(equals, backend, Tools.model_validate(settings), turns)
        assert await tool.reset(EXAMPLE) == EXAMPLE.messages
        try:
            return [await checked_step(tool, action) for action in actions]
        finally:
            await tool.close()

    return asyncio.run(episode())


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def result(text: str, error: Any = None) -> ToolResult:
    return ToolResult(text, error, 0.5, False)


def test_an_answer_without_a_call_is_graded_at_once() -> None:
    backend = Canned()
    assert play(backend, "42") == [Step([], 1.0, True, False, {})]
    assert play(backend, "41") == [Step([], 0.0, True, False, {})]
    assert backend.opened == backend.closed == 0  # a session is made for the first call


def test_a_call_is_answered_and_the_answer_after_it_graded() -> None:
    backend = Canned(result("42\n"), result(""))
    first, second, last = play(backend, fenced("6 * 7"), fenced("x = 1"), "42")
    assert first == Step([{"role": "tool", "content": "42"}], 0.0, False, False, {"tool": {"calls": 1}, "tool_s": 0.5})
    assert second.observation == [{"role": "tool", "content": NOTHING_PRINTED}]
    assert last == Step([], 1.0, True, False, {"tool": {"calls": 2}, "tool_s": 1.0})
    assert backend.ran == ["6 * 7\n", "x = 1\n"] and (backend.opened, backend.closed) == (1, 1)


def test_errors_of_the_code_are_shown_and_counted() -> None:
    backend = Canned(result("ZeroDivisionError: division by zero", "exception"), result("stopped", "timeout"))
    steps = play(backend, fenced("1 / 0"), fenced("while True: pass"), "42")
    assert [step.observation[0]["content"] for step in steps[:2]] == ["ZeroDivisionError: division by zero", "stopped"]
    assert steps[-1].info["tool"] == {"calls": 2, "exception": 1, "timeout": 1} and steps[-1].reward == 1.0


def test_errors_of_the_sandbox_are_no_observation() -> None:
    """Field case R9: infrastructure is no fault of the policy."""
    with pytest.raises(SandboxUnavailable):
        play(Canned(SandboxUnavailable("no interpreter")), fenced("1"))


def test_the_turn_limit_truncates_without_a_reward() -> None:
    backend = Canned(result("1"), result("2"))
    steps = play(backend, fenced("1"), fenced("2"), turns=2)
    assert [(step.terminated, step.truncated, step.reward) for step in steps] == [(False, False, 0), (False, True, 0)]
    assert backend.ran == ["1\n"]  # nobody would see the second result
    assert play(Canned(result("1")), fenced("1"), "42", turns=2)[-1].reward == 1.0


def test_calls_beyond_the_most_are_not_run() -> None:
    backend = Canned(*[result(str(i)) for i in range(MOST_CALLS)])
    [step] = play(backend, "\n".join(fenced(str(i)) for i in range(MOST_CALLS + 2)))
    assert [message["content"] for message in step.observation] == [*map(str, range(MOST_CALLS)), TOO_MANY, TOO_MANY]


def test_tagged_calls_and_unreadable_ones() -> None:
    backend = Canned(result("42"))
    good = '<tool_call>{"name": "python", "arguments": {"code": "6*7"}}</tool_call>'
    [step] = play(backend, f"{good}<tool_call>?</tool_call>", format="tool_call")
    assert step.observation[0]["content"] == "42" and "not JSON" in step.observation[1]["content"]
    assert step.info["tool"] == {"calls": 2, "unreadable": 1}
    settings = {"name": "chain_sum", "tools": {"format": "tool_call"}}
    [schema] = tool_schemas(config.Task.model_validate(settings))
    assert schema["function"]["name"] == "python"
    assert tool_schemas(config.Task.model_validate({"name": "chain_sum", "tools": {}})) == []
    assert tool_schemas(config.Task.model_validate({"name": "chain_sum"})) == []


def test_real_sessions_keep_their_variables_for_the_episode() -> None:
    backend = MontyBackend()
    steps = play(backend, fenced("a = 6"), fenced("a * 7"), "42")
    assert [step.observation for step in steps[:2]] == [
        [{"role": "tool", "content": NOTHING_PRINTED}],
        [{"role": "tool", "content": "42"}],
    ]
    assert steps[-1].reward == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_host_leaves_no_process_of_the_tool(backend: str) -> None:
    opened(backend).close()  # skips where it cannot be used
    others = descendants().keys()
    settings = config.Task.model_validate({"name": "chain_sum", "call_timeout_s": 60, "tools": {"backend": backend}})
    host = LocalHost(partial(make_environments, settings), settings.call_timeout_s)
    host.reset((0, 0, 0), EXAMPLE)
    host.results(0.0)
    assert one(host, (0, 0, 0), fenced("6 * 7")).step.observation == [{"role": "tool", "content": "42"}]
    assert descendants().keys() - others
    host.close()
    assert eventually(lambda: not descendants().keys() - others)


@pytest.mark.parametrize(("seconds", "limit"), [(5.0, 20.0), (1.0, 4.0)])
def test_the_call_limit_must_cover_the_tool(seconds: float, limit: float) -> None:
    settings = {"name": "chain_sum", "call_timeout_s": limit, "tools": {"seconds": seconds}}
    with pytest.raises(ValueError, match=r"call_timeout_s .* must be above 4 calls of tools.seconds"):
        config.Task.model_validate(settings)
    config.Task.model_validate({**settings, "call_timeout_s": limit + 1})
