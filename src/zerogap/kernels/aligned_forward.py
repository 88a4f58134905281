"""The aligned operations without gradients: shapes and addresses into one native call each."""

from __future__ import annotations

from typing import Any

import torch

from zerogap.kernels.aligned_cache import LayerCache, new_cache
from zerogap.kernels.native import LAYOUT_PACKED, LAYOUT_ROWS, dtype_code, inverse_temperature
from zerogap.kernels.rows import PACKED_PAGE_SIZE, AttentionShape, RowBatch
from zerogap.kernels.weight import Weight


class Forward:
    """native: a kernel table from native.load_variant. Nothing here looks at requires_grad."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        table = weight.data
        rows, (vocab, width) = tokens_T.numel(), table.shape
        out = torch.empty(rows, width, dtype=table.dtype)
        self.native.embedding(
            dtype_code(out), table.data_ptr(), tokens_T.data_ptr(), out.data_ptr(), rows, vocab, width
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
        rows, width = x_TH.shape
        y = torch.empty_like(x_TH)
        self.native.rms_norm(
            dtype_code(x_TH),
            x_TH.data_ptr(),
            0 if residual_TH is None else residual_TH.data_ptr(),
            0 if sum_TH is None else sum_TH.data_ptr(),
            weight.data.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            eps,
        )
        return y, x_TH if sum_TH is None else sum_TH

    def linear(
        self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        x_TK = x_TK.contiguous()
        check_operands(x_TK, weight_NK.data)
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
            rows.copies_C2.data_ptr(),
            len(rows.copies_C2),
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
        gate_up_T2I = gate_up_T2I.contiguous()
        rows, double_width = gate_up_T2I.shape
        out = torch.empty(rows, double_width // 2, dtype=gate_up_T2I.dtype)
        self.native.silu_mul(dtype_code(gate_up_T2I), gate_up_T2I.data_ptr(), out.data_ptr(), rows, double_width // 2)
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


def weight_operand(weight: Weight) -> tuple[int, int]:
    """(layout, address) of the packed copy, or of the rows as they are. The bits are the same."""
    panels = weight.derived.get("panels")
    return (LAYOUT_ROWS, weight.data.data_ptr()) if panels is None else (LAYOUT_PACKED, panels.data_ptr())


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
