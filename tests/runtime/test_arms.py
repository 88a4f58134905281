"""Arms: engine and learner with different arithmetic. Counted, told apart from lag, marked, and never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.support import Recorder, metrics, mid_flight, same_weights, stale, tiny_recipe, trajectories
from zerogap.cli.main import main
from zerogap.config import RecipeError
from zerogap.gaps.split import Split, split_tokens
from zerogap.model.checkpoint import CheckpointError
from zerogap.runtime import learner_worker
from zerogap.runtime.audited_run import read_run
from zerogap.runtime.train import train

# Keys beside the learner's aligned float32 -> largest |KERNEL| that its rounding explains on this model.
ARMS: dict[str, tuple[dict[str, str], float]] = {
    "standard": ({"rollout__kernels": "standard"}, 1e-4),
    "bf16 rollout": ({"rollout__dtype": "bfloat16"}, 0.3),
    "standard bf16 rollout": ({"rollout__kernels": "standard", "rollout__dtype": "bfloat16"}, 0.3),
    "int8 rollout": ({"rollout__kernels": "int8"}, 0.5),
    "standard both": ({"model__kernels": "standard"}, 1e-4),
    "fp32 rollout, bf16 learner": ({"rollout__dtype": "float32", "model__dtype": "bfloat16"}, 0.3),
}


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[Split]:
    """Every split that a run makes."""
    made: list[Split] = []

    def keep(*args: Any) -> Split:
        made.append(split_tokens(*args))
        return made[-1]

    monkeypatch.setattr(learner_worker, "split_tokens", keep)
    return made


@pytest.mark.parametrize("name", ARMS)
def test_the_gap_of_an_arm(tiny_model: Path, tmp_path: Path, splits: list[Split], name: str) -> None:
    """Field case 45 and W2: lag 2, updates in flight. LAG + KERNEL = total for each token; KERNEL is not 0 and as small
    as its rounding, from the first update to the sixth; LAG is that of the weights."""
    changes, bound = ARMS[name]
    recorder = Recorder()
    recipe = tiny_recipe(tiny_model, train__lag=2, train__updates=6, **changes)
    assert recipe.audit.on_unequal == "stop" and not recipe.aligned
    summary = train(recipe, tmp_path / "run", observer=recorder, build_backend=mid_flight)

    assert summary["updates"] == len(splits) == 6
    assert any(len({v for v in t["versions"] if v >= 0}) > 1 for t in trajectories(tmp_path / "run"))
    for split in splits:
        parts = (split.lag_N.numpy(), split.kernel_N.numpy(), split.total_N.numpy())
        largest = np.maximum.reduce([np.abs(part) for part in parts])
        assert (np.abs(parts[0] + parts[1] - parts[2]) <= 2 * np.spacing(largest)).all()
        assert 0 < np.abs(parts[1]).max() < bound
        assert split.unequal > 0 and bool((split.lag_N[split.ages_N == 0] == 0).all())
    assert max(float(split.lag_N.abs().max()) for split in splits) > 1e-3

    lines = metrics(tmp_path / "run")
    assert all(line["aligned"] is False for line in lines)
    engine = recipe.engine_arithmetic
    expected = (False, engine.kernels, engine.dtype, recipe.model.kernels, recipe.model.dtype)
    keys = ("aligned", "engine_kernels", "engine_dtype", "kernels", "dtype")
    assert tuple(summary[key] for key in keys) == expected
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [warning for warning in recorder.warnings if "aligned" in warning] == [
        f"aligned: no (engine {engine.kernels} {engine.dtype}, learner {recipe.model.kernels} {recipe.model.dtype}): "
        "unequal bits are expected; the audit counts them and never stops the run, whatever audit.on_unequal says"
    ]


def test_int8_is_coarser_than_bf16(tiny_model: Path, tmp_path: Path) -> None:
    """The arms are different things: each has its own size of KERNEL, at its own contract."""
    sizes, contracts = {}, set()
    for name in ("standard", "bf16 rollout", "int8 rollout"):
        run = tmp_path / name
        train(tiny_recipe(tiny_model, train__updates=3, learner__learning_rate=1e-3, **ARMS[name][0]), run)
        sizes[name] = np.mean([line["gap/kernel/abs_mean"] for line in metrics(run)])
        contracts |= {t["contract"] for t in trajectories(run)}
    assert 10 * sizes["standard"] < sizes["bf16 rollout"] < sizes["int8 rollout"]
    assert len(contracts) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_naming_the_learners_own_arithmetic_is_an_aligned_run(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    """Both keys set to what they would be anyway: bits are checked, 0 unequal, and the weights are those without."""
    recorder = Recorder()
    changes: dict[str, Any] = {"model__dtype": dtype, "train__lag": 2, "train__updates": 6}
    named = tiny_recipe(tiny_model, rollout__kernels="aligned", rollout__dtype=dtype, **changes)
    summary = train(named, tmp_path / "named", observer=recorder, build_backend=mid_flight)
    assert summary["aligned"] is True and summary["bits_unequal"] == 0 < summary["bits_checked"]
    assert all(line["gap/kernel/max"] == 0 < line["gap/total/max"] for line in metrics(tmp_path / "named")[1:])
    assert recorder.warnings == []
    train(tiny_recipe(tiny_model, **changes), tmp_path / "default", build_backend=mid_flight)
    assert same_weights(tmp_path / "named", tmp_path / "default")


def test_undelivered_weights_are_in_kernel_in_any_arm(tiny_model: Path, tmp_path: Path, splits: list[Split]) -> None:
    """Field cases 20 and W3 where bits cannot tell: stale weights are many times the rounding, and no LAG."""
    recipe = tiny_recipe(tiny_model, rollout__dtype="bfloat16")
    train(recipe, tmp_path / "honest")
    honest = max(float(split.kernel_N.abs().mean()) for split in splits)
    splits.clear()
    train(recipe, tmp_path / "stale", build_backend=stale)
    last = splits[-1]
    assert float(last.kernel_N.abs().mean()) > 5 * honest and bool((last.lag_N == 0).all())


def test_resume_keeps_the_arm(tiny_model: Path, tmp_path: Path) -> None:
    """A run is one arm: other arithmetic of the engine is refused as another model is; naming the same one is not."""
    run = tmp_path / "run"
    train(tiny_recipe(tiny_model, rollout__dtype="bfloat16"), run, max_steps=1)
    for changes, words in (
        ({}, "rollout.dtype: 'bfloat16' in the checkpoint, 'float32' in the recipe"),
        ({"rollout__dtype": "bfloat16", "rollout__kernels": "int8"}, "rollout.kernels: 'aligned' in the checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=words):
            train(tiny_recipe(tiny_model, **changes), run, resume=True)
    same = tiny_recipe(tiny_model, rollout__dtype="bfloat16", rollout__kernels="aligned")
    assert train(same, run, resume=True)["updates"] == 5
    assert all(line["aligned"] is False for line in metrics(run))


def test_an_interrupted_arm_is_the_uninterrupted_one(tiny_model: Path, tmp_path: Path) -> None:
    """Field case 41 with bf16 engines under an fp32 learner: the resumed engine converts the checkpoint's weights."""
    recipe = tiny_recipe(tiny_model, rollout__dtype="bfloat16")
    train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "parts", max_steps=2)
    train(recipe, tmp_path / "parts", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


def test_the_audit_of_a_run_folder_is_by_the_learners_arithmetic(tiny_model: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tiny_model, rollout__dtype="bfloat16", rollout__kernels="standard", checkpoint__every=1)
    train(recipe, tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert (found.kernels, found.dtype, found.engine) == ("aligned", "float32", "standard bfloat16")


def test_the_audit_of_an_arm_says_that_it_is_not_aligned(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_recipe(tiny_model, rollout__dtype="bfloat16", checkpoint__every=1), tmp_path / "arm")
    assert main(["audit", str(tmp_path / "arm"), "--html", str(tmp_path / "arm.html"), "--threads", "1"]) == 0
    assert "aligned: no (engine aligned bfloat16, scored with aligned float32)" in capsys.readouterr().out
    assert "sampled with" in (tmp_path / "arm.html").read_text()
    train(tiny_recipe(tiny_model, checkpoint__every=1), tmp_path / "aligned")
    assert main(["audit", str(tmp_path / "aligned"), "--json", "--threads", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["aligned"], answer["engine"], answer["unequal"]) == (True, "aligned float32", 0)


def test_int8_is_no_arithmetic_of_a_learner() -> None:
    with pytest.raises(RecipeError, match=r"model.kernels: int8 weights have no gradient.*set rollout.kernels=int8"):
        tiny_recipe(Path("m"), model__kernels="int8")
