"""Attention against its definition, and what a broken, huge or later row must not reach. Schedules: test_invariance."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits
from tests.kernels import reference as ref
from tests.kernels.reference import BF16, DTYPES, FP32, randn, relative_error
from zerogap.kernels import AttentionShape, RowBatch, get_kernels
from zerogap.kernels.aligned_cache import LayerCache

K = get_kernels("aligned")
SHAPES = [
    AttentionShape(4, 2, 16),
    AttentionShape(6, 2, 10),
    AttentionShape(1, 1, 2),
    AttentionShape(7, 1, 34),
    AttentionShape(3, 1, 64),
    AttentionShape(2, 2, 112),
]


def poisoned_cache(pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype) -> LayerCache:
    """Whatever is read without having been written shows as NaN."""
    cache: LayerCache = K.new_cache(1, pages, page_size, shape, dtype)[0]
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


def qkv_rows(length: int, shape: AttentionShape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return randn(length, shape.qkv_size, dtype=dtype, seed=seed, scale=1.5)


def packed(qkv: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    return K.attention(qkv.clone(), RowBatch.pack([qkv.shape[0]]), None, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_definition(dtype: torch.dtype, shape: AttentionShape) -> None:
    qkv = qkv_rows(150, shape, dtype)
    expected = ref.attention(qkv.double(), [150], shape)
    assert relative_error(packed(qkv, shape), expected) < (1e-6 if dtype == FP32 else 3e-3)


def test_large_scores_neither_overflow_nor_lose_the_largest_key() -> None:
    shape = AttentionShape(1, 1, 4)
    qkv = torch.zeros(100, shape.qkv_size)
    qkv[:, :4] = 200.0
    qkv[:, 4:8] = torch.arange(100.0)[:, None]
    qkv[:, 8:] = torch.arange(100.0)[:, None]
    assert torch.equal(packed(qkv, shape), torch.arange(100.0)[:, None].expand(100, 4))


def test_a_broken_key_shows_in_every_later_row() -> None:
    shape = SHAPES[0]
    qkv = qkv_rows(80, shape, FP32)
    qkv[66, shape.q_size] = torch.nan  # a key of head 0, so of query heads 0 and 1
    output = packed(qkv, shape).view(80, shape.q_heads, shape.head_dim)
    assert output[66:, :2].isnan().all() and not output[:66].isnan().any() and not output[:, 2:].isnan().any()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_broken_value_shows_in_no_earlier_row(shape: AttentionShape) -> None:
    """A key of the future has weight 0, and 0 x NaN is NaN: it must not be multiplied at all."""
    qkv = qkv_rows(80, shape, FP32)
    clean = packed(qkv, shape)
    qkv[66, -1] = torch.nan  # the last kv head, so the last query head
    output = packed(qkv, shape)
    assert same_bits(output[:66], clean[:66]) and output[66:, -1].isnan().all()


@pytest.mark.parametrize("page_size", [0, 4, 24, 128])
def test_impossible_page_sizes_are_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size {page_size}"):
        K.new_cache(1, 2, page_size, SHAPES[0], BF16)


def test_rows_and_cache_must_agree() -> None:
    rows = RowBatch.paged([(0, 2)], [[0]], 16)
    qkv = qkv_rows(2, SHAPES[0], FP32)
    with pytest.raises(ValueError, match="page size 16"):
        K.attention(qkv, rows, poisoned_cache(1, 32, SHAPES[0], FP32), SHAPES[0])
    with pytest.raises(ValueError, match="need a cache"):
        K.attention(qkv, rows, None, SHAPES[0])


def test_no_row_hears_of_a_later_one() -> None:
    """Not even of a NaN (0 * NaN), or by the sign of a zero (-0 + 0 * value)."""
    shape = AttentionShape(1, 1, 2)
    qkv = torch.zeros(70, shape.qkv_size)
    qkv[:, 0], qkv[64, 2] = 30.0, 30.0  # the key of row 64 outweighs all others by more than e^87
    qkv[:64, 4], qkv[64, 4], qkv[65:, 4] = -1.0, -0.0, 1.0
    whole = packed(qkv, shape)
    assert same_bits(packed(qkv[:65], shape), whole[:65])
    qkv[69, 4] = torch.nan
    assert same_bits(packed(qkv, shape)[:69], whole[:69])
