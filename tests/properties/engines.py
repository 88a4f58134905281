"""The engine under any schedule, and the whole loop of engine and learner with real optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from tests.properties.decoders import Model, models
from tests.properties.values import Comparison, seeds
from tests.properties.ways import BEST, threads, variants
from tests.rollout.builders import swap_in_halves
from tests.rollout.caller import Answer, Caller
from zerogap.config import Learner as LearnerConfig
from zerogap.gaps.split import split_tokens
from zerogap.kernels import RowBatch
from zerogap.kernels.aligned_cache import PAGE_SIZES
from zerogap.learner.learner import Learner
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.embedded.sequence import MAX_SAMPLES
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

Snapshot = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Serving:
    """How an engine runs. spare_pages: KV pages beyond the fewest that any of its requests needs for one turn."""

    page_size: int
    spare_pages: int
    max_running: int
    max_batched_tokens: int
    on_update: str
    variant: str
    threads: int

    def engine(self, decoder: Decoder, requests: Sequence[GroupRequest]) -> EmbeddedEngine:
        cached = max(len(r.prompt_token_ids) + r.sampling.max_new_tokens - 1 for r in requests)
        kv_tokens = (-(-cached // self.page_size) + self.spare_pages) * self.page_size
        config = EngineConfig(
            self.max_running,
            self.max_batched_tokens,
            self.page_size,
            kv_tokens,
            on_update=self.on_update,  # type: ignore[arg-type]
        )
        return EmbeddedEngine(decoder, None, config)


servings = st.builds(
    Serving,
    page_size=st.sampled_from(PAGE_SIZES),
    spare_pages=st.integers(0, 12),
    max_running=st.integers(1, 16),
    max_batched_tokens=st.integers(1, 96),
    on_update=st.sampled_from(["recompute", "finish"]),
    variant=variants,
    threads=st.sampled_from([1, 2]),
)


@dataclass(frozen=True)
class Group:
    """prompt, new: tokens. wait: engine steps after it was submitted. min_version: see GroupRequest. answers: what
    follows the first turns of its episodes; None: a request that is not interactive."""

    prompt: int
    n: int
    new: int
    temperature: float
    wait: int
    min_version: int
    answers: tuple[Answer, ...] | None

    def request(self, group_id: int, vocab: int, seed: int) -> GroupRequest:
        tokens = random.Random(seed + group_id).choices(range(vocab), k=self.prompt)
        sampling = SamplingParams(self.new, self.temperature, seed=seed)
        interactive = self.answers is not None
        return GroupRequest(group_id, group_id + 100, tuple(tokens), self.n, sampling, self.min_version, interactive)


@dataclass(frozen=True)
class EngineCase:
    """updates: after how many engine steps the next weights arrive, once all groups are submitted. aborted: the index
    of a group that is dropped before the first update, if there is one. learner_variant, learner_threads,
    token_budget: of the packed forward that scores what was sampled."""

    model: Model
    serving: Serving
    groups: tuple[Group, ...]
    updates: tuple[int, ...]
    aborted: int
    learner_variant: str
    learner_threads: int
    token_budget: int
    seed: int


episodes = st.none() | st.lists(
    st.builds(
        Answer,
        kind=st.sampled_from(["extend", "extend", "extend", "segment", "retry"]),
        tokens=st.integers(1, 40),
        delay=st.integers(0, 9),
    ),
    max_size=3,
).map(tuple)

groups = st.builds(
    Group,
    prompt=st.integers(1, 80),
    n=st.integers(1, 5),
    new=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.6, 0.0]),
    wait=st.integers(0, 4),
    min_version=st.just(0) | st.integers(0, 2),
    answers=episodes,
)

engine_cases = st.builds(
    EngineCase,
    model=models(largest=40),
    serving=servings,
    groups=st.lists(groups, min_size=1, max_size=4).map(tuple),
    updates=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    aborted=st.integers(0, 9),
    learner_variant=variants,
    learner_threads=st.sampled_from([1, 2]),
    token_budget=st.integers(1, 400),
    seed=seeds,
)


def drawn_again(decoder: Decoder, trajectory: Trajectory, comparison: Comparison, version: int) -> None:
    """The tokens of one version, drawn again from one packed forward of their trajectory alone."""
    sampled = [p for p, v in enumerate(trajectory.versions) if v == version]
    sampling = trajectory.sampling
    tokens = torch.tensor(trajectory.token_ids)
    stream = trajectory.segment * MAX_SAMPLES + trajectory.sample_index
    keys = [(sampling.seed, trajectory.prompt_id, stream, p) for p in sampled]
    with torch.no_grad():
        hidden = decoder.hidden(tokens, RowBatch.pack([len(tokens)]))
        logits = decoder.logits(hidden[[p - 1 for p in sampled]])
        drawn, logprobs = decoder.sample(logits, torch.tensor(keys), sampling.temperature)
    where = f"version {version} of group {trajectory.group_id} sample {trajectory.sample_index} of {trajectory.segment}"
    comparison.same(f"tokens, {where}", tokens[sampled], drawn)
    comparison.same(f"logprobs, {where}", torch.tensor(trajectory.logprobs)[sampled], logprobs)


def check_trajectories(
    learner: Decoder, versions: dict[int, Snapshot], done: Sequence[Trajectory], token_budget: int, count: Comparison
) -> None:
    """Each token on the weights of its own version: the learner's packed forward has its logprob, and a fresh draw
    gives the token."""
    split = split_tokens(learner, versions, done, max(versions), token_budget)
    assert split.unequal == 0, f"{split.unequal} of {split.checked} logprobs differ: {split.first_unequal()}"
    count.values += split.checked
    for trajectory in done:
        for version in sorted(set(trajectory.versions) - {-1}):
            drawn_again(learner.view(versions[version]), trajectory, count, version)


def check_engine(case: EngineCase) -> int:
    """Any arrival, batch, chunk, page and pool size, sharing, preemption, abort, and weights that arrive in flight."""
    count, model, serving = Comparison(), case.model, case.serving
    requests = [group.request(g, model.vocab, case.seed) for g, group in enumerate(case.groups)]
    last = max(len(case.updates), *(r.min_version for r in requests))
    versions = {v: model.decoder(serving.variant, seed=v).snapshot() for v in range(last + 1)}
    engine = serving.engine(model.decoder(serving.variant, eos=(1,)), requests)
    waits = [*case.updates, *[0] * (last - len(case.updates))]
    answers = {g: group.answers for g, group in enumerate(case.groups) if group.answers is not None}
    caller = Caller(engine, answers, model.vocab)
    with threads(serving.threads):
        for request, group in zip(requests, case.groups, strict=True):
            caller.submit(request)
            for _ in range(group.wait):
                caller.step()
        caller.abort(case.aborted)
        expected = {(t.group_id, t.sample_index) for t in caller.ended} | set(engine.pending())
        for version, steps in enumerate(waits, start=1):
            for _ in range(steps):
                caller.step()
            caller.take(swap_in_halves(engine, version, versions[version]))
        caller.drain()
    stats, done = engine.stats(), caller.ended
    assert (stats["pages_free"], stats["running"], stats["waiting"]) == (stats["pages_total"], 0, 0), stats
    assert engine.version == last and engine.pending() == []
    assert {(t.group_id, t.sample_index) for t in done} == expected
    for t in done:
        labels = [v for v, m in zip(t.versions, t.loss_mask, strict=True) if m]
        assert labels == sorted(labels) and labels[0] >= requests[t.group_id].min_version
        assert serving.on_update == "recompute" or len(set(labels)) == 1
    with threads(case.learner_threads):
        check_trajectories(model.decoder(case.learner_variant), versions, done, case.token_budget, count)
    return count.values


@dataclass(frozen=True)
class TrainingCase:
    """updates: optimizer steps, each on `groups` groups of n samples; lag: its bound, kept by min_version.
    early: engine steps between an optimizer step and the delivery of its weights. twin_variant: of a second learner
    that gets the same trajectories on two threads."""

    model: Model
    serving: Serving
    updates: int
    lag: int
    groups: int
    n: int
    prompt: int
    new: int
    temperature: float
    answers: tuple[Answer, ...] | None
    early: int
    micro_batch_tokens: int
    variant: str
    twin_variant: str
    seed: int


training_cases = st.builds(
    TrainingCase,
    model=models(largest=40),
    serving=servings,
    updates=st.integers(2, 4),
    lag=st.integers(0, 3),
    groups=st.integers(1, 3),
    n=st.integers(2, 5),
    prompt=st.integers(1, 40),
    new=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.6]),
    answers=episodes,
    early=st.integers(0, 5),
    micro_batch_tokens=st.integers(1, 300),
    variant=variants,
    twin_variant=variants,
    seed=seeds,
)


def check_training(case: TrainingCase) -> int:
    """Engine logprobs = learner logprobs on the weights of each token's version, over two or more real optimizer
    steps; and two learners on other instruction sets, one and two threads, stay equal in every master."""
    count, model = Comparison(), case.model
    config = LearnerConfig(learning_rate=1e-2, micro_batch_tokens=case.micro_batch_tokens)
    learner, twin = (
        Learner(model.decoder(variant, trainable=True), config, case.updates, case.temperature)
        for variant in (case.variant, case.twin_variant)
    )
    group = Group(case.prompt, case.n, case.new, case.temperature, wait=0, min_version=0, answers=case.answers)
    requests = [group.request(g, model.vocab, case.seed) for g in range(case.updates * case.groups)]
    engine = case.serving.engine(model.decoder(case.serving.variant), requests)
    scorer = model.decoder(BEST)
    versions: dict[int, Snapshot] = {0: learner.decoder.snapshot()}
    answers = {} if case.answers is None else dict.fromkeys(range(len(requests)), case.answers)
    caller = Caller(engine, answers, model.vocab)
    for g, request in enumerate(requests):
        oldest = max(0, g // case.groups - case.lag)
        caller.submit(replace(request, min_version=oldest))
    rewards = random.Random(case.seed)
    for update in range(case.updates):
        group_ids = range(update * case.groups, (update + 1) * case.groups)
        with threads(case.serving.threads):
            caller.drain(group_ids)
        batch = sorted(
            (t for t in caller.ended if t.group_id in group_ids),
            key=lambda t: (t.group_id, t.sample_index, t.segment),
        )
        graded: dict[tuple[int, int], float] = {}
        for trajectory in batch:
            place = (trajectory.group_id, trajectory.sample_index)
            trajectory.reward = graded.setdefault(place, rewards.random())
        assert len(graded) == case.groups * case.n
        check_trajectories(scorer, versions, batch, case.micro_batch_tokens, count)
        before = {name: master.detach().clone() for name, master in learner.optimizer.masters.items()}
        metrics = learner.step(batch)
        with threads(2):
            twin.step(batch)
        assert metrics["lag/max"] <= case.lag
        for name, master in learner.optimizer.masters.items():
            count.same(f"master {name} after update {update + 1}", twin.optimizer.masters[name], master)
        moved = any(not torch.equal(learner.optimizer.masters[name], old) for name, old in before.items())
        assert moved or metrics["grad_norm"] < 1e-6, "an optimizer step changed nothing"
        versions[update + 1] = learner.decoder.snapshot()
        with threads(case.serving.threads):
            for _ in range(case.early):
                caller.step()
            engine.load_weights(update + 1, versions[update + 1])
    return count.values
