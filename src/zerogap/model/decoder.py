"""The one decoder: engine and learner both call this forward pass, with whatever kernel family they are given.

Not here: sampling loops, KV paging, losses. Checkpoints are in checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from zerogap.kernels import Kernels, RowBatch, Weight
from zerogap.model.config import DecoderConfig


class WeightMismatch(ValueError):
    """Delivered weights do not fit; nothing was written. The message names the first tensor and why."""


@dataclass(frozen=True)
class Layer:
    input_norm: Weight
    qkv: Weight
    qkv_bias: Weight | None
    q_norm: Weight | None
    k_norm: Weight | None
    o: Weight
    o_bias: Weight | None
    post_norm: Weight
    gate_up: Weight
    gate_up_bias: Weight | None
    down: Weight
    down_bias: Weight | None


class Decoder:
    """A dense decoder-only transformer (Llama, Qwen2, Qwen3).

    weights: fused names -> Weight: `embed`, `norm`, `head` (absent when tied), `layers.<i>.<field of Layer>`.
    vocab: ids below this can be sampled (the tokenizer's size; a padded head has more rows).
    eos_token_ids: ids that end a sequence. rotary: tables to share (`view`); default: computed from config.
    activation_checkpointing: whether a forward with gradients keeps only the input of each layer, which the backward
    pass then runs again (less memory, the same bits).
    """

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        weights: dict[str, Weight],
        vocab: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.weights = weights
        self.vocab = min(vocab or config.vocab_size, config.vocab_size)
        self.eos_token_ids = eos_token_ids
        self.layers = [
            Layer(**{name: weights.get(f"layers.{i}.{name}") for name in Layer.__dataclass_fields__})  # type: ignore[arg-type]
            for i in range(config.num_layers)
        ]
        self.head = weights.get("head", weights["embed"])
        self.cos_PR, self.sin_PR = rotary or config.rotary_tables()
        self.activation_checkpointing = False
        self._packed = False

    @property
    def dtype(self) -> torch.dtype:
        return self.weights["embed"].data.dtype

    def hidden(self, tokens_T: torch.Tensor, rows: RowBatch, cache: list[Any] | None = None) -> torch.Tensor:
        """int64 [T] -> final-normed hidden states [T, H]. Without a cache, rows must be packed."""
        if rows.packed and rows.context > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {rows.context} tokens exceeds the model's context "
                f"(max_position_embeddings {self.config.max_position_embeddings})"
            )
        x_TH = self.kernels.embedding(tokens_T, self.weights["embed"])
        residual_TH: torch.Tensor | None = None
        run_again = self.activation_checkpointing and torch.is_grad_enabled()
        for i, layer in enumerate(self.layers):
            inputs = (layer, x_TH, residual_TH, rows, None if cache is None else cache[i])
            if run_again:
                x_TH, residual_TH = checkpoint(self._layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_TH, residual_TH = self._layer(*inputs)
        return self.kernels.rms_norm(x_TH, self.weights["norm"], self.config.rms_norm_eps, residual_TH)[0]

    def _layer(
        self, layer: Layer, x_TH: torch.Tensor, residual_TH: torch.Tensor | None, rows: RowBatch, cache: Any | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block. What the last one wrote (x) and the residual stream before it -> the same two, one layer on."""
        kernels, eps, shape = self.kernels, self.config.rms_norm_eps, self.config.shape
        y_TH, residual_TH = kernels.rms_norm(x_TH, layer.input_norm, eps, residual_TH)
        qkv_TE = kernels.linear(y_TH, layer.qkv, layer.qkv_bias)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv_TE = kernels.head_norm(qkv_TE, layer.q_norm, layer.k_norm, eps, shape)
        qkv_TE = kernels.rotary(qkv_TE, self.cos_PR, self.sin_PR, rows.positions_T, shape)
        attended = kernels.attention(qkv_TE, rows, cache, shape)
        x_TH = kernels.linear(attended, layer.o, layer.o_bias)
        y_TH, residual_TH = kernels.rms_norm(x_TH, layer.post_norm, eps, residual_TH)
        gate_up_T2I = kernels.linear(y_TH, layer.gate_up, layer.gate_up_bias)
        return kernels.linear(kernels.silu_mul(gate_up_T2I), layer.down, layer.down_bias), residual_TH

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """fp32 [B, V]."""
        return self.kernels.logits(hidden_BH, self.head)

    def logprobs(self, hidden_TH: torch.Tensor, targets_T: torch.Tensor, temperature: float) -> torch.Tensor:
        """fp32 [T]: log-probability of each target under softmax(logits / temperature) over the tokenizer's ids."""
        return self.kernels.logprobs(hidden_TH, self.head, targets_T, temperature, self.vocab)

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernels.sample."""
        return self.kernels.sample(logits_BV, keys_B4, temperature, self.vocab)

    def new_cache(self, pages: int, page_size: int) -> list[Any]:
        return self.kernels.new_cache(self.config.num_layers, pages, page_size, self.config.shape, self.dtype)

    def pack(self) -> None:
        """Derive the run-time copies that make few-row forwards fast (engine); renewed by load_snapshot."""
        self._packed = True
        for name, weight in self.weights.items():
            if weight.data.dim() == 2 and (name != "embed" or weight is self.head):
                self.kernels.pack(weight)

    def refresh(self) -> None:
        """After an optimizer step: compute copies become the rounded masters."""
        for weight in self.weights.values():
            weight.refresh()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Clones of the compute copies: what a weight version is."""
        return {name: weight.data.clone() for name, weight in self.weights.items()}

    def check_snapshot(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """Raises WeightMismatch unless names, shapes and dtypes are exactly this model's (dtype: that one instead)."""
        for name, weight in self.weights.items():
            tensor = tensors.get(name)
            if tensor is None:
                raise WeightMismatch(f"tensor {name!r} was not delivered ({len(tensors)} of {len(self.weights)} were)")
            expected = dtype or weight.data.dtype
            if tensor.shape != weight.data.shape or tensor.dtype != expected:
                raise WeightMismatch(
                    f"tensor {name!r} was delivered as {tensor.dtype} {tuple(tensor.shape)}, "
                    f"expected is {expected} {tuple(weight.data.shape)}"
                )
        unknown = next((name for name in tensors if name not in self.weights), None)
        if unknown is not None:
            raise WeightMismatch(f"tensor {unknown!r} was delivered, but the model has no such weight")

    def load_snapshot(self, tensors: dict[str, torch.Tensor]) -> None:
        """Check everything, then write everything; derived copies are renewed."""
        self.check_snapshot(tensors)
        for name, weight in self.weights.items():
            weight.load(tensors[name])
        if self._packed:
            self.pack()

    def view(self, tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Decoder:
        """The same model on these tensors, without a copy (to score with the weights of an older version).

        dtype: theirs, where the new model is to compute in another one than this.
        """
        self.check_snapshot(tensors, dtype)
        weights = {name: Weight(tensors[name]) for name in self.weights}
        rotary = (self.cos_PR, self.sin_PR)
        return Decoder(self.config, self.kernels, weights, self.vocab, self.eos_token_ids, rotary)

    def digest(self) -> str:
        """SHA-256 over name, dtype, shape and bytes of every compute copy."""
        return snapshot_digest({name: weight.data for name, weight in self.weights.items()})

    def contract(self) -> dict[str, Any]:
        """Everything that can change a bit of a logprob, besides the weights."""
        return {
            "kernels": self.kernels.contract(),
            "weights_dtype": str(self.dtype),
            "activations_dtype": str(self.dtype),
            "logits_dtype": "torch.float32",
            "sampled_vocabulary": self.vocab,
            "rotary_tables": snapshot_digest({"cos": self.cos_PR, "sin": self.sin_PR}),
            "temperature": "logits * fp32(1 / temperature) before log-softmax",
            "model": self.config.to_hf(),
        }

    def contract_digest(self) -> str:
        return hashlib.sha256(json.dumps(self.contract(), sort_keys=True).encode()).hexdigest()


def snapshot_digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of a weight version, independent of the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
