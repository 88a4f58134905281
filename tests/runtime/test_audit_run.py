"""`zerogap audit RUN`: a run's own tokens, scored again from its start model and its checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.support import metrics, tiny_recipe, trajectories
from zerogap.cli.main import main
from zerogap.runtime.checkpoint import checkpoints
from zerogap.runtime.train import train


def audit(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["audit", str(run), "--json", "--threads", "1", *arguments]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def tokens(run: Path) -> list[tuple[int, int]]:
    """(version that sampled, version that was trained) of every sampled token."""
    return [
        (version, line["info"]["update"] - 1)
        for line in trajectories(run)
        for version, sampled in zip(line["versions"], line["loss_mask"], strict=True)
        if sampled
    ]


def test_with_all_versions_the_audit_is_that_of_the_run(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token of five updates: LAG and KERNEL as the run itself measured them."""
    run = tmp_path / "run"
    train(tiny_recipe(tiny_model, train__lag=2, checkpoint__every=1, checkpoint__keep=9), run)
    lines = metrics(run)
    answer = audit(capsys, run)
    statistics = answer["statistics"]
    assert answer["checked"] == sum(line["bitwise/checked"] for line in lines) == len(tokens(run))
    assert (answer["unequal"], answer["tokens_without_weights"], answer["without_lag"]) == (0, 0, 0)
    assert statistics["gap/lag/max"] == max(line["gap/lag/max"] for line in lines) > 0
    assert statistics["gap/kernel/max"] == 0
    mean = sum(line["gap/lag/abs_mean"] * line["bitwise/checked"] for line in lines) / answer["checked"]
    assert statistics["gap/lag/abs_mean"] == pytest.approx(mean, rel=1e-12)
    ages = {row["group"]: row["tokens"] for row in answer["tables"]["age"]}
    assert ages == {str(age): sum(k - v == age for v, k in tokens(run)) for age in {k - v for v, k in tokens(run)}}
    assert len(ages) > 1 and answer["verdict"].startswith("All of the gap is weight lag")


def test_what_has_no_weights_any_more_is_counted(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tiny_recipe(tiny_model, train__lag=1, checkpoint__every=1, checkpoint__keep=2), run)
    kept = {0, *(int(folder.name.removeprefix("step-")) for folder in checkpoints(run))}  # 0: the start model
    answer = audit(capsys, run, "--html", str(tmp_path / "a.html"))
    both = sum(v in kept and k in kept for v, k in tokens(run))
    assert answer["checked"] == sum(v in kept for v, _ in tokens(run))
    assert answer["tokens_without_weights"] == sum(v not in kept for v, _ in tokens(run)) > 0
    assert answer["without_lag"] == answer["checked"] - both > 0
    assert sum(row["tokens"] for row in answer["tables"]["age"]) == both > 0
    unmeasured = {row["group"]: row["gap"] is None for row in answer["tables"]["version"]}
    sampled = {v for v, _ in tokens(run) if v in kept}
    assert unmeasured == {str(v): not any(k in kept for w, k in tokens(run) if w == v) for v in sampled}
    assert f"{answer['without_lag']}" in (tmp_path / "a.html").read_text()

    assert main(["audit", str(run), "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert f"{answer['tokens_without_weights']:,} more left out" in text
    assert f"{answer['without_lag']:,} without LAG" in text
    assert audit(capsys, run, "--kernels", "standard")["unequal"] > 0


def test_a_run_without_the_weights_of_its_tokens(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the last checkpoint is there, and no token was sampled with it; the start model has gone, too."""
    start = tmp_path / "start"
    shutil.copytree(tiny_model, start)
    train(tiny_recipe(start, train__updates=2), tmp_path / "run")
    shutil.rmtree(start)
    assert main(["audit", str(tmp_path / "run")]) == 2
    assert "no token of" in capsys.readouterr().err
