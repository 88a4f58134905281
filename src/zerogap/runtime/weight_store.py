"""The learner's own copies of the weight versions that a living token may still name (for the audit)."""

from __future__ import annotations

import torch


class WeightStore:
    """At learner version k no token older than k - lag is alive (runtime/admission.py), so at most lag + 1 copies
    are held: memory is (lag + 1) x the compute copy of the model."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def put(self, version: int, snapshot: dict[str, torch.Tensor]) -> None:
        """Add the newest version and free those that no living token names."""
        self._snapshots[version] = snapshot
        for old in [v for v in self._snapshots if v < version - self._lag]:
            del self._snapshots[old]

    def __getitem__(self, version: int) -> dict[str, torch.Tensor]:
        """KeyError names the versions held."""
        if version not in self._snapshots:
            raise KeyError(f"weights of version {version} are not kept (held: {self.versions()})")
        return self._snapshots[version]

    def versions(self) -> list[int]:
        return sorted(self._snapshots)
