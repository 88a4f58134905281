"""AdamW on the masters: equals torch's, rounds to the compute copy, repeats and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import same_bits, tiny_decoder
from tests.learner.builders import make_batch, make_learner, masters, on_policy
from zerogap.learner.learner import Learner

FAMILIES = pytest.mark.parametrize("kernels", ["standard", "aligned"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def run(learner: Learner, steps: range) -> list[dict[str, float]]:
    return [learner.step(make_batch(seed=step, versions=step)) for step in steps]


def test_equals_torch_adamw() -> None:
    """Against torch's own unfused AdamW on the same gradients; decay on matrices only."""
    learner = make_learner(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, epsilon=1e-7, warmup_steps=2)
    reference = {name: master.requires_grad_() for name, master in masters(learner).items()}
    decayed = [p for p in reference.values() if p.ndim == 2]
    others = [p for p in reference.values() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-7, foreach=False)
    for step, rate in enumerate([5e-3, 1e-2, 1e-2]):
        batch = make_batch(seed=step)
        learner.backward(learner.batch(batch))
        for name, master in learner.optimizer.masters.items():
            assert master.grad is not None
            reference[name].grad = master.grad.clone()
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        assert learner.step(batch)["learning_rate"] == rate
    for name, master in masters(learner).items():
        torch.testing.assert_close(master, reference[name].detach(), rtol=1e-5, atol=1e-7)


def test_gradient_norm() -> None:
    learner = make_learner()
    learner.backward(learner.batch(make_batch()))
    flat = torch.cat([m.grad.double().flatten() for m in learner.optimizer.masters.values()])  # type: ignore[union-attr]
    assert learner.optimizer.gradient_norm() == pytest.approx(float(flat.norm()), rel=1e-5)


@FAMILIES
def test_bf16_copies_are_the_rounded_masters(kernels: str) -> None:
    """After each step, as bits; and masters move by less than a bf16 step would."""
    learner = make_learner(kernels, torch.bfloat16, learning_rate=1e-4)
    start = {name: weight.data.clone() for name, weight in learner.decoder.weights.items()}
    for step in range(3):
        before = masters(learner)
        run(learner, range(step, step + 1))
        for name, weight in learner.decoder.weights.items():
            assert weight.master is not None and weight.master.dtype == torch.float32
            assert weight.master.grad is None and not weight.derived
            assert same_bits(weight.data, weight.master.detach().to(torch.bfloat16))
            assert not torch.equal(before[name], weight.master)
    moved = {name: weight.data != start[name] for name, weight in learner.decoder.weights.items()}
    assert any(mask.any() for mask in moved.values()) and not all(mask.all() for mask in moved.values())


def test_fp32_copies_share_the_master() -> None:
    learner = make_learner()
    before = learner.decoder.digest()
    run(learner, range(1))
    assert learner.decoder.digest() != before
    for weight in learner.decoder.weights.values():
        assert weight.master is not None and weight.data.data_ptr() == weight.master.data_ptr()


@FAMILIES
@DTYPES
def test_two_runs_give_the_same_bits(kernels: str, dtype: torch.dtype) -> None:
    """Three steps, micro-batches of 20 rows, tokens of the step's own version."""
    first, second = (make_learner(kernels, dtype, micro_batch_tokens=20) for _ in range(2))
    metrics = [
        [{k: v for k, v in m.items() if "throughput" not in k} for m in run(x, range(3))] for x in (first, second)
    ]
    assert metrics[0] == metrics[1]
    for name, tensor in first.state()[0].items():
        assert same_bits(tensor, second.state()[0][name])


@FAMILIES
@DTYPES
def test_resume_equals_the_uninterrupted_run(kernels: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Reserve case R16: rate, version and every bit at step k are the same with and without a resume after 2."""
    config: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.01, "total": 6}
    whole = make_learner(kernels, dtype, **config)
    expected = run(whole, range(5))
    part = make_learner(kernels, dtype, **config)
    run(part, range(2))
    tensors, record = part.state()
    save_file(tensors, tmp_path / "learner.safetensors")
    resumed = Learner(tiny_decoder(kernels, dtype, trainable=True, seed=9), part.config, 6, 1.0)
    resumed.load_state(load_file(tmp_path / "learner.safetensors"), record)
    assert resumed.version == 2 and resumed.decoder.digest() == part.decoder.digest()
    again = run(resumed, range(2, 5))
    assert [m["learning_rate"] for m in again] == [m["learning_rate"] for m in expected[2:]]
    assert [m["loss/policy"] for m in again] == [m["loss/policy"] for m in expected[2:]]
    for name, tensor in whole.state()[0].items():
        assert same_bits(tensor, resumed.state()[0][name])


def test_state_is_complete_before_the_first_step() -> None:
    learner = make_learner()
    tensors, record = learner.state()
    assert record == {"version": 0} and len(tensors) == 4 * len(learner.decoder.weights)
    make_learner().load_state(tensors, record)


def test_a_foreign_state_is_refused() -> None:
    learner = make_learner()
    run(learner, range(1))
    before = learner.decoder.digest()
    tensors, record = make_learner().state()
    without = {name: tensor for name, tensor in tensors.items() if name != "norm.exp_avg"}
    with pytest.raises(ValueError, match=r"missing \['norm.exp_avg'\]"):
        learner.load_state(without, record)
    with pytest.raises(ValueError, match=r"norm.exp_avg is torch.float64"):
        learner.load_state(tensors | {"norm.exp_avg": tensors["norm.exp_avg"].double()}, record)
    with pytest.raises(ValueError, match=r"unknown \['head.master'\]"):
        learner.load_state(tensors | {"head.master": tensors["embed.master"]}, record)
    assert learner.decoder.digest() == before and learner.version == 1


def test_on_policy_ratio_is_one_after_updates() -> None:
    """Field case 40 in small: scored with the weights that made them, log-ratios are exactly 0, after 2 updates."""
    learner = make_learner(micro_batch_tokens=4096)
    for step in range(2):
        batch = on_policy(learner.decoder, make_batch(seed=step, versions=step))
        metrics = learner.step(batch)
        assert metrics["ratio/dev"] == 0.0 and metrics["kl/k3"] == 0.0
