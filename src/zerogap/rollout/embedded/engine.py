"""The embedded engine: schedule, run one batched forward, sample, hand out what ended. One thread drives it.

A sampled token depends only on (weights, its prefix, seed, prompt id, sample index, position); with aligned kernels
neither batch, chunking, paging, sharing nor preemption changes a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.pages import PagePool
from zerogap.rollout.embedded.runner import ModelRunner
from zerogap.rollout.embedded.scheduler import Scheduler
from zerogap.rollout.embedded.sequence import Sample
from zerogap.rollout.embedded.stops import StopRule
from zerogap.rollout.embedded.weights import StagedWeights
from zerogap.rollout.engine import NonFiniteLogprob
from zerogap.trajectory import GroupRequest, Trajectory


@dataclass(frozen=True)
class EngineConfig:
    """max_running: samples decoded together. max_batched_tokens: most rows of one forward; longer prompts are cut.

    page_size, kv_tokens: the KV cache in tokens; kv_tokens None: room for max_running sequences of max_context.
    max_context: most tokens of a sequence, prompt included; None: the model's max_position_embeddings.
    on_update: "recompute": running samples drop their KV and go on with the new weights. "finish": they end on the
        old ones before the swap.
    """

    max_running: int = 64
    max_batched_tokens: int = 1024
    page_size: int = 32
    kv_tokens: int | None = None
    max_context: int | None = None
    on_update: Literal["recompute", "finish"] = "recompute"

    def __post_init__(self) -> None:
        for name in ("max_running", "max_batched_tokens", "page_size", "kv_tokens", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be >= 1")


class EmbeddedEngine:
    """Implements rollout.engine.Engine on a Decoder, which it packs and then owns: nobody else may write to it.

    tokenizer: anything with decode(ids, skip_special_tokens); needed only for stop strings.
    version: version of the decoder's weights at the start.
    """

    def __init__(self, decoder: Decoder, tokenizer: Any | None, config: EngineConfig, version: int = 0) -> None:
        limit = decoder.config.max_position_embeddings
        if config.max_context is not None and config.max_context > limit:
            raise ValueError(f"max_context {config.max_context} exceeds the model's max_position_embeddings {limit}")
        self.config = config
        self.decoder = decoder
        self.max_context = config.max_context or limit
        self._version = version
        pages = -(-self.max_context // config.page_size) * config.max_running
        if config.kv_tokens is not None:
            pages = max(1, config.kv_tokens // config.page_size)
        decoder.pack()
        self._runner = ModelRunner(decoder, pages, config.page_size)
        self._pool = PagePool(pages, config.page_size)
        self._scheduler = Scheduler(self._pool, config.max_running, config.max_batched_tokens, self._runner.copy_page)
        self._stops = StopRule(decoder.eos_token_ids, self.max_context, tokenizer)
        self._contract = decoder.contract_digest()
        self._staged = StagedWeights(decoder)
        self._next: tuple[int, dict[str, torch.Tensor]] | None = None  # committed, waits for running samples to end
        self._counters = dict.fromkeys(("steps", "sampled_tokens", "prefill_tokens", "nonfinite", "weight_updates"), 0)

    @property
    def version(self) -> int:
        return self._version

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; it starts once `version` >= request.min_version. ValueError: it can never be served."""
        problem = self._problem(request)
        if problem:
            raise ValueError(f"group {request.group_id}, prompt {request.prompt_id}: {problem}")
        self._scheduler.add(request)

    def step(self) -> list[Trajectory]:
        """One forward over a mixed batch (decode rows and prefill chunks); the trajectories that ended with it.

        Raises NonFiniteLogprob before anything of the step is kept.
        """
        batch = self._scheduler.schedule(self._version)
        if not batch:
            return []
        drawn = self._runner.run(batch, self._version)
        self._check_finite(drawn)
        for sequence, rows in batch:
            sequence.computed += rows
        done: list[Trajectory] = []
        for sample, token, logprob in drawn:
            sample.append(token, logprob, self._version)
            reason = self._stops.reason(sample)
            if reason is not None:
                self._scheduler.finish(sample)
                done.append(sample.trajectory(reason, self._contract))
        self._counters["steps"] += 1
        self._counters["sampled_tokens"] += len(drawn)
        self._counters["prefill_tokens"] += sum(rows for _, rows in batch) - len(drawn)
        self._swap_when_drained()
        return done

    def has_work(self) -> bool:
        """True when `step` would run something; groups held for newer weights are no work."""
        return any(
            group.request.min_version <= self._version
            and (len(group.waiting) < len(group.samples) or bool(self._scheduler.startable(group)))
            for group in self._scheduler.groups.values()
        )

    def pending(self) -> list[tuple[int, int]]:
        """(group_id, sample_index) of every unfinished trajectory, held ones included."""
        return [(group_id, sample.index) for group_id, g in self._scheduler.groups.items() for sample in g.samples]

    def abort(self, group_ids: Iterable[int]) -> None:
        """Forget these groups and what they sampled; unknown ids are ignored."""
        for group_id in group_ids:
            if group_id in self._scheduler.groups:
                self._scheduler.abort(group_id)
        self._swap_when_drained()

    def stage_weights(self, version: int, bucket: dict[str, torch.Tensor]) -> None:
        """Part of the weights of `version`, in any number of calls. The engine goes on with the old ones."""
        self._staged.add(version, bucket)

    def commit_weights(self, version: int) -> None:
        """Swap to the staged weights before the next forward ("recompute") or once running samples ended ("finish").

        Raises ValueError when `version` is not newer, WeightMismatch when the staged set is not complete; then the
        staged part is gone and the engine goes on unchanged.
        """
        weights = self._staged.take(version)
        newest = self._version if self._next is None else self._next[0]
        if version <= newest:
            raise ValueError(f"weights of version {version} cannot follow version {newest}; versions must grow")
        self._next = (version, weights)
        if self.config.on_update == "recompute":
            self._swap()
        else:
            self._scheduler.drain()
            self._swap_when_drained()

    def load_weights(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Stage and commit in one call."""
        self.stage_weights(version, weights)
        self.commit_weights(version)

    def stats(self) -> dict[str, int]:
        """Counters since the start; running, waiting (held groups included), pages and bytes of the KV cache now."""
        return {
            **self._counters,
            "preemptions": self._scheduler.preemptions,
            "prefix_forks": self._scheduler.prefix_forks,
            "running": len(self._scheduler.running),
            "waiting": sum(len(group.waiting) for group in self._scheduler.groups.values()),
            "pages_free": self._pool.free,
            "pages_total": self._pool.pages,
            "cache_bytes": self._runner.cache_bytes,
        }

    def _problem(self, request: GroupRequest) -> str | None:
        """Why the request can never be served, and what to change; None when it can."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        if request.group_id in self._scheduler.groups:
            return "a group with this id is still unfinished; give each group its own id"
        if not prompt:
            return "the prompt is empty; give at least one token"
        if not 0 <= min(prompt) <= max(prompt) < self.decoder.config.vocab_size:
            return f"token ids {min(prompt)}..{max(prompt)} must lie in 0..{self.decoder.config.vocab_size - 1}"
        if request.n < 1 or sampling.max_new_tokens < 1:
            return f"n {request.n} and max_new_tokens {sampling.max_new_tokens} must be >= 1"
        if not 0 <= sampling.temperature < math.inf:
            return f"temperature {sampling.temperature} must be >= 0 and finite (0 = most likely token)"
        if not 0 <= sampling.seed < 2**63:
            return f"seed {sampling.seed} must lie in 0..2**63 - 1"
        if "" in sampling.stop:
            return "stop holds an empty string, which every text contains; remove it"
        if sampling.stop and self._stops.tokenizer is None:
            return f"stop {sampling.stop} needs an engine with a tokenizer"
        if len(prompt) + 1 > self.max_context:
            return f"{len(prompt)} prompt tokens leave no room for one more in max_context {self.max_context}"
        # The newest token's keys and values are never needed, so a sequence of n tokens holds n - 1.
        cached = min(len(prompt) + sampling.max_new_tokens, self.max_context) - 1
        if self._pool.pages_for(cached) > self._pool.pages:
            return (
                f"{len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} need {cached} tokens of KV, "
                f"the cache has {self._pool.pages * self.config.page_size}; raise kv_tokens or lower max_new_tokens"
            )
        return None

    def _check_finite(self, drawn: list[tuple[Sample, int, float]]) -> None:
        bad = [(sample, token, logprob) for sample, token, logprob in drawn if not math.isfinite(logprob)]
        if not bad:
            return
        self._counters["nonfinite"] += len(bad)
        sample, token, logprob = bad[0]
        request = sample.group.request
        raise NonFiniteLogprob(
            f"group {request.group_id}, prompt {request.prompt_id}, sample {sample.index}: logprob {logprob} for token "
            f"{token} at index {len(sample.tokens)}, weight version {self._version} ({len(bad)} such in this step); "
            "the forward pass is broken, check the weights for NaN and the learning rate"
        )

    def _swap_when_drained(self) -> None:
        if self._next is not None and not any(
            sample.started for group in self._scheduler.groups.values() for sample in group.samples
        ):
            self._swap()

    def _swap(self) -> None:
        """Every page goes before the weights do, so no KV outlives the weights that made it."""
        assert self._next is not None
        version, weights = self._next
        self._scheduler.drop_all()
        self.decoder.load_snapshot(weights)
        self._version, self._next = version, None
        self._scheduler.draining = False
        self._counters["weight_updates"] += 1
