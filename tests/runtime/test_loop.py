"""The loop and the lag bound, through any worker timing in virtual time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fakes import FakeBackend, Timing, fake_trajectory, lags, run, timings
from zerogap.runtime import loop, meter
from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.runtime.queue import TrajectoryQueue
from zerogap.trajectory import NOT_SAMPLED


def token_lags(backend: FakeBackend, start: int) -> list[int]:
    """Lag of every trained token."""
    return [
        start + k - version
        for k, groups in enumerate(backend.trained)
        for group in groups
        for trajectory in group.trajectories
        for version in trajectory.versions
        if version != NOT_SAMPLED
    ]


@settings(max_examples=150, deadline=None)
@given(timing=timings, lag=lags, beyond=st.booleans(), batch=st.integers(1, 5), updates=st.integers(1, 12))
def test_lag_bound_nothing_dropped_no_deadlock(
    timing: Timing, lag: int, beyond: bool, batch: int, updates: int
) -> None:
    """Claims 1 to 4 of admission.py for any timing; field cases 25 and R3 (a resume at version 100 included).
    beyond: more updates than twice the lag, so that the bound can be reached."""
    updates += 2 * lag * beyond
    first, last = timing.start, timing.start + updates
    groups = range(first * batch, last * batch)
    backend = timing.backend(groups)
    lines = run(backend, lag, batch, first, last)

    assert len(lines) == updates
    assert [group.group_id for update in backend.trained for group in update] == list(groups)  # each once, in order
    assert max(token_lags(backend, first)) <= lag
    assert min(token_lags(backend, first)) >= 0
    assert backend.most_alive <= (lag + 1) * batch
    assert backend.alive == 0


def test_lag_zero_is_synchronous() -> None:
    backend = FakeBackend(seed=3, engines=3, longest_delay=9, longest_update=9, ticks=lambda g: 1 + g % 5)
    run(backend, lag=0, batch=4, start=0, updates=10)
    assert set(token_lags(backend, 0)) == {0}


@settings(max_examples=100, deadline=None)
@given(timing=timings, lag=lags, batch=st.integers(1, 4), updates=st.integers(1, 12))
def test_a_held_lag_is_exact(timing: Timing, lag: int, batch: int, updates: int) -> None:
    """Each batch is of one version and trained `lag` updates later; the first ones as early as they come."""
    first, last = timing.start, timing.start + updates + lag
    backend = timing.backend(range(first * batch, last * batch))
    run(backend, lag, batch, first, last, hold_lag=True)
    for done, groups in enumerate(backend.trained):
        versions = {v for group in groups for t in group.trajectories for v in t.versions if v != NOT_SAMPLED}
        assert versions == {first + max(0, done - lag)}


@pytest.mark.parametrize("lag", [5, 64])
def test_bound_is_reached_when_the_learner_is_slow(lag: int) -> None:
    """The bound does not hold merely because engines never run ahead."""
    backend = FakeBackend(seed=1, engines=4, longest_update=60)
    run(backend, lag, batch=2, start=0, updates=2 * lag + 10)
    assert max(token_lags(backend, 0)) == lag


def test_slow_tasks_keep_their_share() -> None:
    """Field case 25: half of the tasks take 1 tick, half 20; lag 2; 50 updates. Nothing is discarded."""
    backend = FakeBackend(seed=0, engines=2, ticks=lambda g: 20 if g % 2 else 1)
    lines = run(backend, lag=2, batch=8, start=0, updates=50)
    for groups in backend.trained:
        assert sum(group.group_id % 2 for group in groups) == 4
    assert all(line["dropped"] == 0 for line in lines)


def test_engine_that_ignores_min_version_is_caught() -> None:
    """The bound is verified on what is trained, not only argued."""
    backend = FakeBackend(
        seed=0, engines=3, longest_delay=80, longest_update=1, ticks=lambda g: 2, obeys_min_version=False
    )
    with pytest.raises(RunFailed, match=r"over train.lag 0"):
        run(backend, lag=0, batch=2, start=0, updates=30)


def test_receiver_blocked_for_two_updates_ends_at_the_newest() -> None:
    """Field case 40: weights that arrive very late neither stop the run nor pin the engine to old ones."""
    backend = FakeBackend(seed=5, engines=2, longest_delay=200, longest_update=1)
    run(backend, lag=4, batch=1, start=0, updates=40)
    newest = max(v for t in backend.trained[-1][0].trajectories for v in t.versions)
    assert newest >= 39 - 4


def test_silence_ends_the_run_and_names_the_groups() -> None:
    """Field case 40: no wait without limit."""
    backend = FakeBackend(seed=0, ticks=lambda g: 10**9 if g == 3 else 1, patience=50)
    with pytest.raises(RunFailed, match=r"waits for groups \[3\] of the next batch; groups with the engines: \[3"):
        run(backend, lag=1, batch=2, start=0, updates=5)


def test_queue_refuses_a_group_twice() -> None:
    queue = TrajectoryQueue(1, first_group=0)
    group = FinishedGroup(0, [fake_trajectory(0, [0])])
    queue.put(group)
    with pytest.raises(ValueError, match="group 0 arrived twice"):
        queue.put(group)
    assert queue.take() == [group]
    with pytest.raises(ValueError, match="group 0 arrived twice"):
        queue.put(group)


def test_waits_are_attributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of metrics says who waited for whom: at lag 0 a group of 5 ticks and an update of 1 follow each other."""
    backend = FakeBackend(seed=0, ticks=lambda g: 5)
    clock = SimpleNamespace(monotonic=lambda: float(backend.now))
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(meter, "time", clock)
    lines = run(backend, lag=0, batch=1, start=0, updates=3)
    waits = [(line["wait/rollout_s"], line["wait/learner_s"], line["time/step_s"]) for line in lines]
    assert waits == [(5.0, 1.0, 6.0)] * 3
    assert {(line["queue/in_flight"], line["queue/finished"]) for line in lines} == {(0, 0)}
