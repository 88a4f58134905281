"""Honest code in sessions of the Python tool: what the model reads, what is kept, who sees what, how sessions end."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from tests.env.tools.conftest import BACKENDS, LIMITS, Sandbox, descendants, eventually, opened
from zerogap.env.tools.interface import Limits, ToolResult

TEXTS = {
    "1 + 1": "2\n",
    "x = 3": "",
    "None": "",
    "print('printed')\n'value'": "printed\n'value'\n",
    "print('no line end', end='')\n3": "no line end3\n",
    "(1,\n 2)  # on two lines": "(1, 2)\n",
    "x = 5; x": "5\n",
    "[n * n\r\n for n in range(3)]\r\n": "[0, 1, 4]\n",
    "class A:\n    def __repr__(self): return 'shown'\nA()": "shown\n",
    "'é', '∑', '🙂'": "('é', '∑', '🙂')\n",
    "print('é∑🙂')": "é∑🙂\n",
    "print('\\x00')": "\x00\n",
    "len('\\x00')": "1\n",
    "import sys\nprint('to stderr', file=sys.stderr)": "to stderr\n",
    "print = len\n'renamed'": "'renamed'\n",
    "": "",
    "# only a comment": "",
}


def test_the_text_is_what_a_repl_shows(sandbox: Sandbox) -> None:
    results = [sandbox.run(code)[0] for code in TEXTS]
    assert {code: result.text for code, result in zip(TEXTS, results, strict=True)} == TEXTS
    assert all(result.error is None and not result.truncated for result in results)


def test_a_traceback_names_calls_and_lines(sandbox: Sandbox) -> None:
    _, syntax, failed = sandbox.run("def f(n):\n    return 1 / n", "x = 1\ny = = 2", "x = 0\nf(x)")
    assert syntax.error == "exception"
    assert 'File "<call 2>", line 2' in syntax.text and "y = = 2" in syntax.text and "SyntaxError" in syntax.text
    lines = [line for line in failed.text.splitlines() if "^" not in line]
    assert lines == [
        "Traceback (most recent call last):",
        '  File "<call 3>", line 2, in <module>',
        "    f(x)",
        '  File "<call 1>", line 2, in f',
        "    return 1 / n",
        "ZeroDivisionError: division by zero",
    ]


@pytest.mark.parametrize("code", ["print('\\ud800')", "'\ud800'", "'\x00'", "\x00", "raise ValueError('\\ud800\\x00')"])
def test_odd_characters_do_not_break_the_protocol(sandbox: Sandbox, code: str) -> None:
    odd, after = sandbox.run(code, "1")
    odd.text.encode()
    assert odd.error in (None, "exception")
    assert after.text == "1\n"


def test_long_text_is_cut_in_the_middle(sandbox: Sandbox) -> None:
    result, failed = sandbox.run("print('head', 'x' * 9000, 'tail')", "'a' * 9000 + 1")
    assert len(result.text) == LIMITS.output_chars and result.truncated and result.error is None
    assert result.text.startswith("head xxx") and result.text.endswith("xxx tail\n")
    assert "characters cut ...]\n" in result.text
    assert "TypeError" in failed.text and not failed.truncated


def test_sessions_run_at_the_same_time_and_do_not_see_each_other(sandbox: Sandbox) -> None:
    async def session(number: int) -> list[ToolResult]:
        opened = await sandbox.backend.open(LIMITS)
        try:
            await opened.run(f"mine_{number} = {number}")
            return [await opened.run(f"mine_{other}") for other in range(4)]
        finally:
            await opened.close()

    async def all_sessions() -> list[list[ToolResult]]:
        return await asyncio.gather(*(session(number) for number in range(4)))

    for number, results in enumerate(sandbox.wait(all_sessions())):
        assert results[number].text == f"{number}\n"
        assert ["NameError" in result.text for result in results] == [other != number for other in range(4)]


def test_cancelling_stops_the_code_and_the_next_call_says_that_variables_are_lost(sandbox: Sandbox) -> None:
    async def cancelled() -> list[ToolResult]:
        session = await sandbox.backend.open(Limits(seconds=30, memory_mb=64, output_chars=2000))
        await session.run("x = 1")
        call = asyncio.ensure_future(session.run("while True: pass"))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert eventually(lambda: "R" not in descendants().values())
        try:
            return [await session.run("x"), await session.run("1")]
        finally:
            await session.close()

    told, after = [result.text for result in sandbox.wait(cancelled())]
    assert told.startswith("[new session: all variables of earlier calls are lost]\nTraceback") and "NameError" in told
    assert after == "1\n"


def test_a_closed_session_may_be_closed_again(sandbox: Sandbox) -> None:
    async def closed() -> None:
        session = await sandbox.backend.open(LIMITS)
        await session.close()
        await session.run("1")
        await session.close()
        await session.close()

    sandbox.wait(closed())


@pytest.mark.parametrize("name", BACKENDS)
def test_killed_processes_are_replaced_and_closing_ends_all(name: str) -> None:
    others = descendants().keys()
    sandbox = opened(name)

    async def killed() -> list[ToolResult]:
        session = await sandbox.backend.open(LIMITS)
        results = [await session.run("x = 1")]
        for process in descendants().keys() - others:
            with suppress(ProcessLookupError):  # bubblewrap's own are gone with it
                os.kill(process, signal.SIGKILL)
        return [*results, await session.run("x"), await session.run("'works'")]

    _, lost, after = sandbox.wait(killed())
    assert (lost.error, lost.text) == ("crashed", "[the interpreter died; all variables are lost]\n")
    assert after.text == "'works'\n"
    sandbox.close()
    assert eventually(lambda: not descendants().keys() - others)
