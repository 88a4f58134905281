"""Errors of episodes by class, and the share that ends a run (field cases 37 and R8)."""

from __future__ import annotations

import pytest

from tests.runtime.fakes import fake_trajectory
from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.runtime.failures import error_statistics


def groups(*errors: str | None) -> list[FinishedGroup]:
    return [FinishedGroup(0, [fake_trajectory(0, [0], i, error=error) for i, error in enumerate(errors)])]


def test_errors_are_counted_by_class() -> None:
    found = error_statistics(groups("timeout: 5 s", None, "KeyError: 'x' (env.py:3 in step)", "timeout: 5 s"), most=1.0)
    assert found == {"errors/KeyError": 1.0, "errors/timeout": 2.0}
    assert error_statistics(groups(None, None), most=0.0) == {}


def test_segments_of_an_episode_are_one_error() -> None:
    segments = [fake_trajectory(0, [0], 0, segment=s, error="lost: x") for s in range(3)]
    found = error_statistics([FinishedGroup(0, [*segments, fake_trajectory(0, [0], 1)])], most=0.5)
    assert found == {"errors/lost": 1.0}


def test_too_many_end_the_run() -> None:
    with pytest.raises(RunFailed, match=r"2 of 4 episodes .*\(2 timeout\).*max_error_share 0.4 .*first: timeout: 5 s"):
        error_statistics(groups("timeout: 5 s", None, None, "timeout: 6 s"), most=0.4)
