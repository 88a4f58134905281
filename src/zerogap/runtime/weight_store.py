"""The learner's own copies of the weight versions that a living token may name, so that the audit can score it.

The newest version is in memory anyway, on its way to the engines. Of the older ones as many are in memory as fit a
budget; the others are files in the run folder, which no other process reads and no later run needs.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zerogap.runtime.backend import RunFailed
from zerogap.runtime.living import Living

Snapshot = dict[str, torch.Tensor]

MEGABYTE = 1_000_000
_FOLDER = "weight_store"


class WeightStore:
    """memory_mb: most megabytes of older versions in memory. version, snapshot: the first one.

    Snapshots are kept by reference and must not change. A version is written at most once: when it stops being the
    newest and has no room. (Batches are trained in order, so the oldest versions, which are read next, stay in memory.)
    """

    def __init__(self, run_dir: Path, memory_mb: float, version: int, snapshot: Snapshot) -> None:
        self._folder = run_dir / _FOLDER
        self._budget = int(memory_mb * MEGABYTE)
        self._newest = version
        self._memory = {version: snapshot}
        self._disk: dict[int, int] = {}  # version -> bytes of its file
        self._write_s = self._read_s = 0.0

    def put(self, version: int, snapshot: Snapshot, living: Living) -> None:
        """Add the newest version; free every older one that no living token names. RunFailed when a disk is full."""
        for old in self.versions():
            if not living.names(old):
                self._free(old)
        if self._newest in self._memory and self._memory_bytes() > self._budget:
            self._spill(self._newest)
        self._newest = version
        self._memory[version] = snapshot

    def __getitem__(self, version: int) -> Snapshot:
        """The same bits and dtypes as were put. KeyError names the versions held."""
        if version in self._memory:
            return self._memory[version]
        if version not in self._disk:
            raise KeyError(f"weights of version {version} are not kept (held: {self.versions()})")
        started = time.perf_counter()
        snapshot: Snapshot = load_file(self._path(version))
        self._read_s += time.perf_counter() - started
        return snapshot

    def versions(self) -> list[int]:
        return sorted([*self._memory, *self._disk])

    def metrics(self) -> dict[str, float]:
        """What is held now, the newest version included, and the milliseconds spent on files since the last call."""
        metrics = {
            "weight_store/versions": float(len(self.versions())),
            "weight_store/memory_bytes": float(self._memory_bytes()),
            "weight_store/disk_bytes": float(sum(self._disk.values())),
            "weight_store/write_ms": 1000 * self._write_s,
            "weight_store/read_ms": 1000 * self._read_s,
        }
        self._write_s = self._read_s = 0.0
        return metrics

    def _memory_bytes(self) -> int:
        return sum(tensor.nbytes for snapshot in self._memory.values() for tensor in snapshot.values())

    def _spill(self, version: int) -> None:
        started = time.perf_counter()
        path = self._path(version)
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(self._memory[version], partial)
            partial.rename(path)
        except OSError as error:
            raise RunFailed(
                f"weights of version {version} could not be kept for the audit in {self._folder}: {error}; make room "
                "there, raise audit.weights_memory_mb, lower train.lag, or turn the audit off (audit.share: 0)"
            ) from error
        self._disk[version] = path.stat().st_size
        del self._memory[version]
        self._write_s += time.perf_counter() - started

    def _free(self, version: int) -> None:
        self._memory.pop(version, None)
        if self._disk.pop(version, None) is not None:
            self._path(version).unlink()

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version:06d}.safetensors"


def remove_stored_weights(run_dir: Path) -> None:
    """What the store of an ended or killed run left; nothing when it wrote nothing."""
    shutil.rmtree(run_dir / _FOLDER, ignore_errors=True)
