"""Requests and small runs of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import Engine
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

Bits = tuple[list[int], list[int], str]


def request(
    group_id: int,
    prompt: Sequence[int],
    n: int = 1,
    new: int = 8,
    min_version: int = 0,
    interactive: bool = False,
    **sampling: Any,
) -> GroupRequest:
    """prompt_id = group_id + 100, so that a mix-up of the two shows."""
    params = SamplingParams(max_new_tokens=new, **sampling)
    return GroupRequest(group_id, group_id + 100, tuple(prompt), n, params, min_version, interactive)


def pages_needed(requests: Sequence[GroupRequest], page_size: int, context: int) -> int:
    """Of the smallest pool in which no turn of these is cut short: that of a whole context where there are episodes."""
    cached = max(
        context - 1 if r.interactive else min(len(r.prompt_token_ids) + r.sampling.max_new_tokens, context) - 1
        for r in requests
    )
    return -(-cached // page_size)


def drain(engine: Engine, limit: int = 20_000) -> list[Trajectory]:
    """Step until there is no work; a limit on steps turns a livelock into a failure."""
    done: list[Trajectory] = []
    for _ in range(limit):
        if not engine.has_work():
            return done
        done += engine.step()
    raise AssertionError(f"still pending after {limit} steps: {engine.pending()}")


def swap_in_halves(engine: Engine, version: int, weights: dict[str, torch.Tensor]) -> list[Trajectory]:
    """Weights that arrive as two messages with an engine step between them. Returns what that step finished."""
    names = list(weights)
    engine.stage_weights(version, {name: weights[name] for name in names[::2]})
    done = engine.step()
    engine.stage_weights(version, {name: weights[name] for name in names[1::2]})
    engine.commit_weights(version)
    return done


def run(decoder: Decoder, requests: Iterable[GroupRequest], config: EngineConfig) -> list[Trajectory]:
    engine = EmbeddedEngine(decoder, None, config)
    for r in requests:
        engine.submit(r)
    done = drain(engine)
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"], "pages leaked"
    return done


def bits(trajectory: Trajectory) -> Bits:
    """Token ids, the logprobs' bit patterns and the reason of ending."""
    patterns = torch.tensor(trajectory.logprobs, dtype=torch.float32).view(torch.int32).tolist()
    return trajectory.token_ids, patterns, trajectory.finish_reason


def by_sample(trajectories: Iterable[Trajectory]) -> dict[tuple[int, int], Bits]:
    found: dict[tuple[int, int], Bits] = {}
    for t in trajectories:
        assert (t.group_id, t.sample_index) not in found, "a trajectory was returned twice"
        found[t.group_id, t.sample_index] = bits(t)
    return found


def alone(decoder: Decoder, requests: Iterable[GroupRequest]) -> dict[tuple[int, int], Bits]:
    """The reference: each sample by itself on a fresh engine, its whole prompt in one forward, nothing shared."""
    found: dict[tuple[int, int], Bits] = {}
    for r in requests:
        for index in range(r.n):
            engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=1, max_batched_tokens=4096, page_size=64))
            engine.submit(r)
            group = engine._scheduler.groups[r.group_id]  # only this sample: then there is no prefix to share
            group.samples, group.waiting = [group.samples[index]], [group.samples[index]]
            found |= by_sample(drain(engine))
            assert engine.stats()["prefix_forks"] == 0
    return found
