"""Tasks from a Python file: what it must define, how params reach it, errors that name its lines."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from zerogap import config
from zerogap.env.environment import Step
from zerogap.env.host import HostError
from zerogap.env.local_host import LocalHost
from zerogap.env.make import make_environments
from zerogap.env.process_host import ProcessHost
from zerogap.env.task import GradeError, TaskError, make_task

DOCUMENT = Path(__file__).parents[2] / "docs" / "environments.md"
EPISODE = (0, 0, 0)

EXAMPLES = """
def examples(low=0, size=10, seed=0):
    return [{"question": f"{i}?", "payload": {"n": i + low}, "solution": str(i + low)} for i in range(size)]
"""
GRADE = """
def grade(payload, text):
    return float(int(text) == payload["n"])
"""
ENVIRONMENT = """
class Environment:
    def __init__(self, bonus=0.0):
        self.bonus = bonus
    async def reset(self, example):
        return example.messages
    async def step(self, action):
        return [], 1.0 + self.bonus, True, False, {}
    async def close(self):
        pass
"""


def settings_of(tmp_path, *parts, **section):
    path = tmp_path / "mine.py"
    path.write_text("".join(parts))
    return config.Task(file=str(path), **section)


def error_of(settings):
    with pytest.raises(TaskError) as caught:
        make_task(settings)
    return str(caught.value)


def play(host, example, action, episode=EPISODE):
    host.reset(episode, example)
    answers = host.results(30.0)
    assert answers[0].messages == example.messages
    host.step(episode, action)
    (answer,) = host.results(30.0) if len(answers) == 1 else answers[1:]
    return answer


def test_a_file_with_a_grader_is_a_task_of_one_turn(tmp_path):
    settings = settings_of(tmp_path, EXAMPLES, GRADE, size=3, params={"low": 5}, instruction="Say it.")
    task = make_task(settings)
    assert len(task) == 3
    example = task.example(2)
    assert example.messages == [{"role": "user", "content": "2?\nSay it."}] and example.payload == {"n": 7}
    assert task.solution(example) == "7" and task.grade(example, "7") == 1.0 and task.grade(example, "8") == 0.0
    with closing(LocalHost(partial(make_environments, settings), 5.0)) as host:
        assert play(host, example, "7").step == Step([], 1.0, True, False, {})
        answer = play(host, example, "seven", (0, 1, 0))
        assert answer.error.kind == "ValueError" and "mine.py:" in answer.error.message
    with pytest.raises(GradeError, match=r"prompt 2.*'seven'"):
        task.grade(example, "seven")


def test_seed_and_size_reach_examples_and_params_reach_both(tmp_path):
    file = """
def examples(seed, size, tag):
    return [{"messages": [{"role": "user", "content": f"{tag} {seed} {size}"}]}]
"""
    settings = settings_of(tmp_path, file, ENVIRONMENT, seed=3, size=4, params={"tag": "x", "bonus": 0.5})
    task = make_task(settings)
    assert task.example(0).messages[0]["content"] == "x 3 4"
    with closing(LocalHost(partial(make_environments, settings), 5.0)) as host:
        assert play(host, task.example(0), "a").step.reward == 1.5
    with pytest.raises(TaskError, match=r"example 0 has no `solution`.*warm_start"):
        task.solution(task.example(0))


def test_a_file_beside_it_can_be_imported_in_both_processes(tmp_path):
    (tmp_path / "beside_it.py").write_text("def right(payload, text):\n    return 1.0\n")
    settings = settings_of(tmp_path, "from beside_it import right as grade\n", EXAMPLES)
    with closing(ProcessHost(partial(make_environments, settings), 5.0)) as host:
        assert play(host, make_task(settings).example(0), "a").step.reward == 1.0


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("x = 1\ndef examples(:\n", r"mine\.py:2: invalid syntax"),
        ("\nimport not_installed_anywhere\n", r"mine\.py:2: ModuleNotFoundError: .*; install it where zerogap runs"),
        ("x = 1\ny = x / 0\n", r"mine\.py:2: ZeroDivisionError"),
        (GRADE, r"mine\.py defines no function `examples`"),
        (EXAMPLES, r"defines neither of a function `grade\(payload, text\)`"),
        (EXAMPLES + GRADE + ENVIRONMENT, "defines both of"),
        ("examples = []\n" + GRADE, "`examples` is a list"),
        (EXAMPLES + "def grade(text):\n    return 1.0\n", r"mine\.py:4: it must take grade\(payload, text\)"),
        (EXAMPLES + "class Environment:\n    pass\n", r"mine\.py:4: class Environment lacks `async def reset"),
        (EXAMPLES + ENVIRONMENT.replace("async def step", "def step"), r"mine\.py:10: .* has step without async"),
        (EXAMPLES + ENVIRONMENT.replace("step(self, action)", "step(self)"), r"must take Environment\.step\(self, act"),
        ("def examples(must):\n    return []\n" + GRADE, r"mine\.py:1: task\.params do not fit examples: .*'must'"),
        ("def examples():\n    return []\n" + GRADE, r"mine\.py:1: examples returned none"),
        ("def examples():\n    yield {}\n" + GRADE, r"examples returned a generator; return a list"),
        ("def examples():\n    return [][1]\n" + GRADE, r"mine\.py:2: IndexError"),
        ("def examples():\n    return ['text']\n" + GRADE, r"example 0 is 'text'; give a dict with keys of question"),
        ("def examples():\n    return [{'questoin': ''}]\n" + GRADE, "give a dict with keys of question"),
        ("def examples():\n    return [{'payload': 1}]\n" + GRADE, "needs either `question`"),
        ("def examples():\n    return [{'question': 3}]\n" + GRADE, "`question` must be a text, got 3"),
        ("def examples():\n    return [{'messages': ['a']}]\n" + GRADE, "`messages` must be a list of"),
        ("def examples():\n    return [{'question': '', 'payload': {1}}]\n" + GRADE, "set is not JSON serializable"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(tmp_path, file, message):
    assert re.search(message, error_of(settings_of(tmp_path, file)))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"params": {"lo": 1}}, "task.params.lo: .*mine.py has no such parameter; did you mean 'low'?"),
        ({"params": {"seed": 1}}, "task.params.seed: write task.seed instead"),
        ({"max_turns": 3}, "task.max_turns: an episode of .*mine.py has one turn"),
    ],
)
def test_a_section_that_does_not_fit_the_file_is_refused(tmp_path, section, message):
    assert re.search(message, error_of(settings_of(tmp_path, EXAMPLES, GRADE, **section)))


def test_a_missing_file_is_named(tmp_path):
    assert "task.file absent.py does not exist" in error_of(config.Task(file="absent.py"))
    (tmp_path / "task.txt").write_text("")
    assert "must end in .py" in error_of(config.Task(file=str(tmp_path / "task.txt")))


def test_what_only_fails_in_the_process_ends_its_start_with_file_and_line(tmp_path):
    file = "import sys\nif 'zerogap.env.process.calls' in sys.modules and 'pytest' not in sys.modules:\n    1 / 0\n"
    settings = settings_of(tmp_path, file, EXAMPLES, GRADE)
    make_task(settings)
    with pytest.raises(HostError, match=r"could not be loaded: task\.file .*mine\.py:3: ZeroDivisionError"):
        ProcessHost(partial(make_environments, settings), 5.0)


def test_the_examples_of_the_document_run(tmp_path):
    reverse, guess = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    settings = settings_of(tmp_path, reverse, params={"length": 5}, size=50)
    task = make_task(settings)
    assert len(task) == 50 and task.grade(task.example(0), task.solution(task.example(0))) == 1.0

    settings = settings_of(tmp_path, guess, params={"highest": 20}, max_turns=6)
    example = make_task(settings).example(0)
    with closing(LocalHost(partial(make_environments, settings), 5.0)) as host:
        assert play(host, example, "0").step.observation == [{"role": "user", "content": "higher"}]
        host.step(EPISODE, "none")
        host.step(EPISODE, f" {example.payload} ")
        wrong, right = (answer.step for answer in host.results(0.0))
    assert wrong.reward == -0.1 and not wrong.terminated and not wrong.truncated
    assert right == Step([], 1.0, True, False, {"guessed": True})


def test_an_episode_that_would_go_on_is_truncated_at_max_turns(tmp_path):
    file = ENVIRONMENT.replace(
        "[], 1.0 + self.bonus, True", "[{'role': 'user', 'content': 'on'}], 0.25, action == 'end'"
    )
    settings = settings_of(tmp_path, EXAMPLES, file, max_turns=2)
    example = make_task(settings).example(0)
    with closing(LocalHost(partial(make_environments, settings), 5.0)) as host:
        assert play(host, example, "a").step == Step([{"role": "user", "content": "on"}], 0.25, False, False, {})
        host.step(EPISODE, "b")
        assert host.results(0.0)[0].step == Step([], 0.25, False, True, {})
        play(host, example, "a", (0, 1, 0))
        host.step((0, 1, 0), "end")
        assert not host.results(0.0)[0].step.truncated  # its own end counts
