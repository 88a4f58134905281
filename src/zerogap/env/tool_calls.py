"""Tool calls in what a policy says: fenced Python, or JSON between <tool_call> tags (as Qwen and Hermes write them)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

CallFormat = Literal["fenced", "tool_call"]

_OPENERS, _FENCE = ("```python", "```py"), "```"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

# What a chat template shows of the tool, in the schema that transformers' templates read.
PYTHON_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Returns what it prints and the value of its last expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code to run"}},
            "required": ["code"],
        },
    },
}


@dataclass(frozen=True)
class ToolCall:
    """code to run; or, with code None, why the call cannot be read (the policy's mistake, for it to see)."""

    code: str | None
    problem: str = ""


def tool_calls(action: str, call_format: CallFormat) -> list[ToolCall]:
    """The calls in a turn, in order; empty: the turn is an answer. What stands in <think> tags is no call, and time
    grows with the length of the text only, whatever the policy writes."""
    said = action.rpartition("</think>")[2].partition("<think>")[0]
    if call_format == "fenced":
        return [ToolCall(code) for code in _fenced(said)]
    return [_tagged(text) for text in _between_tags(said)]


def _fenced(text: str) -> Iterator[str]:
    """Code of each closed block; both fences stand on lines of their own."""
    code: list[str] | None = None
    for line in text.split("\n"):
        if code is None:
            code = [] if line.strip(" \t") in _OPENERS else None
        elif line.strip(" \t") == _FENCE:
            yield "".join(f"{part}\n" for part in code)
            code = None
        else:
            code.append(line)


def _between_tags(text: str) -> Iterator[str]:
    start = text.find(_OPEN)
    while start >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        yield text[start + len(_OPEN) : end]
        start = text.find(_OPEN, end)


def _tagged(text: str) -> ToolCall:
    try:
        call = json.loads(text, strict=False)  # code in JSON often holds raw line breaks
    except (ValueError, RecursionError) as error:  # beside broken JSON: an integer of too many digits
        return ToolCall(None, f"the tool call is not JSON: {error}")
    if not isinstance(call, dict) or call.get("name") != "python":
        named = str(call.get("name") if isinstance(call, dict) else None)
        return ToolCall(None, f"there is no tool {named[:100]!r}; the tool is 'python'")
    arguments = call.get("arguments")
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        return ToolCall(None, 'the tool call has no text in "arguments": {"code": ...}')
    return ToolCall(code)
