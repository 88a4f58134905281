"""`task.tools` of the recipe: a Python tool for the policy, and its limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zerogap.config.section import Section

MOST_CALLS = 4  # of one turn


class Tools(Section):
    """The policy may run Python before it answers; its last turn, one without a call, is graded by the task."""

    backend: Literal["monty", "cpython"] = "monty"
    """monty: an interpreter without files, network and most of the library. cpython: the real one with numpy and sympy,
    in a sandbox (needs bubblewrap)."""
    format: Literal["fenced", "tool_call"] = "fenced"
    """How a call is written. fenced: a ```python block. tool_call: JSON in <tool_call> tags, as Qwen and Hermes do; the
    tool is then described to the policy by the chat template."""
    seconds: float = Field(5.0, ge=0.01)
    """Longest call."""
    memory_mb: int = Field(256, ge=16)
    """MiB that the code of one episode may hold."""
    output_chars: int = Field(2000, ge=256)
    """Most characters of a call's result that the policy is shown; the rest is cut with a mark."""
