"""The public API: what a notebook sees, and that engine and learner agree bit for bit through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from zerogap import Policy, Trajectory
from zerogap.model import save_decoder
from zerogap.rollout.embedded.engine import EngineConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tiny_decoder("standard"), tmp_path_factory.mktemp("policy") / "model")


def unequal(policy: Policy, trajectories: list[Trajectory]) -> int:
    count = 0
    for trajectory, scored in zip(trajectories, policy.score(trajectories), strict=True):
        recorded = [p for p, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if m]
        count += int((torch.tensor(recorded).view(torch.int32) != scored.view(torch.int32)).sum())
    return count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_and_score_agree_bit_for_bit(folder: Path, dtype: str) -> None:
    policy = Policy.load(folder, dtype=dtype)  # type: ignore[arg-type]
    prompts = [[5, 6, 7], [9], list(range(2, 40))]
    small = EngineConfig(max_running=5, max_batched_tokens=16, page_size=8)
    trajectories = policy.generate(prompts, n=4, max_new_tokens=40, temperature=0.8, engine=small)
    assert [(t.prompt_id, t.sample_index) for t in trajectories] == [(p, s) for p in range(3) for s in range(4)]
    assert all(t.token_ids[: len(prompts[t.prompt_id])] == prompts[t.prompt_id] for t in trajectories)
    assert sum(t.num_sampled for t in trajectories) > 50
    assert all(set(t.versions) <= {-1, 0} for t in trajectories)
    assert unequal(policy, trajectories) == 0


def test_tokens_depend_on_the_seed_and_not_on_the_batch(folder: Path) -> None:
    policy = Policy.load(folder, dtype="float32")
    alone = policy.generate(torch.tensor([5, 6, 7]), n=2, seed=3)
    among = policy.generate([[5, 6, 7], [8, 8], [9]], n=2, seed=3)[:2]
    assert [t.token_ids for t in alone] == [t.token_ids for t in among]
    assert [t.logprobs for t in alone] == [t.logprobs for t in among]
    assert [t.token_ids for t in alone] != [t.token_ids for t in policy.generate([5, 6, 7], n=2, seed=4)]


def test_temperature_mixes_are_scored_at_their_own(folder: Path) -> None:
    """Field case 1: every re-scoring path uses the temperature that the token was sampled at."""
    policy = Policy.load(folder, dtype="float32")
    mixed = policy.generate([5, 6], n=2, temperature=0.6) + policy.generate([5, 6], n=2, temperature=1.0)
    assert unequal(policy, mixed) == 0


def test_save_round_trip(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, dtype="float32")
    again = Policy.load(policy.save(tmp_path / "copy"), dtype="float32")
    assert again.decoder.digest() == policy.decoder.digest()
    first, second = policy.generate([4, 5], n=2), again.generate([4, 5], n=2)
    assert same_bits(torch.tensor(first[0].logprobs), torch.tensor(second[0].logprobs))


def test_greedy_and_bad_temperature(folder: Path) -> None:
    policy = Policy.load(folder, dtype="float32")
    greedy = policy.generate([4, 5], n=3, temperature=0, max_new_tokens=8)
    assert len({tuple(t.token_ids) for t in greedy}) == 1
    with pytest.raises(ValueError, match="temperature -1"):
        policy.generate([4, 5], temperature=-1)
