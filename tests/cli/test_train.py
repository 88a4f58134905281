"""`zerogap train` from the command line to the run folder, on the inline driver: steps, verdict, table, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from zerogap.cli.main import main

RECIPE = {
    "name": "small",
    "model": {"create": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "max_position_embeddings": 128}},
    "task": {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
    "rollout": {"group_size": 2, "max_new_tokens": 4},
    "train": {"updates": 3, "groups_per_update": 4, "lag": 1},
    "audit": {"share": 1.0},
    "logging": {"tensorboard": False},
    "runtime": {"driver": "inline"},
}


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(RECIPE))


def test_steps_verdict_table_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"]
    for line in steps:
        equal, _, checked = line.partition("bitwise ")[2].split()[0].partition("/")
        assert equal == checked and int(checked) >= 8
    table = dict(line.rsplit("  ", 1) for line in lines[lines.index(steps[-1]) + 1 :])
    table = {label.strip(): value for label, value in table.items()}
    summary = json.loads(Path("runs/small/summary.json").read_text())
    assert table["updates"] == "3" and table["bits unequal (tokens)"] == "0"
    assert table["bits checked (tokens)"] == f"{summary['bits_checked']:,}" == table["tokens trained"]
    assert table["run folder"] == "runs/small"
    assert Path(table["model"]).joinpath("config.json").is_file()
    assert captured.err == ""


def test_json_and_resume(capsys: pytest.CaptureFixture[str]) -> None:
    """A run stopped after 2 of 3 updates goes on to the third; stdout holds one JSON object, steps go to stderr."""
    assert main(["train", "small.yaml", "--max-steps", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["updates"] == 2
    assert "step 2/2" in captured.err
    assert main(["train", "small.yaml"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["train", "small.yaml", "--resume", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["updates"] == 3 and answer["bits_unequal"] == 0 and answer["tokens_trained"] > 0
    assert [line.split()[1] for line in captured.err.splitlines() if line.startswith("step ")] == ["3/3"]


@pytest.mark.parametrize(
    ("changes", "arms"),
    [
        (["model.kernels=standard"], "engine standard float32, learner standard float32"),
        (["rollout.dtype=bfloat16"], "engine aligned bfloat16, learner aligned float32"),
        (["rollout.kernels=int8"], "engine int8 float32, learner aligned float32"),
    ],
)
def test_arms_are_marked(capsys: pytest.CaptureFixture[str], changes: list[str], arms: str) -> None:
    """At the start, in each step's line, and where the table counts unequal bits."""
    assert main(["train", "small.yaml", *changes, "--max-steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 2 and all("(aligned: no)" in line for line in steps)
    assert [line for line in lines if line.startswith(f"warning: aligned: no ({arms})")]
    assert [line for line in lines if line.startswith("bits unequal (tokens; aligned: no)")]


def test_resume_with_another_batch_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", "--max-steps", "1"]) == 0
    capsys.readouterr()
    before = Path("runs/small/metrics.jsonl").read_bytes()
    assert main(["train", "small.yaml", "--resume", "train.groups_per_update=2"]) == 2
    message = capsys.readouterr().err
    assert "train.groups_per_update: 4 in the checkpoint, 2 in the recipe" in message
    assert "Traceback" not in message
    assert Path("runs/small/metrics.jsonl").read_bytes() == before


def test_run_that_fails_ends_with_1_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt longer than the context is skipped; when all are, the run says so and ends."""
    override = "model.create.max_position_embeddings=16"
    assert main(["train", "small.yaml", override]) == 1
    message = capsys.readouterr().err
    assert message.startswith("zerogap: error: all 10000 prompts of the task are longer than")
