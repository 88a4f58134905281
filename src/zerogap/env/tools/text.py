"""Text from the model and text for it: the same cleaning, cutting and wording for every back-end."""

from __future__ import annotations

from zerogap.env.tools.interface import MAX_PRINTED_BYTES, ErrorClass, Limits, ToolResult

_RESTARTED = "[new session: all variables of earlier calls are lost]\n"


def clean_source(code: str) -> str:
    """Line ends as Python reads them from a file, and lone surrogates as escapes, which mean the same in a string."""
    return _valid(code).replace("\r\n", "\n").replace("\r", "\n")


def _valid(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def cut(text: str, limit: int) -> str:
    """At most `limit` characters: head and tail around a mark that counts what is missing."""
    if len(text) <= limit:
        return text
    # The mark is longest when everything is cut, so this many characters always fit.
    keep = limit - len(_mark(len(text)))
    head = (keep + 1) // 2
    return text[:head] + _mark(len(text) - keep) + text[len(text) - (keep - head) :]


def _mark(characters: int) -> str:
    return f"\n[... {characters:,} characters cut ...]\n"


def tool_result(
    written: str,
    error: ErrorClass | None,
    *,
    seconds: float,
    limits: Limits,
    lost: bool = False,
    restarted: bool = False,
) -> ToolResult:
    """written: what the code printed, then its traceback, if any. lost: the session's variables died with this call.
    restarted: they were lost before it, by a cancelled call."""
    before = _RESTARTED if restarted else ""
    after = ""
    if error is not None and error != "exception":
        reason = {
            "timeout": f"stopped after {limits.seconds:g} s, the limit",
            "memory": f"needs more than {limits.memory_mb:,} MiB, the limit",
            "output": f"stopped after printing {MAX_PRINTED_BYTES:,} bytes, the limit",
            "crashed": "the interpreter died",
        }[error]
        after = f"[{reason}; all variables are lost]\n" if lost else f"[{reason}]\n"
    written = _valid(written)
    if written and not written.endswith("\n"):
        written += "\n"
    body = cut(written, limits.output_chars - len(before) - len(after))
    return ToolResult(before + body + after, error, seconds, truncated=body != written or error == "output")
