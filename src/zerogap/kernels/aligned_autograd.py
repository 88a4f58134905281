"""Gradients of the aligned kernels. Deterministic; the gradient of a weight goes to its fp32 master.

A master enters each Function as an autograd input, only so that autograd carries its gradient; the arithmetic reads
`weight.data`, the compute copy.
"""

from __future__ import annotations

from typing import Any

import torch

from zerogap.kernels.aligned_cache import LayerCache
from zerogap.kernels.aligned_forward import Forward
from zerogap.kernels.native import dtype_code, inverse_temperature
from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.weight import Weight

Gradient = torch.Tensor | None


def wanted(x: torch.Tensor | None, weight: Weight | None) -> bool:
    """Whether this call must be recorded."""
    if not torch.is_grad_enabled():
        return False
    return (x is not None and x.requires_grad) or (weight is not None and weight.master is not None)


class Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, master: torch.Tensor, tokens_T: torch.Tensor, weight: Weight, forward: Forward
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.weight, ctx.forward = weight, forward
        return forward.embedding(tokens_T, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dy = gradients[0].contiguous()
        (tokens_T,) = ctx.saved_tensors
        dtable = torch.zeros(ctx.weight.data.shape, dtype=torch.float32)
        ctx.forward.native.embedding_backward(
            dtype_code(dy), dy.data_ptr(), tokens_T.data_ptr(), dtable.data_ptr(), tokens_T.numel(), *dtable.shape
        )
        return dtable, None, None, None


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor | None,
        master: torch.Tensor | None,
        weight: Weight,
        eps: float,
        forward: Forward,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = None if residual_TH is None else residual_TH.contiguous()
        target = None if residual is None else torch.empty_like(residual)
        y_TH, sum_TH = forward.rms_norm(x_TH, weight, eps, residual, target)
        if residual is None:
            sum_TH = sum_TH.view_as(sum_TH)  # an input may not be returned as it is
        ctx.save_for_backward(sum_TH)
        ctx.weight, ctx.eps, ctx.forward, ctx.has_residual = weight, eps, forward, residual is not None
        ctx.set_materialize_grads(False)
        return y_TH, sum_TH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Gradient, ...]:
        (sum_TH,) = ctx.saved_tensors
        dy = torch.zeros_like(sum_TH) if gradients[0] is None else gradients[0].contiguous()
        dsum = None if gradients[1] is None else gradients[1].contiguous()
        rows, width = sum_TH.shape
        dx, dweight = torch.empty_like(sum_TH), torch.empty(width, dtype=torch.float32)
        ctx.forward.native.rms_norm_backward(
            dtype_code(dx),
            sum_TH.data_ptr(),
            ctx.weight.data.data_ptr(),
            dy.data_ptr(),
            0 if dsum is None else dsum.data_ptr(),
            dx.data_ptr(),
            dweight.data_ptr(),
            rows,
            width,
            ctx.eps,
        )
        return dx, dx if ctx.has_residual else None, dweight if ctx.needs_input_grad[2] else None, None, None, None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        master: torch.Tensor | None,
        bias_master: torch.Tensor | None,
        weight_NK: Weight,
        bias_N: Weight | None,
        forward: Forward,
    ) -> torch.Tensor:
        x_TK = x_TK.contiguous()
        ctx.save_for_backward(x_TK)
        ctx.weight, ctx.bias, ctx.forward = weight_NK, bias_N, forward
        return forward.linear(x_TK, weight_NK, bias_N, x_TK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dy = gradients[0].contiguous()
        (x_TK,) = ctx.saved_tensors
        native, dtype = ctx.forward.native, dtype_code(dy)
        rows = x_TK.shape[0]
        n, k = ctx.weight.data.shape
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x_TK)
            native.linear_input_gradient(dtype, dy.data_ptr(), ctx.weight.data.data_ptr(), dx.data_ptr(), rows, n, k)
        if ctx.needs_input_grad[1]:
            dweight = (torch.empty if rows else torch.zeros)(n, k, dtype=torch.float32)
            native.linear_weight_gradient(dtype, dy.data_ptr(), x_TK.data_ptr(), dweight.data_ptr(), rows, n, k)
        if ctx.needs_input_grad[2]:
            dbias = torch.empty(n, dtype=torch.float32)
            native.column_sum(dtype, dy.data_ptr(), dbias.data_ptr(), rows, n)
        return dx, dweight, dbias, None, None, None


class HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TE: torch.Tensor,
        q_master: torch.Tensor | None,
        k_master: torch.Tensor | None,
        q_weight_D: Weight,
        k_weight_D: Weight,
        eps: float,
        shape: AttentionShape,
        forward: Forward,
    ) -> torch.Tensor:
        qkv_TE = qkv_TE.contiguous()
        ctx.save_for_backward(qkv_TE)
        ctx.weights, ctx.eps, ctx.shape, ctx.forward = (q_weight_D, k_weight_D), eps, shape, forward
        return forward.head_norm(qkv_TE, q_weight_D, k_weight_D, eps, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dy = gradients[0].contiguous()
        (qkv_TE,) = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        dqkv = torch.empty_like(qkv_TE)
        dweights = torch.empty(2, shape.head_dim, dtype=torch.float32)
        ctx.forward.native.head_norm_backward(
            dtype_code(dy),
            qkv_TE.data_ptr(),
            ctx.weights[0].data.data_ptr(),
            ctx.weights[1].data.data_ptr(),
            dy.data_ptr(),
            dqkv.data_ptr(),
            dweights.data_ptr(),
            qkv_TE.shape[0],
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            ctx.eps,
        )
        dq_weight = dweights[0] if ctx.needs_input_grad[1] else None
        dk_weight = dweights[1] if ctx.needs_input_grad[2] else None
        return dqkv, dq_weight, dk_weight, None, None, None, None, None


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
        forward: Forward,
    ) -> torch.Tensor:
        qkv_TE = qkv_TE.contiguous()
        ctx.save_for_backward(cos_PR, sin_PR, positions_T)
        ctx.shape, ctx.forward = shape, forward
        return forward.rotary(qkv_TE, torch.empty_like(qkv_TE), cos_PR, sin_PR, positions_T, shape, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dy = gradients[0].contiguous()
        dqkv = ctx.forward.rotary(dy, torch.empty_like(dy), *ctx.saved_tensors, ctx.shape, -1.0)
        return dqkv, None, None, None, None, None


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TE: torch.Tensor,
        rows: RowBatch,
        cache: LayerCache | None,
        shape: AttentionShape,
        forward: Forward,
    ) -> torch.Tensor:
        if not rows.packed:
            raise ValueError("attention: gradients need packed rows (RowBatch.pack); use torch.no_grad() for an engine")
        qkv_TE = qkv_TE.contiguous()
        log_sums_TQ = torch.empty(rows.num_rows, shape.q_heads, dtype=torch.float32)
        out = forward.attention(qkv_TE, rows, cache, shape, log_sums_TQ)
        ctx.save_for_backward(qkv_TE, out, log_sums_TQ, rows.key_ends_T)
        ctx.shape, ctx.forward = shape, forward
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dout = gradients[0].contiguous()
        qkv_TE, out, log_sums_TQ, key_ends_T = ctx.saved_tensors
        shape: AttentionShape = ctx.shape
        dqkv = torch.empty_like(qkv_TE)
        ctx.forward.native.attention_backward(
            dtype_code(qkv_TE),
            qkv_TE.data_ptr(),
            out.data_ptr(),
            log_sums_TQ.data_ptr(),
            dout.data_ptr(),
            dqkv.data_ptr(),
            key_ends_T.numel(),
            key_ends_T.data_ptr(),
            shape.q_heads,
            shape.kv_heads,
            shape.head_dim,
            shape.scale,
        )
        return dqkv, None, None, None, None


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2I: torch.Tensor, forward: Forward) -> torch.Tensor:
        gate_up_T2I = gate_up_T2I.contiguous()
        ctx.save_for_backward(gate_up_T2I)
        ctx.forward = forward
        return forward.silu_mul(gate_up_T2I)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dy = gradients[0].contiguous()
        (gate_up_T2I,) = ctx.saved_tensors
        dgate_up = torch.empty_like(gate_up_T2I)
        ctx.forward.native.silu_mul_backward(
            dtype_code(dy), gate_up_T2I.data_ptr(), dy.data_ptr(), dgate_up.data_ptr(), dy.shape[0], dy.shape[1]
        )
        return dgate_up, None


class HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        master: torch.Tensor | None,
        weight_VH: Weight,
        targets_T: torch.Tensor,
        temperature: float,
        vocab: int,
        forward: Forward,
    ) -> torch.Tensor:
        hidden_TH = hidden_TH.contiguous()
        log_sums_T = torch.empty(hidden_TH.shape[0], dtype=torch.float32)
        out = forward.logprobs(hidden_TH, weight_VH, targets_T, temperature, vocab, log_sums_T)
        ctx.save_for_backward(hidden_TH, targets_T, log_sums_T)
        ctx.weight, ctx.temperature, ctx.vocab, ctx.forward = weight_VH, temperature, vocab, forward
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Gradient, ...]:
        dlogprobs = gradients[0].contiguous()
        hidden_TH, targets_T, log_sums_T = ctx.saved_tensors
        dhidden = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros(ctx.weight.data.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows, k = hidden_TH.shape
        ctx.forward.native.head_backward(
            dtype_code(hidden_TH),
            hidden_TH.data_ptr(),
            ctx.weight.data.data_ptr(),
            targets_T.data_ptr(),
            log_sums_T.data_ptr(),
            dlogprobs.data_ptr(),
            inverse_temperature(ctx.temperature),
            0 if dhidden is None else dhidden.data_ptr(),
            0 if dweight is None else dweight.data_ptr(),
            rows,
            ctx.vocab,
            k,
        )
        return dhidden, dweight, None, None, None, None, None
