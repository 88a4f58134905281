"""The embedded engine: schedule, run one batched forward, sample, hand out what ended. One thread drives it.

A sampled token depends only on (weights, its prefix, seed, prompt id, sample index, segment, position); with aligned
kernels neither batch, chunking, paging, sharing, parking nor preemption changes a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.limits import Limits
from zerogap.rollout.embedded.pages import PagePool
from zerogap.rollout.embedded.runner import ModelRunner
from zerogap.rollout.embedded.scheduler import Scheduler
from zerogap.rollout.embedded.sequence import MAX_SEGMENTS, Sample
from zerogap.rollout.embedded.stops import StopRule
from zerogap.rollout.embedded.weights import StagedWeights, in_dtype
from zerogap.rollout.engine import NonFiniteLogprob
from zerogap.trajectory import FinishReason, GroupRequest, Trajectory


@dataclass(frozen=True)
class EngineConfig:
    """max_running: samples decoded together. max_batched_tokens: most rows of one forward; longer prompts are cut.

    page_size, kv_tokens: the KV cache in tokens; kv_tokens None: room for max_running sequences of max_context.
    max_context: most tokens of a sequence, all turns; None: the model's max_position_embeddings. An episode of several
        turns may also grow to kv_tokens + 1 only.
    on_update: "recompute": samples that have begun drop their KV and go on with the new weights. "finish": they end on
        the old ones before the swap, parked ones included.
    dtype: what the engine computes in; None: the decoder's. Weights are given and delivered in the decoder's dtype.
    """

    max_running: int = 64
    max_batched_tokens: int = 1024
    page_size: int = 32
    kv_tokens: int | None = None
    max_context: int | None = None
    on_update: Literal["recompute", "finish"] = "recompute"
    dtype: torch.dtype | None = None

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
        delivered = decoder.dtype
        self.decoder = decoder = in_dtype(decoder, config.dtype or delivered)
        self.max_context = config.max_context or limit
        self._version = version
        pages = -(-self.max_context // config.page_size) * config.max_running
        if config.kv_tokens is not None:
            pages = max(1, config.kv_tokens // config.page_size)
        decoder.pack()
        self._runner = ModelRunner(decoder, pages, config.page_size)
        self._pool = PagePool(pages, config.page_size)
        self._scheduler = Scheduler(self._pool, config.max_running, config.max_batched_tokens, self._runner.copy_page)
        self._limits = Limits(
            decoder.config.vocab_size, self.max_context, pages * config.page_size, can_stop=tokenizer is not None
        )
        self._stops = StopRule(decoder.eos_token_ids, self._limits.longest, tokenizer)
        self._contract = decoder.contract_digest()
        self._staged = StagedWeights(decoder, delivered)
        self._next: tuple[int, dict[str, torch.Tensor]] | None = None  # committed, waits for running samples to end
        self._counters = dict.fromkeys(("steps", "sampled_tokens", "prefill_tokens", "nonfinite", "weight_updates"), 0)

    @property
    def version(self) -> int:
        return self._version

    def submit(self, request: GroupRequest) -> None:
        """Queue a group; it starts once `version` >= request.min_version. ValueError: it can never be served."""
        if request.group_id in self._scheduler.groups:
            raise ValueError(
                f"group {request.group_id}, prompt {request.prompt_id}: a group with this id is still unfinished; give "
                "each group its own id"
            )
        self._limits.check_request(request)
        self._scheduler.add(request)

    def step(self) -> list[Trajectory]:
        """One forward over a mixed batch (decode rows and prefill chunks); the trajectories whose turn ended with it.

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
                done.append(self._end_turn(sample, reason))
        self._counters["steps"] += 1
        self._counters["sampled_tokens"] += len(drawn)
        self._counters["prefill_tokens"] += sum(rows for _, rows in batch) - len(drawn)
        self._swap_when_drained()
        return done

    def extend(self, group_id: int, sample_index: int, token_ids: Sequence[int]) -> None:
        """Tokens that were not sampled, after those of a parked sample; then its next turn. See Engine.extend."""
        sample, tokens = self._parked(group_id, sample_index), list(token_ids)
        self._limits.check_tokens(_name(sample), tokens, before=len(sample.tokens))
        sample.extend(tokens)
        self._scheduler.come_back(sample)

    def restart(self, group_id: int, sample_index: int, prompt_token_ids: Sequence[int], segment: int) -> None:
        """A parked sample begins again, from this prompt. See Engine.restart."""
        sample, prompt = self._parked(group_id, sample_index), list(prompt_token_ids)
        if not 0 <= segment < MAX_SEGMENTS:
            raise ValueError(f"{_name(sample)}: segment {segment} must lie in 0..{MAX_SEGMENTS - 1}")
        self._limits.check_tokens(_name(sample), prompt)
        self._scheduler.restart(sample, prompt, segment)

    def end(self, group_id: int, sample_index: int) -> None:
        """Forget a parked sample and release its pages."""
        self._scheduler.finish(self._parked(group_id, sample_index))
        self._swap_when_drained()

    def has_work(self) -> bool:
        """True when `step` would run something; groups held for newer weights and parked samples are no work."""
        return bool(self._scheduler.running) or any(
            group.request.min_version <= self._version and self._scheduler.startable(group)
            for group in self._scheduler.groups.values()
        )

    def pending(self) -> list[tuple[int, int]]:
        """(group_id, sample_index) of every unfinished sample, held and parked ones included."""
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
        """Swap to the staged weights before the next forward ("recompute") or once begun samples ended ("finish").

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
        """Counters since the start; samples running, waiting (held ones included) and parked, pages and bytes of the KV
        cache now.

        preemptions: times that a running sample or a prefix lost its pages; evictions: that a sample without a slot
        did; pauses: that a running sample lost its slot to an older one that came back.
        """
        scheduler = self._scheduler
        return {
            **self._counters,
            "preemptions": scheduler.preemptions,
            "evictions": scheduler.evictions,
            "pauses": scheduler.pauses,
            "prefix_forks": scheduler.prefix_forks,
            "running": len(scheduler.running),
            "waiting": sum(len(group.waiting) for group in scheduler.groups.values()),
            "parked": sum(s.state == "parked" for group in scheduler.groups.values() for s in group.samples),
            "pages_free": self._pool.free,
            "pages_total": self._pool.pages,
            "cache_bytes": self._runner.cache_bytes,
        }

    def _end_turn(self, sample: Sample, reason: FinishReason) -> Trajectory:
        if sample.group.request.interactive:
            self._scheduler.park(sample)
        else:
            self._scheduler.finish(sample)
        return sample.trajectory(reason, self._contract)

    def _parked(self, group_id: int, sample_index: int) -> Sample:
        group = self._scheduler.groups.get(group_id)
        for sample in group.samples if group else ():
            if sample.index == sample_index and sample.state == "parked":
                return sample
        raise ValueError(
            f"group {group_id}, sample {sample_index} is not parked; only a sample of an interactive request can be "
            "extended, restarted or ended, and only between the end of its turn and its next one"
        )

    def _check_finite(self, drawn: list[tuple[Sample, int, float]]) -> None:
        bad = [(sample, token, logprob) for sample, token, logprob in drawn if not math.isfinite(logprob)]
        if not bad:
            return
        self._counters["nonfinite"] += len(bad)
        sample, token, logprob = bad[0]
        raise NonFiniteLogprob(
            f"{_name(sample)}: logprob {logprob} for token {token} at index {len(sample.tokens)}, weight "
            f"version {self._version} ({len(bad)} such in this step); the forward pass is broken, check "
            "the weights for NaN and the learning rate"
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


def _name(sample: Sample) -> str:
    request = sample.group.request
    return f"group {request.group_id}, prompt {request.prompt_id}, sample {sample.index}"
