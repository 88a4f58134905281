"""Weights on their way into the engine: collected in buckets, checked as a whole, converted to the engine's dtype.

They travel as the learner has them, so digests and checks are of what was sent. `_converted` is the only place where
that becomes what an engine computes with, at its start and at every update alike. The engine swaps between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zerogap.model.decoder import Decoder, WeightMismatch


class StagedWeights:
    """Buckets of one version. Nothing of them touches the model before the whole set has been checked.

    delivered: dtype in which weights arrive; `decoder` computes in its own. Buckets of another version than the staged
    ones come from a new sender: what the old one left is dropped, so a set is never put together from two versions.
    Tensors are kept by reference; the sender must not change them.
    """

    def __init__(self, decoder: Decoder, delivered: torch.dtype) -> None:
        self._decoder = decoder
        self._delivered = delivered
        self._version: int | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, version: int, bucket: dict[str, torch.Tensor]) -> None:
        if version != self._version:
            self._version, self._tensors = version, {}
        self._tensors.update(bucket)

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """The complete set of `version`, converted. Raises WeightMismatch, and keeps nothing staged, when it is not
        one."""
        staged_version, tensors = self._version, self._tensors
        self._version, self._tensors = None, {}
        if staged_version != version:
            raise WeightMismatch(f"commit of version {version}, but the staged buckets are of {staged_version}")
        self._decoder.check_snapshot(tensors, self._delivered)
        return _converted(tensors, self._decoder.dtype)


def in_dtype(decoder: Decoder, dtype: torch.dtype) -> Decoder:
    """The decoder with its weights converted as delivered ones are; itself when it has that dtype."""
    if decoder.dtype == dtype:
        return decoder
    return decoder.view(_converted({name: weight.data for name, weight in decoder.weights.items()}, dtype), dtype)


def _converted(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rounded to nearest even, or widened without a change; no copy of what has the dtype already."""
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
