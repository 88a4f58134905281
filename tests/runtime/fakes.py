"""Stand-ins for engines, learner and prompts, so that the loop can be driven through any timing in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from zerogap.env.task import Example
from zerogap.runtime.admission import Admission
from zerogap.runtime.backend import EngineStats, Events, FinishedGroup, Item, Update, Weights
from zerogap.runtime.living import Living
from zerogap.runtime.loop import run_loop
from zerogap.trajectory import NOT_SAMPLED, GroupRequest, SamplingParams, Trajectory

SAMPLING = SamplingParams(max_new_tokens=8)


def fake_item(group_id: int, min_version: int = 0, prompt_id: int | None = None, n: int = 1) -> Item:
    prompt_id = group_id if prompt_id is None else prompt_id
    request = GroupRequest(group_id, prompt_id, (1, 2), n, SAMPLING, min_version)
    return request, Example(prompt_id, [{"role": "user", "content": str(prompt_id)}], None)


def fake_trajectory(group_id: int, versions: Sequence[int], sample_index: int = 0, **fields: Any) -> Trajectory:
    """A prompt of two tokens, then one sampled token for each of `versions`."""
    n = len(versions)
    values: dict[str, Any] = {
        "token_ids": [1, 2, *([3] * n)],
        "loss_mask": [0, 0, *([1] * n)],
        "logprobs": [0.0, 0.0, *([-1.0] * n)],
        "versions": [NOT_SAMPLED, NOT_SAMPLED, *versions],
        "finish_reason": "eos",
        "prompt_id": group_id,
        "group_id": group_id,
        "sample_index": sample_index,
        "sampling": SAMPLING,
        "reward": 1.0,
    }
    return Trajectory(**(values | fields))


class FakePrompts:
    skipped = 0

    def __init__(self) -> None:
        self.requested: list[int] = []

    def request(self, group_id: int, min_version: int) -> Item:
        self.requested.append(group_id)
        return fake_item(group_id, min_version)


@dataclass
class _Running:
    request: GroupRequest
    ticks: int
    versions: list[int] = field(default_factory=list)


@dataclass
class FakeEngine:
    """Receives versions and groups over a slow line on which they may overtake each other."""

    version: int
    on_update: str
    obeys_min_version: bool
    line: list[tuple[int, Any]] = field(default_factory=list)
    waiting: list[GroupRequest] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)


class FakeBackend:
    """Virtual time. Every wait ticks until something is finished; nothing for `patience` ticks is a deadlock.

    ticks(group_id): how long a group takes. All other timing comes from `seed`. deaths: chance per tick that an engine
    is started again, at the first version, and is sent everything anew. on_train: hears every request for an update.
    """

    def __init__(
        self,
        seed: int,
        engines: int = 1,
        version: int = 0,
        longest_delay: int = 0,
        longest_update: int = 1,
        ticks: Callable[[int], int] = lambda group_id: 1,
        on_update: str = "recompute",
        obeys_min_version: bool = True,
        patience: int = 5000,
        deaths: float = 0.0,
        on_train: Callable[[list[FinishedGroup], Living], None] = lambda groups, living: None,
    ) -> None:
        self._random = random.Random(seed)
        self._engines = [FakeEngine(version, on_update, obeys_min_version) for _ in range(engines)]
        self._start_version = self._newest = self._version = version
        self._deaths, self._on_train = deaths, on_train
        self._longest_delay, self._longest_update = longest_delay, longest_update
        self._ticks, self._patience = ticks, patience
        self.now = 0
        self._update_at: int | None = None
        self.trained: list[list[FinishedGroup]] = []
        self.alive = self.most_alive = 0

    def submit(self, items: Sequence[Item]) -> None:
        for request, _ in items:
            self._send(self._random.choice(self._engines), request)
        self.alive += len(items)
        self.most_alive = max(self.most_alive, self.alive)

    def publish(self, weights: Weights) -> None:
        self._newest = weights.version
        for engine in self._engines:
            self._send(engine, weights.version)

    def train(self, groups: list[FinishedGroup], living: Living) -> None:
        assert self._update_at is None, "two updates at once"
        self._on_train(groups, living)
        self.trained.append(groups)
        self._update_at = self.now + self._random.randint(1, self._longest_update)

    def wait(self, timeout_s: float) -> Events:
        for _ in range(self._patience):
            self.now += 1
            events = Events([group for engine in self._engines for group in self._step(engine)])
            if self._update_at is not None and self.now >= self._update_at:
                self._update_at = None
                self._version += 1
                self.alive -= len(self.trained[-1])
                events.update = Update(self._version, {}, Weights(self._version, "", None))
            if events:
                return events
        return Events()

    def stats(self) -> EngineStats:
        return EngineStats(workers=len(self._engines))

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        raise NotImplementedError

    def save_model(self, folder: Path) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _send(self, engine: FakeEngine, message: Any) -> None:
        engine.line.append((self.now + self._random.randint(0, self._longest_delay), message))

    def _restart(self, engine: FakeEngine) -> None:
        lost = [message for _, message in engine.line if isinstance(message, GroupRequest)]
        lost += engine.waiting + [run.request for run in engine.running]
        engine.version, engine.line, engine.waiting, engine.running = self._start_version, [], [], []
        for message in [self._newest, *lost]:
            self._send(engine, message)

    def _step(self, engine: FakeEngine) -> list[FinishedGroup]:
        if self._deaths and self._random.random() < self._deaths:
            self._restart(engine)
        arrived = [message for at, message in engine.line if at <= self.now]
        engine.line = [(at, message) for at, message in engine.line if at > self.now]
        engine.waiting += [message for message in arrived if isinstance(message, GroupRequest)]
        newest = max([engine.version, *(message for message in arrived if isinstance(message, int))])
        if newest > engine.version:
            if engine.on_update == "finish" and engine.running:
                engine.line.append((self.now + 1, newest))  # the old weights go on until what runs has ended
            else:
                engine.version = newest
        may_start = [r for r in engine.waiting if not engine.obeys_min_version or r.min_version <= engine.version]
        draining = engine.on_update == "finish" and newest > engine.version
        if may_start and not draining and len(engine.running) < 3:
            request = self._random.choice(may_start)
            engine.waiting.remove(request)
            engine.running.append(_Running(request, self._ticks(request.group_id)))
        finished = []
        for run in list(engine.running):
            run.versions.append(engine.version)
            if len(run.versions) >= run.ticks:
                engine.running.remove(run)
                group_id = run.request.group_id
                finished.append(FinishedGroup(group_id, [fake_trajectory(group_id, run.versions)]))
        return finished


def run(
    backend: FakeBackend, lag: int, batch: int, start: int, updates: int, hold_lag: bool = False
) -> list[dict[str, Any]]:
    """The loop from version `start` to version `updates`; its lines of metrics."""
    lines: list[dict[str, Any]] = []
    run_loop(
        backend,
        FakePrompts(),
        Admission(batch, lag, start, updates),
        start,
        updates,
        timeout_s=1.0,
        on_update=lambda weights, metrics, groups: lines.append(metrics),
        hold_lag=hold_lag,
    )
    return lines


@dataclass(frozen=True)
class Timing:
    """When things happen. start: first version (100 is as after a resume). slowest: most ticks that a group takes."""

    seed: int
    engines: int
    start: int
    longest_delay: int
    longest_update: int
    slowest: int
    on_update: str

    def backend(self, groups: range, **others: Any) -> FakeBackend:
        """groups: all that the run admits. others: further options of FakeBackend."""
        durations = random.Random(self.seed)
        table = {g: durations.randint(1, self.slowest) for g in groups}
        return FakeBackend(
            self.seed,
            self.engines,
            self.start,
            self.longest_delay,
            self.longest_update,
            table.__getitem__,
            self.on_update,
            **others,
        )


timings = st.builds(
    Timing,
    seed=st.integers(0, 2**32),
    engines=st.integers(1, 4),
    start=st.sampled_from([0, 1, 100]),
    longest_delay=st.sampled_from([0, 1, 7, 60]),
    longest_update=st.sampled_from([1, 5, 80]),
    slowest=st.sampled_from([1, 4, 40]),
    on_update=st.sampled_from(["recompute", "finish"]),
)
lags = st.one_of(st.integers(0, 8), st.integers(0, 64))
