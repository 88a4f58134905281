"""Attention: prefill = decode = chunks, over page sizes and shuffled pages, and packed = paged, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.kernels import reference as ref
from tests.kernels.reference import BF16, DTYPES, FP32, randn, relative_error
from zerogap.kernels import AttentionShape, RowBatch, get_kernels
from zerogap.kernels.aligned_cache import PAGE_SIZES, LayerCache

K = get_kernels("aligned")
SHAPES = [AttentionShape(4, 2, 16), AttentionShape(6, 2, 10), AttentionShape(1, 1, 2), AttentionShape(7, 1, 34)]


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


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    page_size=st.sampled_from(PAGE_SIZES),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_schedule_gives_the_packed_bits(
    dtype: torch.dtype, lengths: list[int], page_size: int, shape: AttentionShape, seed: int, data: st.DataObject
) -> None:
    """Sequences advance by random chunks (1 = a decode step) in random batches, on shuffled, poisoned pages."""
    sequences = [qkv_rows(n, shape, dtype, seed + i) for i, n in enumerate(lengths)]
    whole = [packed(x, shape) for x in sequences]
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = [[order.pop() for _ in range(c)] for c in counts]
    cache = poisoned_cache(sum(counts) + 2, page_size, shape, dtype)
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        open_ones = [i for i, n in enumerate(lengths) if done[i] < n]
        chosen = data.draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        steps = [data.draw(st.sampled_from([1, 1, 2, 13, 60, 150])) for _ in chosen]
        steps = [min(step, lengths[i] - done[i]) for i, step in zip(chosen, steps, strict=True)]
        spans = [(done[i], step) for i, step in zip(chosen, steps, strict=True)]
        rows = RowBatch.paged(spans, [tables[i] for i in chosen], page_size)
        qkv = torch.cat([sequences[i][first : first + step] for i, (first, step) in zip(chosen, spans, strict=True)])
        outputs = K.attention(qkv, rows, cache, shape).split(steps)
        for i, (first, step), output in zip(chosen, spans, outputs, strict=True):
            assert same_bits(output.contiguous(), whole[i][first : first + step])
            done[i] += step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_token_by_token_gives_the_prefill_bits(dtype: torch.dtype, page_size: int) -> None:
    shape, length = SHAPES[0], 200
    qkv = qkv_rows(length, shape, dtype)
    table = torch.randperm(length, generator=torch.Generator().manual_seed(1)).tolist()[: -(-length // page_size)]
    cache = poisoned_cache(length, page_size, shape, dtype)
    steps = [
        K.attention(qkv[t : t + 1].clone(), RowBatch.paged([(t, 1)], [table], page_size), cache, shape)
        for t in range(length)
    ]
    assert same_bits(torch.cat(steps), packed(qkv, shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_does_not_mix_sequences(dtype: torch.dtype) -> None:
    """Field case 8: alone = packed in either order; a change of A leaves B alone."""
    shape = SHAPES[1]
    a, b = qkv_rows(70, shape, dtype, 1), qkv_rows(33, shape, dtype, 2)

    def together(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return K.attention(torch.cat([first, second]), RowBatch.pack([len(first), len(second)]), None, shape)

    assert same_bits(together(a, b), torch.cat([packed(a, shape), packed(b, shape)]))
    assert same_bits(together(b, a), torch.cat([packed(b, shape), packed(a, shape)]))
    assert same_bits(together(-a, b)[70:], packed(b, shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_threads_change_no_bit(dtype: torch.dtype) -> None:
    shape, lengths = AttentionShape(9, 3, 64), [300, 5, 129, 64]
    qkv, rows = qkv_rows(sum(lengths), shape, dtype), RowBatch.pack(lengths)
    one = K.attention(qkv, rows, None, shape)
    torch.set_num_threads(2)
    try:
        assert same_bits(K.attention(qkv, rows, None, shape), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_copied_page_continues_with_the_same_bits(dtype: torch.dtype, page_size: int) -> None:
    """Copy on write: two samples share a prefix whose last page is partly filled."""
    shape, shared = SHAPES[1], page_size + 3
    prefix = qkv_rows(shared, shape, dtype)
    cache = poisoned_cache(5, page_size, shape, dtype)
    K.attention(prefix.clone(), RowBatch.paged([(0, shared)], [[4, 2]], page_size), cache, shape)
    K.copy_page([cache], source=2, target=0)
    for seed, table in ((5, [4, 2]), (6, [4, 0])):
        more = qkv_rows(2, shape, dtype, seed)
        rows = RowBatch.paged([(shared, 2)], [table], page_size)
        output = K.attention(more.clone(), rows, cache, shape)
        assert same_bits(output, packed(torch.cat([prefix, more]), shape)[shared:])


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
