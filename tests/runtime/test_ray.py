"""The run on Ray: the same bits as inline, what listens, what dies, and what is left behind (nothing)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import zerogap
from tests.runtime.processes import alive, descendants, listening_addresses
from tests.runtime.support import Recorder, metrics, same_weights, tiny_recipe, trajectories
from zerogap.config import dump_recipe
from zerogap.runtime import ray_backend
from zerogap.runtime.backend import RunFailed, RunSetup
from zerogap.runtime.train import train


def process_id(run_dir: Path, name: str) -> int:
    """Of the newest process that wrote logs/<name>.log."""
    return int(re.findall(r"INFO process (\d+)", (run_dir / "logs" / f"{name}.log").read_text())[-1])


class Killer(Recorder):
    """Kills one process of the run after a given step."""

    def __init__(self, run_dir: Path, name: str, step: int) -> None:
        def kill(line: dict[str, Any]) -> None:
            if line["step"] == step:
                os.kill(process_id(run_dir, name), signal.SIGKILL)

        super().__init__(kill)


def test_ray_equals_inline_and_stays_on_loopback(tiny_model: Path, tmp_path: Path) -> None:
    """lag 0: bitwise the same final weights. Every port of every process is on loopback; no process is left."""
    addresses: set[str] = set()
    children: set[int] = set()

    def look(line: dict[str, Any]) -> None:
        found = descendants(os.getpid())
        children.update(found)
        addresses.update(listening_addresses([os.getpid(), *found]))

    changes = {"rollout__workers": 2, "logging__tensorboard": True}
    train(tiny_recipe(tiny_model, **changes), tmp_path / "inline")
    summary = train(
        tiny_recipe(tiny_model, runtime__driver="ray", **changes), tmp_path / "ray", observer=Recorder(look)
    )
    assert same_weights(tmp_path / "inline", tmp_path / "ray")
    assert summary["bits_unequal"] == 0 and summary["bits_checked"] > 100 and summary["lag_max"] == 0
    assert addresses == {"127.0.0.1"}
    assert len(children) > 4 and not ray.is_initialized() and alive(sorted(children)) == []
    logs = {path.name for path in (tmp_path / "ray" / "logs").iterdir()}
    assert logs == {"driver.log", "learner.log", "rollout-0.log", "rollout-1.log"}
    same = ("reward/mean", "loss/policy", "grad_norm", "tokens/trained", "bitwise/checked")
    for left, right in zip(metrics(tmp_path / "inline"), metrics(tmp_path / "ray"), strict=True):
        assert [left[key] for key in same] == [right[key] for key in same]
    assert sum(line.get("environment/seconds", 0.0) for line in metrics(tmp_path / "ray")) > 0


@pytest.fixture(scope="module")
def shared_ray(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for the tests below; a backend leaves a Ray that it did not start."""
    recipe = tiny_recipe(tiny_model, rollout__workers=2)
    assert ray_backend.start_ray(RunSetup(recipe, tmp_path_factory.mktemp("ray"), tiny_model))
    yield
    ray.shutdown()


@pytest.mark.usefixtures("shared_ray")
def test_refused_start_leaves_no_process(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a Ray that goes on: nothing but the backend would end its actors."""
    run_dir = tmp_path / "run"
    started: list[int] = []

    def refuse(*args: Any) -> None:
        started.extend(process_id(run_dir, name) for name in ("learner", "rollout-0"))
        raise RunFailed("refused")

    monkeypatch.setattr(ray_backend, "check_identities", refuse)
    with pytest.raises(RunFailed, match="refused") as caught:
        train(tiny_recipe(tiny_model, runtime__driver="ray"), run_dir)
    assert len(started) == 2 and alive(started) == []
    assert ray.is_initialized() and caught.tb is not None  # the traceback keeps every handle: Ray drops no actor itself


@pytest.mark.usefixtures("shared_ray")
def test_dead_engine_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    """A worker is killed with groups in flight at lag 8: they are sampled anew, none is lost or trained twice, and
    no bit is wrong (field cases 21, 22, 40)."""
    run_dir = tmp_path / "run"
    killer = Killer(run_dir, "rollout-1", step=2)
    # Groups are large enough that the killed worker has some left.
    recipe = tiny_recipe(
        tiny_model,
        runtime__driver="ray",
        rollout__workers=2,
        rollout__max_new_tokens=40,
        train__lag=8,
        train__updates=14,
    )
    summary = train(recipe, run_dir, observer=killer)
    assert summary["updates"] == 14 and summary["bits_unequal"] == 0 and summary["bits_checked"] > 1000
    assert 0 < summary["lag_max"] <= 8 and summary["dropped"] == 0
    assert Counter(t["group_id"] for t in trajectories(run_dir)) == dict.fromkeys(range(14 * 3), 4)
    assert metrics(run_dir)[-1]["queue/restarts"] == 1
    assert "a rollout worker died and was started again" in killer.warnings[0]
    assert "rollout worker 1 died" in (run_dir / "logs" / "driver.log").read_text()
    assert alive([process_id(run_dir, name) for name in ("learner", "rollout-0", "rollout-1")]) == []
    assert ray.is_initialized()


@pytest.mark.usefixtures("shared_ray")
def test_engine_that_keeps_dying_ends_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restarts are limited, and the error names the groups that wait."""
    monkeypatch.setattr(ray_backend, "MAX_RESTARTS", 0)
    run_dir = tmp_path / "run"
    recipe = tiny_recipe(tiny_model, runtime__driver="ray", rollout__max_new_tokens=40, train__lag=1)
    with pytest.raises(RunFailed, match=r"rollout worker 0 died 1 times; unfinished groups: \[\d+.*logs/rollout-0.log"):
        train(recipe, run_dir, observer=Killer(run_dir, "rollout-0", step=1))
    assert alive([process_id(run_dir, "learner")]) == []


@pytest.mark.usefixtures("shared_ray")
def test_dead_learner_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    """Field case 21 (the sender is killed): no engine goes on with half of an update; the run says how to go on, and
    does so from its checkpoint to the bits of an undisturbed run."""
    run_dir = tmp_path / "run"
    recipe = tiny_recipe(tiny_model, runtime__driver="ray", checkpoint__every=1)
    with pytest.raises(RunFailed, match=r"learner's process died during (the update|a checkpoint); go on .* --resume"):
        train(recipe, run_dir, observer=Killer(run_dir, "learner", step=2))
    assert alive([process_id(run_dir, "rollout-0")]) == []
    train(tiny_recipe(tiny_model), run_dir, resume=True)
    train(tiny_recipe(tiny_model), tmp_path / "whole")
    assert same_weights(run_dir, tmp_path / "whole")


def test_interrupt_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    """Ctrl-C (to the whole process group, as a terminal sends it): exit code 130, every process of the run gone."""
    recipe = tiny_recipe(tiny_model, runtime__driver="ray", train__updates=100_000, train__lag=1)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    run_dir = tmp_path / "run"
    source = str(Path(zerogap.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "zerogap.cli", "train", str(tmp_path / "recipe.yaml"), "--output-dir", str(run_dir)],
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        lines = run_dir / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (lines.is_file() and lines.stat().st_size):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = descendants(process.pid)
        assert len(children) > 3
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, process.communicate()[1]
        assert alive(children) == []
        assert not (run_dir / "summary.json").exists()
    finally:
        process.kill()
        process.communicate()
