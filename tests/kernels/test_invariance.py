"""Kernels and decoder as functions of the row alone. ZEROGAP_EXAMPLES=20 multiplies the cases; benchmarks/fuzz.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.helpers import same_bits
from tests.kernels.reference import DTYPES, randn, weight
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
from zerogap.kernels import Weight, get_kernels


@examples(100)
@given(case=row_cases())
def test_a_row_alone_is_the_row_in_every_batch(case: RowCase) -> None:
    check_rows(case)


@examples(40)
@given(case=attention_cases())
def test_any_schedule_of_attention_gives_the_packed_bits(case: AttentionCase) -> None:
    check_attention(case)


@examples(25)
@given(case=decoder_cases)
def test_any_schedule_of_the_decoder_gives_the_packed_bits(case: DecoderCase) -> None:
    check_decoder(case)


@examples(15)
@given(case=gradient_cases())
def test_gradients_are_deterministic(case: GradientCase) -> None:
    check_gradients(case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_slices_of_a_weight_change_no_bit(dtype: torch.dtype) -> None:
    """A fused qkv or gate_up weight gives the bits of its parts."""
    kernels, x, w = get_kernels("aligned"), randn(9, 50, dtype=dtype), weight(150, 50, dtype=dtype)
    assert same_bits(kernels.linear(x, Weight(w.data[33:101])), kernels.linear(x, w)[:, 33:101].contiguous())
