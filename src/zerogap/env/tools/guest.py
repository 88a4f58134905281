"""What runs inside the bubblewrap sandbox: a nursery, which imports numpy and sympy once, and its forks, the sessions.

A fork keeps one socket to the host, gives up almost all system calls (seccomp.py), then reads code and answers with
frames. It trusts nobody and is trusted by nobody: the host (cpython.py) bounds its time, memory and output.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import io
import linecache
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import types

from zerogap.env.tools import seccomp
from zerogap.env.tools.interface import MAX_PRINTED_BYTES

PACKAGES = ("numpy", "mpmath", "sympy")  # for the code to use; in the order of their dependence
FRAME = struct.Struct("<cI")  # kind, bytes of the payload
READY = b"+"
# Kinds of frames: code to run; printed text; then one of the ends, with the traceback where there is one.
CODE, PRINTED, DONE, EXCEPTION, MEMORY, OUTPUT = b"C", b"P", b"D", b"E", b"M", b"O"

_CHANNEL = 3  # file descriptor of the socket to the host in a session


class _OutputLimit(BaseException):
    """Not an Exception, so that the code's own `except Exception` does not keep it alive."""


class _Printed(io.TextIOBase):
    """stdout and stderr of the code: every line goes to the host at once, so that it survives a kill."""

    def __init__(self) -> None:
        self._pending: list[str] = []
        self._bytes = 0

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._pending.append(text[:MAX_PRINTED_BYTES])
        if "\n" in text or len(text) >= MAX_PRINTED_BYTES:
            self.flush()
        return len(text)

    def flush(self) -> None:
        data = "".join(self._pending).encode("utf-8", "backslashreplace")
        self._pending.clear()
        room = MAX_PRINTED_BYTES - self._bytes
        self._bytes += len(data)
        if data and room > 0:
            send(PRINTED, data[:room])
        if self._bytes > MAX_PRINTED_BYTES:
            raise _OutputLimit

    def writable(self) -> bool:
        return True


def send(kind: bytes, payload: bytes) -> None:
    data = memoryview(FRAME.pack(kind, len(payload)) + payload)
    while data:
        data = data[os.write(_CHANNEL, data) :]


def receive(count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(_CHANNEL, count - len(data))
        if not part:
            os._exit(0)  # the host is done with this session
        data += part
    return bytes(data)


def execute(code: str, name: str, namespace: dict[str, object]) -> None:
    """As a REPL: a last statement that is an expression is evaluated and its value shown, unless it is None."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = compile(code, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))


def describe(error: BaseException) -> str:
    """The traceback from the code's first frame on."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename == __file__:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place))


def answer(code: str, name: str, namespace: dict[str, object]) -> tuple[bytes, bytes]:
    """Kind and payload of the last frame, whatever the code does."""
    sys.stdout = sys.stderr = printed = _Printed()
    failure: BaseException
    try:
        try:
            execute(code, name, namespace)
        finally:
            printed.flush()
        return DONE, b""
    except _OutputLimit:
        return OUTPUT, b""
    except MemoryError as error:
        kind, failure = MEMORY, error
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the session goes on
        kind, failure = EXCEPTION, error
    text = type(failure).__name__
    with contextlib.suppress(BaseException):  # the code's own __str__ runs here, or memory is short
        text = describe(failure)
    return kind, text.encode("utf-8", "backslashreplace")[-MAX_PRINTED_BYTES:]


def serve() -> None:
    """A session: code frames in, until the host closes the socket."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    call = 0
    while True:
        _, length = FRAME.unpack(receive(FRAME.size))
        code = receive(length).decode()
        call += 1
        send(*answer(code, f"<call {call}>", main.__dict__))


def confine() -> None:
    """No files but to read, no core dumps, and of all system calls those that computing needs."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    seccomp.install()


def become_session(channel: int) -> None:
    """Turn this fresh fork into a session. Does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(1, 2)  # /dev/null
        os.dup2(channel, _CHANNEL)
        os.closerange(_CHANNEL + 1, 1 << 16)
        sys.modules["numpy"].random.seed()  # forks would draw the same numbers; Python's own random reseeds itself
        sys.stdin = None
        confine()
        send(READY, b"")
        serve()
    finally:
        os._exit(1)


def nursery(control: socket.socket) -> None:
    """Fork a session for each socket that the host sends."""
    for package in PACKAGES:
        importlib.import_module(package)
    probe = os.fork()
    if probe == 0:
        try:
            confine()
            os._exit(0)
        except OSError as error:
            print(f"seccomp filter refused by the kernel: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    if os.waitpid(probe, 0)[1] != 0:
        sys.exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for dead sessions
    gc.collect()
    gc.freeze()  # collections in the forks leave the shared pages alone
    control.send(READY)
    while True:
        _, channels, _, _ = socket.recv_fds(control, 1, 1)
        if not channels:
            return
        if os.fork() == 0:
            become_session(channels[0])
        os.close(channels[0])


if __name__ == "__main__":
    nursery(socket.socket(fileno=int(sys.argv[1])))
