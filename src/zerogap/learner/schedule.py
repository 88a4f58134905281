"""Learning rate as a function of the update's index alone, so that a resumed run goes on where it was."""

from __future__ import annotations

import math

from zerogap.config import Learner as LearnerConfig


def learning_rate(step: int, config: LearnerConfig, total: int) -> float:
    """Rate of update `step` (0, 1, ...) of `total`.

    Linear warm-up over config.warmup_steps (the first update has 1/warmup_steps of the peak, not 0), then constant,
    or half a cosine from the peak to 0 at update `total`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
