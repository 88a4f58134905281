"""Learning rate by update index."""

from __future__ import annotations

import pytest

from zerogap.config import Learner as LearnerConfig
from zerogap.learner.schedule import learning_rate


def rates(total: int, **config: object) -> list[float]:
    parsed = LearnerConfig.model_validate({"learning_rate": 1.0} | config)
    return [learning_rate(step, parsed, total) for step in range(total + 1)]


def test_warm_up_then_constant() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert rates(2) == [1.0, 1.0, 1.0]


def test_cosine_ends_at_zero() -> None:
    assert rates(6, warmup_steps=2, schedule="cosine") == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466, 0.0])


def test_warm_up_longer_than_the_run() -> None:
    assert rates(2, warmup_steps=4, schedule="cosine") == [0.25, 0.5, 0.75]
