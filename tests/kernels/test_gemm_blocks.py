"""Products too large for one block: several blocks of rows, of k and of panels, on one thread and two. Same bits."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits
from tests.kernels.reference import BF16, DTYPES, FP32, randn, relative_error, weight
from zerogap.kernels import Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_variant, runnable

# (rows, k, n): over 2,048 steps of k, more panels than a group holds, more rows than stay in L2, no round number.
LARGE = {FP32: (301, 2113, 700), BF16: (301, 4227, 700)}
K = AlignedKernels()


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_a_large_product_change_no_bit(dtype: torch.dtype) -> None:
    rows, k, n = LARGE[dtype]
    x, w = randn(rows, k, dtype=dtype), weight(n, k, dtype=dtype)
    y = K.linear(x, w)
    assert relative_error(y, x.double() @ w.data.double().T) < (1e-6 if dtype is FP32 else 4e-3)
    packed = Weight(w.data)
    K.pack(packed)
    assert same_bits(K.linear(x, packed), y)
    for row in (0, 150, 300):
        assert same_bits(K.linear(x[row : row + 1], packed)[0], y[row])
    assert same_bits(K.linear(x[:200], Weight(w.data[600:])), y[:200, 600:])
    torch.set_num_threads(2)
    try:
        assert same_bits(K.linear(x, w), y) and same_bits(K.linear(x, packed), y)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2048, 4096])
def test_rows_4_kb_apart_change_no_bit(dtype: torch.dtype, width: int) -> None:
    """Such rows are copied to another stride first, but not where they are few."""
    x, w = randn(40, width, dtype=dtype), weight(70, width, dtype=dtype)
    y = K.linear(x, w)
    assert relative_error(y, x.double() @ w.data.double().T) < (1e-6 if dtype is FP32 else 4e-3)
    for few in (1, 6, 7):
        assert same_bits(K.linear(x[:few], w), y[:few])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_large_product(dtype: torch.dtype) -> None:
    """dW sums over more rows than one transposed block holds; dX over a long n."""
    rows, k, n = LARGE[dtype][1], 130, LARGE[dtype][0]
    x = randn(rows, k, dtype=dtype).requires_grad_()
    w = weight(n, k, dtype=dtype, trainable=True)
    dy = randn(rows, n, dtype=dtype, seed=3)
    K.linear(x, w).backward(dy)
    assert w.master is not None and w.master.grad is not None and x.grad is not None
    assert relative_error(w.master.grad, dy.double().T @ x.detach().double()) < 1e-6
    assert relative_error(x.grad, dy.double() @ w.data.double()) < (1e-6 if dtype is FP32 else 4e-3)
    first = w.master.grad.clone()
    for name in runnable():
        w.master.grad = None
        AlignedKernels(load_variant(name)).linear(x, w).backward(dy)
        assert same_bits(w.master.grad, first)
