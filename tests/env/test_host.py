"""What every host does alike: answers, errors that are never rewards, the order of calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.env.environments import example, returns, scripted
from zerogap.env.environment import Step
from zerogap.env.host import Answer, Episode, Host
from zerogap.env.local_host import LocalHost

HOSTS = [LocalHost]
A, B = (3, 0, 0), (3, 1, 0)


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with closing(request.param(scripted, 5.0)) as made:
        yield made


def collect(host: Host, count: int) -> dict[Episode, Answer]:
    answers: dict[Episode, Answer] = {}
    while len(answers) < count:
        found = host.results(10.0)
        assert found, f"{len(answers)} of {count} answers after 10 s"
        answers |= {answer.episode: answer for answer in found}
    assert host.results(0.0) == []
    return answers


def start(host: Host, *episodes: Episode, payload: object = None) -> None:
    for episode in episodes:
        host.reset(episode, example(payload))
    for answer in collect(host, len(episodes)).values():
        assert answer.error is None and answer.messages == example().messages and answer.step is None


def test_two_episodes_of_several_turns_have_their_own_state(host):
    start(host, A, B)
    host.step(A, "+0.5")
    assert collect(host, 1)[A].step == Step([{"role": "tool", "content": "1"}], 0.5, False, False, {})
    host.step(A, "end 1")
    host.step(B, "end 0")
    answers = collect(host, 2)
    assert answers[A].step == Step([], 1.0, True, False, {"turns": 2})
    assert answers[B].step == Step([], 0.0, True, False, {"turns": 1})
    assert answers[A].messages is None and answers[A].seconds >= 0


def test_an_exception_is_an_error_of_its_class_and_no_reward(host):
    """Field case 37."""
    start(host, A, B)
    host.step(A, "raise by hand")
    host.step(B, "end 1")
    answers = collect(host, 2)
    assert answers[A].step is None
    assert answers[A].error.kind == "ZeroDivisionError"
    assert "by hand (environments.py:" in answers[A].error.message and "in step)" in answers[A].error.message
    assert answers[B].error is None and answers[B].step.reward == 1.0


def test_reset_may_fail_and_another_attempt_begins_anew(host):
    host.reset(A, example("raise"))
    assert collect(host, 1)[A].error.kind == "LookupError"
    host.close_episode(A)
    start(host, (3, 0, 1))


def test_opening_messages_that_the_policy_has_not_seen_are_refused(host):
    host.reset(A, example("other"))
    error = collect(host, 1)[A].error
    assert error.kind == "ProtocolError" and "'other'" in error.message and "'go'" in error.message


def test_the_order_of_calls_is_kept(host):
    with pytest.raises(ValueError, match=r"\(3, 0, 0\) is not open"):
        host.step(A, "+1")
    start(host, A)
    with pytest.raises(ValueError, match=r"\(3, 0, 0\) was reset before"):
        host.reset(A, example())
    host.close_episode((99, 0, 0))
    host.close_episode(A)
    with pytest.raises(ValueError, match="not open"):
        host.step(A, "+1")


def test_a_closed_episode_gives_no_answer_and_a_failing_close_hurts_nobody(host):
    start(host, A, payload="close raises")
    start(host, B)
    host.step(A, "+1")
    host.close_episode(A)
    host.step(B, "end 1")
    assert collect(host, 1)[B].step.reward == 1.0
    host.close()
    host.close()


@pytest.mark.parametrize("host_class", HOSTS)
def test_a_coroutine_over_its_limit_is_a_timeout(host_class):
    """Field case 36."""
    with closing(host_class(scripted, 0.2)) as host:
        start(host, A)
        host.step(A, "sleep 60")
        answer = collect(host, 1)[A]
        assert answer.error.kind == "timeout" and "limit of 0.2 s" in answer.error.message
        assert 0.2 <= answer.seconds < 1.2


GOOD = ([{"role": "user", "content": "more"}], 1, False, False, {"n": (1, 2)})


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "text", "list of messages"),
        (0, [{"role": "user"}], "list of messages"),
        (0, [{"role": "assistant", "content": "mine"}], "role of system, user, tool"),
        (0, [{"role": "user", "content": 3}], "list of messages"),
        (0, [], "no message though the episode goes on"),
        (1, None, "reward None"),
        (1, math.nan, "reward nan"),
        (1, math.inf, "finite"),
        (4, None, "must be a dict"),
        (4, {"x": {1, 2}}, "set is not JSON serializable"),
        (4, {"x": math.nan}, "JSON"),
        (None, None, "step returned None"),
        (None, (1, 2), "return Step("),
    ],
)
@pytest.mark.parametrize("host_class", HOSTS)
def test_a_step_that_does_not_fit_is_an_error_that_says_what_to_return(host_class, place, value, message):
    step = value if place is None else (*GOOD[:place], value, *GOOD[place + 1 :])
    with closing(host_class(returns, 5.0)) as host:
        start(host, A, payload=step)
        host.step(A, "go")
        error = collect(host, 1)[A].error
        assert error.kind == "ProtocolError" and message in error.message


@pytest.mark.parametrize("host_class", HOSTS)
def test_a_plain_tuple_is_a_step_with_plain_values(host_class):
    with closing(host_class(returns, 5.0)) as host:
        start(host, A, payload=GOOD)
        host.step(A, "go")
        step = collect(host, 1)[A].step
        assert step == Step(GOOD[0], 1.0, False, False, {"n": [1, 2]}) and isinstance(step.reward, float)
