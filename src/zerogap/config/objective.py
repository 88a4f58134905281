"""`learner.objective` of the recipe: one section per objective, told apart by `name`.

The functions are in learner/objectives/; r is the ratio of a token, learner over recorded probability.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from zerogap.config.section import Section


class ReinforceZero(Section):
    """Each token weighs r, a constant under the gradient. Nothing is clipped, truncated, masked or rejected, and the
    advantage is the reward minus the mean of its group."""

    name: Literal["reinforce_zero"] = "reinforce_zero"
    """The default."""

    @property
    def normalize_std(self) -> bool:
        """Never: it is what "Zero" stands for."""
        return False


class GroupNormalized(Section):
    """What the objectives beside REINFORCE Zero share."""

    normalize_std: bool = False
    """True: the advantage is also divided by the standard deviation of its group (GRPO as published). A group of equal
    rewards has advantage 0 either way."""


class PpoClip(GroupNormalized):
    """PPO's clipped surrogate on groups (GRPO, DAPO): -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) per token."""

    name: Literal["ppo_clip"]
    """A token whose ratio has left the band in the direction of its advantage gives no gradient."""
    eps_low: float = Field(0.2, ge=0, le=1)
    """Tokens of negative advantage give no gradient once r is below 1 - eps_low."""
    eps_high: float = Field(0.2, ge=0)
    """Tokens of positive advantage give no gradient once r is above 1 + eps_high (DAPO: 0.28)."""


class TruncatedIs(GroupNormalized):
    """Truncated importance sampling (TIS): each token weighs min(r, cap)."""

    name: Literal["truncated_is"]
    """Biased towards the behaviour policy where r is large; no token is lost."""
    cap: float = Field(2.0, gt=0)
    """Largest weight."""


class Band(GroupNormalized):
    """Ratios that are kept."""

    low: float = Field(gt=0)
    """Smallest ratio kept. No default: what is usual depends on lag, learning rate and, for a product, on length."""
    high: float = Field(gt=0)
    """Largest ratio kept. No default, as low."""

    @model_validator(mode="after")
    def _order(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"low {self.low} must not be above high {self.high}")
        return self


class MaskedIs(Band):
    """Masked importance sampling (IcePop): a token weighs r inside [low, high] and is left out outside."""

    name: Literal["masked_is"]
    """Masked tokens leave the denominator too."""
    low: float = Field(0.5, ge=0)
    """Tokens with a smaller ratio are masked."""
    high: float = Field(5.0, gt=0)
    """Tokens with a larger ratio are masked."""


class GeometricGate(Band):
    """REINFORCE Zero without the sequences whose geometric mean of r lies outside [low, high]."""

    name: Literal["geometric_gate"]
    """A sequence is accepted or rejected as a whole; rejected tokens leave the denominator."""


class ProductGate(Band):
    """REINFORCE Zero without the sequences whose product of r lies outside [low, high]."""

    name: Literal["product_gate"]
    """A sequence is accepted or rejected as a whole, long ones first; rejected tokens leave the denominator."""


class Cispo(GroupNormalized):
    """CISPO: each token weighs clip(r, 1 - eps_low, 1 + eps_high), a constant under the gradient."""

    name: Literal["cispo"]
    """A clipped token keeps its gradient at the bounded weight; at eps_low 1 it is truncated_is of cap 1 + eps_high."""
    eps_low: float = Field(1.0, ge=0, le=1)
    """1: no lower bound, as in the paper."""
    eps_high: float = Field(4.0, ge=0)
    """The largest weight is 1 + eps_high."""


class IsOff(GroupNormalized):
    """No importance sampling: each token weighs 1, whatever its ratio."""

    name: Literal["is_off"]
    """What is trained is then not the policy that sampled; for comparison."""


ObjectiveConfig = Annotated[
    ReinforceZero | PpoClip | TruncatedIs | MaskedIs | GeometricGate | ProductGate | Cispo | IsOff,
    Field(discriminator="name"),
]
