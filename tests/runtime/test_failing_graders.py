"""Graders that fail: counted by class, never a reward, and the end of a run that has nothing else. And, of a run with
such trouble: every name in metrics.jsonl is on its page."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.support import metrics, tiny_recipe, trajectories
from zerogap.env import make
from zerogap.env.task import Example, GradeError, Task, make_task
from zerogap.runtime.backend import RunFailed
from zerogap.runtime.train import train


class FailingTask:
    """Grades with the real task except for some prompts, on which the grader fails."""

    def __init__(self, task: Task, fails: Any) -> None:
        self._task, self._fails = task, fails
        self.calls: dict[int, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._task)

    def example(self, index: int) -> Example:
        return self._task.example(index)

    def grade(self, example: Example, text: str) -> float:
        self.calls[example.prompt_id] += 1
        if self._fails(example.prompt_id):
            try:
                raise ZeroDivisionError("scorer")
            except ZeroDivisionError as error:
                raise GradeError("the scorer failed") from error
        return self._task.grade(example, text)

    def solution(self, example: Example) -> str:
        return self._task.solution(example)


def test_poison_prompts_are_counted_and_never_rewarded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field cases R8, R9 and 37: a bounded number of tries, no reward 0, counted by class of error; the run goes on."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: prompt % 2 == 0)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    summary = train(tiny_recipe(tiny_model, task__max_error_share=1.0), tmp_path / "run")
    records = trajectories(tmp_path / "run")
    poisoned = [t for t in records if t["prompt_id"] % 2 == 0]
    assert poisoned and len(poisoned) < len(records)
    assert all(t["reward"] is None and t["error"].startswith("ZeroDivisionError: the scorer") for t in poisoned)
    assert all(t["reward"] is not None for t in records if t["prompt_id"] % 2)
    # Each sample is graded once; a failed episode is tried once more (task.retries), with the same tokens.
    assert {prompt: calls for prompt, calls in failing.calls.items()} == {
        prompt: 4 if prompt % 2 else 8 for prompt in failing.calls
    }
    lines = metrics(tmp_path / "run")
    assert sum(line.get("retries/ZeroDivisionError", 0) for line in lines) == len(poisoned)
    assert sum(line.get("errors/ZeroDivisionError", 0) for line in lines) == len(poisoned) == summary["errors"]


def test_grader_that_always_fails_ends_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 37: all errors is no batch of zeros."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: True)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    with pytest.raises(RunFailed, match=r"12 of 12 episodes .*12 ZeroDivisionError.*max_error_share"):
        train(tiny_recipe(tiny_model), tmp_path / "run")


def test_docs_name_every_metric(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/metrics.md and metrics.jsonl name the same things. Unequal bits (standard kernels) and failing grades
    are part of the run, so that the names that only trouble brings are seen too; and objectives that mark tokens."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: prompt % 2 == 0)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    emitted: set[str] = set()
    for name in ("reinforce_zero", "ppo_clip", "truncated_is", "masked_is"):
        recipe = tiny_recipe(
            tiny_model,
            model__kernels="standard",
            train__lag=1,
            learner__objective={"name": name},
            task__max_error_share=1.0,
            evaluation={"every": 2, "samples": 2, "limit": 6},
        )
        train(recipe, tmp_path / name)
        emitted |= {metric for line in metrics(tmp_path / name) for metric in line}
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {name for row in re.findall(r"^\|(.*?)\|", page, re.M) for name in re.findall(r"`(.+?)`", row)}
    patterns = [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in documented]
    assert {name for name in emitted if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    assert {p.pattern for p in patterns if not any(map(p.fullmatch, emitted))} == set()
