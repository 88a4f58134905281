"""benchmarks/rollout.py: both sides sample what they are asked to, and the table has their ratio."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from zerogap.cli.main import main

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "rollout.py"


@pytest.fixture(scope="module")
def rollout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_benchmark", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_sides(rollout: ModuleType, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and tiny; `measure` itself refuses a side that samples another number of tokens."""
    sizes = ["hidden_size=64", "intermediate_size=128", "num_layers=1"]
    assert main(["model", "create", str(tmp_path / "m"), "--task", "chain_sum", "tokenizer=bpe", *sizes]) == 0
    args = argparse.Namespace(
        model=str(tmp_path / "m"), dtype=[dtype], requests=4, samples=2, new_tokens=5, threads=1, rounds=1
    )
    before = torch.get_num_threads()
    monkeypatch.setattr(rollout, "_measure_in_child", lambda side, dtype, args: rollout.measure(side, args))
    result = rollout.compare(dtype, args)
    assert torch.get_num_threads() == before == 1
    medians = result["median_tokens_per_s"]
    assert result["ratio"] == medians["zerogap"] / medians["transformers"] > 0
    table = rollout._table([result], args)
    assert f"| {dtype} | {medians['zerogap']:,.0f} | {medians['transformers']:,.0f} |" in table
    assert "4 requests (2 of each prompt) x 5 new tokens" in table
