"""The weight store: what it keeps is what a living token may name, bit for bit, in memory or on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.runtime.fakes import FakeBackend, Timing, lags, run, timings
from tests.runtime.support import Recorder, metrics, same_weights, tiny_recipe
from zerogap.runtime.backend import FinishedGroup, RunFailed, RunSetup
from zerogap.runtime.inline import InlineBackend, build_inline_backend
from zerogap.runtime.living import Living
from zerogap.runtime.train import train
from zerogap.runtime.weight_store import WeightStore
from zerogap.trajectory import NOT_SAMPLED

EVERYTHING = Living(frozenset(), 0)
NOTHING = Living(frozenset(), None)


def snapshot(version: int) -> dict[str, torch.Tensor]:
    """12 bytes."""
    return {"a": torch.tensor([float(version), -0.0]), "b": torch.tensor([version, torch.nan], dtype=torch.bfloat16)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("budget", "in_memory"), [(0, 1), (24e-6, 3), (25e-6, 3), (1, 10)])
def test_a_budget_decides_what_is_on_disk(tmp_path: Path, budget: float, in_memory: int) -> None:
    """The newest and the oldest that fit are in memory; the rest are files with the same bits and dtypes."""
    store = WeightStore(tmp_path, budget, 0, snapshot(0))
    for version in range(1, 10):
        store.put(version, snapshot(version), EVERYTHING)
    assert store.versions() == list(range(10))
    assert all(same(store[version], snapshot(version)) for version in range(10))
    held = store.metrics()
    assert held["weight_store/versions"] == 10 and held["weight_store/memory_bytes"] == 12 * in_memory
    files = list(tmp_path.glob("weight_store/*"))
    assert len(files) == 10 - in_memory
    assert held["weight_store/disk_bytes"] == sum(file.stat().st_size for file in files)
    assert (held["weight_store/write_ms"] > 0) == (held["weight_store/read_ms"] > 0) == bool(files)
    assert store.metrics()["weight_store/read_ms"] == 0  # since the last call


def test_what_nobody_names_is_freed(tmp_path: Path) -> None:
    """In memory and on disk; a version that a waiting token names outlives newer ones."""
    store = WeightStore(tmp_path, 12e-6, 0, snapshot(0))
    for version in range(1, 6):
        store.put(version, snapshot(version), EVERYTHING)
    store.put(6, snapshot(6), Living(frozenset({0, 2}), 4))
    assert store.versions() == [0, 2, 4, 5, 6]
    with pytest.raises(KeyError, match=r"version 3 are not kept \(held: \[0, 2, 4, 5, 6\]\)"):
        store[3]
    store.put(7, snapshot(7), NOTHING)
    assert store.versions() == [7] and not list(tmp_path.glob("weight_store/*"))
    assert store.metrics()["weight_store/write_ms"] > 0  # version 6 was dropped, not written


def test_a_disk_that_refuses_ends_the_run_with_the_keys_to_turn(tmp_path: Path) -> None:
    (tmp_path / "weight_store").write_text("in the way")
    store = WeightStore(tmp_path, 0, 0, snapshot(0))
    with pytest.raises(RunFailed, match=r"version 0 could not be kept .*audit.weights_memory_mb.*audit.share"):
        store.put(1, snapshot(1), EVERYTHING)


class Auditor:
    """Does with each request for an update what the learner does: score the batch's versions, then add the next."""

    def __init__(self, folder: str, lag: int, memory_mb: float, version: int) -> None:
        self.lag, self.version = lag, version
        self.store = WeightStore(Path(folder), memory_mb, version, snapshot(version))
        self.most_kept = 0

    def on_train(self, groups: list[FinishedGroup], living: Living) -> None:
        named = {v for group in groups for t in group.trajectories for v in t.versions} - {NOT_SAMPLED}
        for version in named:
            assert same(self.store[version], snapshot(version))
        self.version += 1
        self.store.put(self.version, snapshot(self.version), living)
        kept = self.store.versions()
        assert all(living.names(version) for version in kept[:-1]) and kept[-1] == self.version
        assert len(kept) <= self.lag + 1
        self.most_kept = max(self.most_kept, len(kept))


@settings(max_examples=80, deadline=None)
@given(
    timing=timings,
    lag=lags,
    batch=st.integers(1, 4),
    updates=st.integers(1, 40),
    deaths=st.sampled_from([0.0, 0.01]),
    memory_mb=st.sampled_from([0.0, 36e-6, 1.0]),
)
def test_every_named_version_is_kept_and_no_other(
    timing: Timing, lag: int, batch: int, updates: int, deaths: float, memory_mb: float
) -> None:
    """The claims of living.py for any timing: late groups, engines that die, messages that overtake each other, and a
    start at version 100 as after a resume."""
    first, last = timing.start, timing.start + updates
    with tempfile.TemporaryDirectory() as folder:
        auditor = Auditor(folder, lag, memory_mb, first)
        backend = timing.backend(range(first * batch, last * batch), deaths=deaths, on_train=auditor.on_train)
        run(backend, lag, batch, first, last)
        assert auditor.version == last
        assert auditor.store.versions() == [auditor.version]  # nothing lives, nothing older is kept


def test_versions_go_before_the_lag_bound_when_no_token_names_them(tmp_path: Path) -> None:
    """A wide window that the engines do not use costs no memory: they sample shortly before the update."""
    auditor = Auditor(str(tmp_path), lag=64, memory_mb=1.0, version=0)
    run(FakeBackend(seed=0, ticks=lambda g: 6, on_train=auditor.on_train), lag=64, batch=1, start=0, updates=200)
    assert auditor.most_kept == 65  # while the first window of groups is unfinished, version 0 may be named
    auditor = Auditor(str(tmp_path), lag=64, memory_mb=1.0, version=0)
    run(FakeBackend(seed=0, engines=16, on_train=auditor.on_train), lag=64, batch=4, start=0, updates=20)
    assert auditor.most_kept < 20


def mid_flight(setup: RunSetup) -> InlineBackend:
    """Engines run ahead of the learner, and weights change in the middle of trajectories."""
    return build_inline_backend(setup, engine_steps_per_update=25)


def test_versions_on_disk_change_no_bit(tiny_model: Path, tmp_path: Path) -> None:
    """A real run with weights swapped in flight, every older version on disk; the folder is gone at the end."""
    changes: dict[str, Any] = {"train__lag": 4, "train__updates": 8, "model__dtype": "bfloat16"}
    files: list[int] = []
    watch = Recorder(lambda line: files.append(len(list((tmp_path / "disk").glob("weight_store/*.safetensors")))))
    on_disk = tiny_recipe(tiny_model, audit__weights_memory_mb=0, **changes)
    train(on_disk, tmp_path / "disk", observer=watch, build_backend=mid_flight)
    train(tiny_recipe(tiny_model, **changes), tmp_path / "memory", build_backend=mid_flight)
    lines, others = metrics(tmp_path / "disk"), metrics(tmp_path / "memory")
    assert all(line["bitwise/unequal"] == 0 < line["bitwise/checked"] for line in lines)
    assert max(line["lag/max"] for line in lines) > 1 and max(line["weight_store/read_ms"] for line in lines) > 0
    assert [line["weight_store/versions"] - 1 for line in lines] == files and max(files) > 1
    for key in ("gap/lag/abs_mean", "gap/kernel/max", "gap/total/k3"):
        assert [line[key] for line in lines] == [line[key] for line in others]
    assert not any(line["weight_store/disk_bytes"] for line in others)
    assert same_weights(tmp_path / "disk", tmp_path / "memory")
    assert not (tmp_path / "disk" / "weight_store").exists()


class Killed(BaseException):
    """A run that ends without cleaning up."""


def test_a_resumed_run_starts_with_an_empty_store(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed run left is removed, also half a file; versions are counted from the checkpoint."""
    recipe = tiny_recipe(tiny_model, train__lag=3, train__updates=7, checkpoint__every=3, audit__weights_memory_mb=0)

    def kill(line: dict[str, Any]) -> None:
        if line["step"] == 4:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("zerogap.runtime.train.remove_stored_weights", lambda run_dir: None)
        train(recipe, tmp_path / "run", observer=Recorder(kill), build_backend=mid_flight)
    left = tmp_path / "run" / "weight_store"
    (left / "version-000003.partial").write_bytes(b"torn")
    assert len(list(left.iterdir())) > 1
    seen: list[list[str]] = []
    watch = Recorder(lambda line: seen.append(sorted(path.name for path in left.glob("*"))))
    summary = train(recipe, tmp_path / "run", resume=True, observer=watch, build_backend=mid_flight)
    assert summary["updates"] == 7 and summary["bits_unequal"] == 0
    assert seen[0] == ["version-000003.safetensors"] and not left.exists()


def test_no_audit_keeps_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Field case R13: share 0 costs no forward, no copy, no file."""
    train(tiny_recipe(tiny_model, train__lag=2, audit__share=0.0, audit__weights_memory_mb=0), tmp_path / "run")
    names = {key.split("/")[0] for line in metrics(tmp_path / "run") for key in line}
    assert not names & {"weight_store", "gap", "bitwise"}
