"""The int8 family: what its grid does to a weight, and that no rounded copy outlives the weight it was made of."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from zerogap.kernels import Weight, get_kernels
from zerogap.kernels.int8 import Int8Kernels
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

KERNELS = Int8Kernels()


def rounded(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [N, K], scale fp32 [N]) that `linear` left."""
    KERNELS.linear(torch.zeros(1, weight.data.shape[1], dtype=weight.data.dtype), weight)
    integers_NK, scale_N = weight.derived["int8"]
    return integers_NK, scale_N


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_within_half_a_step(dtype: torch.dtype) -> None:
    """Symmetric, one scale per output channel, so a large channel costs the others nothing."""
    generator = torch.Generator().manual_seed(0)
    values_NK = torch.randn(50, 33, generator=generator) * torch.logspace(-6, 6, 50)[:, None]
    weight = Weight(values_NK.to(dtype))
    integers_NK, scale_N = rounded(weight)
    assert integers_NK.dtype == torch.int8 and integers_NK.shape == values_NK.shape
    exact_NK = weight.data.double()
    assert torch.equal(integers_NK.abs().amax(1), torch.full((50,), 127, dtype=torch.int8))
    assert torch.allclose(scale_N.double() * 127, exact_NK.abs().amax(1), rtol=1e-6, atol=0)
    step_N1 = scale_N.double()[:, None]
    assert bool(((integers_NK * step_N1 - exact_NK).abs() <= 0.5001 * step_N1).all())
    mirrored_NK, _ = rounded(Weight(-weight.data))
    assert torch.equal(mirrored_NK, -integers_NK)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_linear_is_the_product_of_the_rounded_weights(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x_TK = torch.randn(rows, 33, generator=generator).to(dtype)
    weight = Weight(torch.randn(20, 33, generator=generator).to(dtype))
    bias = Weight(torch.randn(20, generator=generator).to(dtype))
    y_TN = KERNELS.linear(x_TK, weight, bias)
    integers_NK, scale_N = weight.derived["int8"]
    weights_NK = integers_NK.double() * scale_N.double()[:, None]
    expected_TN = x_TK.double() @ weights_NK.T + bias.data.double()
    largest_TN = x_TK.double().abs() @ weights_NK.abs().T + 1
    assert y_TN.dtype == dtype
    assert bool(((y_TN.double() - expected_TN).abs() <= tolerance * largest_TN).all())


def test_zeros_stay_zeros_and_broken_channels_are_seen() -> None:
    """Field case 5: a NaN or infinity in a weight is not rounded to a harmless integer."""
    values_NK = torch.ones(4, 8)
    values_NK[0], values_NK[1, 3], values_NK[2, 3] = 0, torch.nan, torch.inf
    y_TN = KERNELS.linear(torch.ones(2, 8), Weight(values_NK))
    assert y_TN[:, 0].tolist() == [0, 0] and y_TN[:, 3].tolist() == [8, 8]
    assert bool(y_TN[:, 1:3].isnan().all())


def test_a_learner_cannot_have_it() -> None:
    with pytest.raises(ValueError, match="int8 weights have no gradient; a learner needs 'aligned' or 'standard'"):
        KERNELS.linear(torch.zeros(1, 8), Weight(torch.ones(4, 8), trainable=True))


def test_only_the_layers_are_rounded() -> None:
    """Embedding and head (one tensor here, as in most small models) and biases stay as they are."""
    decoder = tiny_decoder("int8", tie_word_embeddings=True, qkv_bias=True)
    list(sample(EmbeddedEngine(decoder, None, EngineConfig(max_running=2))))
    matrices = {name for name, weight in decoder.weights.items() if weight.data.dim() == 2}
    assert {name for name, weight in decoder.weights.items() if "int8" in weight.derived} == matrices - {"embed"}


def sample(engine: EmbeddedEngine) -> list[Trajectory]:
    sampling = SamplingParams(max_new_tokens=6, seed=3)
    engine.submit(GroupRequest(engine.version, 0, (5, 6, 7), 2, sampling))
    done: list[Trajectory] = []
    while engine.has_work():
        done += engine.step()
    return sorted(done, key=lambda t: t.sample_index)


def test_rounded_copies_follow_the_weights() -> None:
    """Field case 19, W2: after each of two deliveries the engine is the fresh engine on the same weights, as bits."""
    engine = EmbeddedEngine(tiny_decoder("int8"), None, EngineConfig(max_running=2))
    before = sample(engine)
    for version in (1, 2):
        snapshot = tiny_decoder(seed=version).snapshot()
        engine.load_weights(version, snapshot)
        fresh = EmbeddedEngine(tiny_decoder("int8", seed=version), None, EngineConfig(max_running=2), version)
        mine, theirs = sample(engine), sample(fresh)
        assert [t.token_ids for t in mine] == [t.token_ids for t in theirs]
        assert all(same_bits(logprobs(a), logprobs(b)) for a, b in zip(mine, theirs, strict=True))
        assert [t.logprobs for t in mine] != [t.logprobs for t in before]


def logprobs(trajectory: Trajectory) -> torch.Tensor:
    return torch.tensor(trajectory.logprobs, dtype=torch.float32)


def test_its_contract_is_its_own() -> None:
    contracts = [get_kernels(name).contract() for name in ("aligned", "standard", "int8")]
    assert [contract["family"] for contract in contracts] == ["aligned", "standard", "int8"]
