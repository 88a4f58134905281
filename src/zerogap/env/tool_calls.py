"""Tool calls in what a policy says: fenced Python, or JSON between <tool_call> tags (as Qwen and Hermes write them)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

CallFormat = Literal["fenced", "tool_call"]

_FENCED = re.compile(r"^[ \t]*```(?:python|py)[ \t]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_THINKING = re.compile(r"^.*</think>", re.DOTALL)

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
    """The calls in a turn, in order; empty: the turn is an answer. Code in the policy's thinking is no call."""
    said = _THINKING.sub("", action)
    if call_format == "fenced":
        return [ToolCall(match.group(1)) for match in _FENCED.finditer(said)]
    return [_tagged(match.group(1)) for match in _TAGGED.finditer(said)]


def _tagged(text: str) -> ToolCall:
    try:
        call = json.loads(text, strict=False)  # code in JSON often holds raw line breaks
    except (json.JSONDecodeError, RecursionError) as error:
        return ToolCall(None, f"the tool call is not JSON: {error}")
    if not isinstance(call, dict) or call.get("name") != "python":
        named = call.get("name") if isinstance(call, dict) else None
        return ToolCall(None, f"there is no tool {named!r}; the tool is 'python'")
    arguments = call.get("arguments")
    code = arguments.get("code") if isinstance(arguments, dict) else None
    if not isinstance(code, str):
        return ToolCall(None, 'the tool call has no text in "arguments": {"code": ...}')
    return ToolCall(code)
