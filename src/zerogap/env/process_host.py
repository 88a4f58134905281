"""Environments in a process of their own, replaced when one of them hangs or crashes.

The process cancels what awaits too long; what computes too long is seen here, in the memory that it shares, and the
process is killed. The guilty call is an error of its own, the others are "lost": nothing is known against them.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zerogap.env.environment import EpisodeError, Step
from zerogap.env.host import Answer, Episode, HostError, Load, over_limit
from zerogap.env.process.frames import NO_EPISODE, FrameReader, Kind, frame
from zerogap.env.process.slot import Computing, Slot
from zerogap.env.task import Example

START_S = 120.0  # longest start: importing what the environments need
CLOSE_S = 2.0  # environments may take this long to close when the host is closed
SILENT_S = 5.0  # over the limit of a call, without a turn of the process's loop
LOOK_S = 0.05  # between two looks for a call that hangs
MOST_DEATHS, DEATHS_S = 20, 60.0  # more deaths in that many seconds: the run cannot go on


@dataclass
class _Open:
    """An episode. since: when its running call was sent; None between calls. lost: its process ended meanwhile."""

    since: float | None
    lost: bool = False


class ProcessHost:
    """See zerogap.env.host.Host. Calls come from one thread at a time; a thread that starts a process lives as long as
    the host.

    load: picklable (a function of a module, or functools.partial of one); called in the process.
    seconds: limit of each call. Time in which other episodes compute does not count.
    Raises HostError where the environments do not load.
    """

    def __init__(self, load: Load, seconds: float, start_s: float = START_S) -> None:
        self._start_frame = frame(Kind.START, NO_EPISODE, pickle.dumps((sys.path, pickle.dumps(load), seconds)))
        self._seconds = seconds
        self._start_s = start_s
        self._episodes: dict[Episode, _Open] = {}
        self._answers: list[Answer] = []
        self._deaths: deque[tuple[float, str]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()
        try:
            while not self._ready:
                self._exchange(LOOK_S)
        except BaseException:
            self.close()
            raise

    def reset(self, episode: Episode, example: Example) -> None:
        if episode in self._episodes:
            raise ValueError(f"episode {episode} was reset before; each attempt is an episode of its own")
        self._episodes[episode] = state = _Open(time.monotonic())
        try:
            body = pickle.dumps(example, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            what = f"the payload of prompt {example.prompt_id} cannot be sent to the environments' process: {error}"
            self._answer(episode, state, error=EpisodeError(type(error).__name__, what))
            return
        self._send(frame(Kind.RESET, episode, body))

    def step(self, episode: Episode, action: str) -> None:
        state = self._episodes.get(episode)
        if state is None or state.since is not None:
            what = "is not open; reset it first" if state is None else "has not answered its last call yet"
            raise ValueError(f"episode {episode} {what}")
        state.since = time.monotonic()
        if state.lost:
            self._answer(episode, state, error=self._lost())
        else:
            self._send(frame(Kind.STEP, episode, action.encode("utf-8", "surrogatepass")))

    def close_episode(self, episode: Episode) -> None:
        state = self._episodes.pop(episode, None)
        self._answers = [answer for answer in self._answers if answer.episode != episode]
        if state is not None and not state.lost:
            self._outgoing += frame(Kind.CLOSE, episode)  # goes out with the next call: it is in no hurry

    def results(self, timeout_s: float) -> list[Answer]:
        deadline = time.monotonic() + timeout_s
        self._exchange(0.0)
        while not self._answers and (left := deadline - time.monotonic()) > 0:
            self._exchange(min(left, LOOK_S))
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._episodes.clear()
        self._answers.clear()
        try:
            self._socket.settimeout(CLOSE_S)
            self._socket.sendall(self._outgoing + frame(Kind.QUIT, NO_EPISODE))
            process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            pass  # it hangs, or is dead already
        self._end(process)

    # The process

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        slot_fd = Slot.new_file()
        fds = (theirs.fileno(), slot_fd)
        command = [sys.executable, "-m", "zerogap.env.process.program", *map(str, fds), str(os.getpid())]
        self._slot = Slot(slot_fd)
        self._slot.enter(Kind.START, NO_EPISODE, time.monotonic())
        self._slot.tick()
        # A session of its own: Ctrl-C is the run's, and the process can be killed with all that it started.
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(slot_fd)
        ours.setblocking(False)
        self._socket = ours
        self._poll = select.poll()
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._ready = False
        self._hung: str | None = None
        self._send(self._start_frame)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Kill the process and what it started. Returns its exit code, negative for a signal."""
        with suppress(ProcessLookupError):  # nobody of its session is left
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        self._socket.close()
        self._slot.close()
        return code

    def _replace(self, reason: str | None, guilty: Computing | None, kind: str) -> None:
        """The process is dead or must go: answer its running calls and start another.

        reason: None where the process ended by itself.
        """
        assert self._process is not None
        self._receive()  # what was answered before counts
        code = self._end(self._process)
        if reason is None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            reason = f"{guilty or 'idle'}: the environments' process ended ({how})"
        if guilty is not None and guilty.kind is Kind.START:
            self._process = None
            raise HostError(f"the environments could not be loaded: {reason}")
        self._deaths.append((time.monotonic(), reason))
        for episode, state in self._episodes.items():
            state.lost = True
            if state.since is not None:
                own = guilty is not None and guilty.episode == episode
                self._answer(episode, state, error=EpisodeError(kind, reason) if own else self._lost())
        while self._deaths[0][0] < time.monotonic() - DEATHS_S:
            self._deaths.popleft()
        if len(self._deaths) > MOST_DEATHS:
            self._process = None
            last = "; ".join([reason for _, reason in self._deaths][-3:])
            raise HostError(
                f"the environments' process ended {len(self._deaths)} times in {DEATHS_S:g} s; the last three: {last}"
            )
        self._start()

    def _look_for_a_hang(self) -> None:
        computing = self._slot.read()
        if computing is not None and computing.kind is Kind.START:
            if computing.seconds() > self._start_s:
                self._replace(f"not done after {self._start_s:g} s", computing, "timeout")
        elif computing is not None:
            if computing.seconds() > self._seconds:
                self._replace(f"{computing}: {over_limit(self._seconds)}, computing", computing, "timeout")
        elif self._hung is not None:
            self._replace(self._hung, None, "lost")
        elif self._ready and self._slot.seconds_since_tick() > self._seconds + SILENT_S:
            self._replace("code outside of any call keeps the process from answering", None, "lost")

    def _lost(self) -> EpisodeError:
        return EpisodeError("lost", f"the environments' process ended for another's fault: {self._deaths[-1][1]}")

    # The socket

    def _send(self, data: bytes) -> None:
        self._outgoing += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass  # the rest goes out with the next exchange
        except OSError:
            self._outgoing.clear()  # the process is dead: the next exchange sees it

    def _exchange(self, wait_s: float) -> None:
        """Send what is left, receive what there is (waiting up to wait_s for it), look for a hang."""
        if self._process is None:
            raise HostError("the host is closed")
        self._flush()
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._poll.poll(wait_s * 1000) and not self._receive():
            self._replace(None, self._slot.read(), "crashed")
        else:
            self._look_for_a_hang()

    def _receive(self) -> bool:
        """Take in what has arrived. False: the process closed its end."""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            for kind, episode, body in self._reader.feed(data):
                self._take(kind, episode, json.loads(body))

    def _take(self, kind: Kind, episode: Episode, fields: dict[str, Any]) -> None:
        if kind is Kind.START:
            if "error" in fields:
                raise HostError(f"the environments could not be loaded: {fields['error']}")
            self._ready = True
        elif kind is Kind.HUNG:
            self._hung = str(fields["what"])
        elif (state := self._episodes.get(episode)) is not None and state.since is not None:
            error, step = fields.get("error"), fields.get("step")
            self._answer(
                episode,
                state,
                seconds=fields["seconds"],
                messages=fields.get("messages"),
                step=None if step is None else Step(*step),
                error=None if error is None else EpisodeError(*error),
            )

    def _answer(self, episode: Episode, state: _Open, seconds: float | None = None, **result: Any) -> None:
        assert state.since is not None
        seconds = time.monotonic() - state.since if seconds is None else seconds
        state.since = None
        self._answers.append(Answer(episode, seconds, **result))
