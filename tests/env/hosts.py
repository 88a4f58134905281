"""Waiting for a host's answers, shared by the tests of hosts."""

from __future__ import annotations

from tests.env.environments import example
from zerogap.env.host import Answer, Episode, Host

PATIENCE_S = 30.0


def collect(host: Host, count: int) -> dict[Episode, Answer]:
    """The next `count` answers; none may follow."""
    answers: dict[Episode, Answer] = {}
    while len(answers) < count:
        found = host.results(PATIENCE_S)
        assert found, f"{len(answers)} of {count} answers after {PATIENCE_S} s"
        answers |= {answer.episode: answer for answer in found}
    assert host.results(0.0) == []
    return answers


def start(host: Host, *episodes: Episode, payload: object = None) -> None:
    for episode in episodes:
        host.reset(episode, example(payload))
    for answer in collect(host, len(episodes)).values():
        assert answer.error is None and answer.messages == example().messages and answer.step is None


def one(host: Host, episode: Episode, action: str) -> Answer:
    """The answer to one step."""
    host.step(episode, action)
    return collect(host, 1)[episode]
