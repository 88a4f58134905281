"""`zerogap audit RUN`: a run's own tokens, scored again from its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.support import tiny_recipe, trajectories
from zerogap.cli.main import main
from zerogap.runtime.checkpoint import checkpoints
from zerogap.runtime.train import train


def test_a_run_is_audited_from_its_checkpoints(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny_recipe(tiny_model, train__lag=1, checkpoint__every=1, checkpoint__keep=3), run)
    kept = {int(folder.name.removeprefix("step-")) for folder in checkpoints(run)}
    versions = [v for t in trajectories(run) for v, m in zip(t["versions"], t["loss_mask"], strict=True) if m]
    capsys.readouterr()

    assert main(["audit", str(run), "--json", "--threads", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["checked"] == sum(version in kept for version in versions) > 0
    assert answer["tokens_without_weights"] == sum(version not in kept for version in versions) > 0
    assert answer["unequal"] == 0 and answer["verdict"].startswith("No KERNEL gap")

    assert main(["audit", str(run), "--json", "--threads", "1", "--kernels", "standard"]) == 0
    assert json.loads(capsys.readouterr().out)["unequal"] > 0


def test_a_run_without_the_weights_of_its_tokens(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last checkpoint is there, and no token was sampled with it."""
    train(tiny_recipe(tiny_model, train__updates=2), tmp_path / "run")
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert "no token of" in capsys.readouterr().err
