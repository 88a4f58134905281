"""Weights on their way into the engine: collected in buckets, checked as a whole, swapped between two steps."""

from __future__ import annotations

import torch

from zerogap.model.decoder import Decoder, WeightMismatch


class StagedWeights:
    """Buckets of one version. Nothing of them touches the model before the whole set has been checked.

    Buckets of another version than the staged ones come from a new sender: what the old one left is dropped, so a
    set is never put together from two versions. Tensors are kept by reference; the sender must not change them.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._version: int | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, version: int, bucket: dict[str, torch.Tensor]) -> None:
        if version != self._version:
            self._version, self._tensors = version, {}
        self._tensors.update(bucket)

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """The complete set of `version`. Raises WeightMismatch, and keeps nothing staged, when it is not one."""
        staged_version, tensors = self._version, self._tensors
        self._version, self._tensors = None, {}
        if staged_version != version:
            raise WeightMismatch(f"commit of version {version}, but the staged buckets are of {staged_version}")
        self._decoder.check_snapshot(tensors)
        return tensors
