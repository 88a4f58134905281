"""Family `standard`: stock torch kernels, to compare with. Not batch invariant, and not meant to be.

Everything is differentiable by torch's own autograd; masters are cast to the compute dtype on the way in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.step import EagerStep, Model, Step
from zerogap.kernels.weight import Weight

HEAD_ROWS = 512  # rows of logits held at once by the head


@dataclass
class LayerCache:
    """Keys and values of one layer: [pages * page_size, kv_heads, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor
    page_size: int

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def _leaf(weight: Weight) -> torch.Tensor:
    """The compute copy, connected to the master when gradients are recorded."""
    if weight.master is not None and torch.is_grad_enabled():
        return weight.master.to(weight.data.dtype)
    return weight.data


class StandardKernels:
    name = "standard"

    def contract(self) -> dict[str, Any]:
        return {"family": "standard", "torch": torch.__version__, "threads": torch.get_num_threads()}

    def pack(self, weight: Weight) -> None:
        """Stock kernels read the weight as it is."""

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        return F.embedding(tokens_T, _leaf(weight))

    def rms_norm(
        self, x_TH: torch.Tensor, weight: Weight, eps: float, residual_TH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual_TH = x_TH if residual_TH is None else residual_TH + x_TH
        return F.rms_norm(residual_TH, (residual_TH.shape[-1],), _leaf(weight), eps), residual_TH

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None = None) -> torch.Tensor:
        return F.linear(x_TK, _leaf(weight_NK), None if bias_N is None else _leaf(bias_N))

    def head_norm(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        q, k, v = _split_heads(qkv_TE, shape)
        q = F.rms_norm(q, (shape.head_dim,), _leaf(q_weight_D), eps)
        k = F.rms_norm(k, (shape.head_dim,), _leaf(k_weight_D), eps)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)

    def rotary(
        self,
        qkv_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        rotated = qkv_TE[:, : shape.q_size + shape.kv_size].view(len(qkv_TE), -1, shape.head_dim)
        positions = positions_T.long()
        cos, sin = cos_PR[positions][:, None], sin_PR[positions][:, None]
        x1, x2 = rotated.float().chunk(2, dim=-1)
        rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(qkv_TE.dtype)
        return torch.cat([rotated.flatten(1), qkv_TE[:, shape.q_size + shape.kv_size :]], dim=1)

    def attention(
        self, qkv_TE: torch.Tensor, rows: RowBatch, cache: LayerCache | None, shape: AttentionShape
    ) -> torch.Tensor:
        rows.check_cache(cache)
        q, k, v = _split_heads(qkv_TE, shape)
        if cache is None:
            parts = [_packed(q, k, v, rows, s, shape) for s in range(len(rows.lengths))]
            return torch.cat(parts) if parts else qkv_TE.new_zeros(0, shape.q_size)
        slots = rows.slots_T.long()
        cache.k[slots] = k
        cache.v[slots] = v
        if all(n == 1 for n in rows.lengths):
            return _decode(q, rows, cache, shape)
        offsets = torch.arange(rows.page_size)
        parts = []
        start = 0
        for s, n in enumerate(rows.lengths):
            first = int(rows.first_positions_S[s])
            total = first + n
            pages = rows.pages_SP[s, : -(-total // rows.page_size)].long()
            flat = (pages[:, None] * rows.page_size + offsets).flatten()[:total]
            mask = torch.arange(total) <= torch.arange(first, total)[:, None]
            parts.append(_sdpa(q[start : start + n], cache.k[flat], cache.v[flat], shape, mask=mask))
            start += n
        return torch.cat(parts)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate) * up

    def logits(self, hidden_BH: torch.Tensor, weight_VH: Weight) -> torch.Tensor:
        return F.linear(hidden_BH, weight_VH.data).float()

    def logprobs(
        self, hidden_TH: torch.Tensor, weight_VH: Weight, targets_T: torch.Tensor, temperature: float, vocab: int
    ) -> torch.Tensor:
        head = _leaf(weight_VH)
        parts = [
            _gather(F.linear(h, head).float(), t, temperature, vocab)
            for h, t in zip(hidden_TH.split(HEAD_ROWS), targets_T.split(HEAD_ROWS), strict=True)
        ]
        return torch.cat(parts)

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if temperature == 0:
            tokens = logits_BV[:, :vocab].argmax(-1)
            return tokens, _gather(logits_BV, tokens, 1.0, vocab)
        mass = torch.softmax(logits_BV[:, :vocab] / temperature, dim=-1).double()
        uniform = torch.tensor([_uniform(key) for key in keys_B4.tolist()], dtype=torch.float64)
        cdf = mass.cumsum(-1)
        tokens = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0].clamp_max(vocab - 1)
        return tokens, _gather(logits_BV, tokens, temperature, vocab)

    def record(self, model: Model, cache: list[LayerCache], page_size: int) -> Step:
        return EagerStep(model, cache, page_size)

    def new_cache(
        self, layers: int, pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype
    ) -> list[LayerCache]:
        size = (pages * page_size, shape.kv_heads, shape.head_dim)
        return [
            LayerCache(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype), page_size) for _ in range(layers)
        ]

    def copy_page(self, cache: list[LayerCache], source: int, target: int) -> None:
        for layer in cache:
            size = layer.page_size
            for tensor in (layer.k, layer.v):
                tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]


def _split_heads(qkv_TE: torch.Tensor, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv_TE.split([shape.q_size, shape.kv_size, shape.kv_size], dim=1)
    rows, d = len(qkv_TE), shape.head_dim
    return q.view(rows, shape.q_heads, d), k.view(rows, shape.kv_heads, d), v.view(rows, shape.kv_heads, d)


def _sdpa(
    q_LHD: torch.Tensor,
    k_LHD: torch.Tensor,
    v_LHD: torch.Tensor,
    shape: AttentionShape,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    out = F.scaled_dot_product_attention(
        q_LHD.transpose(0, 1)[None],
        k_LHD.transpose(0, 1)[None],
        v_LHD.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=is_causal,
        scale=shape.scale,
        enable_gqa=shape.q_heads != shape.kv_heads,
    )
    return out[0].transpose(0, 1).reshape(len(q_LHD), shape.q_size)


def _packed(
    q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, rows: RowBatch, s: int, shape: AttentionShape
) -> torch.Tensor:
    """Sequence s of packed rows: its own keys after those of the prefix that it shares."""
    start, length = int(rows.starts_Sp1[s]), rows.lengths[s]
    own = slice(start, start + length)
    if int(rows.first_positions_S[s]) == 0:
        return _sdpa(q_THD[own], k_THD[own], v_THD[own], shape, is_causal=True)
    prefix = (rows.key_ends_T[:start] > start).nonzero()[:, 0]
    seen = torch.cat([prefix, torch.arange(start, start + length)])
    mask = torch.ones(length, len(seen), dtype=torch.bool).tril(len(prefix))
    return _sdpa(q_THD[own], k_THD[seen], v_THD[seen], shape, mask=mask)


def _decode(q_SHD: torch.Tensor, rows: RowBatch, cache: LayerCache, shape: AttentionShape) -> torch.Tensor:
    """One row per sequence: one padded SDPA call."""
    lengths_S = rows.positions_T.long() + 1
    longest = int(lengths_S.max())
    width = -(-longest // rows.page_size)
    flat_SP = rows.pages_SP[:, :width].long()[:, :, None] * rows.page_size + torch.arange(rows.page_size)
    flat_SL = flat_SP.flatten(1)[:, :longest]
    mask_S11L = (torch.arange(longest) < lengths_S[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(
        q_SHD[:, :, None],
        cache.k[flat_SL].transpose(1, 2),
        cache.v[flat_SL].transpose(1, 2),
        attn_mask=mask_S11L,
        scale=shape.scale,
        enable_gqa=shape.q_heads != shape.kv_heads,
    )
    return out.reshape(len(q_SHD), shape.q_size)


def _gather(logits_TV: torch.Tensor, targets_T: torch.Tensor, temperature: float, vocab: int) -> torch.Tensor:
    return torch.log_softmax(logits_TV[:, :vocab] / temperature, dim=-1).gather(1, targets_T[:, None])[:, 0]


def _uniform(key: list[int]) -> float:
    """A uniform in [0, 1) from (seed, prompt id, sample index, position) alone."""
    generator = torch.Generator()
    state = 0x9E3779B97F4A7C15
    for part in key:  # splitmix64 over the parts of the key
        state = ((state ^ (part & (2**64 - 1))) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state ^= state >> 29
    generator.manual_seed(state - 2**64 if state >= 2**63 else state)
    return float(torch.rand((), dtype=torch.float64, generator=generator))
