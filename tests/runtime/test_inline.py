"""Whole runs in one process, with the real engine and learner: bits, lag, versions, errors."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.support import Recorder, metrics, same_weights, tiny_recipe, trajectories
from zerogap.env import make
from zerogap.env.task import Example, GradeError, Task, make_task
from zerogap.model.checkpoint import CheckpointError
from zerogap.runtime.backend import BitsUnequal, RunFailed, RunSetup
from zerogap.runtime.identity import Identity, check_identities
from zerogap.runtime.inline import InlineBackend, build_inline_backend
from zerogap.runtime.prompts import PromptSource
from zerogap.runtime.start import prepare_prompts
from zerogap.runtime.train import train
from zerogap.trajectory import NOT_SAMPLED


def mid_flight(setup: RunSetup) -> InlineBackend:
    """Weights change in the middle of trajectories."""
    return build_inline_backend(setup, engine_steps_per_update=3)


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


def test_control_arm_is_reported_not_alarmed(tiny_model: Path, tmp_path: Path) -> None:
    """Standard kernels: unequal bits are counted and every line says aligned: no; the run goes on."""
    summary = train(tiny_recipe(tiny_model, model__kernels="standard"), tmp_path / "run")
    assert summary["bits_unequal"] > 0 and summary["kernels"] == "standard"
    assert all(line["aligned"] is False for line in metrics(tmp_path / "run"))


class StaleBackend(InlineBackend):
    """Claims every version but delivers weights only once (field case 20, W3): the engine stays at version 1."""

    def publish(self, weights: Any) -> None:
        for worker in self.workers:
            engine: Any = worker.engine
            if engine.version >= 1:
                engine._version = weights.version  # the lie
            else:
                worker.publish(weights)


def stale(setup: RunSetup) -> StaleBackend:
    honest = build_inline_backend(setup)
    return StaleBackend(honest.workers, honest.learner)


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


class FailingTask:
    """Grades with the real task except for some prompts, on which the grader fails."""

    def __init__(self, task: Task, fails: Any) -> None:
        self._task, self._fails = task, fails
        self.calls: dict[int, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._task)

    def example(self, index: int) -> Example:
        return self._task.example(index)

    def grade(self, example: Example, text: str) -> float:
        self.calls[example.prompt_id] += 1
        if self._fails(example.prompt_id):
            try:
                raise ZeroDivisionError("scorer")
            except ZeroDivisionError as error:
                raise GradeError("the scorer failed") from error
        return self._task.grade(example, text)

    def solution(self, example: Example) -> str:
        return self._task.solution(example)


def test_poison_prompts_are_counted_and_never_rewarded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field cases R8, R9 and 37: a bounded number of tries, no reward 0, counted by class of error; the run goes on."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: prompt % 2 == 0)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    summary = train(tiny_recipe(tiny_model, task__max_error_share=1.0), tmp_path / "run")
    records = trajectories(tmp_path / "run")
    poisoned = [t for t in records if t["prompt_id"] % 2 == 0]
    assert poisoned and len(poisoned) < len(records)
    assert all(t["reward"] is None and t["error"].startswith("ZeroDivisionError: the scorer") for t in poisoned)
    assert all(t["reward"] is not None for t in records if t["prompt_id"] % 2)
    # Each sample is graded once; a failed episode is tried once more (task.retries), with the same tokens.
    assert {prompt: calls for prompt, calls in failing.calls.items()} == {
        prompt: 4 if prompt % 2 else 8 for prompt in failing.calls
    }
    lines = metrics(tmp_path / "run")
    assert sum(line.get("retries/ZeroDivisionError", 0) for line in lines) == len(poisoned)
    assert sum(line.get("errors/ZeroDivisionError", 0) for line in lines) == len(poisoned) == summary["errors"]


def test_peak_over_median_of_the_run(tiny_model: Path, tmp_path: Path) -> None:
    summary = train(tiny_recipe(tiny_model, train__lag=1), tmp_path / "run")
    for name, key in (("ratio/dev", "ratio_dev_peak"), ("ratio/chi2", "ratio_chi2_peak")):
        values = sorted(line[name] for line in metrics(tmp_path / "run"))
        assert len(values) == 5 and summary[key] == values[4] / values[2] > 1


def test_docs_name_every_metric(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/metrics.md and metrics.jsonl name the same things. Unequal bits (standard kernels) and failing grades
    are part of the run, so that the names that only trouble brings are seen too; and objectives that mark tokens."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: prompt % 2 == 0)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    emitted: set[str] = set()
    for name in ("reinforce_zero", "ppo_clip", "truncated_is", "masked_is"):
        recipe = tiny_recipe(
            tiny_model,
            model__kernels="standard",
            train__lag=1,
            learner__objective={"name": name},
            task__max_error_share=1.0,
            evaluation={"every": 2, "samples": 2, "limit": 6},
        )
        train(recipe, tmp_path / name)
        emitted |= {metric for line in metrics(tmp_path / name) for metric in line}
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = {name for row in re.findall(r"^\|(.*?)\|", page, re.M) for name in re.findall(r"`(.+?)`", row)}
    patterns = [re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in documented]
    assert {name for name in emitted if not any(pattern.fullmatch(name) for pattern in patterns)} == set()
    assert {p.pattern for p in patterns if not any(map(p.fullmatch, emitted))} == set()


def test_grader_that_always_fails_ends_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 37: all errors is no batch of zeros."""
    failing = FailingTask(make_task(tiny_recipe(tiny_model).task), lambda prompt: True)
    monkeypatch.setattr(make, "make_task", lambda settings: failing)
    with pytest.raises(RunFailed, match=r"12 of 12 episodes .*12 ZeroDivisionError.*max_error_share"):
        train(tiny_recipe(tiny_model), tmp_path / "run")


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
