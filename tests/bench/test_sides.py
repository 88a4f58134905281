"""Sides in child processes: by turns, pinned to the same cores, ended with the block; a dead one says why it died."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from zerogap.bench.sides import SideFailed, by_turns, cores, cpu_share, median, running

SERVE = """
import os, sys
from zerogap.bench.serve import Channel
channel = Channel()
print("noise on stdout")
facts = {"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "threads": os.environ["OMP_NUM_THREADS"]}
def run(number):
    with open(sys.argv[1], "a") as log:
        log.write(f"{sys.argv[2]}{number} ")
    return {"double": 2 * number}
channel.serve(run, **facts)
"""


def command(log: Path, name: str) -> list[str]:
    return [sys.executable, "-c", SERVE, str(log), name]


def test_sides_answer_by_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said: list[str] = []
    with running({"a": command(log, "a"), "b": command(log, "b")}, 1, said.append) as sides:
        answers = by_turns(sides, 3, lambda number: {"number": number}, said.append)
        pids = [side.facts["pid"] for side in sides.values()]
        assert len({*pids, os.getpid()}) == 3
        assert [side.facts["cores"] for side in sides.values()] == [cores(1), cores(1)]
        assert {side.facts["threads"] for side in sides.values()} == {"1"}
    assert log.read_text().split() == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [answer["double"] for answer in answers["b"]] == [0, 2, 4]
    assert median(answers["b"], "double") == 2
    assert 0 < cpu_share(answers) <= 1.01
    assert all(answer["seconds"] > 0 for several in answers.values() for answer in several)
    assert said[:2] == ["loading a", "loading b"] and len(said) == 2 + 6
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_own_affinity_is_left_as_it_was(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with running({"a": command(tmp_path / "log", "a")}, 1, lambda _: None):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("when", ["loading", "asked"])
def test_a_dead_side_says_what_it_wrote(when: str) -> None:
    loading = "raise SystemExit('no such weights')"
    asked = "import sys; print('{}', flush=True); sys.stdin.readline(); raise SystemExit('no such weights')"
    script = {"loading": loading, "asked": asked}[when]
    with (
        pytest.raises(SideFailed, match=r"peer ended with exit code 1.*\n  no such weights"),
        running({"peer": [sys.executable, "-c", script]}, 1, lambda _: None) as sides,
    ):
        sides["peer"].ask({})


def test_the_other_side_is_ended_when_one_fails(tmp_path: Path) -> None:
    pids: list[int] = []
    commands = {"ours": command(tmp_path / "log", "a"), "peer": [sys.executable, "-c", "print('{}')"]}
    with pytest.raises(SideFailed, match="peer ended"), running(commands, 1, lambda _: None) as sides:
        pids.append(sides["ours"].facts["pid"])
        sides["peer"].ask({})
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
