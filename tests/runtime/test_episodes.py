"""Episodes of several turns through real engines, learners and environments: token-exact, bits, errors, limits."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.runtime.support import metrics, mid_flight, tiny_recipe, trajectories
from zerogap.env import make
from zerogap.env.environment import EpisodeError, Step
from zerogap.env.host import Answer
from zerogap.env.local_host import LocalHost
from zerogap.env.task import Example
from zerogap.model.chat import load_tokenizer
from zerogap.runtime.train import train
from zerogap.trajectory import Message

STOPS = list("01234")  # random weights seldom end a turn by themselves
FORGETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] + eos_token }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)


class Talks:
    """Three turns; each answers with the number of the turn and gives a reward that depends on what was said.

    log: what every episode was told, by its question.
    """

    log: ClassVar[list[tuple[str, list[str]]]] = []
    fails: ClassVar[Counter[str]] = Counter()

    async def reset(self, example: Example) -> list[Message]:
        self.said: list[str] = []
        self.question = example.messages[-1]["content"]
        self.log.append((self.question, self.said))
        return example.messages

    async def step(self, action: str) -> Step:
        self.said.append(action)
        turn = len(self.said)
        if turn == 2 and self.fails[self.question] > 0:
            self.fails[self.question] -= 1
            raise ConnectionError("the tool is away")
        ended = turn == 3
        seen: list[Message] = [] if ended else [{"role": "tool", "content": f"{turn} + {turn}"}]
        return Step(seen, float(len(action) % 2), ended, False, {"turn": turn})

    async def close(self) -> None:
        self.question = ""


class TalksOn(Talks):
    """Never comes to an end of its own."""

    async def step(self, action: str) -> Step:
        return Step([{"role": "tool", "content": "1 + 1"}], 0.25, False, False, {})


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> type[Talks]:
    Talks.log, Talks.fails = [], Counter()
    monkeypatch.setattr(make, "make_environments", lambda settings, shared: Talks)
    return Talks


def sampled_runs(record: dict[str, Any]) -> list[list[int]]:
    """The sampled ids of each turn."""
    runs: list[list[int]] = []
    for before, (token, mask) in pairwise([(0, 0), *zip(record["token_ids"], record["loss_mask"], strict=True)]):
        if mask and not before[1]:
            runs.append([])
        if mask:
            runs[-1].append(token)
    return runs


@pytest.mark.parametrize("on_update", ["recompute", "finish"])
def test_turns_are_token_exact_and_bitwise(
    tiny_model: Path, tmp_path: Path, talks: type[Talks], on_update: str
) -> None:
    """Field cases 10 and 13: what the learner trains on is what was sampled, with weights that change in mid-episode,
    pages that run out, and tool tokens that are in no loss."""
    changes = {"rollout__stop": STOPS, "train__lag": 2, "train__updates": 4, "rollout__on_update": on_update}
    summary = train(tiny_recipe(tiny_model, **changes), tmp_path / "run", build_backend=mid_flight)
    records = trajectories(tmp_path / "run")
    assert (summary["bits_unequal"], summary["errors"]) == (0, 0)
    assert summary["bits_checked"] == sum(sum(t["loss_mask"]) for t in records) > 200
    tokenizer = load_tokenizer(tiny_model)
    told: Counter[tuple[str, ...]] = Counter(tuple(said) for _, said in talks.log)
    several_versions = 0
    for record in records:
        turns = sampled_runs(record)
        texts = tuple(tokenizer.decode(turn, skip_special_tokens=True) for turn in turns)
        assert told[texts] > 0  # exactly this was said to an environment, turn by turn
        # A turn that max_new_tokens cut is the last one.
        assert record["info"]["turns"] == len(turns) == 3 or record["finish_reason"] == "length"
        assert record["reward"] == sum(len(text) % 2 for text in texts)
        shown = [t for t, m in zip(record["token_ids"], record["loss_mask"], strict=True) if not m]
        assert tokenizer.decode(shown).count("+") >= len(turns) - 1
        several_versions += len(set(record["versions"]) - {-1}) > 1
    assert any(record["info"]["turns"] == 3 for record in records)
    assert (several_versions > 0) == (on_update == "recompute")


def test_a_forgetful_template_makes_segments(
    tiny_model: Path, tmp_path: Path, talks: type[Talks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 11: each segment is trained in the context it was sampled in; the episode counts once."""
    import zerogap.runtime.rollout_worker as module

    def forgetful(folder: Path) -> Any:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = FORGETS
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", forgetful)
    summary = train(tiny_recipe(tiny_model, rollout__stop=STOPS, train__updates=3), tmp_path / "run")
    records = trajectories(tmp_path / "run")
    assert summary["bits_unequal"] == 0 and summary["bits_checked"] == sum(sum(t["loss_mask"]) for t in records)
    episodes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for record in records:
        episodes.setdefault((record["group_id"], record["sample_index"]), []).append(record)
        assert len(sampled_runs(record)) == 1
    assert len(episodes) == 3 * 3 * 4
    for segments in episodes.values():
        assert [s["segment"] for s in segments] == list(range(len(segments)))
        assert len({s["reward"] for s in segments}) == 1
    assert any(len(segments) == 3 for segments in episodes.values())
    for line, update in zip(metrics(tmp_path / "run"), range(1, 4), strict=True):
        rewards = [s[0]["reward"] for s in episodes.values() if s[0]["info"]["update"] == update]
        assert line["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_a_failed_episode_begins_again_then_is_given_up(tiny_model: Path, tmp_path: Path, talks: type[Talks]) -> None:
    """Field cases R8 and R9: at the same weights the second try has the same tokens; after the last one the episode is
    an error, in no mean and in no loss."""
    changes: dict[str, Any] = {"train__updates": 1, "rollout__stop": STOPS}
    train(tiny_recipe(tiny_model, **changes), tmp_path / "plain")
    plain = trajectories(tmp_path / "plain")
    once = next(question for question, said in talks.log if len(said) >= 2)
    talks.log, talks.fails = [], Counter({once: 1})
    train(tiny_recipe(tiny_model, **changes, task__retries=1), tmp_path / "retried")
    retried = trajectories(tmp_path / "retried")
    assert [t["token_ids"] for t in retried] == [t["token_ids"] for t in plain]
    assert [t["reward"] for t in retried] == [t["reward"] for t in plain]
    assert sum(t["info"].get("attempts", 1) == 2 for t in retried) == 1
    [line] = metrics(tmp_path / "retried")
    assert line["retries/ConnectionError"] == 1 and line["errors/ungraded"] == 0

    talks.log, talks.fails = [], Counter({once: 100})
    train(tiny_recipe(tiny_model, **changes, task__retries=2, task__max_error_share=1.0), tmp_path / "given_up")
    given_up = [t for t in trajectories(tmp_path / "given_up") if t["error"] is not None]
    assert given_up and all(t["error"].startswith("ConnectionError: the tool is away") for t in given_up)
    assert all(t["reward"] is None and t["info"]["attempts"] == 3 for t in given_up)
    [line] = metrics(tmp_path / "given_up")
    assert line["errors/ConnectionError"] == line["errors/ungraded"] == len(given_up)
    assert line["retries/ConnectionError"] == 2 * len(given_up)


class Hangs(Talks):
    """The first time, the answer to one question never comes."""

    async def step(self, action: str) -> Step:
        if self.fails[self.question] > 0:
            self.fails[self.question] -= 1
            await asyncio.sleep(1e9)
        return Step([], 1.0, True, False, {})


def test_a_call_that_never_answers_is_tried_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, talks: type[Talks]
) -> None:
    """Field case 36: the update is completed, and the wait is counted."""
    train(tiny_recipe(tiny_model, train__updates=1), tmp_path / "plain")
    question = talks.log[0][0]
    talks.fails = Hangs.fails = Counter({question: 1})
    monkeypatch.setattr(make, "make_environments", lambda settings, shared: Hangs)
    train(tiny_recipe(tiny_model, train__updates=1, task__call_timeout_s=0.3), tmp_path / "run")
    [line] = metrics(tmp_path / "run")
    assert line["retries/timeout"] == 1 and line["errors/ungraded"] == 0 and line["environment/seconds"] > 0.3


class Loses(LocalHost):
    """Answers as a host whose process ended for another's fault: every episode's first three calls are lost."""

    def results(self, timeout_s: float) -> list[Answer]:
        lost = EpisodeError("lost", "the process ended")
        return [
            replace(a, messages=None, step=None, error=lost) if a.episode[2] < 3 else a
            for a in super().results(timeout_s)
        ]


def test_a_lost_episode_is_no_error_of_its_own(
    tiny_model: Path, tmp_path: Path, talks: type[Talks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often others take the process with them; task.retries is for an episode's own failures."""
    monkeypatch.setattr(make, "LocalHost", Loses)
    train(tiny_recipe(tiny_model, train__updates=1, task__retries=0), tmp_path / "run")
    [line] = metrics(tmp_path / "run")
    assert line["retries/lost"] == 3 * 12 and line["errors/ungraded"] == 0


def test_an_endless_conversation_ends_with_the_context(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 14: nothing is cut from the left, no turn has a budget below one token, the run goes on."""
    monkeypatch.setattr(make, "make_environments", lambda settings, shared: TalksOn)
    changes = {
        "rollout__kv_cache_mb": None,
        "rollout__stop": STOPS,
        "train__updates": 2,
        "learner__micro_batch_tokens": 2048,
    }
    train(tiny_recipe(tiny_model, **changes), tmp_path / "run")
    records = trajectories(tmp_path / "run")
    assert {t["finish_reason"] for t in records} <= {"context", "length"}
    full = [t for t in records if t["finish_reason"] == "context"]
    assert full and all(len(t["token_ids"]) <= 128 for t in full)
    assert all(t["reward"] == 0.25 * t["info"]["turns"] for t in records)
