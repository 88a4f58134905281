"""Engine and learner have the same bits under any schedule. ZEROGAP_EXAMPLES=20 multiplies the cases."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.properties.decoders import Model
from tests.properties.engines import (
    EngineCase,
    Serving,
    TrainingCase,
    check_engine,
    check_training,
    engine_cases,
    training_cases,
)
from tests.properties.values import examples
from tests.properties.ways import BEST
from tests.rollout.caller import Answer
from zerogap.kernels import AttentionShape


@examples(30)
@given(case=engine_cases)
def test_any_schedule_gives_the_bits_of_the_learner(case: EngineCase) -> None:
    check_engine(case)


@examples(10)
@given(case=training_cases)
def test_real_updates_at_any_lag_leave_no_unequal_bit(case: TrainingCase) -> None:
    check_training(case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("on_update", ["recompute", "finish"])
def test_episodes_over_real_updates_leave_no_unequal_bit(dtype: str, on_update: str) -> None:
    """Three turns, a retry and a second segment in a pool where parked pages are evicted; four updates at lag 2."""
    model = Model("llama", dtype, 32, 48, 2, AttentionShape(4, 2, 8), vocab=61, unused=3, tied=True, scale=1.0, seed=1)
    answers = [
        Answer("extend", 7, 2),
        Answer("retry"),
        Answer("extend", 9, 5),
        Answer("extend", 20),
        Answer("segment", 12),
    ]
    case = TrainingCase(
        model=model,
        serving=Serving(8, 6, 5, 24, on_update, BEST, threads=1),
        updates=4,
        lag=2,
        groups=2,
        n=3,
        prompt=17,
        new=9,
        temperature=1.0,
        answers=tuple(answers),
        early=3,
        micro_batch_tokens=100,
        variant=BEST,
        twin_variant=BEST,
        seed=5,
    )
    assert check_training(case) > 4 * 2 * 3 * 9
