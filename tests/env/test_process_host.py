"""Environments in their own process: what hangs or crashes is stopped and named, the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.env import environments
from tests.env.environments import example, scripted
from tests.env.hosts import collect, one, start
from zerogap.env import process_host
from zerogap.env.host import HostError
from zerogap.env.process_host import ProcessHost

LIMIT_S = 0.5
A, B, C = (0, 0, 0), (0, 1, 0), (0, 2, 0)


@contextmanager
def host_of(load=scripted, seconds=LIMIT_S, **options):
    with closing(ProcessHost(load, seconds, **options)) as host:
        yield host


def again(episode):
    return (*episode[:2], episode[2] + 1)


def process_of(host, episode=(9, 9, 9)):
    """The process's id, told by an environment."""
    start(host, episode)
    pid = one(host, episode, "pid").step.info["pid"]
    host.close_episode(episode)
    return pid


def gone(pid, within_s=3.0):
    """Ended and, if it was ours, waited for: no zombie either."""
    deadline = time.monotonic() + within_s
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if state[0] == "Z" and int(state[1]) != os.getpid():
            return True  # not our child: whoever adopted it has not waited yet
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_calls_that_compute_for_ever_are_killed_at_their_limit_and_the_others_are_lost():
    """Field cases 37 and 38: no coroutine's limit can stop them."""
    with host_of() as host:
        for group, deed in enumerate(("spin", "spin_natively", "in_task", "compute 60")):
            waiting, guilty, idle = episodes = [(group, sample, 0) for sample in range(3)]
            start(host, *episodes)
            before = process_of(host)
            began = time.monotonic()
            host.step(waiting, "sleep 30")
            host.step(guilty, deed)
            answers = collect(host, 2)
            assert LIMIT_S <= time.monotonic() - began < LIMIT_S + 2.0
            named = f"step of episode {guilty}"
            assert answers[guilty].error.kind == "timeout" and named in answers[guilty].error.message
            assert answers[waiting].error.kind == "lost" and named in answers[waiting].error.message
            assert one(host, idle, "turn 1").error.kind == "lost"  # between two calls: its state is gone, too
            assert gone(before)
            for episode in episodes:
                host.close_episode(episode)
        start(host, again(idle))
        assert one(host, again(idle), "end 1").step.reward == 1.0


def test_one_of_64_that_awaits_for_ever_does_not_disturb_the_others():
    """Field case 36."""
    with host_of() as host:
        episodes = [(group, sample, 0) for group in range(8) for sample in range(8)]
        start(host, *episodes)
        for episode in episodes:
            host.step(episode, "sleep 60" if episode == (3, 3, 0) else "end 1")
        answers = collect(host, 64)
        assert answers.pop((3, 3, 0)).error.kind == "timeout"
        assert all(answer.error is None and answer.step.reward == 1.0 for answer in answers.values())


def test_the_time_in_which_others_compute_is_not_charged():
    with host_of() as host:
        episodes = [(0, sample, 0) for sample in range(5)]
        start(host, *episodes)
        for episode in episodes:
            host.step(episode, "compute 0.3")  # one after the other, 1.5 s in all
        assert all(answer.error is None for answer in collect(host, 5).values())


@pytest.mark.parametrize("deed", ["in_thread", "uncancelled"])
def test_what_goes_on_after_its_limit_is_stopped_with_the_process(deed):
    with host_of() as host:
        start(host, A, B)
        before = process_of(host)
        assert one(host, A, deed).error.kind == "timeout"
        host.close_episode(A)
        deadline = time.monotonic() + 5
        while (answer := one(host, B, "turn 1")).error is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answer.error.kind == "lost" and "cancelled in vain" in answer.error.message
        assert gone(before)


def test_code_outside_of_any_call_that_hangs_is_noticed(monkeypatch):
    monkeypatch.setattr(process_host, "SILENT_S", 0.5)
    with host_of() as host:
        start(host, A)
        host.step(A, "in_callback")
        while (answer := one(host, A, "turn 1") if host.results(0.3) else None) is None:
            pass
        assert answer.error.kind == "lost"


def test_a_call_that_ends_the_process_is_named_and_the_others_are_lost(monkeypatch):
    monkeypatch.setattr(process_host, "MOST_DEATHS", 2)
    with host_of(seconds=10.0) as host:
        start(host, A, B)
        host.step(A, "sleep 30")
        host.step(B, "abort")
        answers = collect(host, 2)
        assert answers[A].error.kind == "lost"
        assert answers[B].error.kind == "crashed" and "SIGABRT" in answers[B].error.message
        start(host, again(B))
        assert "exit code 7" in one(host, again(B), "exit 7").error.message
        start(host, C)
        named = r"step of episode \(0, 1, 0\).*exit code 7.*step of episode \(0, 2, 0\).*SIGABRT"
        with pytest.raises(HostError, match=f"ended 3 times in 60 s.*{named}"):
            one(host, C, "abort")


def test_sys_exit_ends_the_episode_only():
    with host_of() as host:
        start(host, A, B)
        assert one(host, A, "leave 1").error.kind == "SystemExit"
        assert one(host, B, "end 1").step.reward == 1.0


def test_killed_from_outside_all_are_lost_and_a_new_process_answers():
    """Field cases 36 and R9."""
    with host_of(seconds=10.0) as host:
        start(host, A, B)
        host.step(A, "sleep 30")
        host.step(B, "sleep 30")
        pid = process_of(host)
        os.kill(pid, signal.SIGKILL)
        answers = collect(host, 2)
        assert [answers[e].error.kind for e in (A, B)] == ["lost", "lost"]
        assert "SIGKILL" in answers[A].error.message
        assert gone(pid)
        start(host, again(A))
        assert process_of(host) != pid


def test_closing_leaves_nothing_behind(tmp_path):
    host = ProcessHost(scripted, LIMIT_S)
    start(host, A)
    start(host, B, payload="close spins")
    file = tmp_path / "pid"
    one(host, A, f"child {file}")
    pids = [process_of(host), int(file.read_text())]
    host.close()
    host.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(HostError, match="closed"):
        host.results(0.0)


@pytest.mark.parametrize("deed", ["sleep 30", "spin_natively"])
def test_the_process_dies_with_its_parent(deed):
    """Field case 36: no orphan, whatever it is doing."""
    program = f"""
import os, time
from tests.env.environments import example, scripted
from zerogap.env.process_host import ProcessHost
host = ProcessHost(scripted, 600.0)
host.reset((0, 0, 0), example())
host.results(30.0)
host.step((0, 0, 0), "pid")
print(host.results(30.0)[0].step.info["pid"], flush=True)
host.step((0, 0, 0), "{deed}")
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)  # it has begun
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_running_call_is_cancelled_when_its_episode_is_closed():
    with host_of(seconds=30.0) as host:
        start(host, A, B)
        host.step(A, "sleep 20")
        host.close_episode(A)
        host.step(B, "end 1")
        assert list(collect(host, 1)) == [B]
        began = time.monotonic()
    assert time.monotonic() - began < process_host.CLOSE_S  # closing did not wait for it


class Unreadable:
    """Pickles here, fails to unpickle there."""

    def __reduce__(self):
        return environments.raise_error, ("unpickling",)


def test_a_value_that_cannot_be_sent_or_read_is_an_error_of_its_episode_only():
    class Local:
        pass

    with host_of() as host:
        host.reset(A, example(Local(), prompt_id=7))
        host.reset(B, example(Unreadable()))
        host.reset(C, example())
        answers = collect(host, 3)
        assert "payload of prompt 7" in answers[A].error.message
        assert answers[B].error.kind == "ZeroDivisionError" and answers[C].error is None
        host.close_episode(A)


def test_prints_go_to_stderr_and_do_not_disturb(capfd):
    with host_of() as host:
        start(host, A)
        assert one(host, A, "print xyz").error is None
        assert one(host, A, "end 1").step.reward == 1.0
    out, err = capfd.readouterr()
    assert out == "" and "xyzxyz" in err


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (environments.unloadable, r"could not be loaded: task\.file my\.py:3: no luck"),
        (environments.raising, r"KeyError: 'missing' \(environments\.py:\d+ in raising\)"),
        (environments.exiting, "loading the environments: .*exit code 3"),
    ],
)
def test_environments_that_do_not_load_end_the_start_with_the_reason(load, message):
    with pytest.raises(HostError, match=message):
        ProcessHost(load, LIMIT_S)


def test_environments_that_load_for_ever_end_the_start():
    with pytest.raises(HostError, match=r"could not be loaded: not done after 1 s"):
        ProcessHost(environments.endless, LIMIT_S, start_s=1.0)


def test_a_long_queue_neither_blocks_the_caller_nor_is_lost():
    with host_of(seconds=20.0) as host:
        start(host, A)
        host.step(A, "compute 1")
        began = time.monotonic()
        for sample in range(200):
            host.reset((1, sample, 0), example("x" * 10_000))
        assert time.monotonic() - began < 0.9
        assert all(answer.error is None for answer in collect(host, 201).values())
