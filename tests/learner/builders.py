"""Trajectories and learners for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers import tiny_decoder
from zerogap.config import Learner as LearnerConfig
from zerogap.learner.learner import Learner
from zerogap.learner.packing import score
from zerogap.model.decoder import Decoder
from zerogap.trajectory import NOT_SAMPLED, SamplingParams, Trajectory


def make_trajectory(
    prompt: list[int],
    sampled: list[int],
    reward: float | None = 0.0,
    group: int = 0,
    sample: int = 0,
    versions: list[int] | None = None,
    logprobs: list[float] | None = None,
    temperature: float = 1.0,
    **fields: Any,
) -> Trajectory:
    """A trajectory whose behaviour logprob is -1 for each sampled token unless given."""
    n, m = len(prompt), len(sampled)
    return Trajectory(
        token_ids=[*prompt, *sampled],
        loss_mask=[0] * n + [1] * m,
        logprobs=[0.0] * n + (logprobs or [-1.0] * m),
        versions=[NOT_SAMPLED] * n + (versions or [0] * m),
        prompt_id=group,
        group_id=group,
        sample_index=sample,
        sampling=SamplingParams(temperature=temperature),
        reward=reward,
        **({"finish_reason": "eos"} | fields),
    )


def make_batch(groups: int = 2, size: int = 4, seed: int = 0, versions: int = 0) -> list[Trajectory]:
    """Groups of random samples of 1 to 9 tokens, rewards 0 and 1 in turn."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return [int(t) for t in torch.randint(2, 61, (length,), generator=generator)]

    batch = []
    for group in range(groups):
        prompt = tokens(2, 6)
        for sample in range(size):
            sampled = tokens(1, 10)
            batch.append(
                make_trajectory(prompt, sampled, float(sample % 2), group, sample, versions=[versions] * len(sampled))
            )
    return batch


def on_policy(decoder: Decoder, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Give the trajectories the logprobs that this decoder has for them (in place)."""
    for trajectory, logprobs_N in zip(trajectories, score(decoder, trajectories, 4096), strict=True):
        values = iter(logprobs_N.tolist())
        trajectory.logprobs = [next(values) if m else 0.0 for m in trajectory.loss_mask]
    return trajectories


def make_learner(
    kernels: str = "standard", dtype: torch.dtype = torch.float32, total: int = 10, **config: Any
) -> Learner:
    decoder = tiny_decoder(kernels, dtype, trainable=True)
    return Learner(decoder, LearnerConfig.model_validate({"learning_rate": 1e-3} | config), total, temperature=1.0)


def masters(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of the fp32 masters."""
    return {name: master.detach().clone() for name, master in learner.optimizer.masters.items()}


def gradients(learner: Learner) -> torch.Tensor:
    """All gradients held, as one flat vector."""
    parts = []
    for master in learner.optimizer.masters.values():
        assert master.grad is not None
        parts.append(master.grad.flatten())
    return torch.cat(parts)
