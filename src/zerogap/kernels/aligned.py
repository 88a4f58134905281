"""The `aligned` family: our C++ kernels behind the Kernels interface. Forward here, gradients in aligned_autograd.py.

Every output row is one fixed-order computation of its own inputs, so no batch, page, chunk or thread changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerogap.kernels import aligned_autograd as autograd
from zerogap.kernels.native import load_best
from zerogap.kernels.rows import PACKED_PAGE_SIZE, AttentionShape, RowBatch
from zerogap.kernels.weight import Weight

PAGE_SIZES = (8, 16, 32, 64)
PANEL_COLUMNS = 64
LANES = 16
PACKED, ROWS = 0, 1  # layouts of a weight, see csrc/table.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class LayerCache:
    """Keys [pages, kv_heads, head_dim, page_size] (transposed) and values [pages, kv_heads, page_size, padded dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int


def dtype_code(tensor: torch.Tensor) -> int:
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise ValueError(f"kernels: dtype {tensor.dtype} is unknown to `aligned`; use float32 or bfloat16")
    return code


def inverse_temperature(temperature: float) -> float:
    """1 / temperature; 1 for greedy decoding (0), whose logprobs are reported at temperature 1."""
    return 1.0 / temperature if temperature > 0 else 1.0


class AlignedKernels:
    """Implements `Kernels`. `native`: a variant from native.load_variant; default the best for this CPU."""

    name = "aligned"

    def __init__(self, native: Any | None = None) -> None:
        self.native = native or load_best()

    def contract(self) -> dict[str, Any]:
        # The instruction set and the page size are absent on purpose: they change no bit.
        return {
            "family": self.name,
            "version": 1,
            "linear": "one fp32 fma chain per element, k ascending; bf16: pairs, odd then even, denormals flushed",
            "bias": "fp32, before rounding",
            "key_block": 64,
            "vocabulary_block": 512,
            "lanes": LANES,
            "logits": "fp32",
            "temperature": "logit * fp32(1 / temperature)",
            "sampler": "philox4x32-10, 53-bit uniform, inverse cdf over vocabulary blocks",
        }

    def pack(self, weight: Weight) -> None:
        n, k = weight.data.shape
        panels = -(-n // PANEL_COLUMNS)
        if weight.data.dtype == torch.float32:
            packed = torch.empty(panels * k * PANEL_COLUMNS, dtype=torch.float32)
        else:
            packed = torch.empty(panels * -(-k // 2) * PANEL_COLUMNS, dtype=torch.int32)
        self.native.pack(dtype_code(weight.data), weight.data.data_ptr(), packed.data_ptr(), n, k)
        weight.derived["panels"] = packed

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        if autograd.wanted(None, weight):
            return autograd.Embedding.apply(weight.master, tokens_T, weight, self)
        return self.embedding_forward(tokens_T, weight)

    def embedding_forward(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        rows, width = tokens_T.numel(), weight.data.shape[1]
        out = torch.empty(rows, width, dtype=weight.data.dtype)
        self.native.embedding(
            dtype_code(out), weight.data.data_ptr(), tokens_T.data_ptr(), out.data_ptr(), rows, width
        )
        return out

    def rms_norm(
        self, x_TH: torch.Tensor, weight: Weight, eps: float, residual_TH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if autograd.wanted(x_TH, weight) or autograd.wanted(residual_TH, None):
            return autograd.RmsNorm.apply(x_TH, residual_TH, weight.master, weight, eps, self)
        return self.rms_norm_forward(x_TH, weight, eps, residual_TH, residual_TH)

    def rms_norm_forward(
        self,
        x_TH: torch.Tensor,
        weight: Weight,
        eps: float,
        residual_TH: torch.Tensor | None,
        sum_TH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, sum). sum_TH receives residual + x and may be residual_TH itself; both None: the sum is x."""
        x_TH = x_TH.contiguous()
        rows, width = x_TH.shape
        y = torch.empty_like(x_TH)
        has_residual = residual_TH is not None and sum_TH is not None
        self.native.rms_norm(
            dtype_code(x_TH),
            x_TH.data_ptr(),
            residual_TH.data_ptr() if residual_TH is not None else 0,
            sum_TH.data_ptr() if sum_TH is not None else 0,
            weight.data.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            eps,
        )
        return (y, sum_TH) if has_residual else (y, x_TH)  # type: ignore[return-value]

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None = None) -> torch.Tensor:
        if autograd.wanted(x_TK, weight_NK):
            bias_master = None if bias_N is None else bias_N.master
            return autograd.Linear.apply(x_TK, weight_NK.master, bias_master, weight_NK, bias_N, self)
        return self.linear_forward(x_TK, weight_NK, bias_N, x_TK.dtype)

    def linear_forward(
        self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        x_TK = x_TK.contiguous()
        rows = x_TK.shape[0]
        n, k = weight_NK.data.shape
        out = torch.empty(rows, n, dtype=out_dtype)
        layout, pointer = weight_operand(weight_NK)
        self.native.linear(
            dtype_code(x_TK),
            out_dtype is torch.float32,
            layout,
            x_TK.data_ptr(),
            pointer,
            0 if bias_N is None else bias_N.data.data_ptr(),
            out.data_ptr(),
            rows,
            n,
            k,
        )
        return out

    def head_norm(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, q_weight_D):
            return autograd.HeadNorm.apply(
                qkv_TE, q_weight_D.master, k_weight_D.master, q_weight_D, k_weight_D, eps, shape, self
            )
        return self.head_norm_forward(qkv_TE, q_weight_D, k_weight_D, eps, shape)

    def head_norm_forward(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        qkv_TE = qkv_TE.contiguous()
        out = torch.empty_like(qkv_TE)
        self.native.head_norm(
            dtype_code(qkv_TE),
            qkv_TE.data_ptr(),
            q_weight_D.data.data_ptr(),
            k_weight_D.data.data_ptr(),
            out.data_ptr(),
            qkv_TE.shape[0],
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            eps,
        )
        return out

    def rotary(
        self,
        qkv_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, None):
            return autograd.Rotary.apply(qkv_TE, cos_PR, sin_PR, positions_T, shape, self)
        qkv_TE = qkv_TE.contiguous()
        return self.rotate(qkv_TE, qkv_TE, cos_PR, sin_PR, positions_T, shape, 1.0)

    def rotate(
        self,
        source_TE: torch.Tensor,
        target_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
        sign: float,
    ) -> torch.Tensor:
        """Rotate forward (sign 1) or back (sign -1); source and target may be the same tensor."""
        rows, width = source_TE.shape
        self.native.rotary(
            dtype_code(source_TE),
            source_TE.data_ptr(),
            target_TE.data_ptr(),
            cos_PR.data_ptr(),
            sin_PR.data_ptr(),
            positions_T.data_ptr(),
            rows,
            shape.q_heads + shape.kv_heads,
            width,
            shape.head_dim,
            sign,
        )
        return target_TE

    def attention(
        self, qkv_TE: torch.Tensor, rows: RowBatch, cache: LayerCache | None, shape: AttentionShape
    ) -> torch.Tensor:
        if autograd.wanted(qkv_TE, None):
            return autograd.Attention.apply(qkv_TE, rows, cache, shape, self)
        return self.attention_forward(qkv_TE, rows, cache, shape, None)

    def attention_forward(
        self,
        qkv_TE: torch.Tensor,
        rows: RowBatch,
        cache: LayerCache | None,
        shape: AttentionShape,
        log_sums_TQ: torch.Tensor | None,
    ) -> torch.Tensor:
        if cache is None:
            if not rows.packed:
                raise ValueError("attention: rows that are not packed need a cache; pass one entry of new_cache")
            cache = self.new_cache(1, rows.num_pages, PACKED_PAGE_SIZE, shape, qkv_TE.dtype)[0]
        if rows.page_size != cache.page_size:
            raise ValueError(f"attention: rows use page size {rows.page_size}, the cache {cache.page_size}")
        qkv_TE = qkv_TE.contiguous()
        out = torch.empty(rows.num_rows, shape.q_size, dtype=qkv_TE.dtype)
        sequences, pages_per_sequence = rows.pages_SP.shape
        self.native.attention(
            dtype_code(qkv_TE),
            qkv_TE.data_ptr(),
            out.data_ptr(),
            0 if log_sums_TQ is None else log_sums_TQ.data_ptr(),
            rows.num_rows,
            sequences,
            rows.starts_Sp1.data_ptr(),
            rows.first_positions_S.data_ptr(),
            rows.pages_SP.data_ptr(),
            pages_per_sequence,
            rows.slots_T.data_ptr(),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            cache.page_size,
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.scale,
        )
        return out

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        if autograd.wanted(gate_up_T2I, None):
            return autograd.SiluMul.apply(gate_up_T2I, self)
        return self.silu_mul_forward(gate_up_T2I)

    def silu_mul_forward(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_up_T2I = gate_up_T2I.contiguous()
        rows, double_width = gate_up_T2I.shape
        out = torch.empty(rows, double_width // 2, dtype=gate_up_T2I.dtype)
        self.native.silu_mul(
            dtype_code(gate_up_T2I), gate_up_T2I.data_ptr(), out.data_ptr(), rows, double_width // 2
        )
        return out

    def logits(self, hidden_BH: torch.Tensor, weight_VH: Weight) -> torch.Tensor:
        return self.linear_forward(hidden_BH, weight_VH, None, torch.float32)

    def logprobs(
        self, hidden_TH: torch.Tensor, weight_VH: Weight, targets_T: torch.Tensor, temperature: float, vocab: int
    ) -> torch.Tensor:
        if autograd.wanted(hidden_TH, weight_VH):
            return autograd.HeadLogprobs.apply(
                hidden_TH, weight_VH.master, weight_VH, targets_T, temperature, vocab, self
            )
        return self.logprobs_forward(hidden_TH, weight_VH, targets_T, temperature, vocab, None)

    def logprobs_forward(
        self,
        hidden_TH: torch.Tensor,
        weight_VH: Weight,
        targets_T: torch.Tensor,
        temperature: float,
        vocab: int,
        log_sums_T: torch.Tensor | None,
    ) -> torch.Tensor:
        check_vocab(vocab, weight_VH.data.shape[0])
        hidden_TH = hidden_TH.contiguous()
        rows, k = hidden_TH.shape
        out = torch.empty(rows, dtype=torch.float32)
        layout, pointer = weight_operand(weight_VH)
        self.native.head_logprobs(
            dtype_code(hidden_TH),
            layout,
            hidden_TH.data_ptr(),
            pointer,
            targets_T.data_ptr(),
            inverse_temperature(temperature),
            out.data_ptr(),
            0 if log_sums_T is None else log_sums_T.data_ptr(),
            rows,
            vocab,
            k,
        )
        return out

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = logits_BV.shape
        check_vocab(vocab, width)
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self.native.sample(
            logits_BV.data_ptr(),
            logits_BV.stride(0),
            keys_B4.data_ptr(),
            temperature == 0,
            inverse_temperature(temperature),
            tokens.data_ptr(),
            logprobs.data_ptr(),
            rows,
            vocab,
        )
        return tokens, logprobs

    def new_cache(
        self, layers: int, pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype
    ) -> list[LayerCache]:
        if page_size not in PAGE_SIZES:
            raise ValueError(f"kernels: page_size {page_size} is not possible; use one of {PAGE_SIZES}")
        padded = -(-shape.head_dim // LANES) * LANES
        return [
            LayerCache(
                keys=torch.empty(pages, shape.kv_heads, shape.head_dim, page_size, dtype=dtype),
                values=torch.empty(pages, shape.kv_heads, page_size, padded, dtype=dtype),
                page_size=page_size,
            )
            for _ in range(layers)
        ]

    def copy_page(self, cache: list[LayerCache], source: int, target: int) -> None:
        for layer in cache:
            layer.keys[target].copy_(layer.keys[source])
            layer.values[target].copy_(layer.values[source])


def weight_operand(weight: Weight) -> tuple[int, int]:
    """(layout, address) of the packed copy, or of the rows as they are. The bits are the same."""
    panels = weight.derived.get("panels")
    return (ROWS, weight.data.data_ptr()) if panels is None else (PACKED, panels.data_ptr())


def check_vocab(vocab: int, rows: int) -> None:
    if not 0 < vocab <= rows:
        raise ValueError(f"kernels: vocab {vocab} must be in 1..{rows}, the rows of the output head")
