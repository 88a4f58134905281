"""zerogap eval: what it reports, how it is resumed, what it refuses, and the benchmarks' own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import PARAMS
from zerogap.cli.main import main
from zerogap.runtime.rollout_worker import RolloutWorker
from zerogap.trajectory import SamplingParams

DATA = Path(__file__).parents[3] / "shared" / "data"


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON answer of one evaluation; nothing else is printed."""
    capsys.readouterr()
    assert main(["eval", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_eval(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field case 44: all tokens of one eval carry one version, which is reported; greedy again gives the same."""
    command = ["--model", str(model), "--task", "chain_sum", *PARAMS, "--limit", "5", "--max-new-tokens", "4"]
    result = evaluate(capsys, *command, "--samples", "3")
    assert (result["prompts"], result["samples"], result["version"]) == (5, 3, 0)
    assert result["pass@k"].keys() == {"1", "2"} and result["pass@k"]["1"]["value"] == result["reward"]
    assert 0 <= result["reward"] <= result["pass@k"]["2"]["value"] <= 1 and 0 <= result["truncated"] <= 1
    assert 15 <= result["tokens"] <= 60 and result["tokens_mean"] == result["tokens"] / 15
    assert result["errors"] == {} and result["turns_mean"] == 1 and len(result["weights"]) == 64

    greedy = [evaluate(capsys, *command, "--temperature", "0") for _ in range(2)]
    assert greedy[0]["answers"] == greedy[1]["answers"] != result["answers"]
    assert main(["eval", *command, "--samples", "2", "--k", "2"]) == 0
    printed = capsys.readouterr().out
    assert "all tokens of version 0" in printed and "pass@1 " in printed and "pass@2 " in printed


def test_eval_resumes(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ended in the middle of a line: finished prompts are not sampled again, and the answers are those of one go."""
    path = tmp_path / "answers.jsonl"
    command = ["--model", str(model), "--task", "chain_sum", *PARAMS, "--limit", "4", "--max-new-tokens", "4"]
    command += ["--samples", "2", "--output", str(path)]
    whole = evaluate(capsys, *command)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    path.write_text("".join(lines[:3]) + lines[3][:20])
    resumed = evaluate(capsys, *command, "--resume")
    assert resumed["answers"] == whole["answers"] and resumed["pass@k"] == whole["pass@k"]
    assert path.read_text().splitlines(keepends=True)[:3] == lines[:3]
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    assert evaluate(capsys, *command, "--resume")["tokens_per_s"] is None  # nothing was left to sample

    for options, expected in (
        (["--resume", "--max-new-tokens", "5"], "begun with max_new_tokens 4, now it is 5"),
        (["--resume", "--task-seed", "7"], "begun with task.seed 1, now it is 7"),
        ([], "exists; add --resume"),
    ):
        assert main(["eval", *command, *options]) == 2
        assert expected in capsys.readouterr().err


def test_eval_samples_as_the_recipe_does_unless_told_otherwise(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rollout.max_new_tokens, stop and temperature, and the seed, are defaults; each option wins over its key."""
    recipe = tmp_path / "recipe.yaml"
    values = {
        "name": "r",
        "seed": 3,
        "model": {"create": {}},
        "task": {"name": "chain_sum"},
        "rollout": {"max_new_tokens": 3, "stop": ["7", "8"], "temperature": 0.5},
    }
    recipe.write_text(yaml.safe_dump(values))
    seen: list[SamplingParams] = []
    submit = RolloutWorker.submit

    def watched(self: RolloutWorker, items: list[Any]) -> None:
        seen.append(items[0][0].sampling)
        submit(self, items)

    monkeypatch.setattr(RolloutWorker, "submit", watched)
    command = ["eval", "--model", str(model), "--recipe", str(recipe), "--limit", "1"]
    options = ["--max-new-tokens", "2", "--temperature", "0", "--stop", "9", "--stop", "+", "--seed", "4"]
    assert main(command) == 0
    assert main([*command, *options]) == 0
    assert main(["eval", "--model", str(model), "--task", "chain_sum", *PARAMS, "--limit", "1"]) == 0
    assert seen == [
        SamplingParams(3, 0.5, ("7", "8"), 3),
        SamplingParams(2, 0.0, ("9", "+"), 4),
        SamplingParams(64, 1.0, ()),
    ]


def test_eval_with_the_python_tool(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "--model", str(model), "--limit", "2", "--max-new-tokens", "4", "--tools", "python"]
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "1 + 1 = ?", "answer": "2"}\n')
    assert main([*command, "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 1
    assert main([*command, "--recipe", str(Path(__file__).parents[2] / "recipes" / "tiny.yaml")]) == 2
    assert "--tools belongs to --task or --data" in capsys.readouterr().err


def test_eval_skips_and_counts_long_prompts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    lines = [{"question": "1 + 1 = ", "answer": "2"}, {"question": "1 + " * 200, "answer": "200"}]
    data.write_text("\n".join(map(json.dumps, lines)))
    command = ["--model", str(model), "--data", str(data), "--max-new-tokens", "4"]
    result = evaluate(capsys, *command)
    assert (result["prompts"], result["prompts_too_long"]) == (1, 1)
    data.write_text(json.dumps(lines[1]))
    assert main(["eval", *command]) == 2
    assert "all 1 prompts are longer than the context" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "prompts"), [("aime24", 30), ("gsm8k_test", 1319)])
def test_benchmark_files(name: str, prompts: int, model: Path, tmp_path: Path) -> None:
    """Their lines have `question` and `answer` as ours; every worked-out answer is graded right, another wrong."""
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in ../shared/data")
    from zerogap.config import Task
    from zerogap.env.task import make_task

    task = make_task(Task.model_validate({"jsonl": str(path)}))
    assert len(task) == prompts
    for example in map(task.example, range(20)):
        assert task.grade(example, f"\\boxed{{{example.payload}}}") == 1.0
        assert task.grade(example, f"\\boxed{{{example.payload}7}}") == 0.0
