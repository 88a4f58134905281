"""The `aligned` family: our C++ kernels behind the Kernels interface. Forward here, gradients in aligned_autograd.py.

Every output row is one fixed-order computation of its own inputs, so no batch, page, chunk or thread changes a bit.
"""

from __future__ import annotations

from typing import Any

import torch

from zerogap.kernels import aligned_autograd as autograd
from zerogap.kernels.aligned_cache import LANES, LayerCache, copy_page, new_cache
from zerogap.kernels.aligned_forward import Forward
from zerogap.kernels.native import dtype_code, load_best
from zerogap.kernels.program import RecordedStep
from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.step import Model, Step
from zerogap.kernels.weight import Weight

PANEL_COLUMNS = 32  # output columns per packed panel, as in csrc/panel.h


class AlignedKernels:
    """Implements `Kernels`. `native`: a variant from native.load_variant; default the best for this CPU."""

    name = "aligned"

    def __init__(self, native: Any | None = None) -> None:
        self.forward = Forward(native or load_best())

    def contract(self) -> dict[str, Any]:
        # The instruction set and the page size are absent on purpose: they change no bit.
        return {
            "family": self.name,
            "version": 2,
            "linear": "fp32 fma chains of 128 steps, k ascending, added ascending; bf16: a step is a pair, odd then "
            "even, denormals flushed",
            "bias": "fp32, before rounding",
            "key_block": 64,
            "vocabulary_block": 512,
            "rounding": "to nearest even; bf16: denormals to zero, every NaN 0x7fc0",
            "lanes": LANES,
            "logits": "fp32",
            "temperature": "logit * fp32(1 / temperature)",
            "sampler": "philox4x32-10, 53-bit uniform, inverse cdf over vocabulary blocks",
        }

    def pack(self, weight: Weight) -> None:
        n, k = weight.data.shape
        panels = -(-n // PANEL_COLUMNS)
        packed = weight.spare.pop("panels", None)
        if packed is None and weight.data.dtype == torch.float32:
            packed = torch.empty(panels * k * PANEL_COLUMNS, dtype=torch.float32)
        elif packed is None:
            packed = torch.empty(panels * -(-k // 2) * PANEL_COLUMNS, dtype=torch.int32)
        self.forward.native.pack(dtype_code(weight.data), weight.data.data_ptr(), packed.data_ptr(), n, k)
        weight.derived["panels"] = packed

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        tokens_T = as_indices(tokens_T)
        if autograd.wanted(None, weight):
            return autograd.Embedding.apply(weight.master, tokens_T, weight, self.forward)
        return self.forward.embedding(tokens_T, weight)

    def rms_norm(
        self, x_TH: torch.Tensor, weight: Weight, eps: float, residual_TH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if autograd.wanted(x_TH, weight) or autograd.wanted(residual_TH, None):
            return autograd.RmsNorm.apply(x_TH, residual_TH, weight.master, weight, eps, self.forward)
        return self.forward.rms_norm(x_TH, weight, eps, residual_TH, residual_TH)

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None = None) -> torch.Tensor:
        if autograd.wanted(x_TK, weight_NK):
            bias_master = None if bias_N is None else bias_N.master
            return autograd.Linear.apply(x_TK, weight_NK.master, bias_master, weight_NK, bias_N, self.forward)
        return self.forward.linear(x_TK, weight_NK, bias_N, x_TK.dtype)

    def head_norm(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, q_weight_D):
            return autograd.HeadNorm.apply(
                qkv_TE, q_weight_D.master, k_weight_D.master, q_weight_D, k_weight_D, eps, shape, self.forward
            )
        return self.forward.head_norm(qkv_TE, q_weight_D, k_weight_D, eps, shape)

    def rotary(
        self,
        qkv_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, None):
            return autograd.Rotary.apply(qkv_TE, cos_PR, sin_PR, positions_T, shape, self.forward)
        qkv_TE = qkv_TE.contiguous()
        return self.forward.rotary(qkv_TE, qkv_TE, cos_PR, sin_PR, positions_T, shape, 1.0)

    def attention(
        self, qkv_TE: torch.Tensor, rows: RowBatch, cache: LayerCache | None, shape: AttentionShape
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, None):
            return autograd.Attention.apply(qkv_TE, rows, cache, shape, self.forward)
        return self.forward.attention(qkv_TE, rows, cache, shape, None)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        if autograd.wanted(gate_up_T2I, None):
            return autograd.SiluMul.apply(gate_up_T2I, self.forward)
        return self.forward.silu_mul(gate_up_T2I)

    def logits(self, hidden_BH: torch.Tensor, weight_VH: Weight) -> torch.Tensor:
        return self.forward.linear(hidden_BH, weight_VH, None, torch.float32)

    def logprobs(
        self, hidden_TH: torch.Tensor, weight_VH: Weight, targets_T: torch.Tensor, temperature: float, vocab: int
    ) -> torch.Tensor:
        targets_T = as_indices(targets_T)
        if autograd.wanted(hidden_TH, weight_VH):
            return autograd.HeadLogprobs.apply(
                hidden_TH, weight_VH.master, weight_VH, targets_T, temperature, vocab, self.forward
            )
        return self.forward.logprobs(hidden_TH, weight_VH, targets_T, temperature, vocab, None)

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits_BV.dtype != torch.float32:
            raise ValueError(f"kernels: logits are {logits_BV.dtype}; sample wants the float32 of `logits`")
        return self.forward.sample(logits_BV, as_indices(keys_B4), temperature, vocab)

    def record(self, model: Model, cache: list[LayerCache], page_size: int) -> Step:
        return RecordedStep(self, model, cache, page_size)

    def new_cache(
        self, layers: int, pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype
    ) -> list[LayerCache]:
        return new_cache(layers, pages, page_size, shape, dtype)

    def copy_page(self, cache: list[LayerCache], source: int, target: int) -> None:
        copy_page(cache, source, target)


def as_indices(values: torch.Tensor) -> torch.Tensor:
    """Contiguous int64, as the kernels read it; no copy if it is that already."""
    return values.to(torch.int64).contiguous()
