"""The learner with its audit, weight versions and checkpoints. The same class runs inline and in a Ray actor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from zerogap.gaps.split import Split, choose_groups, gap_statistics, split_tokens
from zerogap.kernels.native import keep_memory
from zerogap.learner.learner import Learner
from zerogap.model.checkpoint import load_decoder, save_decoder
from zerogap.model.decoder import Decoder, snapshot_digest
from zerogap.runtime.backend import BitsUnequal, FinishedGroup, RunFailed, RunSetup, Update, Weights
from zerogap.runtime.checkpoint import load_trainer, save_checkpoint
from zerogap.runtime.failures import error_statistics
from zerogap.runtime.identity import Identity
from zerogap.runtime.living import Living
from zerogap.runtime.transfer import to_arrays
from zerogap.runtime.weight_store import WeightStore
from zerogap.trajectory import Trajectory


class LearnerWorker:
    """Owns the trainable decoder. Updates are audited before the step, so against weights that tokens name."""

    def __init__(self, setup: RunSetup) -> None:
        recipe = setup.recipe
        torch.set_num_threads(recipe.learner.threads)
        keep_memory()
        self.setup = setup
        self.decoder: Decoder = load_decoder(
            setup.model_folder, recipe.model.kernels, recipe.model.dtype, trainable=True
        )
        self.learner = Learner(self.decoder, recipe.learner, recipe.train.updates, recipe.rollout.temperature)
        if setup.trainer_folder is not None:
            self.learner.load_state(*load_trainer(setup.trainer_folder))
        if self.learner.version != setup.start_version:
            raise RunFailed(
                f"checkpoint {setup.trainer_folder} holds version {self.learner.version}, not {setup.start_version}"
            )
        self._contract = self.decoder.contract_digest()
        self._newest = self.decoder.snapshot()
        self._store: WeightStore | None = None  # nothing is kept when nothing is audited
        if recipe.audit.share > 0:
            self._store = WeightStore(setup.run_dir, recipe.audit.weights_memory_mb, self.learner.version, self._newest)

    def weights(self) -> Weights:
        """The newest version, as numpy arrays that share memory with the stored snapshot (which never changes)."""
        return Weights(self.learner.version, snapshot_digest(self._newest), to_arrays(self._newest))

    def update(self, groups: list[FinishedGroup], living: Living) -> Update:
        """Audit, then one optimizer step. living: the versions that other groups may name, which are kept.

        Raises BitsUnequal, RunFailed, or NonFiniteUpdate.
        """
        started = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self._refuse_foreign(trajectories)
        errors = error_statistics(groups, self.setup.recipe.task.max_error_share)
        metrics: dict[str, Any] = self._audit(groups)
        audited = time.perf_counter()
        metrics |= self.learner.step(trajectories)
        self._newest = self.decoder.snapshot()
        if self._store is not None:
            self._store.put(self.learner.version, self._newest, living)
            metrics |= self._store.metrics()
        metrics |= errors
        metrics |= {"time/audit_s": audited - started, "time/update_s": time.perf_counter() - audited}
        return Update(self.learner.version, metrics, self.weights())

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        return save_checkpoint(run_dir, self.learner, self.setup.model_folder, record, keep)

    def save_model(self, folder: Path) -> None:
        save_decoder(self.decoder, folder, self.setup.model_folder)

    def identity(self) -> Identity:
        return Identity.of(self.decoder, self.learner.version, self.decoder.digest())

    def _audit(self, groups: list[FinishedGroup]) -> dict[str, Any]:
        recipe = self.setup.recipe
        aligned = recipe.aligned
        chosen = choose_groups([group.group_id for group in groups], recipe.audit.share)
        if self._store is None or not chosen:
            return {"aligned": aligned}
        split = split_tokens(
            self.decoder,
            self._store,
            [trajectory for group in groups if group.group_id in chosen for trajectory in group.trajectories],
            self.learner.version,
            recipe.learner.micro_batch_tokens,
        )
        if split.unequal and aligned and recipe.audit.on_unequal == "stop":
            raise BitsUnequal(_alarm(split))
        metrics: dict[str, Any] = {"aligned": aligned}
        metrics |= {"bitwise/checked": split.checked, "bitwise/unequal": split.unequal} | gap_statistics(split)
        if split.unequal:
            metrics["bitwise/first_unequal"] = str(split.first_unequal())
        return metrics

    def _refuse_foreign(self, trajectories: list[Trajectory]) -> None:
        """In an aligned run every trajectory must come from an engine with the learner's own contract."""
        if not self.setup.recipe.aligned:
            return
        for trajectory in trajectories:
            if trajectory.contract != self._contract:
                raise RunFailed(
                    f"group {trajectory.group_id} sample {trajectory.sample_index} was sampled under the numerical "
                    f"contract {trajectory.contract[:16]!r}, the learner computes under {self._contract[:16]!r}; "
                    "engine and learner must run the same kernels, dtype and model"
                )


def _alarm(split: Split) -> str:
    return (
        f"{split.unequal} of {split.checked} audited tokens are not reproduced bit for bit by the learner with the "
        f"weights of their own version. First: {split.first_unequal()}. Engine and learner differ in kernels, or an "
        "engine sampled with other weights than it says (audit.on_unequal: warn goes on regardless)"
    )
