"""What a Python tool is to an episode: sessions that run code under limits and answer with text.

This file is also read inside the sandbox, so it imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# Printing more than this stops the code (class "output"): no model reads it, and the host should not hold it.
MAX_PRINTED_BYTES = 1_000_000

ErrorClass = Literal["exception", "timeout", "memory", "output", "crashed"]


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate the code. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Limits:
    """What one session may use; the recipe's bounds (config.tools) keep it above what the back-ends need.

    seconds: wall-clock time of one call; starting the interpreter does not count.
    memory_mb: MiB that the session's code may hold beyond the interpreter itself.
    output_chars: characters of text handed to the model per call, marks included.
    """

    seconds: float
    memory_mb: int
    output_chars: int


@dataclass(frozen=True)
class ToolResult:
    """What one call gave.

    text: what the model reads: printed text and the value of a last expression, or the traceback; at most
        `output_chars` characters of valid Unicode. Where the session's variables are lost it says so.
    error: None, or how the code ended: "exception" (raised by the code), "timeout", "memory", "output" (printed more
        than MAX_PRINTED_BYTES), "crashed" (the interpreter died: by a segmentation fault, or killed from outside).
    seconds: wall-clock time of the code.
    truncated: whether text was cut, or printing stopped.
    """

    text: str
    error: ErrorClass | None
    seconds: float
    truncated: bool


class PythonSession(Protocol):
    """One interpreter whose variables live from call to call. One call at a time."""

    async def run(self, code: str) -> ToolResult:
        """Run code. Whatever the code does comes back as a result, within limits.seconds and a fraction of a second.

        After "timeout" and "crashed" the next call starts with no variables; after the other errors they are kept
        where the interpreter survived, and the text says where it did not. Cancelling the awaiting task stops the
        code. Raises SandboxUnavailable when no interpreter can be started.
        """
        ...

    async def close(self) -> None:
        """Stop the interpreter and forget the variables. May be called twice."""
        ...


class PythonBackend(Protocol):
    """Where sessions come from: one for a whole run."""

    async def open(self, limits: Limits) -> PythonSession:
        """A new session; its interpreter starts with the first call. Raises SandboxUnavailable."""
        ...

    async def close(self) -> None:
        """Stop all processes of this back-end, those of open sessions, too."""
        ...
