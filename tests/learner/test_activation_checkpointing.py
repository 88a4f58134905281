"""A learner that keeps only the input of each layer: the same bits everywhere, less memory between the passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import same_bits, tiny_decoder
from tests.learner.builders import gradients, make_batch, make_trajectory, masters, on_policy
from tests.learner.test_sft import EXAMPLES
from zerogap.config import Learner as LearnerConfig
from zerogap.learner.learner import Learner
from zerogap.learner.packing import pack
from zerogap.learner.sft import train_sft

MODELS: list[dict[str, Any]] = [
    {"num_layers": 3},
    {"architecture": "qwen2", "qkv_bias": True, "num_layers": 1},
    {"architecture": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
]


def learner_of(checkpointing: bool, kernels: str, dtype: torch.dtype, model: dict[str, Any]) -> Learner:
    settings = {"learning_rate": 1e-2, "micro_batch_tokens": 40, "activation_checkpointing": checkpointing}
    return Learner(tiny_decoder(kernels, dtype, True, **model), LearnerConfig.model_validate(settings), 10, 1.0)


@pytest.mark.parametrize("model", MODELS, ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["aligned", "standard"])
def test_loss_gradients_and_weights_have_the_same_bits(kernels: str, dtype: torch.dtype, model: dict[str, Any]) -> None:
    plain, checkpointed = (learner_of(on, kernels, dtype, model) for on in (False, True))
    for step in range(3):
        batch = on_policy(plain.decoder, make_batch(seed=step, versions=step))
        outputs = []
        for learner in (plain, checkpointed):
            learner.optimizer.clear_gradients()
            outputs.append(learner.backward(learner.batch(batch)))
        assert outputs[0].loss == outputs[1].loss
        assert same_bits(outputs[0].log_ratios_N, outputs[1].log_ratios_N)
        assert same_bits(gradients(plain), gradients(checkpointed))
        metrics = [learner.step(batch) for learner in (plain, checkpointed)]
        assert metrics[0]["grad_norm"] == metrics[1]["grad_norm"] > 0
        after = masters(checkpointed)
        assert all(same_bits(value, after[name]) for name, value in masters(plain).items())


def test_the_warm_start_has_the_same_bits() -> None:
    losses: dict[bool, list[float]] = {False: [], True: []}
    for on, seen in losses.items():
        decoder = tiny_decoder("aligned", trainable=True)
        train_sft(decoder, (EXAMPLES for _ in range(4)), 1e-2, 1, 4, 64, lambda _, loss: seen.append(loss), on)  # noqa: B023
    assert losses[False] == losses[True]


class WatchedKernels:
    """A kernel family that remembers its outputs without keeping them alive."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.outputs: dict[int, tuple[StorageWeakRef, int]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            result = getattr(self.kernels, name)(*arguments)
            for tensor in result if isinstance(result, tuple) else (result,):
                storage = tensor.untyped_storage()
                self.outputs[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
            return result

        return call

    def kept_bytes(self) -> int:
        return sum(size for storage, size in self.outputs.values() if not storage.expired())


def test_a_forward_keeps_little() -> None:
    """Of eight layers the inputs (2 x hidden values a token each) instead of all that is in them."""
    kept = {}
    for on in (False, True):
        decoder = learner_of(on, "aligned", torch.float32, {"num_layers": 8}).decoder
        watched = WatchedKernels(decoder.kernels)
        decoder.kernels = watched  # type: ignore[assignment]
        (micro_batch,) = pack([make_trajectory([3] * 100, [4] * 100)], 400)
        logprobs_N = micro_batch.logprobs(decoder, 1.0)
        kept[on] = watched.kept_bytes()
        logprobs_N.sum().backward()
    one_value_a_row = 199 * 32 * 4
    assert kept[True] <= (8 * 2 + 3) * one_value_a_row
    assert kept[False] > 4 * kept[True]
