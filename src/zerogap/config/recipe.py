"""The whole recipe, and its sections about the run: train, audit, checkpoint, logging, runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from zerogap.config.evaluation import Evaluation
from zerogap.config.learner import Learner
from zerogap.config.model import Arithmetic, Model
from zerogap.config.rollout import Rollout
from zerogap.config.section import Section
from zerogap.config.task import Task, WarmStart


class Train(Section):
    updates: int = Field(300, ge=1)
    """Optimizer updates of the run."""
    groups_per_update: int = Field(16, ge=1)
    """Prompts per update; each brings rollout.group_size samples."""
    lag: int = Field(2, ge=0, le=1024)
    """Most optimizer updates between the weights that sampled a token and those trained on it. 0 = synchronous.
    Kept by admission: nothing generated is ever dropped."""
    hold_lag: bool = False
    """Hold the lag at exactly `lag` (a research mode; the first updates of a run, and after each --resume, have less):
    engines get new weights only when they have finished everything that the ones before allowed. Costs waiting where
    rollouts are uneven."""
    min_ess: float = Field(0.3, ge=0, le=1)
    """Warn (never gate) when the effective sample size of any version age falls below this share."""


class Audit(Section):
    share: float = Field(0.125, ge=0, le=1)
    """Share of each batch's groups whose tokens are scored again with the weights of their own version."""
    on_unequal: Literal["stop", "warn"] = "stop"
    """stop: an aligned run ends at the first unequal bit. warn: it goes on and counts. A run that is `aligned: no`
    counts and never stops, whatever is set here."""
    weights_memory_mb: float = Field(2000.0, ge=0)
    """Most megabytes (10^6 bytes) of older weight versions that the learner keeps in memory for the audit. The others
    are files in the run folder until the last token that names them is trained. At most train.lag versions in all."""


class Checkpoint(Section):
    every: int = Field(0, ge=0)
    """Updates between checkpoints; 0 = only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class Logging(Section):
    tensorboard: bool = True
    """Also write TensorBoard events; metrics.jsonl is always written."""
    trajectories_mb: float = Field(64.0, ge=0)
    """Most megabytes of trajectories.jsonl; 0 keeps none."""


class Runtime(Section):
    driver: Literal["ray", "inline"] = "ray"
    """inline: the same loop in one process, deterministic (tests, replay, debugging)."""
    ray_address: str | None = None
    """Join this Ray cluster; default: an embedded one that listens on loopback only."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for a rollout or an update before the run ends with an error naming what it waits for."""


class Recipe(Section):
    name: str
    """Names the run folder runs/<name>."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Keys the sampler, the order of prompts and the weights of a created model."""
    output_dir: str | None = None
    """Run folder; default runs/<name>."""
    model: Model
    task: Task
    warm_start: WarmStart | None = None
    rollout: Rollout = Field(default_factory=lambda: Rollout.model_validate({}))
    learner: Learner = Field(default_factory=lambda: Learner.model_validate({}))
    train: Train = Field(default_factory=lambda: Train.model_validate({}))
    evaluation: Evaluation = Field(default_factory=lambda: Evaluation.model_validate({}))
    audit: Audit = Field(default_factory=lambda: Audit.model_validate({}))
    checkpoint: Checkpoint = Field(default_factory=lambda: Checkpoint.model_validate({}))
    logging: Logging = Field(default_factory=lambda: Logging.model_validate({}))
    runtime: Runtime = Field(default_factory=lambda: Runtime.model_validate({}))

    @property
    def engine_arithmetic(self) -> Arithmetic:
        """rollout.kernels and rollout.dtype, each with the model's in its place where it is not set."""
        return Arithmetic(self.rollout.kernels or self.model.kernels, self.rollout.dtype or self.model.dtype)

    @property
    def aligned(self) -> bool:
        """Whether engine and learner claim equal bits: both aligned, in one dtype. runtime/identity.py then insists on
        equal contracts."""
        return self.engine_arithmetic == self.model.arithmetic and self.model.kernels == "aligned"

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir or f"runs/{self.name}")
