"""Instruction sets: exp, log, silu, rounding and denormals on each; how one is chosen. The rest: test_invariance."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import same_bits
from tests.kernels.reference import BF16, FP32, randn
from zerogap.kernels import Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_best, load_variant, runnable, variants

OTHERS = [name for name in runnable() if name != load_best().name]


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


def test_rounding_to_bf16_is_that_of_torch_for_normal_numbers() -> None:
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


@pytest.mark.parametrize("name", runnable())
def test_rounding_to_bf16_flushes_denormals_and_has_one_nan(name: str) -> None:
    """A sum of two bf16 is exact in fp32 or nearly, so it meets every tie, denormals on both sides of 2^-126, NaN."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**15), 2**15, (40, 1000), dtype=torch.int16, generator=generator)
    near = bits ^ torch.randint(0, 2**11, bits.shape, dtype=torch.int16, generator=generator)
    edge = (bits & 0x01FF) - 2**15 * (bits & 1)  # denormals, small normals, either sign
    for x, y in ((bits, near), (edge, bits.roll(1) & 0x01FF), (edge, -(2**15) + (near & 0x01FF)), (edge * 0, edge)):
        x, y = x.to(torch.int16).view(BF16), y.to(torch.int16).view(BF16)
        exact = x.float() + y.float()
        rounded = torch.where(exact.abs() < 2.0**-126, exact * 0, exact).to(BF16)
        rounded = torch.where(exact.isnan(), torch.tensor(0x7FC0, dtype=torch.int16).view(BF16), rounded)
        weight = Weight(torch.ones(x.shape[1], dtype=BF16))
        _, total = AlignedKernels(load_variant(name)).rms_norm(x, weight, 1e-5, y.clone())
        assert same_bits(total, rounded)


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
