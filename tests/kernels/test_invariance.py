"""Kernels and decoder as functions of the row alone. ZEROGAP_EXAMPLES=20 multiplies the cases; see benchmarks/fuzz.py."""

from __future__ import annotations

from hypothesis import given

from tests.properties.attention import AttentionCase, attention_cases, check_attention
from tests.properties.decoders import (
    DecoderCase,
    GradientCase,
    check_decoder,
    check_gradients,
    decoder_cases,
    gradient_cases,
)
from tests.properties.rows import RowCase, check_rows, row_cases
from tests.properties.values import examples


@examples(100)
@given(case=row_cases())
def test_a_row_alone_is_the_row_in_every_batch(case: RowCase) -> None:
    check_rows(case)


@examples(40)
@given(case=attention_cases)
def test_any_schedule_of_attention_gives_the_packed_bits(case: AttentionCase) -> None:
    check_attention(case)


@examples(25)
@given(case=decoder_cases)
def test_any_schedule_of_the_decoder_gives_the_packed_bits(case: DecoderCase) -> None:
    check_decoder(case)


@examples(15)
@given(case=gradient_cases)
def test_gradients_are_deterministic(case: GradientCase) -> None:
    check_gradients(case)
