"""Outputs and gradients of every operation against fp64 autograd. Their determinism: test_invariance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels import reference as ref
from tests.kernels.reference import BF16, DTYPES, FP32, randn, relative_error, weight
from zerogap.kernels import AttentionShape, RowBatch, Weight, get_kernels

K = get_kernels("aligned")
SHAPES = [AttentionShape(4, 2, 16), AttentionShape(6, 2, 10), AttentionShape(3, 3, 64), AttentionShape(9, 3, 34)]
LENGTHS = [3, 64, 1, 0, 130, 65]
Operation = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == FP32 else 2e-2


def compare(aligned: Operation, reference: Operation, inputs: list[torch.Tensor], weights: list[Weight]) -> None:
    """Same outputs, and same gradients of `inputs` and of the masters, as fp64 autograd on the same rounded values."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = aligned(*leaves, *weights)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    seeds = [randn(*y.shape, dtype=y.dtype, seed=90 + i) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, seeds)

    leaves64 = [x.double().requires_grad_() for x in inputs]
    weights64 = [w.data.double().requires_grad_() for w in weights]
    outputs64 = reference(*leaves64, *weights64)
    outputs64 = outputs64 if isinstance(outputs64, tuple) else (outputs64,)
    torch.autograd.backward(outputs64, [s.double() for s in seeds])

    limit = tolerance(inputs[0].dtype if inputs else weights[0].data.dtype)
    for y, y64 in zip(outputs, outputs64, strict=True):
        assert relative_error(y, y64) < limit
    for x, x64 in zip(leaves, leaves64, strict=True):
        assert relative_error(x.grad, x64.grad) < limit
    for w, w64 in zip(weights, weights64, strict=True):
        assert w.master.grad.dtype == FP32
        assert relative_error(w.master.grad, w64.grad) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 7, 5), (5, 64, 64), (37, 129, 70), (200, 96, 130), (33, 2500, 3)])
def test_linear(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    w, b = weight(n, k, dtype=dtype, trainable=True), weight(n, dtype=dtype, seed=2, trainable=True)
    compare(K.linear, lambda x, w, b: x @ w.T + b, [randn(m, k, dtype=dtype)], [w, b])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_without_bias_and_without_rows(dtype: torch.dtype) -> None:
    w = weight(20, 12, dtype=dtype, trainable=True)
    compare(K.linear, lambda x, w: x @ w.T, [randn(9, 12, dtype=dtype)], [w])
    w.master.grad = None
    x = torch.empty(0, 12, dtype=dtype, requires_grad=True)
    K.linear(x, w).sum().backward()
    assert x.grad.shape == (0, 12) and not w.master.grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (70, 64), (130, 100)])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, residual: bool) -> None:
    w = weight(width, dtype=dtype, trainable=True)
    inputs = [randn(rows, width, dtype=dtype, seed=i) for i in range(2 if residual else 1)]

    def aligned(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return K.rms_norm(arguments[0], arguments[-1], 1e-5, arguments[1] if residual else None)

    def reference(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = sum(arguments[:-1])
        return ref.rms_norm(total, arguments[-1], 1e-5), total

    compare(aligned, reference, inputs, [w])


def test_rms_norm_whose_sum_alone_is_used() -> None:
    x = randn(4, 32).requires_grad_()
    _, total = K.rms_norm(x, weight(32, trainable=True), 1e-5)
    total.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_norm_and_rotary(dtype: torch.dtype, shape: AttentionShape) -> None:
    qkv = randn(70, shape.qkv_size, dtype=dtype)
    weights = [weight(shape.head_dim, dtype=dtype, seed=s, trainable=True) for s in (3, 4)]
    compare(
        lambda x, q, k: K.head_norm(x, q, k, 1e-6, shape),
        lambda x, q, k: ref.head_norm(x, q, k, 1e-6, shape),
        [qkv],
        weights,
    )
    angles = randn(100, shape.head_dim // 2, seed=5)
    positions = torch.randint(0, 100, (70,), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    compare(
        lambda x: K.rotary(x, angles.cos(), angles.sin(), positions, shape),
        lambda x: ref.rotary(x, angles.cos().double(), angles.sin().double(), positions, shape),
        [qkv],
        [],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, AttentionShape(70, 1, 4)])
def test_attention(dtype: torch.dtype, shape: AttentionShape) -> None:
    rows = RowBatch.pack(LENGTHS)
    compare(
        lambda x: K.attention(x, rows, None, shape),
        lambda x: ref.attention(x, LENGTHS, shape),
        [randn(sum(LENGTHS), shape.qkv_size, dtype=dtype)],
        [],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 80])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    compare(K.silu_mul, reference, [randn(21, 2 * width, dtype=dtype, scale=3.0)], [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_adds_up_repeated_tokens(dtype: torch.dtype) -> None:
    tokens = torch.randint(0, 7, (200,), generator=torch.Generator().manual_seed(3))
    w = weight(9, 70, dtype=dtype, trainable=True)
    compare(lambda w: K.embedding(tokens, w), lambda w: w[tokens], [], [w])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "total", "vocab"), [(3, 16, 40, 40), (70, 33, 1100, 1029), (401, 64, 513, 513)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs(dtype: torch.dtype, rows: int, width: int, total: int, vocab: int, temperature: float) -> None:
    w = weight(total, width, dtype=dtype, trainable=True)
    targets = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(4))
    compare(
        lambda x, w: K.logprobs(x, w, targets, temperature, vocab),
        lambda x, w: ref.logprobs(x, w, targets, temperature, vocab),
        [randn(rows, width, dtype=dtype)],
        [w],
    )
    assert not w.master.grad[vocab:].any()


def test_gradients_add_up_in_the_master_of_a_tied_weight() -> None:
    tokens = torch.tensor([3, 1, 3])
    w = weight(20, 8, trainable=True)

    def loss(w: Weight) -> torch.Tensor:
        return K.logprobs(K.embedding(tokens, w), w, tokens, 1.0, 20).sum()

    loss(w).backward()
    w64 = w.data.double().requires_grad_()
    ref.logprobs(w64[tokens], w64, tokens, 1.0, 20).sum().backward()
    assert relative_error(w.master.grad, w64.grad) < 1e-5


def test_nothing_is_recorded_without_gradients() -> None:
    w = weight(5, 4, trainable=True)
    with torch.no_grad():
        assert K.linear(randn(2, 4), w).grad_fn is None
    assert K.linear(randn(2, 4), weight(5, 4)).grad_fn is None
    assert K.linear(randn(2, 4), w).grad_fn is not None


def test_gradients_through_paged_attention_are_refused() -> None:
    shape = AttentionShape(2, 1, 8)
    rows = RowBatch.paged([(0, 3)], [[0]], 16)
    with pytest.raises(ValueError, match="packed"):
        K.attention(randn(3, shape.qkv_size).requires_grad_(), rows, None, shape)


def test_bf16_forward_is_close_to_fp32_on_the_same_values() -> None:
    x, w = randn(17, 130, dtype=BF16), weight(40, 130, dtype=BF16)
    exact = K.linear(x.float(), Weight(w.data.float()))
    assert relative_error(K.linear(x, w), exact) < 2**-8
    assert relative_error(K.logits(x, w), exact) < 1e-6
