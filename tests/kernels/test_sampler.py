"""The sampler: known Philox outputs, the drawn distribution, dependence on the key alone, edges of the mass."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.reference import randn
from zerogap.kernels import get_kernels

K = get_kernels("aligned")
MASK = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Straight from Salmon et al. (2011), section 3.3."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & MASK, (a >> 32) ^ c[3] ^ k[1], a & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


def test_reference_generator_against_the_known_answers_of_random123() -> None:
    assert philox4x32([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox4x32([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_drawn_tokens_follow_philox_and_the_inverse_cdf() -> None:
    """With 4,096 equal logits (all sums exact) the token is floor(4096 u)."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**62), 2**62, (200, 4), generator=generator)
    keys[:, 2:] = torch.randint(0, 2**31, (200, 2), generator=generator)
    tokens, logprobs = K.sample(torch.zeros(200, 4096), keys, 1.0, 4096)
    for (seed, prompt, sample, position), token in zip(keys.tolist(), tokens.tolist(), strict=True):
        c = philox4x32([prompt & MASK, (prompt >> 32) & MASK, sample, position], [seed & MASK, (seed >> 32) & MASK])
        u = ((c[0] << 32 | c[1]) >> 11) * 2.0**-53
        assert token == math.floor(4096 * u)
    assert torch.allclose(logprobs, torch.tensor(-math.log(4096)))


@pytest.mark.parametrize("vocab", [5, 40, 1500])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_distribution(vocab: int, temperature: float) -> None:
    """Chi-square over cells of the true distribution; fixed keys, so it either always passes or always fails."""
    draws, cells = 20_000, min(vocab, 25)
    logits = 1.5 * randn(1, vocab, seed=vocab)
    keys = torch.stack([torch.full((draws,), c) for c in (7, 11)] + [torch.arange(draws), torch.arange(draws)], 1)
    tokens, _ = K.sample(logits.expand(draws, vocab).contiguous(), keys, temperature, vocab)
    p = (logits[0].double() / temperature).softmax(-1)
    cell_of = torch.arange(vocab) * cells // vocab
    expected = torch.zeros(cells, dtype=torch.float64).index_add(0, cell_of, p) * draws
    observed = torch.bincount(cell_of[tokens], minlength=cells).double()
    chi_square = float(((observed - expected).square() / expected.clamp_min(1e-9)).sum())
    degrees = cells - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_each_part_of_the_key_changes_the_draw_and_the_batch_does_not() -> None:
    logits = torch.zeros(1, 50_000)
    base = torch.tensor([[1, 2, 3, 4]])
    drawn = {int(K.sample(logits, base, 1.0, 50_000)[0])}
    for part in range(4):
        key = base.clone()
        key[0, part] += 1
        drawn.add(int(K.sample(logits, key, 1.0, 50_000)[0]))
    for part in (0, 1):  # the upper half of seed and prompt id counts too
        key = base.clone()
        key[0, part] += 2**40
        drawn.add(int(K.sample(logits, key, 1.0, 50_000)[0]))
    assert len(drawn) == 7
    rows = 2.0 * randn(9, 700)
    keys = torch.arange(36).view(9, 4)
    together, _ = K.sample(rows, keys, 0.7, 700)
    alone = [int(K.sample(rows[i : i + 1], keys[i : i + 1], 0.7, 700)[0]) for i in range(9)]
    assert together.tolist() == alone


@pytest.mark.parametrize("only", [0, 3, 511, 512, 1029])
def test_a_token_without_mass_is_never_drawn(only: int) -> None:
    """Whole blocks of -inf before and after, and logits that underflow."""
    keys = torch.arange(400).view(100, 4)
    for floor in (-torch.inf, -1e4):
        logits = torch.full((100, 1030), floor)
        logits[:, only] = 2.0
        tokens, logprobs = K.sample(logits, keys, 1.0, 1030)
        assert (tokens == only).all() and not logprobs.any()


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    logits = torch.full((3, 1200), -1.0)
    logits[0, [700, 900]] = 2.0
    logits[1, 1199] = 9.0
    tokens, logprobs = K.sample(logits, torch.zeros(3, 4, dtype=torch.int64), 0.0, 1199)
    assert tokens.tolist() == [700, 0, 0]
    expected = logits[:, :1199].double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
