"""Ctrl-C and SIGTERM in the middle of a run: it ends as it should, and says where --resume goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.support import Recorder, metrics, tiny_recipe
from zerogap.runtime.train import train


def test_sigterm_is_an_interrupt(tiny_model: Path, tmp_path: Path) -> None:
    """A run ends on SIGTERM as on Ctrl-C, through the code that closes every process; the old handler is put back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        train(
            tiny_recipe(tiny_model), tmp_path / "run", observer=Recorder(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        )
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(metrics(tmp_path / "run")) == 1 and not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_swallowed_interrupt_still_ends_the_run(tiny_model: Path, tmp_path: Path, number: int) -> None:
    """Python drops a KeyboardInterrupt that is raised inside a destructor, as Ray's references have; the run ends with
    the next update all the same."""

    class Reference:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)  # the handler runs here, and what it raises is only printed

    def drop(line: dict[str, Any]) -> None:
        if line["step"] == 2:
            Reference()

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(tiny_model, train__updates=6), tmp_path / "run", observer=Recorder(drop))
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("every", "says"),
    [(1, "interrupted; --resume goes on from .*/checkpoints/step-000001$"), (0, "no.* go on from; checkpoint.every=0")],
)
def test_interrupt_says_where_resume_goes_on(tiny_model: Path, tmp_path: Path, every: int, says: str) -> None:
    def interrupt(line: dict[str, Any]) -> None:
        if line["step"] == 2:
            raise KeyboardInterrupt

    recorder = Recorder(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(tiny_model, checkpoint__every=every), tmp_path / "run", observer=recorder)
    assert len(recorder.warnings) == 1 and re.search(says, recorder.warnings[0])
