"""Who computes: every stretch of Python between two awaits is put on the account of the call that it belongs to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from zerogap.env.host import Episode
from zerogap.env.process.frames import Kind
from zerogap.env.process.slot import Slot

MOST_THREADS = 256  # of asyncio.to_thread: those that hang until the process is replaced must not starve the others


@dataclass(eq=False)
class Call:
    """One reset, step or close. computed: seconds it computed itself; others_before: all calls' when it began."""

    kind: Kind
    episode: Episode
    started: float
    others_before: float
    computed: float = 0.0
    over: bool = False  # answered, or no answer is wanted
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    threads: list[Future[Any]] = field(default_factory=list)

    def still_runs(self) -> bool:
        return (self.task is not None and not self.task.done()) or any(future.running() for future in self.threads)


class Ledger:
    """Runs the stretches; the slot says which call's is running."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.current: Call | None = None
        self.computed = 0.0  # by all calls

    def open(self, kind: Kind, episode: Episode) -> Call:
        return Call(kind, episode, time.monotonic(), self.computed)

    def seconds(self, call: Call) -> float:
        """What the call has used of its limit: the time since it began without that in which others computed."""
        others = self.computed - call.others_before - call.computed
        return time.monotonic() - call.started - others

    def run(self, call: Call, function: Callable[..., Any], *args: Any) -> Any:
        began = time.monotonic()
        self.current = call
        self._slot.enter(call.kind, call.episode, began, 0.0 if call.over else call.computed)
        try:
            return function(*args)
        finally:
            self._slot.leave()
            self.current = None
            spent = time.monotonic() - began
            call.computed += spent
            self.computed += spent

    def task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """A loop's task factory: the tasks that a call starts are on its account too."""
        if self.current is not None:
            coroutine = Stretches(coroutine, self.current, self)
        return asyncio.Task(coroutine, loop=loop, **options)


class Stretches(Coroutine[Any, Any, Any]):
    """A coroutine whose stretches run through the ledger."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], call: Call, ledger: Ledger) -> None:
        self._coroutine, self._call, self._ledger = coroutine, call, ledger

    def send(self, value: Any) -> Any:
        return self._ledger.run(self._call, self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._ledger.run(self._call, self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # cr_frame and the like, which libraries look at


class Threads(ThreadPoolExecutor):
    """The loop's threads (asyncio.to_thread): a call knows its own, since they cannot be cancelled."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(MOST_THREADS, "environment")
        self._ledger = ledger

    def submit(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future = super().submit(function, *args, **named)
        if (call := self._ledger.current) is not None:
            call.threads.append(future)
        return future
