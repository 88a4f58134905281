"""The small interface behind which every arithmetic step of a forward pass lives.

Three families implement it: `aligned` (our C++, batch invariant by construction), `standard` (stock torch), and `int8`
(the same with rounded weights, for engines only). Shape suffixes: T rows, S sequences, B sampled rows,
H hidden, K in, N out, E fused qkv, I intermediate, V vocabulary, P positions, D head_dim.

With gradients enabled and weights that have a master, every operation marked (grad) is differentiable; the
gradient of a weight arrives in fp32 in `weight.master.grad`. Under `torch.no_grad()` nothing is recorded.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from zerogap.kernels.rows import AttentionShape, RowBatch
from zerogap.kernels.step import Model, Step
from zerogap.kernels.weight import Weight


class Kernels(Protocol):
    name: str

    def contract(self) -> dict[str, Any]:
        """Everything of this family that can change a bit of a logprob (block sizes, version, accumulators)."""
        ...

    def pack(self, weight: Weight) -> None:
        """Derive the run-time copy that makes `linear`/`logits` fast for few rows (engine). Same bits either way."""
        ...

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        """(grad) int64 [T] -> [T, H] in the weight's dtype."""
        ...

    def rms_norm(
        self, x_TH: torch.Tensor, weight: Weight, eps: float, residual_TH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(grad) residual' = residual + x (or x when residual is None), y = residual' * rsqrt(mean(residual'^2) + eps)
        * weight. Returns (y, residual'), both in x's dtype; residual' is rounded to it before the norm reads it.
        Without gradients the implementation may update residual_TH in place and return it."""
        ...

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None = None) -> torch.Tensor:
        """(grad) x @ weight.T + bias -> [T, N] in x's dtype. fp32 accumulation; bias added in fp32 before rounding."""
        ...

    def head_norm(
        self, qkv_TE: torch.Tensor, q_weight_D: Weight, k_weight_D: Weight, eps: float, shape: AttentionShape
    ) -> torch.Tensor:
        """(grad) Qwen3's QK-norm: RMS norm of each query head and each key head over head_dim; values unchanged."""
        ...

    def rotary(
        self,
        qkv_TE: torch.Tensor,
        cos_PR: torch.Tensor,
        sin_PR: torch.Tensor,
        positions_T: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """(grad) Rotate query and key heads, half-split convention (x1, x2 = halves): (x1 c - x2 s, x2 c + x1 s).
        cos/sin: fp32 [positions, head_dim / 2]. May work in place on qkv_TE; use only the returned tensor."""
        ...

    def attention(self, qkv_TE: torch.Tensor, rows: RowBatch, cache: Any | None, shape: AttentionShape) -> torch.Tensor:
        """(grad when rows.packed) Causal attention -> [T, q_heads * head_dim]. Packed rows hold all their keys and take
        no cache; those of other rows are first written to rows.slots_T of the cache (one entry of `new_cache`)."""
        ...

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """(grad) [gate | up] -> silu(gate) * up, [T, I]."""
        ...

    def logits(self, hidden_BH: torch.Tensor, weight_VH: Weight) -> torch.Tensor:
        """fp32 [B, V], not rounded to the compute dtype. For the sampler."""
        ...

    def logprobs(
        self, hidden_TH: torch.Tensor, weight_VH: Weight, targets_T: torch.Tensor, temperature: float, vocab: int
    ) -> torch.Tensor:
        """(grad) Fused head + log-softmax + gather: fp32 [T], log softmax(logits[:, :vocab] / temperature)[target].
        Never holds the full [T, V] logits."""
        ...

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token per row over the first `vocab` columns. keys_B4: int64 (seed, prompt id, sample index,
        position). temperature 0: the largest logit, lowest id on ties, and its logprob at temperature 1.
        Returns (tokens int64 [B], logprobs fp32 [B]); the logprob has the same bits as `logprobs` for that token.
        A row with NaN or +inf logits gives a non-finite logprob (the engine stops on it), never a crash."""
        ...

    def record(self, model: Model, cache: list[Any], page_size: int) -> Step:
        """The step of this model (which uses these kernels) on this cache (of `new_cache`), as fast as the family can.

        It equals EagerStep(model, cache, page_size) as bits. It may hold addresses of the weights: record anew after
        every change of them.
        """
        ...

    def new_cache(
        self, layers: int, pages: int, page_size: int, shape: AttentionShape, dtype: torch.dtype
    ) -> list[Any]:
        """Paged KV, one opaque entry per layer; `nbytes` of an entry is its memory."""
        ...

    def copy_page(self, cache: Any, source: int, target: int) -> None:
        """Copy one page of every layer (copy-on-write of a shared prefix's last, partial page)."""
        ...


def get_kernels(name: str) -> Kernels:
    """`aligned`, `standard` or `int8`."""
    if name == "aligned":
        from zerogap.kernels.aligned import AlignedKernels

        return AlignedKernels()
    if name == "standard":
        from zerogap.kernels.standard import StandardKernels

        return StandardKernels()
    if name == "int8":
        from zerogap.kernels.int8 import Int8Kernels

        return Int8Kernels()
    raise ValueError(f"kernels: {name!r} is unknown; use 'aligned', 'standard' or 'int8'")
