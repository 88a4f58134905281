"""A few bytes of memory that the environments' process shares with the run: which call computes at this moment.

The run can read them whatever the process does: code that hangs without ever letting go of Python's lock, or that
crashed, is named.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

from zerogap.env.host import Episode
from zerogap.env.process.frames import Kind

_KIND = 0  # one byte; 0: nobody computes. Written after the details, so they are never older than it.
_DETAILS = struct.Struct("<qqqdd")  # episode, since, before
_TICK = struct.Struct("<d")
_DETAILS_AT = 8
_TICK_AT = _DETAILS_AT + _DETAILS.size


@dataclass(frozen=True)
class Computing:
    """A call (START, RESET, STEP or CLOSE) that computes now. since: time.monotonic(), which all processes share.
    before: seconds that it had computed earlier, between its awaits."""

    kind: Kind
    episode: Episode
    since: float
    before: float

    def seconds(self) -> float:
        return time.monotonic() - self.since + self.before

    def __str__(self) -> str:
        if self.kind is Kind.START:
            return "loading the environments"
        return f"{self.kind.name.lower()} of episode {self.episode}"


class Slot:
    """Written by the process, read by the run. fd: of a file of SIZE bytes; stays the caller's."""

    SIZE = _TICK_AT + _TICK.size

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, self.SIZE)

    @staticmethod
    def new_file() -> int:
        """The fd of a fresh slot. The caller closes it."""
        fd = os.memfd_create("zerogap-environments")
        os.ftruncate(fd, Slot.SIZE)
        return fd

    def enter(self, kind: Kind, episode: Episode, since: float, before: float = 0.0) -> None:
        _DETAILS.pack_into(self._memory, _DETAILS_AT, *episode, since, before)
        self._memory[_KIND] = kind

    def leave(self) -> None:
        self.tick()
        self._memory[_KIND] = 0

    def tick(self) -> None:
        """The process's loop is alive."""
        _TICK.pack_into(self._memory, _TICK_AT, time.monotonic())

    def read(self) -> Computing | None:
        """Who computes; None: nobody."""
        kind = self._memory[_KIND]
        group_id, sample_index, attempt, since, before = _DETAILS.unpack_from(self._memory, _DETAILS_AT)
        return Computing(Kind(kind), (group_id, sample_index, attempt), since, before) if kind else None

    def seconds_since_tick(self) -> float:
        return time.monotonic() - float(_TICK.unpack_from(self._memory, _TICK_AT)[0])

    def close(self) -> None:
        self._memory.close()
