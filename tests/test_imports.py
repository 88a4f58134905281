"""Imports point one way, downward (docs/architecture.md, Rooms)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "zerogap"
DOWNWARD = ("cli", "bench", "runtime", "gaps", "env", "rollout", "learner", "model", "kernels")
BESIDE = {"rollout": {"learner"}, "learner": {"rollout"}}  # never import each other


def imported_rooms(path: Path) -> set[str]:
    """The second part of each `zerogap.x...` that a file imports, inside functions and TYPE_CHECKING, too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("zerogap.")}


@pytest.mark.parametrize("room", DOWNWARD)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    forbidden = {*DOWNWARD[: DOWNWARD.index(room)]} | BESIDE.get(room, set())
    files = sorted((SOURCES / room).rglob("*.py"))
    assert files
    found = {str(path.relative_to(SOURCES)): imported_rooms(path) & forbidden for path in files}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}
