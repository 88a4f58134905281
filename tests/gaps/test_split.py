"""The split: its arithmetic, which token is named when a bit differs, and which groups are looked at."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gaps.faults import Fault, Scene, play
from tests.helpers import tiny_decoder
from zerogap.gaps.split import Split, choose_groups, gap_statistics, split_tokens
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import NOT_SAMPLED, GroupRequest, SamplingParams, Trajectory

BUDGET = 64
Snapshots = dict[int, dict[str, torch.Tensor]]


def sampled(temperature: float = 1.0, kernels: str = "aligned") -> tuple[Decoder, Snapshots, list[Trajectory]]:
    """Two groups of three, sampled over the versions 0, 1, 2 of a model whose weights really move."""
    learner = tiny_decoder(kernels, trainable=True)
    engine = EmbeddedEngine(tiny_decoder(kernels), None, EngineConfig(max_running=4, page_size=8, kv_tokens=256))
    snapshots = {0: learner.snapshot()}
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
            snapshots[version] = {name: tensor * (1 + 0.3 * version) for name, tensor in snapshots[0].items()}
            engine.load_weights(version, snapshots[version])
    return learner, snapshots, done


def split_of(sample: tuple[Decoder, Snapshots, list[Trajectory]]) -> Split:
    learner, snapshots, done = sample
    return split_tokens(learner, snapshots, done, 2, BUDGET)


def bare_split(behaviour: list[float], own: list[float], current: list[float], versions: list[int]) -> Split:
    """A split of given logprobs, at learner version 3."""
    owners_N = torch.zeros(len(behaviour), dtype=torch.int64)
    logprobs = [torch.tensor(values, dtype=torch.float32) for values in (behaviour, own, current)]
    return Split([], torch.full_like(owners_N, 3), owners_N, owners_N, torch.tensor(versions), *logprobs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_clean_trajectories_over_versions(temperature: float) -> None:
    """Field case 1 on the re-scoring path: at any temperature, 0 unequal; every sampled token is checked once."""
    learner, snapshots, done = sampled(temperature)
    assert {v for t in done for v in t.versions} == {NOT_SAMPLED, 0, 1, 2}
    split = split_of((learner, snapshots, done))
    assert (split.checked, split.unequal, split.first_unequal()) == (sum(t.num_sampled for t in done), 0, None)
    recorded = [lp for t in done for lp, m in zip(t.logprobs, t.loss_mask, strict=True) if m]
    assert split.recorded_N.tolist() == recorded  # trajectory by trajectory, in the order of the tokens


def test_one_bit_is_found_and_named() -> None:
    """Both values, as numbers and as bits."""
    learner, snapshots, done = sampled()
    position = len(done[1].token_ids) - 1
    pattern = struct.unpack("I", struct.pack("f", done[1].logprobs[position]))[0]
    wrong = struct.unpack("f", struct.pack("I", pattern ^ 1))[0]
    done[1].logprobs[position] = wrong
    split = split_of((learner, snapshots, done))
    first = split.first_unequal()
    assert split.unequal == 1 and first is not None
    assert (first.group_id, first.sample_index, first.position) == (done[1].group_id, done[1].sample_index, position)
    assert first.engine == wrong != first.learner and first.version == done[1].versions[position]
    assert f"position {position} version" in str(first)
    assert f"engine {wrong!r} (bits {pattern ^ 1:#010x}), learner {first.learner!r} (bits {pattern:#010x})" in str(
        first
    )


def test_wrong_version_label_is_a_kernel_fault() -> None:
    """Field case 22 and W3: a token that claims newer weights than made it is unequal, however stale it is."""
    learner, snapshots, done = sampled()
    changed = 0
    for trajectory in done:
        for position, version in enumerate(trajectory.versions):
            if version == 0:
                trajectory.versions[position] = 1
                changed += 1
    split = split_of((learner, snapshots, done))
    first = split.first_unequal()
    assert changed and split.unequal == changed and first is not None and first.version == 1


def test_wrong_temperature_is_found() -> None:
    """Field case 1: recorded at one temperature, scored at another."""
    learner, snapshots, done = sampled(0.6)
    for trajectory in done:
        trajectory.sampling = replace(trajectory.sampling, temperature=1.0)
    split = split_of((learner, snapshots, done))
    assert split.unequal == split.checked


def test_learner_weights_do_not_enter() -> None:
    """Everything is scored with the stored weights, wherever the learner's own are by now."""
    learner, snapshots, done = sampled()
    before = split_of((learner, snapshots, done))
    for weight in learner.weights.values():
        assert weight.master is not None
        weight.master.data.mul_(3)
    learner.refresh()
    after = split_of((learner, snapshots, done))
    assert after.unequal == 0 and torch.equal(after.total_N, before.total_N)


def test_standard_kernels_are_counted_not_hidden() -> None:
    """The control arm reports its KERNEL; LAG is free of it: exactly 0 for tokens of the learner's own version."""
    split = split_of(sampled(kernels="standard"))
    assert 0 < split.unequal <= split.checked
    assert 0 < float(split.kernel_N.abs().max()) < 1e-4
    assert bool((split.lag_N[split.versions_N == 2] == 0).all())


def test_lag_is_exactly_zero_where_weights_are_equal() -> None:
    """Also in the control arm, whose logprobs depend on the batch: both passes run the same one."""
    learner, snapshots, done = sampled(kernels="standard")
    split = split_of((learner, {version: snapshots[0] for version in snapshots}, done))
    assert bool((split.lag_N == 0).all()) and torch.equal(split.kernel_N, split.total_N)


def test_version_that_is_gone() -> None:
    learner, snapshots, done = sampled()
    del snapshots[0]
    with pytest.raises(KeyError, match="0"):
        split_of((learner, snapshots, done))


def test_nothing_sampled() -> None:
    learner, snapshots, done = sampled()
    prompt = replace(done[0], token_ids=[1], loss_mask=[0], logprobs=[0.0], versions=[NOT_SAMPLED])
    for trajectories in ([], [prompt]):
        split = split_of((learner, snapshots, trajectories))
        assert (split.checked, split.unequal, gap_statistics(split)) == (0, 0, {})


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
    split = bare_split([-0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3, 3])
    assert split.unequal_N.tolist() == [True, False] and bool((split.kernel_N == 0).all())


logprob = st.floats(-120.0, 0.0, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(logprob, logprob, logprob), min_size=1, max_size=8))
def test_parts_add_up(logprobs: list[tuple[float, float, float]]) -> None:
    """Field case 45: LAG + KERNEL = total for each token within one fp32 rounding, as kept and as stored in fp32."""
    behaviour, own, current = (list(values) for values in zip(*logprobs, strict=True))
    split = bare_split(behaviour, own, current, [0] * len(behaviour))
    lag, kernel, total = (part_N.numpy() for part_N in (split.lag_N, split.kernel_N, split.total_N))
    largest = np.maximum(np.abs(lag), np.maximum(np.abs(kernel), np.abs(total)))
    assert (np.abs(lag + kernel - total) <= 2 * np.spacing(largest)).all()  # far below one fp32 rounding
    stored = lag.astype(np.float32).astype(np.float64) + kernel.astype(np.float32)
    # In fp32 each of the three is rounded once, by at most half a unit of the largest.
    assert (np.abs(stored - total.astype(np.float32)) <= 1.5 * np.spacing(largest.astype(np.float32))).all()


def test_statistics_by_hand() -> None:
    """Two tokens at learner version 3, ages 3 and 1; logprobs that fp32 holds exactly."""
    statistics = gap_statistics(bare_split([-1.0, -2.0], [-1.5, -2.0], [-1.25, -3.0], [0, 2]))
    assert {name: statistics[f"gap/lag/{name}"] for name in ("mean", "abs_mean", "max", "k1")} == {
        "mean": -0.375,
        "abs_mean": 0.625,
        "max": 1.0,
        "k1": 0.375,
    }
    assert statistics["gap/lag/k3"] == pytest.approx((np.exp(0.25) - 1.25 + np.exp(-1.0)) / 2, rel=1e-14)
    assert (statistics["gap/lag/age_3"], statistics["gap/lag/age_1"]) == (0.25, 1.0)
    assert (statistics["gap/kernel/mean"], statistics["gap/kernel/age_1"]) == (-0.25, 0.0)
    assert (statistics["gap/total/mean"], statistics["gap/total/max"]) == (-0.625, 1.0)


def test_audit_runs_exactly_its_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R13: per version one pass on its own weights, and one on the learner's unless they are the same; only
    rows up to a version's last token."""
    scene: Scene = play(Fault(), lag=1)
    rows: list[int] = []
    hidden = Decoder.hidden
    monkeypatch.setattr(
        Decoder, "hidden", lambda self, tokens_T, *rest: (rows.append(len(tokens_T)), hidden(self, tokens_T, *rest))[1]
    )
    split = split_tokens(scene.decoder, scene.snapshots, scene.trajectories, scene.version, 4096)
    _, newer = split.versions_N.unique().tolist()
    assert newer == scene.version and len(rows) == 3 and rows[0] == rows[1] < rows[2]
