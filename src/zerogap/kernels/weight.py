"""One parameter of a model: its compute copy, its fp32 master, and whatever a kernel family derives from it."""

from __future__ import annotations

from typing import Any

import torch


class Weight:
    """data: compute copy, contiguous, in the run's dtype ([out, in] for matrices, [n] for vectors).

    master: fp32 autograd leaf (learner only; None in an engine). In an fp32 run `data` shares its storage.
    derived: run-time copies made by a kernel family (packed panels, keyed by name). They are dropped by every
        change of `data`, so a stale copy cannot outlive an update (field cases 17 and 19).
    spare: memory of dropped copies, for the family to make the next ones in (fresh memory costs page faults).
    """

    def __init__(self, data: torch.Tensor, trainable: bool = False) -> None:
        self.data = data.contiguous()
        self.master: torch.Tensor | None = None
        self.derived: dict[str, Any] = {}
        self.spare: dict[str, Any] = {}
        if trainable:
            self.master = data.detach().to(torch.float32, copy=True).requires_grad_(True)
            if data.dtype == torch.float32:
                self.data = self.master.detach()

    def refresh(self) -> None:
        """After an optimizer step: the compute copy becomes the rounded master."""
        assert self.master is not None
        if self.data.dtype != torch.float32:
            self.data.copy_(self.master.detach())
        self._drop_derived()

    def load(self, data: torch.Tensor) -> None:
        """Replace the values (weight delivery). The caller has checked name, shape and dtype."""
        self.data.copy_(data)
        self._drop_derived()

    def _drop_derived(self) -> None:
        self.spare.update(self.derived)
        self.derived.clear()
