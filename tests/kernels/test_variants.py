"""Every instruction set gives the same bits, forward and backward; exp, log and silu are accurate; denormals agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import same_bits
from tests.kernels.reference import BF16, DTYPES, FP32, randn, weight
from zerogap.kernels import AttentionShape, RowBatch, Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_best, load_variant, runnable, variants

OTHERS = [name for name in runnable() if name != load_best().name]


def everything(kernels: AlignedKernels, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Outputs and gradients of every operation at odd sizes."""
    shape, lengths = AttentionShape(6, 2, 10), [70, 1, 13]
    rows = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 89, (rows,), generator=generator)
    embed = weight(90, 33, dtype=dtype, trainable=True)
    names = [(33,), (shape.qkv_size, 33), (shape.qkv_size,), (10,), (10,), (2 * 21, shape.q_size), (33, 21)]
    norm, qkv_w, qkv_b, q_w, k_w, up_w, down_w = (
        weight(*size, dtype=dtype, seed=i, trainable=True) for i, size in enumerate(names)
    )
    angles, batch = randn(80, 5, seed=5), RowBatch.pack(lengths)
    out: dict[str, torch.Tensor] = {}
    out["embedding"] = kernels.embedding(tokens, embed)
    out["norm"], residual = kernels.rms_norm(out["embedding"], norm, 1e-5)
    out["linear"] = kernels.linear(out["norm"], qkv_w, qkv_b)
    out["head_norm"] = kernels.head_norm(out["linear"], q_w, k_w, 1e-5, shape)
    out["rotary"] = kernels.rotary(out["head_norm"], angles.cos(), angles.sin(), batch.positions_T, shape)
    out["attention"] = kernels.attention(out["rotary"], batch, None, shape)
    out["up"] = kernels.linear(out["attention"], up_w)
    out["silu"] = kernels.silu_mul(out["up"])
    out["down"] = kernels.linear(out["silu"], down_w)
    out["norm2"], out["residual"] = kernels.rms_norm(out["down"], norm, 1e-5, residual)
    out["logprobs"] = kernels.logprobs(out["norm2"], embed, tokens, 0.8, 89)
    out["logprobs"].sum().backward()
    weights = {
        "embed": embed,
        "norm": norm,
        "qkv": qkv_w,
        "bias": qkv_b,
        "q": q_w,
        "k": k_w,
        "up": up_w,
        "down": down_w,
    }
    for name, w in weights.items():
        out[f"gradient of {name}"] = w.master.grad
    with torch.no_grad():
        kernels.pack(embed)
        out["logits"] = kernels.logits(out["norm2"], embed)
        keys = torch.arange(4 * rows).view(rows, 4)
        drawn, out["sampled"] = kernels.sample(out["logits"], keys, 0.8, 89)
        out["drawn"] = drawn.float()
        cache = kernels.new_cache(1, 8, 16, shape, dtype)[0]
        paged = RowBatch.paged([(0, 70)], [[5, 1, 7, 0, 3]], 16)
        out["paged"] = kernels.attention(out["rotary"][:70].contiguous(), paged, cache, shape)
    return {name: value.detach() for name, value in out.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OTHERS)
def test_every_operation_has_the_same_bits(name: str, dtype: torch.dtype) -> None:
    best = everything(AlignedKernels(load_best()), dtype)
    other = everything(AlignedKernels(load_variant(name)), dtype)
    assert best.keys() == other.keys()
    assert [key for key in best if not same_bits(best[key], other[key])] == []
    assert all(torch.isfinite(value).all() for value in best.values())


@pytest.mark.parametrize("name", OTHERS)
def test_bf16_dot_products_flush_denormals_alike(name: str) -> None:
    """vdpbf16ps flushes inputs and results below 2^-126; the emulation must. All exponents, products at the edge."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (60, 64), dtype=torch.int16, generator=generator)
    tiny = torch.randint(0, 0x0200, (60, 64), dtype=torch.int16, generator=generator)
    every = bits.view(BF16)
    edge = randn(60, 64, dtype=BF16, scale=2.0**-63)
    for x, w in ((every, every), (tiny.view(BF16), every), (edge, edge), (tiny.view(BF16), tiny.view(BF16) + 1)):
        x = torch.where(torch.isfinite(x), x, torch.ones_like(x))
        w = Weight(torch.where(torch.isfinite(w), w, torch.ones_like(w)))
        expected = AlignedKernels(load_best()).logits(x, w)
        other = AlignedKernels(load_variant(name)).logits(x, w)
        nan = expected.isnan()
        assert torch.equal(nan, other.isnan())
        assert same_bits(expected[~nan], other[~nan])


def evaluate(function: str, x: torch.Tensor, name: str) -> torch.Tensor:
    y = torch.empty_like(x)
    getattr(load_variant(name), function)(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def ulps(value: torch.Tensor, reference: torch.Tensor) -> float:
    spacing = 2.0 ** (reference.abs().log2().floor() - 23)
    return float(((value.double() - reference).abs() / spacing).max())


@pytest.mark.parametrize("name", runnable())
def test_exp(name: str) -> None:
    x = torch.cat([torch.linspace(-87, 88, 300_001), randn(100_000)])
    assert ulps(evaluate("exp", x, name), x.double().exp()) < 2
    edges = torch.tensor([0.0, -0.0, -87.01, -100.0, -1e30, -torch.inf, torch.nan, 88.0, 1e30])
    y = evaluate("exp", edges, name)
    assert y[:6].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0] and y[6].isnan() and y[7] == y[8]
    assert same_bits(evaluate("exp", x, name), evaluate("exp", x, load_best().name))


@pytest.mark.parametrize("name", runnable())
def test_log(name: str) -> None:
    x = torch.cat([torch.linspace(0.5, 2, 100_001), 10 ** torch.linspace(-44, 38, 100_001)])
    x = x[x.log() != 0]
    assert ulps(evaluate("log", x, name), x.double().log()) < 1
    y = evaluate("log", torch.tensor([1.0, 0.0, torch.inf, -1.0, torch.nan]), name)
    assert y[:3].tolist() == [0.0, -torch.inf, torch.inf] and y[3:].isnan().all()


def test_silu_from_the_far_left_to_the_far_right() -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 1e4])
    y = AlignedKernels().silu_mul(torch.cat([gate, torch.ones(7)])[None])[0]
    torch.testing.assert_close(y.double(), torch.nn.functional.silu(gate.double()), rtol=1e-6, atol=1e-33)


def test_rounding_to_bf16_is_that_of_torch() -> None:
    x = torch.cat([randn(50_000), randn(1000, scale=1e-39), torch.tensor([torch.nan, torch.inf, 3.4e38, -0.0])])
    rounded = AlignedKernels().linear(randn(1, 1, dtype=BF16) * 0 + 1, Weight(x.to(BF16)[:, None]))[0]
    exact = torch.where(x.to(BF16).float().abs() < 2.0**-126, x.to(BF16) * 0, x.to(BF16))  # flushed by the dot product
    assert torch.equal(rounded.isnan(), exact.isnan())
    assert torch.equal(rounded[~exact.isnan()], exact[~exact.isnan()])
    sums, _ = AlignedKernels().rms_norm(x.to(BF16)[None, :50_000], Weight(torch.ones(50_000, dtype=BF16)), 1e-5)
    mean = x.to(BF16)[:50_000].double().square().mean()
    torch.testing.assert_close(
        sums[0].double(), x.to(BF16)[:50_000].double() * (mean + 1e-5).rsqrt(), rtol=4e-3, atol=0
    )


def chosen(**environment: str) -> str:
    """The variant that a fresh process uses."""
    code = "from zerogap.kernels.native import load_best; print(load_best().name)"
    inherited = {name: value for name, value in os.environ.items() if name != "ZEROGAP_ISA"}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_variants_are_chosen_by_cpu_or_by_name() -> None:
    assert variants()[0] == "baseline"
    assert chosen() == runnable()[-1]
    assert chosen(ZEROGAP_ISA="baseline") == "baseline"
    with pytest.raises(ValueError, match="avx9000"):
        load_variant("avx9000")


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    """Else torch.set_num_threads would not reach the kernels, and every test with two threads would prove nothing."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    runtimes = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line or "libomp" in line}
    assert load_best() and len(runtimes) == 1


def test_the_contract_names_no_instruction_set() -> None:
    contracts = [AlignedKernels(load_variant(name)).contract() for name in runnable()]
    assert all(contract == contracts[0] for contract in contracts)
    assert contracts[0]["key_block"] == 64 and contracts[0]["vocabulary_block"] == 512


def test_fp32_results_are_those_of_chains_of_128() -> None:
    """Against an emulation in fp64, which is exact here: integers of 13 bits times powers of two, so that neither a
    product nor a sum is rounded before the one rounding to fp32."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-4000, 4000, (5, 300), generator=generator).float() * 2.0**-20
    w = torch.randint(-4000, 4000, (7, 300), generator=generator).float() + 0.5
    total = torch.zeros(5, 7)
    for start in range(0, 300, 128):
        chain = torch.zeros(5, 7)
        for k in range(start, min(start + 128, 300)):
            chain = (chain.double() + x[:, k, None].double() * w[None, :, k].double()).to(FP32)
        total = total + chain
    assert same_bits(AlignedKernels().linear(x, Weight(w)), total)
