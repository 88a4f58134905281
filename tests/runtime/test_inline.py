"""Whole runs in one process, with the real engine and learner: bits, lag, versions, what a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.support import Recorder, metrics, mid_flight, same_weights, tiny_recipe, trajectories
from zerogap.model.checkpoint import CheckpointError
from zerogap.runtime.backend import RunFailed, RunSetup
from zerogap.runtime.identity import Identity, check_identities
from zerogap.runtime.prompts import PromptSource
from zerogap.runtime.start import prepare_prompts
from zerogap.runtime.train import train
from zerogap.trajectory import NOT_SAMPLED


def versions_of(record: dict[str, Any]) -> list[int]:
    return [v for v in record["versions"] if v != NOT_SAMPLED]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lag", [0, 8])
def test_bits_equal_with_updates_in_mid_flight(tiny_model: Path, tmp_path: Path, dtype: str, lag: int) -> None:
    """Every sampled token of 12 updates, scored with the weights of its own version; field cases W2, 22 and 23 (on)."""
    recipe = tiny_recipe(
        tiny_model,
        model__dtype=dtype,
        train__lag=lag,
        train__updates=12,
        rollout__workers=2,
        rollout__max_batched_tokens=64,
    )
    summary = train(recipe, tmp_path / "run", build_backend=mid_flight)
    assert summary["updates"] == 12
    assert summary["bits_unequal"] == 0
    assert summary["bits_checked"] == sum(sum(t["loss_mask"]) for t in trajectories(tmp_path / "run")) > 500
    assert summary["lag_max"] <= lag and summary["dropped"] == 0

    spans = [versions_of(t) for t in trajectories(tmp_path / "run")]
    assert all(v == sorted(v) for v in spans)
    if lag == 8:
        assert any(len(set(v)) > 1 for v in spans), "no trajectory crossed an update: the test is too easy"
        assert summary["lag_max"] > 0
    # The weights did change: the ratio of trained tokens is not 1 everywhere.
    assert lag == 0 or max(line["ratio/dev"] for line in metrics(tmp_path / "run")) > 0


def test_finish_gives_each_trajectory_one_version(tiny_model: Path, tmp_path: Path) -> None:
    """Field case 23 (off): no sample goes on across an update, and none is taken apart for it."""
    recipe = tiny_recipe(tiny_model, rollout__on_update="finish", train__lag=4, train__updates=8)
    summary = train(recipe, tmp_path / "run", build_backend=mid_flight)
    assert summary["bits_unequal"] == 0
    spans = [versions_of(t) for t in trajectories(tmp_path / "run")]
    assert all(len(set(v)) == 1 for v in spans)
    assert len({v[0] for v in spans}) > 1


def test_exact_lag(tiny_model: Path, tmp_path: Path) -> None:
    """Without engine steps per update, each token is trained exactly `lag` updates after its weights."""
    train(tiny_recipe(tiny_model, train__lag=2), tmp_path / "run")
    assert [(line["lag/mean"], line["lag/max"]) for line in metrics(tmp_path / "run")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 2),
        (2, 2),
    ]


def test_lag_zero_does_not_depend_on_engine_steps_or_workers(tiny_model: Path, tmp_path: Path) -> None:
    """Synchronous training is one thing, however the engines are driven."""
    train(tiny_recipe(tiny_model), tmp_path / "a")
    train(tiny_recipe(tiny_model, rollout__workers=3, rollout__max_running=3), tmp_path / "b", build_backend=mid_flight)
    assert same_weights(tmp_path / "a", tmp_path / "b")
    train(tiny_recipe(tiny_model, seed=1), tmp_path / "c")
    assert not same_weights(tmp_path / "a", tmp_path / "c")


def test_run_folder(tiny_model: Path, tmp_path: Path) -> None:
    """What a finished run leaves, and the keys of summary.json."""
    recorder = Recorder()
    run_dir = tmp_path / "run"
    summary = train(tiny_recipe(tiny_model, logging__tensorboard=True), run_dir, observer=recorder)
    assert json.loads((run_dir / "summary.json").read_text()) == summary == recorder.summaries[0]
    assert list(summary) == [
        "updates",
        "tokens_trained",
        "reward_first",
        "reward_last",
        "bits_checked",
        "bits_unequal",
        "lag_max",
        "ratio_dev_peak",
        "ratio_chi2_peak",
        "dropped",
        "engine_tokens_per_s",
        "learner_tokens_per_s",
        "evaluations",
        "evaluations_missing",
        "eval_reward",
        "seconds",
        "final_model",
        "aligned",
        "kernels",
        "dtype",
        "engine_kernels",
        "engine_dtype",
        "prompts_skipped",
        "errors",
    ]
    assert summary["tokens_trained"] == sum(sum(t["loss_mask"]) for t in trajectories(run_dir))
    assert summary["engine_tokens_per_s"] > 0 and summary["learner_tokens_per_s"] > 0
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert len(trajectories(run_dir)) == 5 * 3 * 4
    assert list((run_dir / "tensorboard").iterdir())
    assert not [path for path in run_dir.rglob("*") if "partial" in path.name]
    assert summary["ratio_dev_peak"] is None  # lag 0: every ratio is exactly 1, there is no median to compare with
    record = trajectories(run_dir)[0]
    assert record["info"]["update"] == 1 and isinstance(record["info"]["text"], str) and record["reward"] is not None


def test_used_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(RunFailed, match=r"run already holds a run; add --resume .* --output-dir"):
        train(tiny_recipe(tiny_model), tmp_path / "run")


def test_missing_model_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        train(tiny_recipe(tmp_path / "nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_peak_over_median_of_the_run(tiny_model: Path, tmp_path: Path) -> None:
    summary = train(tiny_recipe(tiny_model, train__lag=1), tmp_path / "run")
    for name, key in (("ratio/dev", "ratio_dev_peak"), ("ratio/chi2", "ratio_chi2_peak")):
        values = sorted(line[name] for line in metrics(tmp_path / "run"))
        assert len(values) == 5 and summary[key] == values[4] / values[2] > 1


def test_low_effective_sample_size_warns_once_per_age(tiny_model: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    recipe = tiny_recipe(tiny_model, train__lag=1, train__min_ess=1.0, learner__learning_rate=3e-2)
    train(recipe, tmp_path / "run", observer=recorder)
    about = [w for w in recorder.warnings if "effective sample size" in w]
    assert len(about) == 1 and "tokens 1 update(s) old" in about[0]
    assert "learner.learning_rate" in about[0] and "train.lag" in about[0]


def test_identities_are_compared() -> None:
    """Contract of an aligned run, start weights of any run (field case R4); and all engines of a run are one arm.

    Field case 4: a head in another precision on one side is another contract, so it is refused at the start.
    """
    recipe = tiny_recipe(Path("m"))
    learner = Identity(0, "w", "c", {"key_block": 64})
    check_identities(recipe, learner, [learner])
    with pytest.raises(RunFailed, match=r'(?s)contract.*worker 1: \{"key_block": 32\}.*learner: \{"key_block": 64'):
        check_identities(recipe, learner, [learner, Identity(0, "w", "d", {"key_block": 32})])
    with pytest.raises(RunFailed, match="rollout worker 0 starts with weights v of version 0"):
        check_identities(recipe, learner, [Identity(0, "v", "c", {})])
    for arm in ({"model__kernels": "standard"}, {"rollout__dtype": "bfloat16"}):
        recipe = tiny_recipe(Path("m"), **arm)
        other = Identity(0, "w", "d", {})
        check_identities(recipe, learner, [other, other])
        with pytest.raises(RunFailed, match="rollout worker 1 and rollout worker 0 differ in their numerical contract"):
            check_identities(recipe, learner, [other, learner])
        with pytest.raises(RunFailed, match="rollout worker 0 starts with weights v of version 0"):
            check_identities(recipe, learner, [Identity(0, "v", "d", {})])


def test_consumed_prompts_are_forgotten(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver remembers of the prompts does not grow with the run, also when it saves no checkpoint."""
    sources: list[PromptSource] = []

    def prepare(*args: Any) -> tuple[PromptSource, RunSetup]:
        prompts, setup = prepare_prompts(*args)
        sources.append(prompts)
        return prompts, setup

    monkeypatch.setattr("zerogap.runtime.train.prepare_prompts", prepare)
    held: list[int] = []
    recipe = tiny_recipe(tiny_model, train__updates=8, train__lag=1)
    train(recipe, tmp_path / "run", observer=Recorder(lambda _: held.append(len(sources[0]._cursors))))
    assert max(held) <= 3 * (1 + 2)  # batches: the one just trained, and lag + 1 that wait


def test_threads_do_not_change_bits(tiny_model: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        train(tiny_recipe(tiny_model), tmp_path / "one")
        train(tiny_recipe(tiny_model, learner__threads=2, rollout__threads=2), tmp_path / "two")
    finally:
        torch.set_num_threads(before)
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_a_small_cache_costs_time_and_no_bit(tiny_model: Path, tmp_path: Path) -> None:
    """Room for one long sample instead of all of them: preempted again and again, trained to the same weights."""
    roomy = tiny_recipe(tiny_model, train__updates=2)
    tight = tiny_recipe(tiny_model, train__updates=2, rollout__kv_cache_mb=0.04)
    for name, recipe in (("roomy", roomy), ("tight", tight)):
        train(recipe, tmp_path / name)
    lines = {name: metrics(tmp_path / name) for name in ("roomy", "tight")}
    assert sum(line["kv/preemptions"] for line in lines["tight"]) > sum(
        line["kv/preemptions"] for line in lines["roomy"]
    )
    page = 8 * 2 * 2 * (8 + 16) * 4  # of 8 tokens, 2 layers, 2 heads: keys of 8 and padded values of 16 fp32 numbers
    assert {(line["kv/pages"], line["kv/bytes"]) for line in lines["tight"]} == {(13, 13 * page)}
    assert 13 * page <= 40_000 < 14 * page
    assert same_weights(tmp_path / "roomy", tmp_path / "tight")
