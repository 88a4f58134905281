"""Cutting of tool text, and the limits themselves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.config.tools import Tools
from zerogap.env.tools.interface import Limits
from zerogap.env.tools.monty import show_last_expression
from zerogap.env.tools.text import cut, tool_result


@settings(deadline=None)  # busy machines
@given(length=st.integers(0, 3000), limit=st.integers(100, 1000))
def test_cut_text_has_the_limits_length_head_and_tail_and_counts_what_is_missing(length: int, limit: int) -> None:
    text = "".join(chr(0x4E00 + index) for index in range(length))
    result = cut(text, limit)
    assert len(result) <= limit
    if length <= limit:
        assert result == text
        return
    head, mark, tail = result.split("\n")
    assert text.startswith(head) and text.endswith(tail)
    assert mark == f"[... {length - len(head) - len(tail):,} characters cut ...]"
    assert len(result) >= limit - 3  # the mark may be shorter than it could be


def test_notes_are_inside_the_limit() -> None:
    limits = Limits(seconds=1, memory_mb=16, output_chars=300)
    result = tool_result("x" * 1000, "timeout", seconds=1.0, limits=limits, lost=True, restarted=True)
    assert len(result.text) <= 300 and result.truncated
    assert result.text.startswith("[new session") and result.text.endswith("all variables are lost]\n")


@pytest.mark.parametrize(("key", "value"), [("seconds", 0.001), ("memory_mb", 1), ("output_chars", 10)])
def test_limits_too_small_are_refused_in_the_recipe(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{key}\n .*greater than or equal"):
        Tools.model_validate({key: value})


def test_only_a_last_expression_is_wrapped() -> None:
    for code in ("x = 1", "if x:\n    x", "def f(): pass", "no python", "", "'\x00'", "(" * 10**5, "1\n" * 10**6):
        assert show_last_expression(code) == code
    assert show_last_expression("'é'; 'é' ; # end") == "'é'; _show_(('é')) ; # end"
    assert show_last_expression("x = (\n    1)\n(x +\n    2)  # end") == "x = (\n    1)\n_show_(((x +\n    2)))  # end"
