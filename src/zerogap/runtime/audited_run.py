"""What `zerogap audit RUN` reads of a run folder: its rollouts, and the weights by version that still exist."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from zerogap.config import Recipe, load_recipe
from zerogap.gaps.audit.importers import read_rollouts
from zerogap.gaps.audit.rescore import Models
from zerogap.gaps.audit.schema import Rollout, RolloutFileError
from zerogap.model.checkpoint import read_json
from zerogap.runtime.checkpoint import RECORD, checkpoints
from zerogap.runtime.prepare import prepared_model
from zerogap.runtime.records import TRAJECTORIES
from zerogap.trajectory import NOT_SAMPLED


@dataclass(frozen=True)
class Run:
    """rollouts: with a 1 in the mask only where the weights that sampled still exist. left_out: sampled tokens whose
    weights do not. kernels, dtype: the learner's. engine: what the engines computed with ("int8 bfloat16")."""

    rollouts: list[Rollout]
    models: Models
    left_out: int
    kernels: str
    dtype: str
    engine: str


def read_run(run_dir: Path) -> Run:
    """What of a run can be audited. RolloutFileError says what is missing: trajectories, or the weights of all."""
    path = run_dir / TRAJECTORIES
    if not path.is_file():
        raise RolloutFileError(f"{path} does not exist; a run keeps it where logging.trajectories_mb is not 0")
    recipe = load_recipe(run_dir / "recipe.yaml")
    weights = weights_by_version(run_dir, recipe)
    rollouts, left_out = [], 0
    for rollout in read_rollouts(path, "zerogap", 1.0):
        trajectory = rollout.trajectory
        versions = [version if version in weights else NOT_SAMPLED for version in trajectory.versions]
        mask = [int(version != NOT_SAMPLED) for version in versions]
        left_out += trajectory.num_sampled - sum(mask)
        if any(mask):
            rollouts.append(replace(rollout, trajectory=replace(trajectory, loss_mask=mask, versions=versions)))
    if not rollouts:
        raise RolloutFileError(
            f"no token of {path} was sampled with weights that still exist (versions "
            f"{', '.join(str(version) for version in weights) or 'none'}); set checkpoint.every to 1 and "
            "checkpoint.keep higher, or audit the file with --model DIR"
        )
    model, engine = recipe.model, str(recipe.engine_arithmetic)
    return Run(rollouts, Models(weights, each_its_own=True), left_out, model.kernels, model.dtype, engine)


def weights_by_version(run_dir: Path, recipe: Recipe) -> dict[int | None, Path]:
    """The model that the run started from (version 0) and its checkpoints, oldest first. (The final model is not among
    them: no token of a run is sampled by it, and no update is computed on it.)"""
    found: dict[int | None, Path] = {}
    if (start := prepared_model(recipe, run_dir)) is not None:
        found[0] = start
    for folder in checkpoints(run_dir):
        found[int(read_json(folder, RECORD)["version"])] = folder
    return found
