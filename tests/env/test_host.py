"""What every host does alike: answers, errors that are never rewards, the order of calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.env.environments import example, scripted
from tests.env.hosts import collect, start
from zerogap.env.environment import Step
from zerogap.env.host import Episode, Host
from zerogap.env.local_host import LocalHost
from zerogap.env.process_host import ProcessHost

HOSTS = [LocalHost, ProcessHost]
numbers = itertools.count()


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with closing(request.param(scripted, 10.0)) as made:
        yield made


@pytest.fixture
def a() -> Episode:
    return next(numbers), 0, 0


@pytest.fixture
def b() -> Episode:
    return next(numbers), 1, 0


def test_two_episodes_of_several_turns_have_their_own_state(host, a, b):
    start(host, a, b)
    host.step(a, "turn 0.5")
    assert collect(host, 1)[a].step == Step([{"role": "tool", "content": "1"}], 0.5, False, False, {})
    host.step(a, "end 1")
    host.step(b, "end 0")
    answers = collect(host, 2)
    assert answers[a].step == Step([], 1.0, True, False, {"turns": 2})
    assert answers[b].step == Step([], 0.0, True, False, {"turns": 1})
    assert answers[a].messages is None and answers[a].seconds >= 0


def test_an_exception_is_an_error_of_its_class_and_no_reward(host, a, b):
    """Field case 37."""
    start(host, a, b)
    host.step(a, "raise by hand")
    host.step(b, "end 1")
    answers = collect(host, 2)
    assert answers[a].step is None
    assert answers[a].error.kind == "ZeroDivisionError"
    assert "by hand (environments.py:" in answers[a].error.message and "in raise_error)" in answers[a].error.message
    assert answers[b].error is None and answers[b].step.reward == 1.0


def test_reset_may_fail_and_another_attempt_begins_anew(host, a):
    host.reset(a, example("raise"))
    assert collect(host, 1)[a].error.kind == "LookupError"
    host.close_episode(a)
    start(host, (a[0], 0, 1))


def test_opening_messages_that_the_policy_has_not_seen_are_refused(host, a):
    host.reset(a, example("other"))
    error = collect(host, 1)[a].error
    assert error.kind == "ProtocolError" and "'other'" in error.message and "'go'" in error.message


def test_the_order_of_calls_is_kept(host, a):
    with pytest.raises(ValueError, match="is not open"):
        host.step(a, "turn 1")
    start(host, a)
    with pytest.raises(ValueError, match="was reset before"):
        host.reset(a, example())
    host.close_episode((10**9, 0, 0))
    host.close_episode(a)
    with pytest.raises(ValueError, match="not open"):
        host.step(a, "turn 1")


def test_a_closed_episode_gives_no_answer_and_a_failing_close_hurts_nobody(host, a, b):
    start(host, a, payload="close raises")
    start(host, b)
    host.step(a, "turn 1")
    host.close_episode(a)
    host.step(b, "end 1")
    assert collect(host, 1)[b].step.reward == 1.0


def test_an_environment_that_cancels_itself_is_an_error(host, a):
    start(host, a)
    host.step(a, "cancels_itself")
    assert collect(host, 1)[a].error.kind == "CancelledError"


def test_any_text_reaches_the_environment(host, a):
    start(host, a)
    host.step(a, "raise \ud800 ж \x00")
    assert "\ud800 ж \x00" in collect(host, 1)[a].error.message


@pytest.mark.parametrize("host_class", HOSTS)
def test_a_coroutine_over_its_limit_is_a_timeout(host_class, a):
    """Field case 36."""
    with closing(host_class(scripted, 0.2)) as host:
        start(host, a)
        host.step(a, "sleep 60")
        answer = collect(host, 1)[a]
        assert answer.error.kind == "timeout" and "limit of 0.2 s" in answer.error.message
        assert 0.2 <= answer.seconds < 1.2
    host.close()


GOOD = ([{"role": "user", "content": "more"}], 1, False, False, {"n": (1, 2)})


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, "text", "list of messages"),
        (0, [{"role": "user"}], "list of messages"),
        (0, [{"role": "assistant", "content": "mine"}], "role of system, user, tool"),
        (0, [{"role": "user", "content": 3}], "list of messages"),
        (0, [{"role": "user", "content": "\udcff"}], "valid Unicode"),
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
def test_a_step_that_does_not_fit_is_an_error_that_says_what_to_return(host, a, place, value, message):
    start(host, a, payload=value if place is None else (*GOOD[:place], value, *GOOD[place + 1 :]))
    host.step(a, "return")
    error = collect(host, 1)[a].error
    assert error.kind == "ProtocolError" and message in error.message


def test_a_plain_tuple_is_a_step_with_plain_values(host, a):
    start(host, a, payload=GOOD)
    host.step(a, "return")
    step = collect(host, 1)[a].step
    assert step == Step(GOOD[0], 1.0, False, False, {"n": [1, 2]}) and isinstance(step.reward, float)
