"""Evaluations in a process of their own on Ray, behind everything else that wants a core."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from zerogap.runtime.backend import RunSetup, Weights
from zerogap.runtime.evaluation.plan import Plan
from zerogap.runtime.evaluation.training import Outcome, VersionMeter
from zerogap.runtime.ray_backend import actor_options, death_reason
from zerogap.runtime.worker import start_process_log

NICENESS = 10  # beside engines and learner that want every core, about a tenth of one is left for it

log = logging.getLogger("zerogap")


class EvaluationActor:
    """Weights come as a reference into the object store and are checked against the learner's digest."""

    def __init__(self, setup: RunSetup, plan: Plan) -> None:
        os.nice(NICENESS)
        start_process_log(setup.run_dir, "evaluation")
        self._meter = VersionMeter(setup, plan)

    def measure(self, weights: Weights, arrays: Any) -> Outcome:
        """arrays: weights.tensors; apart, so that Ray maps it into this process before the call."""
        log.info("weights of version %d", weights.version)
        try:
            return self._meter.measure(replace(weights, tensors=arrays))
        except Exception:
            log.exception("the evaluation failed")
            raise


class RayEvaluator:
    """Implements evaluation.training.Evaluator. Needs a running Ray (RayBackend starts it).

    The actor starts with the first evaluation. One that fails is missing, and the next gets a new actor: whatever
    happens here, training goes on.
    """

    def __init__(self, setup: RunSetup, plan: Plan) -> None:
        self._setup, self._plan = setup, plan
        self._actor: Any = None
        self._weights: Weights | None = None
        self._outcome: Any = None

    def start(self, weights: Weights) -> None:
        if self._actor is None:
            # No core is reserved: what engines and learner leave idle is enough.
            self._actor = ray.remote(**actor_options(0))(EvaluationActor).remote(self._setup, self._plan)
        self._weights = weights
        self._outcome = self._actor.measure.remote(weights, weights.tensors)

    def wait(self, timeout_s: float) -> Outcome | None:
        assert self._weights is not None
        if not ray.wait([self._outcome], timeout=timeout_s)[0]:
            return None
        try:
            outcome: Outcome = ray.get(self._outcome)
        except RayTaskError as error:
            outcome = self._failed(f"{type(error.cause).__name__}: {error.cause}")
        except RayError as error:
            outcome = self._failed(death_reason(error))
        self._weights = self._outcome = None
        return outcome

    def close(self) -> None:
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor, no_restart=True)
        self._actor = self._outcome = None

    def _failed(self, reason: str) -> Outcome:
        assert self._weights is not None
        weights = self._weights
        self.close()
        return Outcome(weights.version, weights.digest, missing=f"{reason}; see logs/evaluation.log")
