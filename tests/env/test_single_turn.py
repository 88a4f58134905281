"""A task as an environment: one step, the grade as reward, the grader's failure as an error."""

import time
from contextlib import closing
from functools import partial

from zerogap import config
from zerogap.env.environment import Step
from zerogap.env.local_host import LocalHost
from zerogap.env.make import make_environments
from zerogap.env.process_host import ProcessHost
from zerogap.env.task import make_task

EPISODE = (0, 0, 0)


def play(settings, action):
    example = make_task(settings).example(0)
    with closing(LocalHost(partial(make_environments, settings), 10.0)) as host:
        host.reset(EPISODE, example)
        host.step(EPISODE, action(example))
        reset, step = host.results(0.0)
    assert reset.messages == example.messages
    return step


def test_the_grade_is_the_reward_of_the_only_step():
    settings = config.Task(name="chain_sum", answer_pattern=r"= (\S+)")
    assert play(settings, lambda e: f"= {e.payload['answer']}").step == Step([], 1.0, True, False, {})
    assert play(settings, lambda e: "no answer").step == Step([], 0.0, True, False, {})


def test_a_failing_grader_is_an_error_by_the_class_of_its_cause(tmp_path, monkeypatch):
    """Field case 37."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "72"}\n')
    from zerogap.env import jsonl

    def fail(*args, **kwargs):
        raise RecursionError("deep")

    monkeypatch.setattr(jsonl, "verify", fail)
    answer = play(config.Task(jsonl=str(path)), lambda e: "72")
    assert answer.step is None and answer.error.kind == "RecursionError"
    assert "prompt 0" in answer.error.message and "deep" in answer.error.message


def test_an_answer_on_which_math_verify_never_ends_is_stopped_at_the_limit(tmp_path):
    """Field case 37: sympy computes 9^(9^9), holding Python's lock."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "72"}\n')
    settings = config.Task(jsonl=str(path))
    example = make_task(settings).example(0)
    limit_s = 4.0
    with closing(ProcessHost(partial(make_environments, settings), limit_s)) as host:

        def grade(sample, text):
            for call in (host.reset, host.step):
                call((0, sample, 0), example if call == host.reset else text)
                (answer,) = host.results(30.0)
            return answer

        assert grade(0, "$72$").step.reward == 1.0
        began = time.monotonic()
        assert grade(1, "$9^{9^{9}}$").error.kind == "timeout"
        assert time.monotonic() - began < limit_s + 2.0
        assert grade(2, "$71$").step.reward == 0.0
