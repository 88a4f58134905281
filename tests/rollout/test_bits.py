"""The engine on real decoders: logprobs compared as bits, alone and in any company, and with the learner's forward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.helpers import tiny_decoder
from tests.rollout.builders import Bits, alone, bits, by_sample, drain, request, run, swap_in_halves
from zerogap.kernels import RowBatch
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, Trajectory

MODELS: list[dict[str, Any]] = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float32, "architecture": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
    {"dtype": torch.bfloat16, "architecture": "qwen2", "qkv_bias": True, "hidden_size": 64, "head_dim": 16},
]
models = pytest.mark.parametrize("model", MODELS, ids=["llama-fp32", "llama-bf16", "qwen3-fp32", "qwen2-bf16"])


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, 61), k=length)


def learner_logprobs(decoder: Decoder, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
    """fp32 logprobs of the sampled tokens of each, from one packed forward as the learner does it."""
    tokens = [t.token_ids for t in trajectories]
    with torch.no_grad():
        flat_T = torch.tensor([token for row in tokens for token in row])
        hidden_TH = decoder.hidden(flat_T, RowBatch.pack([len(row) for row in tokens]), None)
        found, start = [], 0
        for t in trajectories:
            first, last = start + t.loss_mask.index(1), start + len(t.token_ids)
            found.append(
                decoder.logprobs(
                    hidden_TH[first - 1 : last - 1].contiguous(), flat_T[first:last], t.sampling.temperature
                )
            )
            start = last
    return found


def pattern(logprobs: torch.Tensor) -> list[int]:
    return logprobs.view(torch.int32).tolist()


def sampled_pattern(t: Trajectory) -> list[int]:
    return pattern(torch.tensor(t.logprobs[t.loss_mask.index(1) :], dtype=torch.float32))


@models
def test_preemption_and_prefix_sharing_leave_no_trace(model: dict[str, Any]) -> None:
    """A pool for about two of twelve samples, against a pool for all, against one by one without a prefix."""
    decoder = tiny_decoder(**model)
    requests = [request(g, prompt(g, 45), n=4, new=24) for g in range(3)]
    small = EmbeddedEngine(decoder, None, EngineConfig(max_batched_tokens=40, page_size=8, kv_tokens=160))
    large = EmbeddedEngine(decoder, None, EngineConfig(max_batched_tokens=40, page_size=8))
    for r in requests:
        small.submit(r)
        large.submit(r)
    preempted, shared = by_sample(drain(small)), by_sample(drain(large))
    assert small.stats()["preemptions"] >= 3
    assert (large.stats()["preemptions"], large.stats()["prefix_forks"]) == (0, 12)
    assert preempted == shared == alone(decoder, requests)


@models
def test_weights_swapped_in_mid_flight_each_token_has_exactly_one_version(model: dict[str, Any]) -> None:
    """Field cases 16, 17, 21, 22, 23: the learner reproduces each token with its own version and with no other.

    Three complete versions, tied and untied heads, while samples decode, prefill, wait and are preempted.
    """
    decoder = tiny_decoder(**model)
    versions = [tiny_decoder(**model, seed=seed).snapshot() for seed in range(3)]
    learners = [decoder.view(tensors) for tensors in versions]
    config = EngineConfig(max_running=6, max_batched_tokens=50, page_size=8, kv_tokens=320)
    engine = EmbeddedEngine(decoder, None, config)
    for g in range(5):
        engine.submit(request(g, prompt(g, 10 + 9 * g), n=3, new=20, temperature=0.8))
    done: list[Trajectory] = []
    for version in (1, 2):
        for _ in range(9):
            done += engine.step()
        done += swap_in_halves(engine, version, versions[version])
    done += drain(engine)
    assert len(done) == 15
    scores = [[pattern(x) for x in learner_logprobs(learner, done)] for learner in learners]
    spans_seen = set()
    for i, t in enumerate(done):
        labels = t.versions[t.loss_mask.index(1) :]
        spans_seen.add(tuple(sorted(set(labels))))
        for place, (got, label) in enumerate(zip(sampled_pattern(t), labels, strict=True)):
            assert [v for v in range(3) if scores[v][i][place] == got] == [label], (t.group_id, t.sample_index, place)
    assert any(len(span) > 1 for span in spans_seen), "no trajectory spans an update"


@models
def test_prefix_filled_by_old_weights_is_not_used_after_the_update(model: dict[str, Any]) -> None:
    """Field case 16: prompt P at v0, a big change, P again (and a group in flight) = a fresh engine at v1."""
    decoder = tiny_decoder(**model)
    config = EngineConfig(page_size=8, max_batched_tokens=32)
    engine = EmbeddedEngine(decoder, None, config)
    engine.submit(request(0, prompt(0, 41), n=4, new=6))
    drain(engine)
    engine.submit(request(1, prompt(0, 41), n=4, new=6))
    engine.step()  # its prefix is half computed
    engine.load_weights(1, tiny_decoder(**model, seed=9).snapshot())
    engine.submit(request(2, prompt(0, 41), n=4, new=6))
    done = by_sample(drain(engine))
    fresh = tiny_decoder(**model, seed=9)
    assert done == by_sample(run(fresh, [request(g, prompt(0, 41), n=4, new=6) for g in (1, 2)], config))
    assert decoder.digest() == fresh.digest()


@models
def test_weights_loaded_twice_leave_nothing_of_the_old_ones(model: dict[str, Any]) -> None:
    """Field cases 17 and 19: packed copies are renewed, and so is the recorded step, which holds addresses."""
    engine = EmbeddedEngine(tiny_decoder(**model), None, EngineConfig())
    ours = []
    for version in range(3):
        if version:
            engine.load_weights(version, tiny_decoder(**model, seed=version).snapshot())
        engine.submit(request(version, prompt(0, 20), n=3, new=6))
        ours.append({sample: found for (_, sample), found in by_sample(drain(engine)).items()})
    for version, found in enumerate(ours):
        again = request(version, prompt(0, 20), n=3, new=6)
        fresh = by_sample(run(tiny_decoder(**model, seed=version), [again], EngineConfig()))
        assert found == {sample: bits for (_, sample), bits in fresh.items()}
    assert ours[0] != ours[1] != ours[2]


@models
def test_torn_delivery_keeps_the_old_weights_bit_for_bit(model: dict[str, Any]) -> None:
    """Field case 21: the sender dies after half of the tensors while 8 requests decode."""
    decoder = tiny_decoder(**model)
    digest = decoder.digest()
    requests = [request(g, prompt(g, 12), new=10) for g in range(8)]
    engine = EmbeddedEngine(decoder, None, EngineConfig())
    for r in requests:
        engine.submit(r)
    done = engine.step() + engine.step()
    new = tiny_decoder(**model, seed=5).snapshot()
    engine.stage_weights(1, dict(list(new.items())[: len(new) // 2]))
    done += engine.step()
    with pytest.raises(ValueError, match="was not delivered"):
        engine.commit_weights(1)
    done += drain(engine)
    assert (engine.version, decoder.digest()) == (0, digest)
    assert by_sample(done) == alone(tiny_decoder(**model), requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_pattern_per_request_over_the_whole_grid(dtype: torch.dtype) -> None:
    """Field case 32: 8 requests alone, with 31 and 63 others, shuffled, chunk 64/512, cold/warm prefix, 5 times."""
    decoder = tiny_decoder(dtype=dtype)
    fixed = [request(g, prompt(g, 20 + 7 * g), n=1 + g % 2, new=8) for g in range(8)]
    others = [request(100 + g, prompt(50 + g, 5 + g % 40), new=3 + g % 8) for g in range(63)]
    seen: dict[tuple[int, int], set[str]] = {}

    def record(found: dict[tuple[int, int], Bits]) -> None:
        for key, value in found.items():
            if key[0] < 100:
                seen.setdefault(key, set()).add(repr(value))

    record(alone(decoder, fixed))
    for company in (0, 31, 63):
        for chunk in (64, 512):
            for warm in (False, True):
                for repeat in range(5):
                    mix: list[GroupRequest] = [*fixed, *others[:company]]
                    random.Random(repeat).shuffle(mix)
                    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=64, max_batched_tokens=chunk))
                    done: list[Trajectory] = []
                    if warm:  # the prompts have been seen before, and a group of each holds its prefix
                        for r in fixed:
                            engine.submit(request(r.group_id + 200, r.prompt_token_ids, n=2, new=2))
                        done += engine.step()
                    for r in mix:
                        engine.submit(r)
                    record(by_sample(done + drain(engine)))
    assert len(seen) == 12
    assert {key: len(patterns) for key, patterns in seen.items()} == dict.fromkeys(seen, 1)


def test_repeated_group_is_the_same_and_another_seed_is_not() -> None:
    decoder = tiny_decoder()
    first, again = (run(decoder, [request(0, prompt(0, 9), n=4, seed=3)], EngineConfig()) for _ in range(2))
    other = run(decoder, [request(0, prompt(0, 9), n=4, seed=4)], EngineConfig())
    assert by_sample(first) == by_sample(again) != by_sample(other)
    assert len({repr(bits(t)[0]) for t in first}) > 1, "samples of a group must differ"
    assert {t.contract for t in first} == {decoder.contract_digest()}
