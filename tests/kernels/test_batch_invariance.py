"""A row alone has the bits of the same row in any batch, at any place, on any number of threads, packed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.kernels.reference import DTYPES, randn, weight
from zerogap.kernels import AttentionShape, Weight, get_kernels

K = get_kernels("aligned")
SHAPE = AttentionShape(4, 2, 10)
ANGLES = randn(64, 5, seed=8)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def row_operations(dtype: torch.dtype) -> dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
    """name -> (input width, operation on any number of rows). Odd widths on purpose."""
    matrix, bias = weight(77, 45, dtype=dtype), weight(77, dtype=dtype, seed=2)
    norm, q_norm, k_norm = weight(45, dtype=dtype), weight(10, dtype=dtype), weight(10, dtype=dtype, seed=3)
    head = weight(530, 45, dtype=dtype)
    return {
        "linear": (45, lambda x: K.linear(x, matrix, bias)),
        "logits": (45, lambda x: K.logits(x, head)),
        "logprobs": (45, lambda x: K.logprobs(x, head, torch.full((len(x),), 517), 0.7, 525)),
        "rms_norm": (45, lambda x: K.rms_norm(x, norm, 1e-5)[0]),
        "rms_norm with residual": (45, lambda x: K.rms_norm(x, norm, 1e-5, x.flip(1))[1]),
        "head_norm": (SHAPE.qkv_size, lambda x: K.head_norm(x, q_norm, k_norm, 1e-6, SHAPE)),
        "rotary": (
            SHAPE.qkv_size,
            lambda x: K.rotary(
                x.clone(), ANGLES.cos(), ANGLES.sin(), torch.full((len(x),), 9, dtype=torch.int32), SHAPE
            ),
        ),
        "silu_mul": (46, K.silu_mul),
        "sample": (530, lambda x: K.sample(x.float(), torch.tensor([[1, 2, 3, 4]] * len(x)), 0.7, 525)[1]),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(row_operations(DTYPES[0])))
def test_a_row_alone_is_the_row_in_every_batch(dtype: torch.dtype, name: str) -> None:
    """Field case 32: every batch size 1..33 and every place."""
    width, operation = row_operations(dtype)[name]
    row = randn(1, width, dtype=dtype, seed=7, scale=2.0)
    alone = operation(row)
    for size in range(1, 34):
        others = randn(size, width, dtype=dtype, seed=size, scale=3.0)
        for place in {0, size // 2, size - 1}:
            batch = others.clone()
            batch[place] = row[0]
            assert same_bits(operation(batch)[place : place + 1], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 200),
    n=st.integers(1, 200),
    packed=st.booleans(),
    with_bias=st.booleans(),
    data=st.data(),
)
def test_linear_of_a_row_is_a_function_of_the_row(
    dtype: torch.dtype, rows: int, k: int, n: int, packed: bool, with_bias: bool, data: st.DataObject
) -> None:
    x, w = randn(rows, k, dtype=dtype, seed=k), weight(n, k, dtype=dtype)
    bias = weight(n, dtype=dtype, seed=2) if with_bias else None
    whole = K.linear(x, w, bias)
    if packed:
        K.pack(w)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert same_bits(K.linear(x[first:last], w, bias), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 64), (64, 65), (129, 300), (2500, 70)])
def test_packed_panels_change_no_bit(dtype: torch.dtype, k: int, n: int) -> None:
    x, w = randn(19, k, dtype=dtype), weight(n, k, dtype=dtype)
    targets = torch.arange(19) % n
    outputs = [(K.linear(x, w), K.logits(x, w), K.logprobs(x, w, targets, 0.6, n))]
    K.pack(w)
    outputs.append((K.linear(x, w), K.logits(x, w), K.logprobs(x, w, targets, 0.6, n)))
    for rows, panels in zip(*outputs, strict=True):
        assert same_bits(rows, panels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_slices_of_a_weight_change_no_bit(dtype: torch.dtype) -> None:
    """A fused qkv or gate_up weight gives the bits of its parts."""
    x, w = randn(9, 50, dtype=dtype), weight(150, 50, dtype=dtype)
    assert same_bits(K.linear(x, Weight(w.data[33:101]))[:, :], K.linear(x, w)[:, 33:101].contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(row_operations(DTYPES[0])))
def test_two_threads_change_no_bit(dtype: torch.dtype, name: str) -> None:
    width, operation = row_operations(dtype)[name]
    x = randn(900, width, dtype=dtype, seed=5)
    one = operation(x)
    with threads(2):
        assert same_bits(operation(x), one)


def test_no_rows() -> None:
    for dtype in DTYPES:
        for width, operation in row_operations(dtype).values():
            assert operation(torch.empty(0, width, dtype=dtype)).shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(row_operations(DTYPES[0])))
def test_flush_to_zero_in_the_calling_process_changes_no_bit(dtype: torch.dtype, name: str) -> None:
    """Some library may have set it; the kernels pin the mode and give it back."""
    width, operation = row_operations(dtype)[name]
    x, tiny = randn(40, width, dtype=dtype, scale=1e-38), torch.tensor([1e-39])
    expected = operation(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = operation(x)
        assert not (tiny * 1.0).any()  # still flushing: the mode was restored
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(flushed, expected)
