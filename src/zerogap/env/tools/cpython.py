"""Python tool, second back-end: CPython with numpy and sympy in a bubblewrap sandbox. This file is the host's side.

One sandbox holds a nursery (guest.py) and its sessions: own namespaces, no network, a read-only file system with Python
and nothing else. Sessions are kept apart from each other by seccomp (seccomp.py): without processes, signals, sockets
or anything to write to, there is nothing that one could do to another. Time limits are kept from here, by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import struct

from zerogap.env.tools import bubblewrap, guest
from zerogap.env.tools.interface import MAX_PRINTED_BYTES, ErrorClass, Limits, PythonSession
from zerogap.env.tools.session import Session

_START_SECONDS = 60.0  # for the imports of the nursery on a busy machine
_CREDENTIALS = struct.Struct("iII")  # process, user, group

_ENDS: dict[bytes, ErrorClass | None] = {
    guest.DONE: None,
    guest.EXCEPTION: "exception",
    guest.MEMORY: "memory",
    guest.OUTPUT: "output",
}


class _Broken(Exception):
    """The session sent what no honest session sends."""


class CPythonBackend:
    """See zerogap.env.tools.interface.PythonBackend. One sandbox for all sessions, restarted when it dies.

    The sandbox dies with the thread that started it, so use a back-end from one event loop that lives as long as it.
    """

    def __init__(self) -> None:
        self._busy = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None

    async def open(self, limits: Limits) -> PythonSession:
        async with self._busy:
            await self._living_control()
        return _CPythonSession(self, limits)

    async def close(self) -> None:
        if self._process is None or self._control is None:
            return
        self._control.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._process.wait()  # bubblewrap ends after everything in its namespace
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = self._control = None

    async def fork(self) -> tuple[socket.socket, int]:
        """A fresh session: the socket to it and its process id. Raises SandboxUnavailable."""
        async with self._busy:
            for _ in range(2):  # the sandbox may have died since it was last used
                control = await self._living_control()
                try:
                    return await _fork(control)
                except OSError:
                    await self.close()
            raise bubblewrap.refused("no session could be forked, twice")

    async def _living_control(self) -> socket.socket:
        if self._process is not None and self._process.returncode is not None:
            await self.close()
        if self._control is None:
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            control.setblocking(False)
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *bubblewrap.command(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                )
            self._process, self._control = process, control
            ready = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_START_SECONDS):
                    ready = await asyncio.get_running_loop().sock_recv(control, 1)
            if ready != guest.READY:
                await self.close()
                assert process.stderr is not None
                raise bubblewrap.refused((await process.stderr.read()).decode(errors="replace"))
        return self._control


async def _fork(control: socket.socket) -> tuple[socket.socket, int]:
    """Raises OSError when the nursery is gone."""
    host, theirs = socket.socketpair()
    host.setblocking(False)
    host.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with theirs:
        socket.send_fds(control, [guest.READY], [theirs.fileno()])
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(host, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(host)
    # The kernel says who sent the greeting, in our numbering of processes; no code of the model has run yet.
    greeting, ancillary, _, _ = host.recvmsg(guest.FRAME.size, socket.CMSG_SPACE(_CREDENTIALS.size))
    if not greeting:
        host.close()
        raise ConnectionError("the session died at its start")
    process, _, _ = _CREDENTIALS.unpack(ancillary[0][2])
    return host, process


class _CPythonSession(Session):
    def __init__(self, backend: CPythonBackend, limits: Limits) -> None:
        super().__init__(limits)
        self._backend = backend
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pidfd = -1

    async def close(self) -> None:
        if self._reader is None or self._writer is None:
            return
        reader, writer, pidfd = self._reader, self._writer, self._pidfd
        self._reader = self._writer = None
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):  # the end comes when the process has let go of everything
                pass
        writer.close()

    async def _start(self) -> None:
        if self._reader is not None:
            return
        connection, process = await self._backend.fork()
        self._reader, self._writer = await asyncio.open_connection(sock=connection)
        self._pidfd = os.pidfd_open(process)
        with open(f"/proc/{process}/statm") as statm:
            interpreter_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        limit_bytes = interpreter_bytes + self._limits.memory_mb * 2**20
        resource.prlimit(process, resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    async def _execute(self, code: str) -> tuple[str, ErrorClass | None, bool]:
        written = bytearray()
        error: ErrorClass | None
        lost = False
        try:
            async with asyncio.timeout(self._limits.seconds):
                error = await self._exchange(code, written)
        except TimeoutError:
            error, lost = "timeout", True
        except (asyncio.IncompleteReadError, OSError, _Broken):
            error, lost = "crashed", True
        return written.decode(errors="replace"), error, lost

    async def _exchange(self, code: str, written: bytearray) -> ErrorClass | None:
        """Run code in the session; its text goes to `written` as it comes."""
        assert self._reader is not None and self._writer is not None
        payload = code.encode()
        self._writer.write(guest.FRAME.pack(guest.CODE, len(payload)) + payload)
        while True:
            kind, length = guest.FRAME.unpack(await self._reader.readexactly(guest.FRAME.size))
            if len(written) + length > 3 * MAX_PRINTED_BYTES:  # printed text and a traceback fit
                raise _Broken
            written += await self._reader.readexactly(length)
            if kind in _ENDS:
                return _ENDS[kind]
            if kind != guest.PRINTED:
                raise _Broken
