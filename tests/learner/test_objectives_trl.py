"""Our objectives against TRL's GRPOTrainer, by calling its own loss on the same log-probabilities.

TRL's weights against a mismatch of sampler and trainer live in the middle of a method that also generates; that one
`if` is taken out of TRL's source and run as it stands.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from zerogap.config.objective import ObjectiveConfig
from zerogap.learner.objectives import policy_loss
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens

SEQUENCES, LENGTH = 6, 9


@pytest.fixture(scope="module")
def trl_trainer() -> Any:
    module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed (pip install trl)")
    return module.GRPOTrainer


@pytest.fixture
def data() -> dict[str, torch.Tensor]:
    """Rows of 1 to 9 tokens: logprobs, mask, recorded logprobs (ratios from 0.1 to 10), advantages of each row."""
    generator = torch.Generator().manual_seed(0)
    logprobs_BT = -3 * torch.rand(SEQUENCES, LENGTH, generator=generator) - 0.05
    lengths_B = torch.tensor([1, 2, 4, 5, 8, 9])
    return {
        "logprobs_BT": logprobs_BT,
        "mask_BT": (torch.arange(LENGTH) < lengths_B[:, None]).int(),
        "behaviour_BT": logprobs_BT + 2 * math.log(10) * (torch.rand(SEQUENCES, LENGTH, generator=generator) - 0.5),
        "advantages_B": torch.tensor([0.7, -0.3, 1.1, -0.9, 0.4, -1.0]),
    }


def ours(data: dict[str, torch.Tensor], objective: dict[str, Any]) -> tuple[LossOutput, torch.Tensor]:
    """(output, gradient at the logprobs as [B, T])."""
    logprobs_BT = data["logprobs_BT"].clone().requires_grad_(True)
    chosen_BT = data["mask_BT"].bool()
    owners_BT = torch.arange(SEQUENCES)[:, None].expand(SEQUENCES, LENGTH)
    tokens = TrainedTokens(
        logprobs_BT[chosen_BT],
        data["behaviour_BT"][chosen_BT],
        data["advantages_B"][:, None].expand(SEQUENCES, LENGTH)[chosen_BT],
        owners_BT[chosen_BT],
        denominator=int(chosen_BT.sum()),
    )
    output = policy_loss(tokens, TypeAdapter(ObjectiveConfig).validate_python(objective))
    output.loss.backward()
    assert logprobs_BT.grad is not None
    return output, logprobs_BT.grad


def theirs(
    trainer: Any, data: dict[str, torch.Tensor], old_BT: torch.Tensor, ratio: torch.Tensor | None = None, **keys: Any
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, gradient at the logprobs as [B, T], logged metrics) of TRL. ratio: of its sampler correction."""
    logprobs_BT = data["logprobs_BT"].clone().requires_grad_(True)
    ids_BT = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    settings = SimpleNamespace(
        **{
            "top_entropy_quantile": 1.0,
            "aux_loss_enabled": False,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "loss_type": "dapo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "use_vllm": ratio is not None,
            "vllm_importance_sampling_correction": True,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
            "args": SimpleNamespace(delta=None, steps_per_generation=1),
            "model": SimpleNamespace(training=True),
            "accelerator": SimpleNamespace(
                num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor
            ),
            "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_, **__: (logprobs_BT, torch.zeros_like(logprobs_BT), None),
        }
        | keys
    )
    inputs = {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": torch.ones(SEQUENCES, 1, dtype=torch.int64),
        "completion_ids": ids_BT,
        "completion_mask": data["mask_BT"],
        "advantages": data["advantages_B"],
        "old_per_token_logps": old_BT,
        "num_items_in_batch": data["mask_BT"].sum(),
        "importance_sampling_ratio": ratio,
    }
    loss = trainer._compute_loss(settings, None, inputs)
    loss.backward()
    assert logprobs_BT.grad is not None
    return loss.item(), logprobs_BT.grad, {name: values[0] for name, values in settings._metrics["train"].items()}


def sampler_correction(
    trainer: Any, data: dict[str, torch.Tensor], mode: str, low: float | None, high: float
) -> torch.Tensor:
    """TRL's vllm_importance_sampling_ratio: [B, T] in the token modes, [B, 1] in the sequence modes."""
    source = textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions))
    wanted = "self.use_vllm and self.vllm_importance_sampling_correction"
    blocks = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.If) and ast.unparse(n.test) == wanted]
    block = next((b for b in blocks if "torch.exp(logps_diff)" in ast.unparse(b)), None)
    if block is None:
        pytest.skip("this version of TRL computes its sampler correction elsewhere")
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "completion_mask": data["mask_BT"],
        "tool_mask": None,
        "old_per_token_logps": data["logprobs_BT"],
        "sampling_per_token_logps": data["behaviour_BT"],
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        ),
    }
    exec(compile(ast.Module([block], []), "trl", "exec"), names)
    ratio: torch.Tensor = names["vllm_importance_sampling_ratio"]
    return ratio


def assert_close(ours_BT: torch.Tensor, theirs_BT: torch.Tensor) -> None:
    torch.testing.assert_close(ours_BT, theirs_BT, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.2, 0.2), (0.2, 0.28), (0.9, 4.0)])
def test_ppo_clip(trl_trainer: Any, data: dict[str, torch.Tensor], eps_low: float, eps_high: float) -> None:
    """loss_type dapo: one denominator for all tokens."""
    output, gradient_BT = ours(data, {"name": "ppo_clip", "eps_low": eps_low, "eps_high": eps_high})
    loss, expected_BT, logged = theirs(
        trl_trainer, data, data["behaviour_BT"], epsilon_low=eps_low, epsilon_high=eps_high
    )
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert_close(gradient_BT, expected_BT)
    assert float(output.marks["clipped"].double().mean()) == pytest.approx(logged["clip_ratio/region_mean"], rel=1e-5)


def test_cispo(trl_trainer: Any, data: dict[str, torch.Tensor]) -> None:
    """TRL's epsilon_high is the largest weight itself, and it has no lower bound."""
    output, gradient_BT = ours(data, {"name": "cispo", "eps_high": 2.0})
    loss, expected_BT, _ = theirs(trl_trainer, data, data["behaviour_BT"], loss_type="cispo", epsilon_high=3.0)
    assert output.loss.item() == pytest.approx(loss, rel=1e-5)
    assert_close(gradient_BT, expected_BT)


def test_truncated_is(trl_trainer: Any, data: dict[str, torch.Tensor]) -> None:
    """token_truncate. TRL's loss has the constant 1 where ours has the log-probability: the gradients are the same."""
    _, gradient_BT = ours(data, {"name": "truncated_is", "cap": 2.0})
    ratio_BT = sampler_correction(trl_trainer, data, "token_truncate", None, 2.0)
    _, expected_BT, _ = theirs(trl_trainer, data, data["logprobs_BT"], ratio_BT)
    assert_close(gradient_BT, expected_BT)


def test_masked_is(trl_trainer: Any, data: dict[str, torch.Tensor]) -> None:
    """token_mask. TRL leaves masked tokens in the denominator, where the learner takes them out afterwards."""
    output, gradient_BT = ours(data, {"name": "masked_is", "low": 0.5, "high": 5.0})
    ratio_BT = sampler_correction(trl_trainer, data, "token_mask", 0.5, 5.0)
    _, expected_BT, _ = theirs(trl_trainer, data, data["logprobs_BT"], ratio_BT)
    assert_close(gradient_BT, expected_BT)
    assert output.marks["masked"].any() and not output.marks["masked"].all()


def test_product_gate(trl_trainer: Any, data: dict[str, torch.Tensor]) -> None:
    """sequence_mask rejects the same sequences; TRL then gives each kept token the product, ours its own ratio."""
    _, gradient_BT = ours(data, {"name": "product_gate", "low": 0.2, "high": 3.0})
    product_B1 = sampler_correction(trl_trainer, data, "sequence_mask", 0.2, 3.0)
    _, expected_BT, _ = theirs(trl_trainer, data, data["logprobs_BT"], product_B1)
    rejected_B = product_B1.squeeze(1) == 0
    assert rejected_B.any() and not rejected_B.all()
    assert torch.equal((gradient_BT == 0).all(1), rejected_B)
    own_BT = (data["logprobs_BT"] - data["behaviour_BT"]).exp() / product_B1
    assert_close(gradient_BT[~rejected_B], (expected_BT * own_BT)[~rejected_B])


def test_importance_sampling_off(trl_trainer: Any, data: dict[str, torch.Tensor]) -> None:
    _, gradient_BT = ours(data, {"name": "is_off"})
    _, expected_BT, _ = theirs(trl_trainer, data, data["logprobs_BT"])
    assert_close(gradient_BT, expected_BT)
