"""The audit inside a run: what it checks, and that weights which never arrived stop an aligned run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.runtime.support import Recorder, metrics, same_weights, stale, tiny_recipe, trajectories
from zerogap.runtime.backend import BitsUnequal
from zerogap.runtime.train import train


def test_undelivered_weights_stop_an_aligned_run(tiny_model: Path, tmp_path: Path) -> None:
    """Field cases 20 and W3: stale weights are found by the audit at once, and the message says which token."""
    with pytest.raises(
        BitsUnequal, match=r"First: group 6 prompt \d+ sample 0 segment 0 position \d+ version 2: engine -"
    ):
        train(tiny_recipe(tiny_model), tmp_path / "stop", build_backend=stale)
    recorder = Recorder()
    summary = train(
        tiny_recipe(tiny_model, audit__on_unequal="warn"), tmp_path / "warn", observer=recorder, build_backend=stale
    )
    assert summary["updates"] == 5 and summary["bits_unequal"] > 0
    assert [line["bitwise/unequal"] > 0 for line in metrics(tmp_path / "warn")] == [False, False, True, True, True]
    assert "bits differ in an aligned run" in recorder.warnings[0]


def test_audit_share(tiny_model: Path, tmp_path: Path) -> None:
    """Field case R13: whole groups, at least one per update while the share is above 0, none when it is 0."""
    train(tiny_recipe(tiny_model, audit__share=0.1), tmp_path / "some")
    per_group: dict[int, int] = defaultdict(int)
    for record in trajectories(tmp_path / "some"):
        per_group[record["group_id"]] += sum(record["loss_mask"])
    for line in metrics(tmp_path / "some"):
        groups = range(3 * (line["step"] - 1), 3 * line["step"])
        assert line["bitwise/checked"] in [per_group[g] for g in groups]
    train(tiny_recipe(tiny_model, audit__share=0.0), tmp_path / "none")
    assert not any(key.startswith("bitwise/") for line in metrics(tmp_path / "none") for key in line)
    assert same_weights(tmp_path / "some", tmp_path / "none")
