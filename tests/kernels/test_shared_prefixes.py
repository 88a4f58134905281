"""Packed rows whose sequences share prefixes: the bits of the unshared layout, and its gradients, in both families."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.kernels import reference as ref
from tests.kernels.reference import BF16, DTYPES, FP32, randn, relative_error
from zerogap.kernels import AttentionShape, RowBatch, get_kernels

ALIGNED, STANDARD = get_kernels("aligned"), get_kernels("standard")
SHAPES = [AttentionShape(4, 2, 16), AttentionShape(6, 2, 10), AttentionShape(3, 1, 34), AttentionShape(70, 1, 4)]


@dataclass(frozen=True)
class Tree:
    """lengths, shared: see RowBatch.pack."""

    lengths: list[int]
    shared: list[int]

    def paths(self) -> list[list[int]]:
        """The row of each position of each sequence."""
        paths: list[list[int]] = []
        rows = 0
        for n, shared in zip(self.lengths, self.shared, strict=True):
            paths.append([*(paths[-1][:shared] if paths else []), *range(rows, rows + n)])
            rows += n
        return paths


# A prompt that ends within a page and its samples; one that ends with a page; forks within samples; whole pages shared
# twice; a sequence without own rows; sharing of 0 in between.
GROUP = Tree([45, 4, 90, 1], [0, 45, 45, 45])
FORKS = Tree([64, 70, 30, 140, 3, 5, 0, 7, 2], [0, 64, 100, 64, 200, 70, 33, 0, 7])


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    lengths: list[int] = []
    shared: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        longest = lengths[-1] + shared[-1] if lengths else 0
        shared.append(draw(st.sampled_from([0, longest, longest // 2, min(longest, 64), max(0, longest - 1)])))
        lengths.append(draw(st.integers(0, 3) | st.integers(0, 150)))
    return Tree(lengths, shared)


def unshared(qkv_TE: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, list[int]]:
    """The rows of every sequence whole, and where the rows of the shared layout lie in them."""
    paths = tree.paths()
    ends = torch.tensor([len(path) for path in paths]).cumsum(0).tolist()
    own = [end - n + i for end, n in zip(ends, tree.lengths, strict=True) for i in range(n)]
    return qkv_TE[torch.tensor([row for path in paths for row in path], dtype=torch.int64)], own


def attend(kernels: object, qkv_TE: torch.Tensor, tree: Tree, shape: AttentionShape) -> torch.Tensor:
    return kernels.attention(qkv_TE, RowBatch.pack(tree.lengths, tree.shared), None, shape)  # type: ignore[attr-defined]


def check_bits(tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    qkv = randn(sum(tree.lengths), shape.qkv_size, dtype=dtype)
    whole, own = unshared(qkv, tree)
    expected = ALIGNED.attention(whole, RowBatch.pack([len(path) for path in tree.paths()]), None, shape)
    assert same_bits(attend(ALIGNED, qkv, tree, shape), expected[own])


def check_gradients(kernels: object, tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    """Against fp64 autograd of the unshared layout: what a shared row gets is the sum over its sequences."""
    qkv = randn(sum(tree.lengths), shape.qkv_size, dtype=dtype)
    seed = randn(len(qkv), shape.q_size, dtype=dtype, seed=5)
    leaf, leaf64 = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    output = attend(kernels, leaf, tree, shape)
    output.backward(seed)
    whole, own = unshared(leaf64, tree)
    expected = ref.attention(whole, [len(path) for path in tree.paths()], shape)[own]
    expected.backward(seed.double())
    limit = 1e-5 if dtype == FP32 else 2e-2
    assert relative_error(output, expected) < limit
    assert relative_error(leaf.grad, leaf64.grad) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", [GROUP, FORKS])
def test_shared_rows_have_the_bits_of_whole_sequences(tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    check_bits(tree, shape, dtype)


@settings(deadline=None)
@given(tree=trees(), shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES))
def test_any_sharing_has_the_bits_of_whole_sequences(tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    check_bits(tree, shape, dtype)


@pytest.mark.parametrize("kernels", [ALIGNED, STANDARD], ids=["aligned", "standard"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tree", [GROUP, FORKS])
def test_gradients(kernels: object, tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    check_gradients(kernels, tree, shape, dtype)


@settings(deadline=None)
@given(tree=trees(), shape=st.sampled_from(SHAPES), dtype=st.sampled_from(DTYPES))
def test_gradients_of_any_sharing(tree: Tree, shape: AttentionShape, dtype: torch.dtype) -> None:
    check_gradients(ALIGNED, tree, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [AttentionShape(9, 3, 64), AttentionShape(3, 1, 34)])
def test_gradients_have_the_same_bits_on_any_threads(dtype: torch.dtype, shape: AttentionShape) -> None:
    """Key blocks of one head add to the same dq, so one kv head is the hard case."""
    qkv = randn(sum(FORKS.lengths), shape.qkv_size, dtype=dtype)
    seed = randn(len(qkv), shape.q_size, dtype=dtype, seed=5)

    def gradient(threads: int) -> torch.Tensor:
        leaf = qkv.clone().requires_grad_()
        torch.set_num_threads(threads)
        try:
            attend(ALIGNED, leaf, FORKS, shape).backward(seed)
        finally:
            torch.set_num_threads(1)
        assert leaf.grad is not None
        return leaf.grad

    first = gradient(1)
    assert all(same_bits(gradient(threads), first) for threads in (1, 2, 2, 3))


def test_a_sample_does_not_see_another() -> None:
    shape = SHAPES[0]
    qkv = randn(sum(GROUP.lengths), shape.qkv_size, dtype=BF16)
    before = attend(ALIGNED, qkv, GROUP, shape)
    qkv[45:49] = -qkv[45:49]
    after = attend(ALIGNED, qkv, GROUP, shape)
    assert same_bits(before[:45], after[:45]) and same_bits(before[49:], after[49:])
    assert not same_bits(before[45:49], after[45:49])


def test_sharing_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shared\[1\] is 6, but sequence 0 has only 5 positions"):
        RowBatch.pack([5, 2], [0, 6])


@pytest.mark.parametrize("kernels", [ALIGNED, STANDARD], ids=["aligned", "standard"])
def test_packed_rows_take_no_cache(kernels: object) -> None:
    shape = SHAPES[0]
    cache = kernels.new_cache(1, 4, 64, shape, FP32)[0]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cache=None"):
        kernels.attention(randn(3, shape.qkv_size), RowBatch.pack([3]), cache, shape)  # type: ignore[attr-defined]
