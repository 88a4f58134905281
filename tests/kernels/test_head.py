"""The fused head: right values, one logprob routine for sampler and learner, temperature, chunks, memory, NaN."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import same_bits
from tests.kernels import reference as ref
from tests.kernels.reference import DTYPES, randn, weight
from zerogap.kernels import Weight, get_kernels

K = get_kernels("aligned")


def keys(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([[seed, 5, i, 9] for i in range(rows)], dtype=torch.int64).reshape(rows, 4)


def test_recorded_logprobs_are_of_the_tempered_policy() -> None:
    """Field case 1: logits [1, 0] at T = 0.6, token 0 -> -0.1730, in the sampler and in the fused head."""
    logits, head, hidden = torch.tensor([[1.0, 0.0]]), Weight(torch.tensor([[1.0], [0.0]])), torch.tensor([[1.0]])
    zero = torch.tensor([0])
    token, seed = 1, 0
    while token != 0:
        tokens, sampled = K.sample(logits, keys(1, seed), 0.6, 2)
        token, seed = int(tokens), seed + 1
    scored = K.logprobs(hidden, head, zero, 0.6, 2)
    assert float(scored) == pytest.approx(-0.1730, abs=5e-5)
    assert same_bits(scored, sampled)
    assert float(K.logprobs(hidden, head, zero, 1.0, 2)) == pytest.approx(-0.3133, abs=5e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 70),
    vocab=st.sampled_from([1, 2, 17, 511, 512, 513, 1030]),
    extra=st.integers(0, 70),
    temperature=st.sampled_from([1.0, 0.6, 0.001, 7.0, 0.0]),
    packed=st.booleans(),
)
def test_sampler_and_learner_report_the_same_bits(
    dtype: torch.dtype, rows: int, width: int, vocab: int, extra: int, temperature: float, packed: bool
) -> None:
    """Field cases 1 and 4, and 9: ids at or past `vocab` are never drawn, and both sides leave them out."""
    head, hidden = weight(vocab + extra, width, dtype=dtype), randn(rows, width, dtype=dtype, scale=3.0)
    head.data[vocab:] += 5.0
    if packed:
        K.pack(head)
    tokens, sampled = K.sample(K.logits(hidden, head), keys(rows), temperature, vocab)
    head.derived.clear()
    assert int(tokens.max()) < vocab
    assert same_bits(K.logprobs(hidden, head, tokens, temperature, vocab), sampled)
    expected = ref.logprobs(hidden.double(), head.data.double(), tokens, temperature or 1.0, vocab)
    largest = float(K.logits(hidden, head).abs().max()) / (temperature or 1.0)  # its fp32 rounding is all the error
    torch.testing.assert_close(sampled.double(), expected, rtol=2e-6, atol=2e-6 + 1e-6 * largest)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_many_rows(temperature: float) -> None:
    """Field case 4: unequal bit patterns = 0 of 4096."""
    head, hidden = weight(700, 16), randn(4096, 16, scale=3.0)
    tokens, sampled = K.sample(K.logits(hidden, head), keys(4096), temperature, 700)
    assert same_bits(K.logprobs(hidden, head, tokens, temperature, 700), sampled)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_is_not_finite_and_alone(bad: float) -> None:
    """Field case 5: NaN or +inf logits give a non-finite logprob, never a crash; the other rows keep their bits."""
    logits = randn(4, 1100)
    good_tokens, good = K.sample(logits, keys(4), 1.0, 1100)
    for place in (0, 600, 1099):
        for temperature in (1.0, 0.5, 0.0):
            broken = logits.clone()
            broken[2, place] = bad
            tokens, logprobs = K.sample(broken, keys(4), temperature, 1100)
            assert not torch.isfinite(logprobs[2]) and 0 <= int(tokens[2]) < 1100
            if temperature == 1.0:
                assert torch.equal(tokens[[0, 1, 3]], good_tokens[[0, 1, 3]])
                assert same_bits(logprobs[[0, 1, 3]], good[[0, 1, 3]])
    hidden = randn(3, 8)
    hidden[1, 3] = bad
    scored = K.logprobs(hidden, weight(600, 8), torch.tensor([1, 2, 3]), 1.0, 600)
    assert torch.isfinite(scored).tolist() == [True, False, True]


def test_a_target_outside_the_vocabulary_is_nan() -> None:
    scored = K.logprobs(randn(3, 8), weight(20, 8), torch.tensor([17, 18, -1]), 1.0, 18)
    assert scored.isnan().tolist() == [False, True, True]


def test_a_token_outside_the_embedding_is_nan() -> None:
    rows = K.embedding(torch.tensor([2, 20, -1, 19]), weight(20, 40))
    assert rows.isnan().all(1).tolist() == [False, True, True, False]
    w = weight(20, 40, trainable=True)
    K.embedding(torch.tensor([2, 20, -1]), w).nan_to_num().sum().backward()
    assert torch.equal(w.master.grad.sum(1).nonzero()[:, 0], torch.tensor([2]))


def test_very_unlikely_tokens_keep_their_logprob() -> None:
    head = Weight(torch.tensor([[0.0], [-300.0], [-1.0e5]]))
    scored = K.logprobs(torch.ones(3, 1), head, torch.tensor([0, 1, 2]), 1.0, 3)
    assert scored.tolist() == [0.0, -300.0, -1.0e5]


def test_impossible_arguments_are_refused() -> None:
    head = weight(20, 8)
    with pytest.raises(ValueError, match="vocab 21"):
        K.logprobs(randn(1, 8), head, torch.tensor([0]), 1.0, 21)
    with pytest.raises(ValueError, match="must agree"):
        K.logprobs(randn(1, 9), head, torch.tensor([0]), 1.0, 20)
    with pytest.raises(ValueError, match="must agree"):
        K.linear(randn(1, 8, dtype=torch.bfloat16), head)
    with pytest.raises(ValueError, match="bfloat16"):
        K.sample(randn(1, 8, dtype=torch.bfloat16), keys(1), 1.0, 8)
    with pytest.raises(ValueError, match="float16"):
        K.silu_mul(torch.ones(1, 8, dtype=torch.float16))


def test_strided_and_narrow_indices_are_read_as_values() -> None:
    head, hidden = weight(20, 8), randn(3, 8)
    targets = torch.tensor([3, 9, 17])
    strided = torch.stack([targets, targets + 1], 1)[:, 0]
    expected = K.logprobs(hidden, head, targets, 1.0, 20)
    assert same_bits(K.logprobs(hidden, head, strided, 1.0, 20), expected)
    assert same_bits(K.logprobs(hidden, head, targets.to(torch.int32), 1.0, 20), expected)
    assert same_bits(K.embedding(strided, head), K.embedding(targets, head))


PEAK = """
import resource
import torch
from zerogap.kernels import Weight, get_kernels

rows, width, vocab = 8192, 896, 151_936
head = Weight(torch.empty(vocab, width, dtype=torch.bfloat16).normal_(), trainable=True)
hidden = torch.empty(rows, width, dtype=torch.bfloat16).normal_().requires_grad_()
targets = torch.arange(rows) * 18
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
get_kernels("aligned").logprobs(hidden, head, targets, 1.0, vocab).sum().backward()
gradients = sum(x.grad.numel() * x.grad.element_size() for x in (head.master, hidden))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 - gradients / 2**30)
"""


@pytest.mark.slow
def test_the_full_logits_are_never_held() -> None:
    """Field case 43: 8,192 rows x 151,936 entries (4.6 GiB of fp32 logits), forward and backward, peak at no more than
    1 GiB above weights and gradients. In a process of its own, whose peak is only this."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.0
