"""Messages on the socket between a run and its environments' process: a header that can always be read, then a body.

The run sends pickles; the process answers in JSON, so that the run never unpickles what environments made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from zerogap.env.host import Episode

NO_EPISODE: Episode = (-1, -1, -1)

_HEADER = struct.Struct("<IBqqq")  # bytes of the body, kind, episode


class Kind(IntEnum):
    """To the process, and back as its answer: START, RESET, STEP. To the process only: CLOSE, QUIT.
    From the process only: HUNG (a call that cannot be cancelled: replace me)."""

    START = 1
    RESET = 2
    STEP = 3
    CLOSE = 4
    QUIT = 5
    HUNG = 6


def frame(kind: Kind, episode: Episode, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body), kind, *episode) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Episode, bytes]]:
        """The frames that are complete with `data`."""
        self._data += data
        start = 0
        while len(self._data) - start >= _HEADER.size:
            size, kind, group_id, sample_index, attempt = _HEADER.unpack_from(self._data, start)
            end = start + _HEADER.size + size
            if len(self._data) < end:
                break
            yield Kind(kind), (group_id, sample_index, attempt), bytes(self._data[start + _HEADER.size : end])
            start = end
        del self._data[:start]
