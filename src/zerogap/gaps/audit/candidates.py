"""Other weights that may have sampled the tokens: the versions that an audit was given, the nearest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerogap.gaps.audit.rescore import FolderWeights, Models
from zerogap.gaps.split import Snapshots

MOST = 32  # versions that are tried


@dataclass(frozen=True)
class Candidates:
    """weights: of all `versions`, and of every version that the audited tokens name."""

    weights: Snapshots
    versions: Sequence[int]

    @staticmethod
    def of(models: Models, others: Mapping[int, Path], kernels: str, dtype: str) -> Candidates:
        """All folders of an audit that have a version, and others beside them."""
        folders = {version: folder for version, folder in models.behaviour.items() if version is not None}
        if models.learner is not None and models.learner_version is not None:
            folders[models.learner_version] = models.learner
        folders = {**others, **folders}
        return Candidates(FolderWeights(folders, kernels, dtype), list(folders))

    def near(self, version: int | None) -> list[int]:
        """Those to try for tokens of a version: older ones before newer ones; None: the newest first."""
        if version is None:
            return sorted(self.versions, reverse=True)[:MOST]
        others = [other for other in self.versions if other != version]
        return sorted(others, key=lambda other: (other > version, abs(other - version)))[:MOST]
