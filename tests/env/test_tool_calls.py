"""Tool calls found in what a policy says, and mistakes in them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerogap.env.tool_calls import ToolCall, tool_calls


def tagged(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("action", "codes"),
    [
        ("The sum:\n```python\n1 + 2\n```", ["1 + 2\n"]),
        ("```py\na = 1\n```\nand\n```python\na\n```\n", ["a = 1\n", "a\n"]),
        ("```python\n```", [""]),
        ("the answer is 3", []),
        ("```python\nnever closed", []),
        ("```json\n{}\n```", []),
        ("use ```python``` blocks", []),
        ("<think>\n```python\n1\n```\n</think>\n```python\n2\n```", ["2\n"]),
        ("<think>\n```python\n1\n```\n</think>\n3", []),
        ("```python\n1\n```\n<think>\n```python\n2\n```", ["1\n"]),
        ("```python\n1\n```python\n2\n```", ["1\n```python\n2\n"]),
    ],
)
def test_fenced_code(action, codes):
    assert [call.code for call in tool_calls(action, "fenced")] == codes
    assert tool_calls(action, "tool_call") == []


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ({"name": "shell", "arguments": {"code": "ls"}}, "no tool 'shell'"),
        ({"name": "python", "arguments": {"source": "1"}}, '"arguments": {"code"'),
        ({"name": "python", "arguments": {"code": 1}}, '"arguments": {"code"'),
        ({"name": "python"}, '"arguments": {"code"'),
        ([1], "no tool 'None'"),
    ],
)
def test_a_wrong_call_is_told_to_the_policy(call, problem):
    [found] = tool_calls(tagged(call), "tool_call")
    assert found.code is None and problem in found.problem


@pytest.mark.parametrize("text", ["{", "1 + 2", "[" * 100_000, "9" * 5000])
def test_what_is_not_json_is_told_to_the_policy(text):
    [found] = tool_calls(f"<tool_call>{text}</tool_call>", "tool_call")
    assert found.code is None and "not JSON" in found.problem


def test_raw_line_breaks_inside_the_json_are_read():
    action = '<tool_call>{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}</tool_call>'
    assert tool_calls(action, "tool_call") == [ToolCall("a = 1\nprint(a)")]


@pytest.mark.parametrize("text", ["<tool_call>", "```python\n", "<think>", "</tool_call>", "```py\nx\n"])
def test_time_grows_with_the_length_only(text):
    """A quadratic search would take minutes here."""
    for call_format in ("fenced", "tool_call"):
        assert tool_calls(text * 200_000, call_format) == []


@given(codes=st.lists(st.text(max_size=30), max_size=4), between=st.text(alphabet="ab\n ", max_size=10))
def test_any_code_comes_through_the_tags(codes, between):
    codes = [code for code in codes if "</tool_call>" not in code and "think>" not in code]
    action = between.join(tagged({"name": "python", "arguments": {"code": code}}) for code in codes)
    assert [call.code for call in tool_calls(action, "tool_call")] == codes
