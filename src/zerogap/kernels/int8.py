"""Family `int8`, for engines only: `standard` with the weight matrices of the layers rounded to 8 bits.

Weight-only, symmetric, one scale per output channel. Embedding, norms, biases, the head, activations and the KV cache
stay in the engine's dtype: the usual choice, since errors of the head go into every logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from zerogap.kernels.standard import StandardKernels
from zerogap.kernels.weight import Weight

LARGEST = 127  # -128 is not used, so that the grid is symmetric


class Int8Kernels(StandardKernels):
    name = "int8"

    def contract(self) -> dict[str, Any]:
        return super().contract() | {"family": self.name, "layer_weights": "int8, symmetric, fp32 scale per output"}

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight, bias_N: Weight | None = None) -> torch.Tensor:
        """Integers up to 127 are exact in both dtypes, so the product is of the rounded weights and of nothing else.

        Stock torch has a kernel that reads int8 (_weight_int8pack_mm); on CPU it was slower and failed on some widths.
        """
        integers_NK, scale_N = weight_NK.derived.get("int8") or _quantise(weight_NK)
        y_TN = F.linear(x_TK, integers_NK.to(x_TK.dtype)).float() * scale_N
        return (y_TN if bias_N is None else y_TN + bias_N.data).to(x_TK.dtype)


def _quantise(weight_NK: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [N, K], and fp32 [N] such that integers * scale is within scale / 2 of the weight. Kept until it changes.

    A channel with a NaN or infinity gets a scale that makes its outputs NaN.
    """
    if weight_NK.master is not None:
        raise ValueError("kernels: int8 weights have no gradient; a learner needs 'aligned' or 'standard'")
    values_NK = weight_NK.data.float()
    scale_N = values_NK.abs().amax(1) / LARGEST
    scale_N = scale_N.where(scale_N.isfinite(), torch.nan).where(scale_N != 0, 1.0)  # a channel of zeros
    integers_NK = weight_NK.spare.pop("int8", (torch.empty_like(values_NK, dtype=torch.int8),))[0]
    integers_NK.copy_((values_NK / scale_N[:, None]).round_().clamp_(-LARGEST, LARGEST))
    weight_NK.derived["int8"] = integers_NK, scale_N
    return integers_NK, scale_N
