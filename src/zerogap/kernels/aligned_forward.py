"""The aligned operations without gradients: shapes and addresses into one native call each.

Only `address`, `size` and `new` touch memory, so that a subclass can record the same calls (program.py).
"""

from __future__ import annotations

from typing import Any

import torch

from zerogap.kernels.aligned_cache import LayerCache, new_cache
from zerogap.kernels.native import (
    LAYOUT_PACKED,
    LAYOUT_ROWS,
    dtype_code,
    inverse_temperature,
    sampler_inverse_temperature,
)
from zerogap.kernels.rows import PACKED_PAGE_SIZE, AttentionShape, RowBatch
from zerogap.kernels.weight import Weight


class Forward:
    """native: a kernel table from native.load_variant. Nothing here looks at requires_grad."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def address(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def size(self, tensor: torch.Tensor, dimension: int = 0) -> int:
        return tensor.shape[dimension]

    def new(self, rows_of: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised, with as many rows as `rows_of`."""
        return torch.empty(rows_of.shape[0], width, dtype=dtype)

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        table = weight.data
        width = table.shape[1]
        out = self.new(tokens_T, width, table.dtype)
        self.native.embedding(
            dtype_code(out),
            self.address(table),
            self.address(tokens_T),
            self.address(out),
            self.size(tokens_T),
            self.size(table),
            width,
        )
        return out

    def rms_norm(
        self,
        x_TH: torch.Tensor,
        weight: Weight,
        eps: float,
        residual_TH: torch.Tensor | None,
        sum_TH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, sum). sum_TH receives residual + x and may be residual_TH itself; both None: the sum is x."""
        x_TH = x_TH.contiguous()
        width = x_TH.shape[1]
        y = self.new(x_TH, width, x_TH.dtype)
        self.native.rms_norm(
            dtype_code(x_TH),
            self.address(x_TH),
            0 if residual_TH is None else self.address(residual_TH),
            0 if sum_TH is None else self.address(sum_TH),
            self.address(weight.data),
            self.address(y),
            self.size(x_TH),
            width,
            eps,
        )
        return y, x_TH if sum_TH is None else sum_TH

    def linear(
        self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        x_TK = x_TK.contiguous()
        check_operands(x_TK, weight_NK.data)
        n, k = weight_NK.data.shape
        out = self.new(x_TK, n, out_dtype)
        layout, weight = weight_operand(weight_NK)
        self.native.linear(
            dtype_code(x_TK),
            out_dtype is torch.float32,
            layout,
            self.address(x_TK),
            self.address(weight),
            0 if bias_N is None else self.address(bias_N.data),
            self.address(out),
            self.size(x_TK),
            n,
            k,
        )
        return out

    def head_norm(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        qkv_TE = qkv_TE.contiguous()
        out = self.new(qkv_TE, qkv_TE.shape[1], qkv_TE.dtype)
        self.native.head_norm(
            dtype_code(qkv_TE),
            self.address(qkv_TE),
            self.address(q_weight_D.data),
            self.address(k_weight_D.data),
            self.address(out),
            self.size(qkv_TE),
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            eps,
        )
        return out

    def rotary(
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
        self.native.rotary(
            dtype_code(source_TE),
            self.address(source_TE),
            self.address(target_TE),
            self.address(cos_PR),
            self.address(sin_PR),
            self.address(positions_T),
            self.size(source_TE),
            shape.q_heads + shape.kv_heads,
            source_TE.shape[1],
            shape.head_dim,
            sign,
        )
        return target_TE

    def attention(
        self,
        qkv_TE: torch.Tensor,
        rows: RowBatch,
        cache: LayerCache | None,
        shape: AttentionShape,
        log_sums_TQ: torch.Tensor | None,
    ) -> torch.Tensor:
        rows.check_cache(cache)
        if cache is None:
            cache = new_cache(1, rows.num_pages, PACKED_PAGE_SIZE, shape, qkv_TE.dtype)[0]
        if rows.page_size != cache.page_size:
            raise ValueError(f"attention: rows use page size {rows.page_size}, the cache {cache.page_size}")
        qkv_TE = qkv_TE.contiguous()
        out = self.new(qkv_TE, shape.q_size, qkv_TE.dtype)
        copies = len(rows.copies_C2)
        self.native.attention(
            dtype_code(qkv_TE),
            self.address(qkv_TE),
            self.address(out),
            0 if log_sums_TQ is None else self.address(log_sums_TQ),
            self.size(qkv_TE),
            self.size(rows.first_positions_S),
            self.address(rows.starts_Sp1),
            self.address(rows.first_positions_S),
            self.address(rows.pages_SP),
            self.size(rows.pages_SP, 1),
            self.address(rows.slots_T),
            self.address(rows.copies_C2) if copies else 0,
            copies,
            self.address(cache.keys),
            self.address(cache.values),
            cache.page_size,
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.scale,
        )
        return out

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_up_T2I = gate_up_T2I.contiguous()
        width = gate_up_T2I.shape[1] // 2
        out = self.new(gate_up_T2I, width, gate_up_T2I.dtype)
        self.native.silu_mul(
            dtype_code(gate_up_T2I), self.address(gate_up_T2I), self.address(out), self.size(gate_up_T2I), width
        )
        return out

    def logprobs(
        self,
        hidden_TH: torch.Tensor,
        weight_VH: Weight,
        targets_T: torch.Tensor,
        temperature: float,
        vocab: int,
        log_sums_T: torch.Tensor | None,
    ) -> torch.Tensor:
        check_operands(hidden_TH, weight_VH.data)
        check_vocab(vocab, weight_VH.data.shape[0])
        hidden_TH = hidden_TH.contiguous()
        rows, k = hidden_TH.shape
        out = torch.empty(rows, dtype=torch.float32)
        layout, weight = weight_operand(weight_VH)
        self.native.head_logprobs(
            dtype_code(hidden_TH),
            layout,
            self.address(hidden_TH),
            self.address(weight),
            self.address(targets_T),
            inverse_temperature(temperature),
            self.address(out),
            0 if log_sums_T is None else self.address(log_sums_T),
            rows,
            vocab,
            k,
        )
        return out

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_vocab(vocab, logits_BV.shape[1])
        logits_BV = logits_BV.contiguous()
        rows, width = logits_BV.shape
        inverse_temperatures_B = torch.full((rows,), sampler_inverse_temperature(temperature), dtype=torch.float32)
        tokens_B = torch.empty(rows, dtype=torch.int64)
        logprobs_B = torch.empty(rows, dtype=torch.float32)
        self.native.sample(
            self.address(logits_BV),
            width,
            self.address(keys_B4),
            self.address(inverse_temperatures_B),
            self.address(tokens_B),
            self.address(logprobs_B),
            rows,
            vocab,
        )
        return tokens_B, logprobs_B


def weight_operand(weight: Weight) -> tuple[int, torch.Tensor]:
    """(layout, values) of the packed copy, or of the rows as they are. The bits are the same."""
    panels = weight.derived.get("panels")
    return (LAYOUT_ROWS, weight.data) if panels is None else (LAYOUT_PACKED, panels)


def check_operands(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> None:
    """The kernels get bare addresses, so a wrong shape would read foreign memory."""
    if x_TK.dtype != weight_NK.dtype or x_TK.shape[1] != weight_NK.shape[1]:
        raise ValueError(
            f"kernels: x is {tuple(x_TK.shape)} {x_TK.dtype}, but the weight is {tuple(weight_NK.shape)} "
            f"{weight_NK.dtype}; the last dimensions and the dtypes must agree"
        )


def check_vocab(vocab: int, rows: int) -> None:
    if not 0 < vocab <= rows:
        raise ValueError(f"kernels: vocab {vocab} must be in 1..{rows}, the rows of the output head")
