"""Stop and go on: nothing skipped, nothing trained twice, and at lag 0 the same bits as without a stop."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import same_bits
from tests.runtime.support import Recorder, metrics, same_weights, tiny_recipe, trajectories
from zerogap.model.checkpoint import CheckpointError, load_decoder
from zerogap.runtime import checkpoint
from zerogap.runtime.backend import RunSetup
from zerogap.runtime.checkpoint import checkpoints
from zerogap.runtime.inline import InlineBackend, build_inline_backend
from zerogap.runtime.train import train
from zerogap.trajectory import NOT_SAMPLED


class Stop(Exception):
    """A run that dies in the middle."""


def die_at(step: int) -> Recorder:
    def on_step(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise Stop

    return Recorder(on_step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_run_equals_uninterrupted_run(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    """Field cases 41 and R16, lag 0: died at step 3, resumed from step 2; weights, moments and rates as bits."""
    recipe = tiny_recipe(
        tiny_model,
        model__dtype=dtype,
        train__updates=6,
        checkpoint__every=2,
        learner__schedule="cosine",
        learner__warmup_steps=2,
    )
    train(recipe, tmp_path / "whole")
    with pytest.raises(Stop):
        train(recipe, tmp_path / "parts", observer=die_at(3))
    train(recipe, tmp_path / "parts", resume=True)

    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (load_file(checkpoints(tmp_path / d)[-1] / "trainer.safetensors") for d in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(same_bits(whole[name], parts[name]) for name in whole)

    lines = metrics(tmp_path / "parts")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for key in ("learning_rate", "reward/mean", "version", "bitwise/checked"):
        assert [line[key] for line in lines] == [line[key] for line in metrics(tmp_path / "whole")]
    assert len({line["learning_rate"] for line in lines}) > 3
    assert [t["group_id"] for t in trajectories(tmp_path / "parts")] == [g for g in range(18) for _ in range(4)]
    # Field case 40: the first requests after the resume ran on the restored weights.
    assert lines[2]["ratio/max"] == lines[2]["ratio/min"] == 1.0


def test_every_prompt_once_per_epoch_with_groups_in_flight(tiny_model: Path, tmp_path: Path) -> None:
    """Field case 41: 40 prompts, lag 3, died with groups in flight, resumed twice; R3, R4 and R19 on the way."""
    recipe = tiny_recipe(
        tiny_model, train__updates=10, train__groups_per_update=4, train__lag=3, checkpoint__every=1, checkpoint__keep=1
    )

    def build(setup: RunSetup) -> InlineBackend:
        return build_inline_backend(setup, engine_steps_per_update=2)

    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", observer=die_at(3), build_backend=build)
    first_after = checkpoint_version(tmp_path / "run")
    assert first_after == 2
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", resume=True, observer=die_at(6), build_backend=build)
    assert checkpoint_version(tmp_path / "run") == 5
    summary = train(recipe, tmp_path / "run", resume=True, build_backend=build)

    records = trajectories(tmp_path / "run")
    assert Counter(t["prompt_id"] for t in records) == {prompt: 4 for prompt in range(40)}
    assert [line["version"] for line in metrics(tmp_path / "run")] == list(range(1, 11))
    assert summary["bits_unequal"] == 0 and summary["lag_max"] <= 3
    # No token of the last part is of the start weights or of any version before the checkpoint.
    resumed = [v for t in records if t["group_id"] >= 5 * 4 for v in t["versions"] if v != NOT_SAMPLED]
    assert min(resumed) >= 5


def checkpoint_version(run_dir: Path) -> int:
    return int(json.loads((checkpoints(run_dir)[-1] / "trainer.json").read_text())["version"])


def test_max_steps_then_resume(tiny_model: Path, tmp_path: Path) -> None:
    """max_steps counts all updates, leaves a checkpoint, and does not shorten the schedule."""
    recipe = tiny_recipe(tiny_model, learner__schedule="cosine")
    train(recipe, tmp_path / "whole")
    assert train(recipe, tmp_path / "parts", max_steps=2)["updates"] == 2
    assert train(recipe, tmp_path / "parts", resume=True)["updates"] == 5
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert train(recipe, tmp_path / "parts", resume=True)["updates"] == 5  # nothing left to do


def test_keep_counts_the_newest_and_spares_the_start(tiny_model: Path, tmp_path: Path) -> None:
    """An engine that dies late in a resumed run is started again from the folder that the run began with."""
    recipe = tiny_recipe(tiny_model, train__updates=6, checkpoint__every=1, checkpoint__keep=2)
    train(recipe, tmp_path / "run", max_steps=2)
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000001", "step-000002"]
    train(recipe, tmp_path / "run", resume=True)
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000002", "step-000005", "step-000006"]
    # A checkpoint is a model folder.
    decoder = load_decoder(checkpoints(tmp_path / "run")[-1], "aligned", "float32")
    assert torch.isfinite(decoder.weights["embed"].data).all()
    assert (checkpoints(tmp_path / "run")[-1] / "tokenizer.json").is_file()


def _killed_while_saving(model: str, run_dir: str) -> None:
    saves = 0
    sync = checkpoint._sync

    def kill_in_second_save(path: Path) -> None:
        nonlocal saves
        sync(path)
        saves += path.name == checkpoint.RECORD
        if saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._sync = kill_in_second_save
    train(tiny_recipe(Path(model), checkpoint__every=2), run_dir)


def test_half_written_checkpoint_is_not_picked(tiny_model: Path, tmp_path: Path) -> None:
    """Field case 41: kill -9 in the middle of the save at step 4; the run goes on from step 2 to the same bits."""
    process = get_context("spawn").Process(target=_killed_while_saving, args=(str(tiny_model), str(tmp_path / "run")))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert "step-000002" in names and len(names) == 2  # and the torn one, under a name of its own
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["step-000002"]

    (tmp_path / "run" / ".final_model.123.partial").mkdir()  # torn in the same way
    train(tiny_recipe(tiny_model, checkpoint__every=2), tmp_path / "run", resume=True)
    assert not [path for path in (tmp_path / "run").rglob("*") if "partial" in path.name]
    train(tiny_recipe(tiny_model), tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")


def test_resume_is_refused_when_it_cannot_be(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"--resume: .* holds no checkpoint"):
        train(tiny_recipe(tiny_model), tmp_path / "empty", resume=True)
    train(tiny_recipe(tiny_model), tmp_path / "run", max_steps=1)
    with pytest.raises(CheckpointError, match=r"train.groups_per_update: 3 in the checkpoint, 4 in the recipe"):
        train(tiny_recipe(tiny_model, train__groups_per_update=4), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=r"model.kernels: 'aligned' in the checkpoint, 'standard' in the recipe"):
        train(tiny_recipe(tiny_model, model__kernels="standard"), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=r"model.path: '.*tiny' in the checkpoint, '.*elsewhere' in the recipe"):
        train(tiny_recipe(tmp_path / "elsewhere"), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=r"warm_start: None in the checkpoint, \{'steps': 3"):
        train(tiny_recipe(tiny_model, warm_start={"steps": 3}), tmp_path / "run", resume=True)
    # What does not touch the numbering may change, and the old recipe file follows.
    train(tiny_recipe(tiny_model, train__lag=2, train__updates=2), tmp_path / "run", resume=True)
    assert "lag: 2" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_relative_path_still_resumes(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are compared as absolute ones."""
    monkeypatch.chdir(tiny_model.parent)
    train(tiny_recipe(Path("tiny")), "../run", max_steps=1)
    assert train(tiny_recipe(Path("tiny")), "../run", resume=True, max_steps=2)["updates"] == 2
    assert train(tiny_recipe(tiny_model), "../run", resume=True, max_steps=3)["updates"] == 3


def test_resume_cuts_records_to_the_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    """Lines after the checkpoint, a torn last line included, are not counted twice."""
    recipe = tiny_recipe(tiny_model, checkpoint__every=2)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "run", observer=die_at(3))
    assert len(metrics(tmp_path / "run")) == 3
    with (tmp_path / "run" / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "torn')
    summary = train(recipe, tmp_path / "run", resume=True)
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert summary["bits_checked"] == sum(sum(t["loss_mask"]) for t in trajectories(tmp_path / "run"))
