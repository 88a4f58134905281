"""The rollout worker and the learner worker alone: weight delivery, version labels, empty samples."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest

from tests.helpers import same_bits
from tests.runtime.fakes import fake_trajectory
from tests.runtime.support import TASK, tiny_recipe
from zerogap.config import Task
from zerogap.env.task import make_task
from zerogap.gaps.split import split_tokens
from zerogap.model.chat import load_tokenizer
from zerogap.model.decoder import WeightMismatch, snapshot_digest
from zerogap.runtime.backend import EngineStats, FinishedGroup, Item, RunSetup, Weights
from zerogap.runtime.learner_worker import LearnerWorker
from zerogap.runtime.living import Living
from zerogap.runtime.rollout_worker import RolloutWorker, build_rollout_worker
from zerogap.runtime.transfer import WeightDeliveryError, from_arrays, to_arrays
from zerogap.runtime.worker import Report, RolloutActor
from zerogap.trajectory import NOT_SAMPLED, GroupRequest, SamplingParams, Trajectory

NOTHING = Living(frozenset(), None)


def setup(model: Path, **changes: object) -> RunSetup:
    return RunSetup(tiny_recipe(model, **changes), Path("unused"), model, kv_tokens=512)


def item(group_id: int, n: int = 4, min_version: int = 0, tokens: int = 8) -> Item:
    example = make_task(Task(**TASK)).example(group_id)
    sampling = SamplingParams(max_new_tokens=tokens)
    return GroupRequest(group_id, group_id, (1, 5, 6, 7, 8), n, sampling, min_version), example


def new_weights(learner: LearnerWorker, version: int, factor: float) -> Weights:
    """Weights of another version, far enough away that any mixture is seen."""
    tensors = {name: tensor * factor for name, tensor in learner.decoder.snapshot().items()}
    return Weights(version, snapshot_digest(tensors), to_arrays(tensors))


def run_out(worker: RolloutWorker) -> list[Trajectory]:
    done: list[FinishedGroup] = []
    while worker.has_work():
        done += worker.step()
    return [trajectory for group in done for trajectory in group.trajectories]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_travel_as_the_same_bits(tiny_model: Path, dtype: str) -> None:
    learner = LearnerWorker(setup(tiny_model, model__dtype=dtype))
    snapshot = learner.decoder.snapshot()
    arrays = to_arrays(snapshot)
    for _, values in arrays.values():
        values.flags.writeable = False  # as Ray hands them out
    back = from_arrays(arrays)
    assert back.keys() == snapshot.keys() and all(same_bits(back[name], snapshot[name]) for name in snapshot)
    assert learner.weights().digest == snapshot_digest(back) == learner.decoder.digest()


def test_torn_or_incomplete_delivery_changes_nothing(tiny_model: Path) -> None:
    """Field cases 21 and R2: the sender dies after half of the tensors, or bits flip on the way, while 8 samples
    decode. The engine stays at the old version and every token is reproduced by exactly that version."""
    learner = LearnerWorker(setup(tiny_model))
    worker, _ = build_rollout_worker(setup(tiny_model))
    worker.submit([item(0), item(1)])
    worker.step()
    good = new_weights(learner, 1, 1.5)
    half = dict(list(good.tensors.items())[: len(good.tensors) // 2])
    with pytest.raises(WeightDeliveryError, match=r"weights of version 1 arrived with digest .* stays at version 0"):
        worker.publish(replace(good, tensors=half))
    with pytest.raises(WeightMismatch, match="was not delivered"):
        worker.publish(Weights(1, snapshot_digest(from_arrays(half)), half))
    name, (dtype, values) = next(iter(good.tensors.items()))
    flipped = values.copy()
    flipped.reshape(-1)[0] += 1
    with pytest.raises(WeightDeliveryError, match="digest"):
        worker.publish(replace(good, tensors=good.tensors | {name: (dtype, flipped)}))
    assert worker.engine.version == 0

    split = split_tokens(learner.decoder, {0: learner.decoder.snapshot()}, run_out(worker), 0, 512)
    assert (split.unequal, split.checked > 30) == (0, True)

    worker.publish(good)  # and the engine still takes a whole set
    assert worker.engine.version == 1


def test_labels_name_the_weights_that_made_the_token(tiny_model: Path) -> None:
    """Field case 22: 3 tokens, an update, the rest; and a group that waited across the update."""
    learner = LearnerWorker(setup(tiny_model))
    worker, _ = build_rollout_worker(setup(tiny_model))
    worker.submit([item(0, n=1)])
    for _ in range(3):
        assert worker.step() == []
    worker.submit([item(1, n=1)])
    weights = new_weights(learner, 4, 0.5)
    worker.publish(weights)
    running, queued = sorted(run_out(worker), key=lambda t: t.group_id)
    assert [v for v in running.versions if v != NOT_SAMPLED][:5] == [0, 0, 0, 4, 4]
    assert {v for v in queued.versions if v != NOT_SAMPLED} == {4}
    snapshots = {0: learner.decoder.snapshot(), 4: from_arrays(weights.tensors)}
    split = split_tokens(learner.decoder, snapshots, [running, queued], 4, 512)
    assert split.unequal == 0 and split.checked == running.num_sampled + queued.num_sampled


def test_group_waits_for_its_min_version(tiny_model: Path) -> None:
    """The lag bound as a property of the request: older weights never sample it."""
    learner = LearnerWorker(setup(tiny_model))
    worker, _ = build_rollout_worker(setup(tiny_model))
    worker.submit([item(0, min_version=2)])
    worker.publish(new_weights(learner, 1, 1.1))
    assert run_out(worker) == []
    worker.publish(new_weights(learner, 2, 1.2))
    versions = {v for t in run_out(worker) for v in t.versions if v != NOT_SAMPLED}
    assert versions == {2}


def group(group_id: int, lengths: list[int], contract: str, reward: float | None = 1.0) -> FinishedGroup:
    trajectories = [
        fake_trajectory(
            group_id,
            [0] * n,
            i,
            contract=contract,
            reward=reward if reward is None else reward * i,
            sampling=SamplingParams(max_new_tokens=8),
        )
        for i, n in enumerate(lengths)
    ]
    return FinishedGroup(group_id, trajectories)


@pytest.mark.parametrize("lengths", [[3, 0, 2, 1], [0, 0, 0, 0]])
def test_empty_samples(tiny_model: Path, lengths: list[int]) -> None:
    """Field case 15: empty samples add nothing; a step of nothing else changes no weight; no NaN in any metric."""
    learner = LearnerWorker(setup(tiny_model, audit__on_unequal="warn"))
    before = learner.weights().digest
    contract = learner.identity().contract_digest
    update = learner.update([group(0, lengths, contract), group(1, [0, 0, 0, 0], contract)], NOTHING)
    assert update.version == learner.learner.version == 1
    assert update.metrics["tokens/trained"] == sum(lengths) == update.metrics["bitwise/checked"]
    assert all(math.isfinite(v) for v in update.metrics.values() if isinstance(v, float))
    assert (update.weights.digest == before) == (sum(lengths) == 0)
    if sum(lengths) == 0:
        assert update.metrics["loss/policy"] == 0.0


def test_foreign_contract_is_refused(tiny_model: Path) -> None:
    learner = LearnerWorker(setup(tiny_model))
    with pytest.raises(Exception, match="group 0 sample 0 was sampled under the numerical contract 'other'"):
        learner.update([group(0, [2, 2], "other")], NOTHING)
    assert learner.learner.version == 0


def test_the_text_that_was_graded_travels_with_the_sample(tiny_model: Path) -> None:
    worker, _ = build_rollout_worker(setup(tiny_model))
    request, example = item(0)
    worker.submit([(request, example)])
    done = run_out(worker)
    assert len(done) == 4
    tokenizer, task = load_tokenizer(tiny_model), make_task(Task(**TASK))
    for trajectory in done:
        text = tokenizer.decode(trajectory.sampled_token_ids, skip_special_tokens=True)
        assert (trajectory.info["text"], trajectory.reward) == (text, task.grade(example, text))
        assert trajectory.error is None


def test_a_worker_that_was_busy_loads_only_the_newest_weights(tiny_model: Path) -> None:
    """Field case 40: blocked for the time of two updates, it goes to the newest, and groups sent between are kept."""
    learner = LearnerWorker(setup(tiny_model))
    actor = RolloutActor.__new__(RolloutActor)  # without the process log and the engine thread
    actor._worker, _ = build_rollout_worker(setup(tiny_model))
    actor._commands = Queue()
    loaded: list[int] = []
    publish = actor._worker.publish
    actor._worker.publish = lambda weights: (loaded.append(weights.version), publish(weights))[1]  # type: ignore
    for version in (1, 2, 3):
        weights = new_weights(learner, version, 1 + version / 10)
        actor.publish(replace(weights, tensors=None), weights.tensors)
        actor.submit([item(version, min_version=version)])
    actor._take_commands(block=True)
    assert loaded == [3] and actor._worker.engine.version == 3
    done = run_out(actor._worker)
    assert {t.group_id for t in done} == {1, 2, 3}
    assert {v for t in done for v in t.versions if v != NOT_SAMPLED} == {3}


class ThreadSpy:
    """A rollout worker with three steps of work that notes which thread calls it; a submit ends it."""

    def __init__(self) -> None:
        self.steps = 0
        self.callers: set[str] = set()

    def _note(self) -> None:
        self.callers.add(threading.current_thread().name)

    def has_work(self) -> bool:
        self._note()
        return self.steps < 3

    def step(self) -> list[FinishedGroup]:
        self._note()
        self.steps += 1
        return []

    def stats(self) -> EngineStats:
        self._note()
        return EngineStats(sampled_tokens=self.steps, workers=1)

    def submit(self, items: list[Item]) -> None:
        raise RuntimeError("the end")


def test_only_the_engine_thread_touches_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report takes counters that the engine thread stored: counting walks through what a step changes."""
    monkeypatch.setattr("zerogap.runtime.worker.POLL_S", 0.01)
    spy = ThreadSpy()
    actor = RolloutActor.__new__(RolloutActor)  # without the process log and the real engine
    actor._worker, actor._threads = spy, 1  # type: ignore[assignment]
    actor._commands, actor._reports, actor._stats = Queue(), Queue(), EngineStats()
    engine = threading.Thread(target=actor._drive, name="engine", daemon=True)
    engine.start()
    poll: Callable[[], Report] = actor.report  # type: ignore[assignment]  # plain here, remote to mypy
    while spy.steps < 3:
        poll()
    for _ in range(100):  # the last step is counted soon after it was made
        if (report := poll()).stats.sampled_tokens == 3:
            break
    assert (report.finished, report.stats.sampled_tokens) == ([], 3)
    actor.submit([])
    engine.join(10)
    with pytest.raises(RuntimeError, match="the end"):
        poll()
    assert spy.callers == {"engine"}
