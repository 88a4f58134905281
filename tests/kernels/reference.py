"""fp64 references of the operations, and random operands, for the kernel tests."""

from __future__ import annotations

import torch

from zerogap.kernels import AttentionShape, Weight

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16]


def randn(*size: int, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def weight(*size: int, dtype: torch.dtype = FP32, seed: int = 1, trainable: bool = False) -> Weight:
    return Weight(randn(*size, dtype=dtype, seed=seed, scale=size[-1] ** -0.5), trainable)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference, in fp64."""
    difference = value.detach().double() - reference.detach().double()
    return float(difference.norm() / reference.detach().double().norm().clamp_min(1e-30))


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def head_norm(
    qkv_TE: torch.Tensor, q_w: torch.Tensor, k_w: torch.Tensor, eps: float, s: AttentionShape
) -> torch.Tensor:
    q, k, v = qkv_TE.split([s.q_size, s.kv_size, s.kv_size], 1)
    rows = qkv_TE.shape[0]
    q = rms_norm(q.reshape(rows, s.q_heads, s.head_dim), q_w, eps).reshape(rows, -1)
    k = rms_norm(k.reshape(rows, s.kv_heads, s.head_dim), k_w, eps).reshape(rows, -1)
    return torch.cat([q, k, v], 1)


def rotary(
    qkv_TE: torch.Tensor, cos_PR: torch.Tensor, sin_PR: torch.Tensor, positions_T: torch.Tensor, s: AttentionShape
) -> torch.Tensor:
    rows = qkv_TE.shape[0]
    heads = qkv_TE[:, : s.q_size + s.kv_size].reshape(rows, -1, s.head_dim)
    cos, sin = cos_PR[positions_T.long()][:, None], sin_PR[positions_T.long()][:, None]
    x1, x2 = heads.chunk(2, -1)
    rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    return torch.cat([rotated.reshape(rows, -1), qkv_TE[:, s.q_size + s.kv_size :]], 1)


def attention(qkv_TE: torch.Tensor, lengths: list[int], s: AttentionShape) -> torch.Tensor:
    outputs = []
    for rows in qkv_TE.split(lengths):
        n = rows.shape[0]
        q, k, v = rows.split([s.q_size, s.kv_size, s.kv_size], 1)
        q = q.reshape(n, s.q_heads, s.head_dim).transpose(0, 1)
        k, v = (
            x.reshape(n, s.kv_heads, s.head_dim).transpose(0, 1).repeat_interleave(s.q_heads // s.kv_heads, 0)
            for x in (k, v)
        )
        scores = (q @ k.transpose(1, 2)) * s.scale
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append((probabilities @ v).transpose(0, 1).reshape(n, s.q_size))
    return torch.cat(outputs)


def logprobs(
    hidden_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor, temperature: float, vocab: int
) -> torch.Tensor:
    logits = hidden_TH @ weight_VH[:vocab].T / temperature
    return logits.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]
