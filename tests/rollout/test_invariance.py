"""Engine and learner have the same bits under any schedule. ZEROGAP_EXAMPLES=20 multiplies the cases."""

from __future__ import annotations

from hypothesis import given

from tests.properties.engines import (
    EngineCase,
    TrainingCase,
    check_engine,
    check_training,
    engine_cases,
    training_cases,
)
from tests.properties.values import examples


@examples(30)
@given(case=engine_cases)
def test_any_schedule_gives_the_bits_of_the_learner(case: EngineCase) -> None:
    check_engine(case)


@examples(10)
@given(case=training_cases)
def test_real_updates_at_any_lag_leave_no_unequal_bit(case: TrainingCase) -> None:
    check_training(case)
