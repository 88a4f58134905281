"""What `zerogap audit RUN` reads of a run folder: its rollouts, and its checkpoints by version."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from zerogap.gaps.audit.importers import read_rollouts
from zerogap.gaps.audit.rescore import Models
from zerogap.gaps.audit.schema import Rollout, RolloutFileError
from zerogap.model.checkpoint import read_json
from zerogap.runtime.checkpoint import RECORD, checkpoints
from zerogap.runtime.records import TRAJECTORIES
from zerogap.trajectory import NOT_SAMPLED


@dataclass(frozen=True)
class Run:
    """rollouts: with a 1 in the mask only where the weights still exist. left_out: sampled tokens whose weights do
    not. kernels, dtype: the learner's."""

    rollouts: list[Rollout]
    models: Models
    left_out: int
    kernels: str
    dtype: str


def read_run(run_dir: Path) -> Run:
    """What of a run can be audited. RolloutFileError says what is missing: trajectories, checkpoints, or both apart."""
    path, folders = run_dir / TRAJECTORIES, checkpoints(run_dir)
    if not path.is_file():
        raise RolloutFileError(f"{path} does not exist; a run keeps it where logging.trajectories_mb is not 0")
    if not folders:
        raise RolloutFileError(f"{run_dir} has no checkpoint; set checkpoint.every, or audit with --model DIR")
    records = [read_json(folder, RECORD) for folder in folders]
    behaviour: dict[int | None, Path] = {
        int(record["version"]): folder for record, folder in zip(records, folders, strict=True)
    }
    rollouts, left_out = [], 0
    for rollout in read_rollouts(path, "zerogap", 1.0):
        trajectory = rollout.trajectory
        versions = [version if version in behaviour else NOT_SAMPLED for version in trajectory.versions]
        mask = [int(version != NOT_SAMPLED) for version in versions]
        left_out += trajectory.num_sampled - sum(mask)
        if any(mask):
            rollouts.append(replace(rollout, trajectory=replace(trajectory, loss_mask=mask, versions=versions)))
    if not rollouts:
        raise RolloutFileError(
            f"no token of {path} was sampled with weights that still exist (versions "
            f"{', '.join(str(version) for version in behaviour)}); set checkpoint.every to 1 and checkpoint.keep higher"
        )
    model = records[-1]["recipe"]["model"]
    return Run(rollouts, Models(behaviour), left_out, model["kernels"], model["dtype"])
