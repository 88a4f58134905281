"""Objectives as pure functions, and the one place that chooses among them by the recipe's `learner.objective`."""

from __future__ import annotations

from zerogap.config.objective import (
    Cispo,
    GeometricGate,
    IsOff,
    MaskedIs,
    ObjectiveConfig,
    PpoClip,
    ProductGate,
    ReinforceZero,
    TruncatedIs,
)
from zerogap.learner.objectives.clipped_surrogate import ppo_clip
from zerogap.learner.objectives.constant_weight import cispo, is_off, masked_is, reinforce_zero, truncated_is
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens
from zerogap.learner.objectives.sequence_gate import geometric_gate, product_gate


def policy_loss(tokens: TrainedTokens, config: ObjectiveConfig) -> LossOutput:
    """The loss of these tokens under the objective that the recipe names."""
    match config:
        case ReinforceZero():
            return reinforce_zero(tokens)
        case IsOff():
            return is_off(tokens)
        case TruncatedIs():
            return truncated_is(tokens, config)
        case MaskedIs():
            return masked_is(tokens, config)
        case Cispo():
            return cispo(tokens, config)
        case PpoClip():
            return ppo_clip(tokens, config)
        case GeometricGate():
            return geometric_gate(tokens, config)
        case ProductGate():
            return product_gate(tokens, config)
