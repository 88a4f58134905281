"""Tasksets of the verifiers package: scored as that package scores them; what cannot run here is refused."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from functools import partial

import pytest

from zerogap import config
from zerogap.env.local_host import LocalHost
from zerogap.env.make import make_environments
from zerogap.env.task import TaskError, make_task

TASKSET = """
import itertools
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Mine(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def exact(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def short(self, trace) -> float:
        if trace.last_reply == "fail":
            raise KeyError("by hand")
        return 0.25

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))

class Config(vf.TasksetConfig):
    words: int = 3

class Set(vf.Taskset[Mine, Config]):
    def load(self):
        for i in range(self.config.words):
            yield Mine(Data(prompt=f"reverse {i}a", answer=f"a{i}"), self.config.task)

__all__ = ["Set"]
"""


def write(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_without_the_package_the_recipe_is_refused_with_the_fix(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(
        TaskError, match=r"'any' needs version 0.4 of the verifiers package.*pip install zerogap\[verifiers\]"
    ):
        make_task(config.Task(verifiers="any"))


@pytest.fixture
def package() -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed (pip install zerogap[verifiers])")


def test_a_taskset_is_scored_by_its_own_rewards(tmp_path, monkeypatch, package):
    write(tmp_path, monkeypatch, "vf_mine", TASKSET)
    settings = config.Task(verifiers="vf-mine", params={"words": 2}, instruction="Only the word.")
    task = make_task(settings)
    assert len(task) == 2
    example = task.example(1)
    assert example.messages == [{"role": "user", "content": "reverse 1a\nOnly the word."}]
    with closing(LocalHost(partial(make_environments, settings), 10.0)) as host:
        answers = {}
        for sample, action in enumerate(["a1", "a2", "fail"]):
            host.reset((0, sample, 0), example)
            host.step((0, sample, 0), action)
            answers[action] = host.results(0.0)[1]
    assert answers["a1"].step == ([], 0.75, True, False, {"exact": 1.0, "short": 0.25, "length": 2.0})
    assert answers["a2"].step.reward == 0.25
    assert answers["fail"].step is None and answers["fail"].error.kind == "KeyError"  # field case 37
    with pytest.raises(TaskError, match="leave out warm_start"):
        task.solution(example)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("async def exact(self, trace)", "async def exact(self, trace, runtime)", "its exact needs a runtime"),
        ("class Mine(vf.Task[Data]):", "class Mine(vf.Task[Data]):\n    NEEDS_CONTAINER = True", "needs a container"),
        ("range(self.config.words)", "[]", "yields no task"),
        ('prompt=f"reverse {i}a", ', "", "task 0 has no prompt of texts"),
        ("__all__", "__none__", "cannot be loaded: .*__all__"),
    ],
)
def test_what_cannot_run_here_is_refused(tmp_path, monkeypatch, package, old, new, message):
    name = "vf_" + re.sub(r"\W", "_", message)
    assert old in TASKSET
    write(tmp_path, monkeypatch, name, TASKSET.replace(old, new))
    with pytest.raises(TaskError, match=message):
        make_task(config.Task(verifiers=name)).example(0)


def test_params_and_names_that_do_not_fit_are_refused(tmp_path, monkeypatch, package):
    write(tmp_path, monkeypatch, "vf_params", TASKSET)
    with pytest.raises(TaskError, match=r"(?s)task.params do not fit the taskset 'vf_params'.*wrods"):
        make_task(config.Task(verifiers="vf_params", params={"wrods": 2}))
    with pytest.raises(TaskError, match="'vf_not_there' cannot be loaded"):
        make_task(config.Task(verifiers="vf_not_there"))


def test_a_taskset_without_end_is_cut_to_size(tmp_path, monkeypatch, package):
    endless = TASKSET.replace("range(self.config.words)", "itertools.count()")
    write(tmp_path, monkeypatch, "vf_endless", endless.replace("    def load", "    INFINITE = True\n    def load"))
    assert len(make_task(config.Task(verifiers="vf_endless", size=7))) == 7
