"""Whatever is really broken between engine and learner is in KERNEL, never in LAG, at any lag.

Field cases 1, 2, 7, 16, 17, 18, 20, 21, R2 and W3; each run makes four real updates with weights swapped in flight.
"""

from __future__ import annotations

import pytest
import torch

from tests.gaps.faults import FAULTS, Fault, Scene, play, undelivered
from tests.helpers import same_bits
from zerogap.gaps.split import Split, split_tokens
from zerogap.kernels import RowBatch

BUDGET = 64


def split_of(scene: Scene) -> Split:
    return split_tokens(scene.decoder, scene.snapshots, scene.trajectories, scene.version, BUDGET)


def alone(scene: Scene, split: Split, version: int | None) -> torch.Tensor:
    """The reference, fp32 [N]: each trajectory by itself on the weights of `version`, None: of each token's own."""
    logprobs_N = torch.empty(split.checked)
    for place in range(split.checked):
        trajectory = scene.trajectories[int(split.owners_N[place])]
        position = int(split.positions_N[place])
        weights = scene.snapshots[trajectory.versions[position] if version is None else version]
        decoder = scene.decoder.view(weights)
        tokens_T = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            hidden_TH = decoder.hidden(tokens_T[:position], RowBatch.pack([position]))
            logprobs_N[place] = decoder.logprobs(
                hidden_TH[-1:], tokens_T[position : position + 1], trajectory.sampling.temperature
            )
    return logprobs_N


@pytest.mark.parametrize("lag", [1, 3])
def test_healthy_run(lag: int) -> None:
    """Weights move, trajectories span versions, and KERNEL has no bit; the oldest tokens are `lag` updates old."""
    scene = play(Fault(), lag, updates=lag + 2)
    split = split_of(scene)
    assert split.unequal == 0 and split.first_unequal() is None
    assert split.checked == sum(t.num_sampled for t in scene.trajectories)
    assert split.ages_N.unique().tolist() == [lag - 1, lag]
    assert bool((split.kernel_N == 0).all())
    assert float(split.lag_N.abs().max()) > 1e-3


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_in_kernel_and_not_in_lag(name: str) -> None:
    scene = play(FAULTS[name])
    split = split_of(scene)
    assert split.unequal > 0
    own_N, current_N = alone(scene, split, None), alone(scene, split, scene.version)
    assert same_bits(split.own_N, own_N) and same_bits(split.current_N, current_N)
    assert torch.equal(split.lag_N, current_N.double() - own_N.double())  # of the clean weights, whatever was recorded
    first = split.first_unequal()
    assert first is not None and f"version {first.version}: engine {first.engine}" in str(first)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_undelivered_weights_at_age_zero(updates: int) -> None:
    """A token that claims the learner's own version has no LAG at all: what is missing there is KERNEL."""
    scene = play(undelivered(updates), lag=1)
    split = split_of(scene)
    fresh_N = split.versions_N == scene.version
    assert bool(fresh_N.any()) and bool((split.lag_N[fresh_N] == 0).all())
    assert bool(split.unequal_N[fresh_N].all())


def test_wrong_pairing_without_any_lag() -> None:
    """At a learning rate that changes no bit of a weight, LAG is 0 for every token, and the whole gap is KERNEL."""
    split = split_of(play(FAULTS["rows paired with another prompt"]))
    assert bool((split.lag_N == 0).all())
    assert torch.equal(split.kernel_N, split.total_N) and float(split.kernel_N.abs().mean()) > 0.1


def test_only_the_end_marks_are_unequal() -> None:
    scene = play(FAULTS["EOS logprob replaced by 0"])
    split = split_of(scene)
    ended = [o for o, t in enumerate(scene.trajectories) if t.finish_reason == "eos"]
    assert ended and split.owners_N[split.unequal_N].tolist() == ended
    assert bool((split.recorded_N[split.unequal_N] == 0).all())


def test_stale_cache_is_seen_only_after_the_update() -> None:
    """Tokens on the weights that made the cache are whole; every one after the swap is not."""
    split = split_of(play(FAULTS["stale prefix cache"]))
    older, newer = split.versions_N.unique().tolist()
    assert not split.unequal_N[split.versions_N == older].any()
    assert bool(split.unequal_N[split.versions_N == newer].all())


def test_one_temperature_is_a_shift_that_depends_on_the_token() -> None:
    """Field case 1: mu is of the untempered model, so log pi_v and log mu differ by more than a constant."""
    split = split_of(play(FAULTS["temperature 0.6 on one side"]))
    assert split.unequal == split.checked
    assert float(split.kernel_N.max()) > 0.1


def test_truncated_sampling_is_the_kept_mass() -> None:
    """Field case 2: exp(KERNEL) is the probability that was kept, between 0.9 and 1."""
    kept_N = split_of(play(FAULTS["top-p 0.9 on one side"])).kernel_N.exp()
    assert float(kept_N.min()) > 0.9 - 1e-6 and float(kept_N.max()) < 1 + 1e-6
