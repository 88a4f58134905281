"""`learner` of the recipe: the optimizer, memory, and the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zerogap.config.objective import ObjectiveConfig, ReinforceZero
from zerogap.config.section import Section


class Learner(Section):
    threads: int = Field(1, ge=1)
    """CPU threads of the learner. Log-probabilities do not depend on it."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak rate of AdamW. With lag it bounds how far the policy moves away from the tokens it trains on."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: from learning_rate to 0 over train.updates, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the rate rises linearly to its peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Packed rows per forward/backward; changes memory and speed, not the gradient."""
    activation_checkpointing: bool = False
    """True: the forward pass keeps only the input of each layer, the backward pass runs the layer again. Less memory,
    the more rows a micro-batch has and the more layers the model; about a quarter more time; the same bits."""
    mask_truncated: bool = False
    """True: samples ended by a limit keep their place in the group mean but add nothing to loss or denominator."""
    objective: ObjectiveConfig = Field(default_factory=ReinforceZero)
    """What is maximised: the section of its `name`, one of those below; default: reinforce_zero."""
