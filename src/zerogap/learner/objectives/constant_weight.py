"""Objectives in which a token's log-probability is multiplied by a constant made from its own ratio.

All of them: loss = - sum_t stopgrad(w_t) * advantage_t * logprob_t / denominator, with r_t = exp(logprob_t -
behaviour_t) and w_t as each says. They differ in w_t, and in which tokens count in the denominator.
"""

from __future__ import annotations

import torch

from zerogap.config.objective import Cispo, MaskedIs, TruncatedIs
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens, weighted_logprobs


def reinforce_zero(tokens: TrainedTokens) -> LossOutput:
    """w = r. Nothing is bounded, no token leaves the loss: `rejected` is marked nowhere."""
    log_ratios_N = tokens.log_ratios_N
    return weighted_logprobs(tokens, log_ratios_N.exp(), {"rejected": torch.zeros_like(log_ratios_N, dtype=torch.bool)})


def is_off(tokens: TrainedTokens) -> LossOutput:
    """w = 1: as if every token had been sampled by the weights that train on it."""
    return weighted_logprobs(tokens, torch.ones_like(tokens.behaviour_logprobs_N))


def truncated_is(tokens: TrainedTokens, config: TruncatedIs) -> LossOutput:
    """w = min(r, cap). Marks `truncated_weight` where r > cap. Every token stays in the denominator.

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025),
    https://fengyao.notion.site/off-policy-rl
    """
    ratios_N = tokens.log_ratios_N.exp()
    return weighted_logprobs(tokens, ratios_N.clamp(max=config.cap), {"truncated_weight": ratios_N > config.cap})


def masked_is(tokens: TrainedTokens, config: MaskedIs) -> LossOutput:
    """IcePop: w = r where low <= r <= high, else 0. Marks `masked`; masked tokens leave the denominator.

    Source: Ling Team, Every Step Evolves (2025), arXiv:2510.18855. There a masked token still counts in the length that
    its sequence is divided by; it does not here, because the step of the kept tokens would shrink with the share masked
    (the fault of https://github.com/THUDM/slime/pull/657).
    """
    ratios_N = tokens.log_ratios_N.exp()
    masked_N = (ratios_N < config.low) | (ratios_N > config.high)
    return weighted_logprobs(tokens, ratios_N.masked_fill(masked_N, 0.0), {"masked": masked_N})


def cispo(tokens: TrainedTokens, config: Cispo) -> LossOutput:
    """w = clip(r, 1 - eps_low, 1 + eps_high). Marks `clipped` where the bound acts; such a token keeps a gradient, and
    every token stays in the denominator.

    Source: MiniMax, MiniMax-M1 (2025), arXiv:2506.13585.
    """
    ratios_N = tokens.log_ratios_N.exp()
    low, high = 1.0 - config.eps_low, 1.0 + config.eps_high
    return weighted_logprobs(tokens, ratios_N.clamp(low, high), {"clipped": (ratios_N < low) | (ratios_N > high)})
