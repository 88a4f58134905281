"""The audit finds every kind of fault that is not lag, and says where."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from tests.helpers import tiny_decoder
from zerogap.gaps.bitwise import check_bits, choose_groups
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.runtime.weight_store import WeightStore
from zerogap.trajectory import NOT_SAMPLED, GroupRequest, SamplingParams, Trajectory

BUDGET = 64


def sampled(temperature: float = 1.0, kernels: str = "aligned") -> tuple[Decoder, WeightStore, list[Trajectory]]:
    """Two groups of three, sampled over the versions 0, 1, 2 of a model whose weights really move."""
    learner = tiny_decoder(kernels, trainable=True)
    engine = EmbeddedEngine(tiny_decoder(kernels), None, EngineConfig(max_running=4, page_size=8, kv_tokens=256))
    store = WeightStore(lag=8)
    store.put(0, learner.snapshot())
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature, seed=5)
    for group_id in range(2):
        engine.submit(GroupRequest(group_id, group_id, tuple(range(2, 9 + group_id)), 3, sampling))
    done: list[Trajectory] = []
    steps = 0
    while engine.has_work():
        done += engine.step()
        steps += 1
        if steps % 4 == 0 and engine.version < 2:
            version = engine.version + 1
            weights = {name: tensor * (1 + 0.3 * version) for name, tensor in store.get(0).items()}
            store.put(version, weights)
            engine.load_weights(version, weights)
    return learner, store, done


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_clean_trajectories_over_versions(temperature: float) -> None:
    """Field case 1 on the re-scoring path: at any temperature, 0 unequal; every sampled token is checked once."""
    learner, store, done = sampled(temperature)
    assert {v for t in done for v in t.versions} == {NOT_SAMPLED, 0, 1, 2}
    report = check_bits(learner, store, done, BUDGET)
    assert (report.checked, report.unequal, report.first) == (sum(t.num_sampled for t in done), 0, None)


def test_one_bit_is_found_and_named() -> None:
    learner, store, done = sampled()
    position = len(done[1].token_ids) - 1
    wrong = struct.unpack(
        "f", struct.pack("I", struct.unpack("I", struct.pack("f", done[1].logprobs[position]))[0] ^ 1)
    )
    done[1].logprobs[position] = wrong[0]
    report = check_bits(learner, store, done, BUDGET)
    assert report.unequal == 1 and report.first is not None
    first = report.first
    assert (first.group_id, first.sample_index, first.position) == (done[1].group_id, done[1].sample_index, position)
    assert first.engine == wrong[0] != first.learner and first.version == done[1].versions[position]
    assert f"position {position} version" in str(first)


def test_wrong_version_label_is_a_kernel_fault() -> None:
    """Field case 22 and W3: a token that claims newer weights than made it is unequal, however stale it is."""
    learner, store, done = sampled()
    changed = 0
    for trajectory in done:
        for position, version in enumerate(trajectory.versions):
            if version == 0:
                trajectory.versions[position] = 1
                changed += 1
    report = check_bits(learner, store, done, BUDGET)
    assert changed and report.unequal == changed and report.first is not None and report.first.version == 1


def test_wrong_temperature_is_found() -> None:
    """Field case 1: recorded at one temperature, scored at another."""
    learner, store, done = sampled(0.6)
    for trajectory in done:
        trajectory.sampling = replace(trajectory.sampling, temperature=1.0)
    report = check_bits(learner, store, done, BUDGET)
    assert report.unequal == report.checked


def test_learner_weights_do_not_enter() -> None:
    """The audit scores with the weights of the token's version, wherever the learner is by now."""
    learner, store, done = sampled()
    for weight in learner.weights.values():
        assert weight.master is not None
        weight.master.data.mul_(3)
    learner.refresh()
    assert check_bits(learner, store, done, BUDGET).unequal == 0


def test_standard_kernels_are_counted_not_hidden() -> None:
    learner, store, done = sampled(kernels="standard")
    report = check_bits(learner, store, done, BUDGET)
    assert 0 < report.unequal <= report.checked


def test_version_that_is_gone() -> None:
    learner, _, done = sampled()
    with pytest.raises(KeyError, match="weights of version 0 are not kept"):
        check_bits(learner, WeightStore(lag=0), done, BUDGET)


def test_nothing_sampled() -> None:
    learner, store, done = sampled()
    prompt = replace(done[0], token_ids=[1], loss_mask=[0], logprobs=[0.0], versions=[NOT_SAMPLED])
    report = check_bits(learner, store, [prompt], BUDGET)
    assert (report.checked, report.unequal) == (0, 0)


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.01, 1), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_choice_of_groups(share: float, count: int) -> None:
    """ceil(share x groups), a fixed choice, and over a few updates every place in a batch is looked at."""
    batches = [list(range(8 * k, 8 * k + 8)) for k in range(8)]
    chosen = [choose_groups(batch, share) for batch in batches]
    assert all(len(c) == count and c <= set(batch) for c, batch in zip(chosen, batches, strict=True))
    assert chosen == [choose_groups(batch, share) for batch in batches]
    if count:
        assert {g % 8 for c in chosen for g in c} == set(range(8))


def test_bits_not_values_are_compared() -> None:
    """-0.0 and 0.0 are equal numbers and unequal bits."""
    learner, store, done = sampled()
    trajectory = done[0]
    position = trajectory.loss_mask.index(1)
    assert torch.tensor(0.0) == torch.tensor(-0.0)
    certain = replace(trajectory, logprobs=list(trajectory.logprobs))
    certain.logprobs[position] = -0.0
    assert check_bits(learner, store, [certain], BUDGET).unequal == 1
