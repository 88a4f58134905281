"""The program inside the environments' process: `python -m zerogap.env.process.program SOCKET SLOT PARENT`.

One asyncio loop runs all episodes. A call over its limit is cancelled here; what cannot be cancelled, the run stops
together with this process.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from zerogap.env.environment import Environment, EpisodeError, checked_reset, checked_step
from zerogap.env.host import Episode, MakeEnvironment, over_limit
from zerogap.env.process.calls import Call, Ledger, Stretches, Threads
from zerogap.env.process.frames import NO_EPISODE, FrameReader, Kind, frame
from zerogap.env.process.slot import Slot
from zerogap.env.task import TaskError

log = logging.getLogger(__name__)

TICK_S = 0.25
GRACE_S = 0.5  # what a cancelled call may still take to end

_PR_SET_PDEATHSIG = 1


class Program(asyncio.Protocol):
    """The process's end of the socket: runs the calls that come in, writes their answers."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        self._loop = loop
        self._slot = slot
        self._ledger = Ledger(slot)
        self._reader = FrameReader()
        self._answers: list[bytes] = []
        self._shared = AsyncExitStack()
        self._environments: dict[Episode, Environment] = {}
        self._calls: dict[Episode, Call] = {}
        loop.set_task_factory(self._ledger.task)
        loop.set_default_executor(Threads(self._ledger))
        self._tick()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        os._exit(0)  # the run is gone

    def data_received(self, data: bytes) -> None:
        for kind, episode, body in self._reader.feed(data):
            if kind is Kind.START:
                self._start_up(body)
            elif kind is Kind.RESET:
                self._begin(Kind.RESET, episode, self._reset(episode, body))
            elif kind is Kind.STEP:
                self._begin(Kind.STEP, episode, self._step(episode, body))
            elif kind is Kind.CLOSE:
                self._close(episode)
            else:
                self._loop.create_task(self._quit())

    def _start_up(self, body: bytes) -> None:
        """Load what makes environments; say so, or why not."""
        sys_path, load, self._limit_s = pickle.loads(body)
        sys.path[:] = sys_path
        self._slot.enter(Kind.START, NO_EPISODE, time.monotonic())
        fields = {}
        try:
            self._make: MakeEnvironment = pickle.loads(load)(self._shared)
        except TaskError as error:
            fields["error"] = str(error)
        except BaseException as error:  # of the user's file; SystemExit, too
            fields["error"] = str(EpisodeError.of(error))
        self._slot.leave()
        self._write(Kind.START, NO_EPISODE, fields)

    # The calls of the protocol

    async def _reset(self, episode: Episode, body: bytes) -> dict[str, Any]:
        example = pickle.loads(body)
        environment = self._environments[episode] = self._make()
        return {"messages": await checked_reset(environment, example)}

    async def _step(self, episode: Episode, body: bytes) -> dict[str, Any]:
        return {"step": await checked_step(self._environments[episode], body.decode("utf-8", "surrogatepass"))}

    def _close(self, episode: Episode) -> None:
        running = self._calls.pop(episode, None)
        if running is not None:
            self._stop(running)
        environment = self._environments.pop(episode, None)
        if environment is not None:
            self._begin(Kind.CLOSE, episode, self._closed(environment, running))

    async def _closed(self, environment: Environment, running: Call | None) -> dict[str, Any]:
        if running is not None and running.task is not None:
            await asyncio.wait([running.task], timeout=GRACE_S)
        await environment.close()
        return {}

    async def _quit(self) -> None:
        for episode in list(self._environments):
            self._close(episode)
        while self._calls:  # each within its limit; the run does not wait that long
            await asyncio.sleep(0.01)
        try:
            await self._shared.aclose()
        finally:
            os._exit(0)

    # Running a call

    def _begin(self, kind: Kind, episode: Episode, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> None:
        call = self._calls[episode] = self._ledger.open(kind, episode)
        call.timer = self._loop.call_later(self._limit_s, self._check, call)
        call.task = asyncio.Task(Stretches(self._run(call, coroutine), call, self._ledger), loop=self._loop)

    async def _run(self, call: Call, coroutine: Coroutine[Any, Any, dict[str, Any]]) -> None:
        try:
            fields = await coroutine
        except BaseException as error:  # SystemExit ends the episode, not the process; CancelledError may be its own
            self._fail(call, EpisodeError.of(error))
        else:
            self._finish(call, fields)

    def _check(self, call: Call) -> None:
        """Is the call over its limit? The time in which others computed is not its own."""
        left = self._limit_s - self._ledger.seconds(call)
        if left > 0:
            call.timer = self._loop.call_later(left, self._check, call)
            return
        self._fail(call, EpisodeError("timeout", over_limit(self._limit_s)))
        self._stop(call)

    def _fail(self, call: Call, error: EpisodeError) -> None:
        if call.kind is Kind.CLOSE and not call.over:
            log.warning("closing the environment of episode %s failed: %s", call.episode, error)
        self._finish(call, {"error": [error.kind, error.message]})

    def _finish(self, call: Call, fields: dict[str, Any]) -> None:
        if call.over:
            return
        call.over = True
        if call.timer is not None:
            call.timer.cancel()
        if self._calls.get(call.episode) is call:
            del self._calls[call.episode]
        if call.kind is not Kind.CLOSE:
            self._write(call.kind, call.episode, {"seconds": time.monotonic() - call.started, **fields})

    def _stop(self, call: Call) -> None:
        """Cancel a call whose answer is not wanted any more."""
        call.over = True
        if call.timer is not None:
            call.timer.cancel()
        if call.task is not None:
            call.task.cancel()
        self._loop.call_later(GRACE_S, self._insist, call)

    def _insist(self, call: Call) -> None:
        if call.still_runs():
            what = f"{call.kind.name.lower()} of episode {call.episode} went on after its limit, cancelled in vain"
            self._write(Kind.HUNG, call.episode, {"what": what})

    # Writing

    def _write(self, kind: Kind, episode: Episode, fields: dict[str, Any]) -> None:
        if not self._answers:  # all answers of one turn of the loop in one write
            self._loop.call_soon(self._flush)
        self._answers.append(frame(kind, episode, json.dumps(fields).encode()))

    def _flush(self) -> None:
        self._transport.write(b"".join(self._answers))
        self._answers.clear()

    def _tick(self) -> None:
        self._slot.tick()
        self._loop.call_later(TICK_S, self._tick)


def die_with(parent: int) -> None:
    """Linux kills this process when the thread that started it ends, also while it hangs in native code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        os._exit(0)


def main(socket_fd: int, slot_fd: int, parent: int) -> None:
    die_with(parent)
    os.dup2(2, 1)  # what environments print goes where errors go: the run's own output is not theirs
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # a crash in native code shows its Python lines
    loop = asyncio.new_event_loop()
    slot = Slot(slot_fd)
    os.close(slot_fd)
    connection = socket.socket(fileno=socket_fd)
    loop.run_until_complete(loop.create_connection(lambda: Program(loop, slot), sock=connection))
    loop.run_forever()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
