"""REINFORCE Zero behind a gate: a sequence whose ratio lies outside a band is rejected as a whole.

An accepted sequence is trained with its tokens' own ratios, as in REINFORCE Zero: the gate decides which sequences are
trained, not what they weigh. Rejected tokens leave the denominator.
"""

from __future__ import annotations

import math

import torch

from zerogap.config.objective import GeometricGate, ProductGate
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens, weighted_logprobs


def geometric_gate(tokens: TrainedTokens, config: GeometricGate) -> LossOutput:
    """Keeps a sequence of T tokens where low <= exp(1/T * sum_t log r_t) <= high. Marks `rejected`.

    Source: Liu et al., When Speed Kills Stability: Demystifying RL Collapse from Training-Inference Mismatch (2025),
    https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda
    and verl's docs/algo/rollout_corr.md (rejection sampling, apart from the weights).
    """
    return _gate(tokens, sequence_log_ratios(tokens) / _lengths(tokens), config.low, config.high)


def product_gate(tokens: TrainedTokens, config: ProductGate) -> LossOutput:
    """Keeps a sequence where low <= prod_t r_t <= high: the true ratio of the sequence, so that the longer it is the
    further it is from 1 at the same distance per token. Marks `rejected`.

    Source: as geometric_gate (there: sequence-level masked importance sampling).
    """
    return _gate(tokens, sequence_log_ratios(tokens), config.low, config.high)


def sequence_log_ratios(tokens: TrainedTokens) -> torch.Tensor:
    """float64 [largest owner + 1]: sum of the raw log-ratios of each sequence; 0 for one that is not here."""
    return torch.bincount(tokens.owners_N, weights=tokens.log_ratios_N.double())


def _lengths(tokens: TrainedTokens) -> torch.Tensor:
    return torch.bincount(tokens.owners_N).clamp(min=1)


def _gate(tokens: TrainedTokens, log_ratios_S: torch.Tensor, low: float, high: float) -> LossOutput:
    # Compared as logarithms: the product over a long sequence may not fit a float.
    rejected_N = ((log_ratios_S < math.log(low)) | (log_ratios_S > math.log(high)))[tokens.owners_N]
    weights_N = tokens.log_ratios_N.masked_fill(rejected_N, -math.inf).exp()
    return weighted_logprobs(tokens, weights_N, {"rejected": rejected_N})
