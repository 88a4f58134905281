"""Python tool, default back-end: Monty, a Python interpreter in Rust without files, sockets, processes, environment.

Each session has a worker process of Monty's own pool, which restores crashed workers: what Monty cannot stop from the
inside (a builtin that loops in Rust, a stack overflow) ends with the worker and never reaches this process.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import re
import warnings

from pydantic_monty import (
    AsyncMonty,
    AsyncMontySession,
    CollectString,
    MontyCrashedError,
    MontyRuntimeError,
    MontySyntaxError,
)

from zerogap.env.tools.interface import MAX_PRINTED_BYTES, ErrorClass, Limits, PythonSession
from zerogap.env.tools.session import Session

_GRACE_SECONDS = 0.25  # between Monty's own time limit and the end of its worker
_UNLIMITED = 1_000_000
_MAX_PARSED_CHARS = 100_000  # parsing holds up the event loop: some tens of milliseconds for this much

# Prints the value of a last expression inside the sandbox: as a Python object here it would cost time and memory of
# ours. Bound to its builtins early, since the code may rename print.
_SHOW = "_show_"
_INPUT = re.compile(r"<python-input-(\d+)>")
_PRELUDE = f"def {_SHOW}(value, print=print, repr=repr):\n    if value is not None: print(repr(value))\n"


class MontyBackend:
    """See zerogap.env.tools.interface.PythonBackend. Idle workers stay warm for later sessions."""

    def __init__(self) -> None:
        # One worker per session that has run code: Monty refuses to share one, and a checkout must never wait.
        self._pool = AsyncMonty(max_processes=_UNLIMITED, feed_duration_limit_grace=_GRACE_SECONDS)
        self._start = asyncio.Lock()
        self._started = False

    async def open(self, limits: Limits) -> PythonSession:
        async with self._start:
            if not self._started:
                await self._pool.__aenter__()
                self._started = True
        return _MontySession(self._pool, limits)

    async def close(self) -> None:
        if self._started:
            self._started = False
            await self._pool.__aexit__(None, None, None)


class _MontySession(Session):
    def __init__(self, pool: AsyncMonty, limits: Limits) -> None:
        super().__init__(limits)
        self._pool = pool
        self._worker: AsyncMontySession | None = None
        self._sources: list[str] = []  # by Monty's number of the call, for tracebacks

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.__aexit__(None, None, None)

    async def _execute(self, code: str) -> tuple[str, ErrorClass | None, bool]:
        worker = self._worker
        assert worker is not None
        self._sources.append(code)
        printed = CollectString(max_bytes=MAX_PRINTED_BYTES)
        error: ErrorClass | None = None
        traceback = ""
        lost = False
        try:
            # Monty's limit counts execution, and its pool ends a worker that overruns it even while our event loop is
            # busy; this one counts sleeps, too. Cancelling ends the worker.
            async with asyncio.timeout(self._limits.seconds + _GRACE_SECONDS):
                await worker.feed_run(show_last_expression(code), print_callback=printed)
        except TimeoutError:
            error, lost = "timeout", True
        except MontyCrashedError as reason:
            error, lost = ("timeout" if reason.timed_out else "crashed"), True
        except MontySyntaxError as reason:
            error, traceback = "exception", self._traceback(reason)
        except MontyRuntimeError as reason:
            error, traceback = self._classify(reason)
            # A time limit stops Monty anywhere, so that its heap is not to be used again.
            lost = error == "timeout" or worker.worker_pid is None
        return printed.output + traceback, error, lost

    async def _start(self) -> None:
        if self._worker is None:
            worker = self._pool.checkout(
                limits={
                    "max_feed_duration_secs": self._limits.seconds,
                    "max_memory": self._limits.memory_mb * 2**20,
                    "max_suspensions": _UNLIMITED,
                },
                os_policy={"sleep_system_max": float("inf")},
            )
            await worker.__aenter__()
            await worker.feed_run(_PRELUDE)
            self._worker = worker
            self._sources = [_PRELUDE]

    def _classify(self, reason: MontyRuntimeError) -> tuple[ErrorClass, str]:
        """Class and traceback. For its limits Monty raises what the code could raise, but without a place in it."""
        kind = reason.exception()
        if not reason.traceback():
            if isinstance(kind, TimeoutError):
                return "timeout", ""
            if isinstance(kind, MemoryError):
                # Either the worker's allocator gave up and ended it, or the collector of printed text is full.
                return ("memory" if "worker" in str(kind) else "output"), ""
        return ("memory" if isinstance(kind, MemoryError) else "exception"), self._traceback(reason)

    def _traceback(self, reason: MontyRuntimeError | MontySyntaxError) -> str:
        """As Python writes it, from the sources as the model wrote them."""
        places: list[str] = []
        for frame in reason.traceback():
            name, source = frame.filename, frame.source_line or ""
            if call := _INPUT.fullmatch(name):
                name, source = f"<call {call[1]}>", self._sources[int(call[1])].split("\n")[frame.line - 1]
            if frame.function_name != _SHOW:
                function = frame.function_name or "<module>"
                places.append(f'  File "{name}", line {frame.line}, in {function}\n    {source.strip()}\n')
        text = "Traceback (most recent call last):\n"
        for place, repeated in itertools.groupby(places):  # a recursion
            count = len(list(repeated))
            text += place * min(count, 3)
            text += f"  [Previous line repeated {count - 3} more times]\n" if count > 3 else ""
        return text + reason.display("type-msg")


def show_last_expression(code: str) -> str:
    """The code with a call of _SHOW around its last statement, if that is an expression; line numbers stay."""
    if len(code) > _MAX_PARSED_CHARS:
        return code
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        with warnings.catch_warnings():  # of an unknown escape in a string, say
            warnings.simplefilter("ignore")
            tree = compile(code, "<call>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # Monty explains what is wrong, or knows more than this Python does
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or last.end_lineno is None or last.end_col_offset is None:
        return code
    lines = code.encode().split(b"\n")  # offsets count bytes
    for row, column, text in (last.end_lineno, last.end_col_offset, "))"), (last.lineno, last.col_offset, f"{_SHOW}(("):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + text.encode() + line[column:]
    return b"\n".join(lines).decode()
