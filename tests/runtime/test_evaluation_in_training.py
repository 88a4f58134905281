"""Field case 44: evaluations beside a run measure one version each, disturb nothing, and the last one is not lost."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.processes import alive
from tests.runtime.support import Recorder, metrics, same_weights, tiny_recipe, trajectories
from tests.runtime.test_evaluation import result
from zerogap.cli.main import main
from zerogap.runtime.backend import Weights
from zerogap.runtime.evaluation.figures import summarise
from zerogap.runtime.evaluation.training import Evaluations, Outcome
from zerogap.runtime.train import train


class SlowEvaluator:
    """Each evaluation takes `polls` questions for its outcome; more than a run asks: it hangs."""

    def __init__(self, polls: int) -> None:
        self._polls = polls
        self._left = 0
        self._version: int | None = None
        self.started: list[int] = []

    def start(self, weights: Weights) -> None:
        assert self._version is None, "two evaluations at once"
        self._version, self._left = weights.version, self._polls
        self.started.append(weights.version)

    def wait(self, timeout_s: float) -> Outcome | None:
        self._left -= 1
        if self._left >= 0:
            time.sleep(timeout_s)
            return None
        version, self._version = self._version, None
        assert version is not None
        return Outcome(version, f"digest {version}", 1.0, summarise([result(0, 1.0, 0.0)], [1, 2]))

    def close(self) -> None:
        pass


def run(evaluator: SlowEvaluator, every: int, updates: int, timeout_s: float) -> tuple[list[Any], list[Outcome]]:
    outcomes: list[Outcome] = []
    evaluations = Evaluations(evaluator, every, updates, outcomes.append)
    lines = [evaluations.after_update(Weights(v, f"digest {v}", None)) for v in range(1, updates + 1)]
    evaluations.finish(timeout_s)
    return lines, outcomes


def test_evaluation_longer_than_three_updates() -> None:
    """Begun after 1, it arrives at 6; those of 2 to 5 are skipped, and nothing waits."""
    evaluator = SlowEvaluator(polls=5)
    lines, outcomes = run(evaluator, every=1, updates=7, timeout_s=0.0)
    assert [line["eval/skipped"] for line in lines] == [0, 1, 2, 3, 4, 4, 4]
    assert [line.get("eval/version") for line in lines] == [None, None, None, None, None, 1, None]
    assert lines[5]["eval/reward"] == 0.5 and lines[5]["eval/pass@2"] == 1.0
    assert evaluator.started == [1, 6] and lines[-1]["eval/missing"] == 0
    assert [(o.version, o.missing[:12]) for o in outcomes] == [(1, ""), (6, "not finished"), (7, "not finished")]


def test_last_update_is_evaluated_though_another_runs() -> None:
    evaluator = SlowEvaluator(polls=2)
    lines, outcomes = run(evaluator, every=4, updates=5, timeout_s=0.0)
    assert evaluator.started == [4, 5] and lines[-1]["eval/skipped"] == 0
    assert outcomes[0].version == 4 and outcomes[0].figures is not None


def test_evaluation_that_never_ends_is_missing() -> None:
    """And so is the last one behind it; the run ends all the same."""
    evaluator = SlowEvaluator(polls=10**9)
    lines, outcomes = run(evaluator, every=4, updates=5, timeout_s=0.01)
    assert evaluator.started == [4] and "eval/version" not in lines[-1]
    assert [(o.version, o.weights) for o in outcomes] == [(4, "digest 4"), (5, "digest 5")]
    assert all(o.missing == "not finished 0.01 s after the last update (runtime.timeout_s)" for o in outcomes)


def evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "evaluations.jsonl").read_text().splitlines()]
    assert len({line["version"] for line in lines}) == len(lines)
    return {line["version"]: line for line in lines}


CHANGES: dict[str, Any] = {"checkpoint__every": 2, "checkpoint__keep": 9, "learner__learning_rate": 0.1}
GREEDY = {"every": 2, "limit": 9, "temperature": 0.0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def inline(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Run folders of two inline runs: without evaluations, with."""
    folder = tmp_path_factory.mktemp("inline")
    train(tiny_recipe(tiny_model, **CHANGES), folder / "without")
    train(tiny_recipe(tiny_model, evaluation=GREEDY, **CHANGES), folder / "with")
    return folder / "without", folder / "with"


def test_training_is_the_same_with_evaluations(inline: tuple[Path, Path]) -> None:
    without, beside = inline
    assert same_weights(without, beside) and trajectories(without) == trajectories(beside)
    clock = re.compile(r"(time|wait|throughput)/|environment/seconds|weight_store/\w+_ms|eval/")
    for left, right in zip(metrics(without), metrics(beside), strict=True):
        assert {k for k in right if k not in left} == {k for k in right if k.startswith("eval/")}
        assert [(k, v) for k, v in left.items() if not clock.match(k)] == [
            (k, v) for k, v in right.items() if not clock.match(k)
        ]
    found = evaluations(beside)
    assert list(found) == [2, 4, 5]  # the last update, too
    assert {line["step"]: line["eval/version"] for line in metrics(beside) if "eval/version" in line} == {
        version: version for version in found
    }
    assert len({line["answers"] for line in found.values()}) == 3  # different policies answered
    summary = json.loads((beside / "summary.json").read_text())
    assert (summary["evaluations"], summary["evaluations_missing"]) == (3, 0)
    assert summary["eval_reward"] == found[5]["reward"]


def check_again(run_dir: Path, version: int, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`zerogap eval` on the checkpoint of that version gives what the run reported."""
    command = ["eval", "--model", str(run_dir / "checkpoints" / f"step-{version:06d}"), "--json"]
    capsys.readouterr()
    assert main([*command, "--recipe", str(run_dir / "recipe.yaml"), "--max-new-tokens", "6", *options]) == 0
    again, line = json.loads(capsys.readouterr().out), evaluations(run_dir)[version]
    same = ("version", "weights", "answers", "pass@k", "truncated", "tokens")
    assert [again[key] for key in same] == [line[key] for key in same]


def test_evaluating_a_checkpoint_gives_the_answers_of_the_run(
    inline: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for version in evaluations(inline[1]):
        check_again(inline[1], version, ["--limit", "9", "--temperature", "0"], capsys)


def test_on_ray(
    inline: tuple[Path, Path], tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the run, in another process: the same training (lag 0), each evaluation that of its version, the last
    one waited for, no process left. One whose process is killed is missing, and the next comes from a new one."""
    log = tmp_path / "run" / "logs" / "evaluation.log"

    def kill(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            while not log.is_file() or "weights of version 2" not in log.read_text():
                time.sleep(0.05)
            os.kill(int(re.findall(r"INFO process (\d+)", log.read_text())[-1]), signal.SIGKILL)

    # The first evaluation is killed before it can end: it has far more to sample than the others take.
    many = GREEDY | {"samples": 40, "temperature": 1.0, "limit": 40}
    recorder = Recorder(kill)
    recipe = tiny_recipe(tiny_model, runtime__driver="ray", evaluation=many, **CHANGES)
    summary = train(recipe, tmp_path / "run", observer=recorder)
    assert same_weights(inline[0], tmp_path / "run")
    assert trajectories(tmp_path / "run") == trajectories(inline[0])
    found = evaluations(tmp_path / "run")
    assert "missing" in found[2] and found[5]["samples"] == 40 and found[5]["prompts"] == 40
    assert [found[v]["weights"] for v in found] == [evaluations(inline[1])[v]["weights"] for v in found]
    assert summary["evaluations"] == len(found) - 1 and summary["evaluations_missing"] == 1
    assert any("evaluation of version 2 is missing" in warning for warning in recorder.warnings)
    processes = [int(number) for number in re.findall(r"INFO process (\d+)", log.read_text())]
    assert len(processes) == 2 and alive(processes) == []
    check_again(tmp_path / "run", 5, ["--limit", "40", "--samples", "40"], capsys)
