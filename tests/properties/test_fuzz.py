"""benchmarks/fuzz.py: it counts what it compared, stops at a failure, and names the seed that repeats it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import strategies as st

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the program adds to it
    spec.loader.exec_module(module)
    return module


def below_900(number: int) -> int:
    assert number < 900
    return 1


def outcome(fuzz: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fuzz.py", "--json", *arguments])
        code = fuzz.main()
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_it_counts_what_it_compared(fuzz: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz.PROPERTIES = {"numbers": (st.integers(0, 2), lambda number: 7, 1)}
    code, found, _ = outcome(fuzz, capsys, "--replay", "3")
    assert (code, found["failed_seed"], found["batches"]) == (0, None, 1)
    (row,) = found["properties"]
    assert (row["property"], row["cases"], row["values compared"]) == ("numbers", 3, 21)


def test_a_failure_names_its_seed_which_repeats_it(fuzz: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz.PROPERTIES = {"numbers": (st.integers(0, 1000), below_900, 1)}
    code, found, printed = outcome(fuzz, capsys, "--seed", "5")
    seed = found["failed_seed"]
    assert code == 1 and f"numbers FAILED; repeat it with --replay {seed}" in printed
    assert "case=900" in printed  # shrunk to the smallest
    code, replayed, printed = outcome(fuzz, capsys, "--replay", str(seed))
    assert (code, replayed["failed_seed"]) == (1, seed) and "case=900" in printed
