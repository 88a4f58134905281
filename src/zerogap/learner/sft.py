"""Supervised warm start: mean negative log-likelihood of worked solutions, on the optimizer of the learner."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zerogap.config import Learner as LearnerConfig
from zerogap.learner.optimizer import MasterOptimizer
from zerogap.learner.packing import pack
from zerogap.model.decoder import Decoder


@dataclass(frozen=True)
class Solution:
    """token_ids: prompt, solution, end mark. loss_mask: 1 on what the model has to learn to write."""

    token_ids: list[int]
    loss_mask: list[int]


def train_sft(
    decoder: Decoder,
    batches: Iterable[list[tuple[list[int], list[int]]]],
    learning_rate: float,
    warmup_steps: int,
    total_steps: int,
    micro_batch_tokens: int,
    on_step: Callable[[int, float], None],
    activation_checkpointing: bool = False,
) -> None:
    """One update per batch of (token_ids, loss_mask), total_steps in all; rate: warm-up, then half a cosine to 0.

    on_step(steps done, mean NLL per trained token in nats, before that step's update).
    Raises ValueError on a batch without a trained token or when the batches run out early, RuntimeError when loss or
    gradient is not finite (the weights are then those before the step).
    """
    config = LearnerConfig.model_validate(
        {
            "learning_rate": learning_rate,
            "warmup_steps": warmup_steps,
            "schedule": "cosine",
            "micro_batch_tokens": micro_batch_tokens,
        }
    )
    optimizer = MasterOptimizer(decoder, config, total_steps)
    decoder.activation_checkpointing = activation_checkpointing
    source = iter(batches)
    for step in range(total_steps):
        batch = next(source, None)
        if batch is None:
            raise ValueError(f"warm start: the examples ended after {step} of {total_steps} steps")
        loss = backward_sft(decoder, [Solution(*example) for example in batch], micro_batch_tokens)
        if not math.isfinite(loss) or not math.isfinite(optimizer.gradient_norm()):
            raise RuntimeError(
                f"warm start step {step}: loss {loss} or its gradient is not finite; lower warm_start.learning_rate "
                f"({learning_rate}) or check the starting model"
            )
        optimizer.apply(step)
        on_step(step + 1, loss)


def backward_sft(decoder: Decoder, solutions: list[Solution], micro_batch_tokens: int) -> float:
    """Add the gradient of the mean NLL per trained token to the masters; returns that mean."""
    tokens = sum(sum(solution.loss_mask) for solution in solutions)
    if not tokens:
        raise ValueError(f"warm start: none of the {len(solutions)} examples of a batch has a trained token")
    total = 0.0
    for micro_batch in pack(solutions, micro_batch_tokens):
        loss = -micro_batch.logprobs(decoder, temperature=1.0).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total
