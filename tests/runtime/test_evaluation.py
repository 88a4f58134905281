"""Figures of an evaluation by hand and by brute force, and its file: resumed, torn, begun with other settings."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fakes import fake_trajectory
from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.runtime.evaluation.figures import Answer, Estimate, PromptResult, default_ks, pass_at_k, summarise
from zerogap.runtime.evaluation.results_file import ResultsFile, ResultsFileError


def result(prompt_id: int, *rewards: float | None, error: str = "ValueError: no", **fields: Any) -> PromptResult:
    values: dict[str, Any] = {"truncated": False, "turns": 1, "token_ids": [1, 2], "text": "x"} | fields
    answers = [Answer(reward=r, error=error if r is None else None, **values) for r in rewards]
    return PromptResult(prompt_id, 3, answers)


def test_pass_at_k_by_hand() -> None:
    """n = 4, c = 2: 1 - C(2, k) / C(4, k)."""
    rewards = [0.0, 1.0, 0.0, 1.0]
    assert [pass_at_k(rewards, k) for k in (1, 2, 3, 4)] == [0.5, pytest.approx(5 / 6), 1.0, 1.0]
    assert pass_at_k([0.0] * 5, 5) == 0.0 and pass_at_k([1.0], 1) == 1.0
    # Partial rewards: the mean best of {0.2, 0.5, 1} by twos is (0.5 + 1 + 1) / 3.
    assert pass_at_k([0.5, 1.0, 0.2], 2) == pytest.approx(2.5 / 3)
    for k in (0, 2):
        with pytest.raises(ValueError, match=f"pass@{k} needs"):
            pass_at_k([1.0], k)
    assert [default_ks(n) for n in (1, 2, 7, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=7))
def test_pass_at_k_is_the_mean_over_all_choices(rewards: list[int]) -> None:
    values = []
    for k in range(1, len(rewards) + 1):
        choices = list(combinations(rewards, k))
        exact = Fraction(sum(map(max, choices)), len(choices))
        values.append(pass_at_k([float(reward) for reward in rewards], k))
        assert values[-1] == pytest.approx(float(exact), abs=1e-12)
    assert all(a <= b + 1e-12 for a, b in pairwise(values))


def test_errors_are_in_no_mean_and_prompts_count_alike() -> None:
    """Prompt 0: 1 of 2; prompt 1: one graded answer of two, right; prompt 2: none."""
    results = [
        result(1, 1.0, None, error="timeout: 5 s"),
        result(0, 1.0, 0.0, truncated=True, turns=3),
        result(2, None, None),
    ]
    figures = summarise(results, [1, 2])
    assert figures.pass_at == {1: Estimate(0.75, pytest.approx(0.25), 2), 2: Estimate(1.0, None, 1)}
    assert figures.errors == {"ValueError": 2, "timeout": 1} and figures.version == 3
    assert (figures.prompts, figures.samples, figures.tokens, figures.tokens_mean) == (3, 2, 12, 2)
    assert figures.truncated == pytest.approx(1 / 3) and figures.turns == pytest.approx(10 / 6)
    assert figures.answers == summarise(results[::-1], [1]).answers  # whatever the order in which prompts ended
    other = [*results[:2], result(2, None, None, token_ids=[2, 1])]
    assert figures.answers != summarise(other, [1]).answers
    nothing = summarise([result(0, None)], [1]).to_json()
    assert nothing["reward"] is None and nothing["pass@k"] == {}


def test_tokens_of_two_versions_are_refused() -> None:
    info = {"text": "a", "turns": 1}
    group = FinishedGroup(5, [fake_trajectory(5, [7, 7], info=info), fake_trajectory(5, [7, 8], 1, info=info)])
    with pytest.raises(RunFailed, match=r"prompt 5 sample 1 name versions \[7, 8\]"):
        PromptResult.of(group, 7)


def test_segments_of_an_episode_are_one_answer() -> None:
    segments = [
        fake_trajectory(5, [7], reward=0.5, info={"text": "a", "turns": 2}),
        fake_trajectory(5, [7, 7], reward=0.5, segment=1, finish_reason="turns", info={"text": "b", "turns": 2}),
    ]
    (answer,) = PromptResult.of(FinishedGroup(5, segments), 7).answers
    assert answer == Answer(0.5, None, True, 2, [3, 3, 3], "ab")


SETTINGS = {"samples": 2, "task.seed": 1, "stop": ["x"]}


def written(path: Path, *results: PromptResult) -> bytes:
    with ResultsFile(path, SETTINGS, resume=False) as file:
        for each in results:
            file.add(each)
    return path.read_bytes()


def test_file_goes_on_where_it_ended(tmp_path: Path) -> None:
    """At whatever byte it was torn: whole lines stay, the rest is dropped, and the file ends up the same."""
    results = [result(1, 1.0, None), result(0, 0.0, 1.0)]
    path = tmp_path / "deep" / "answers.jsonl"
    whole = written(path, *results)
    for cut in {0, 5, len(whole) // 2, len(whole) - 1, len(whole), *(i + 1 for i, b in enumerate(whole) if b == 10)}:
        path.write_bytes(whole[:cut])
        with ResultsFile(path, SETTINGS, resume=True) as file:
            assert file.done == results[: len(file.done)]
            for each in results[len(file.done) :]:
                file.add(each)
        assert path.read_bytes() == whole, cut


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (None, {"task.seed": 2}, "task.seed 1, now it is 2"),
        (None, {"extra": 1}, "extra None, now it is 1"),
        (b"question\n", {}, "answers.jsonl:1: not a line of an evaluation"),
        (b'{"question": 1}\n', {}, "answers.jsonl:1: no settings"),
        (b"[]\n", {}, "answers.jsonl:1: not a line of an evaluation"),
        (json.dumps({"settings": SETTINGS}).encode() + b'\n{"prompt_id": 1}\n', {}, "answers.jsonl:2: not a prompt's"),
    ],
)
def test_file_that_does_not_fit_is_left_as_it_is(
    tmp_path: Path, content: bytes | None, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "answers.jsonl"
    before = written(path, result(0, 1.0)) if content is None else content
    path.write_bytes(before)
    with pytest.raises(ResultsFileError, match=message.replace(".", r"\.")):
        ResultsFile(path, SETTINGS | changes, resume=True)
    with pytest.raises(ResultsFileError, match="exists; add --resume"):
        ResultsFile(path, SETTINGS, resume=False)
    assert path.read_bytes() == before
    with pytest.raises(ResultsFileError, match="does not exist"):
        ResultsFile(tmp_path / "none", SETTINGS, resume=True)
