"""Evaluations beside a training run: what is asked, when one is due, and what becomes of each.

Each measures one version on an engine of its own, so no update can abort it and no answer is a rollout (field case 44).
At most one runs at a time. One that is due meanwhile is counted as skipped, but the last update's follows the one that
runs; whatever has no result when the run ends is reported as missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from zerogap.config import Recipe
from zerogap.runtime.backend import RunSetup, Weights
from zerogap.runtime.evaluation.figures import Figures, default_ks, summarise
from zerogap.runtime.evaluation.plan import Plan, evaluate, make_plan
from zerogap.runtime.rollout_worker import build_rollout_worker


@dataclass(frozen=True)
class Outcome:
    """Of the evaluation of one version: figures, or why there are none. weights: their digest (Weights.digest)."""

    version: int
    weights: str
    seconds: float = 0.0
    figures: Figures | None = None
    missing: str = ""

    def line(self) -> dict[str, Any]:
        """For evaluations.jsonl."""
        start = {"version": self.version, "weights": self.weights}
        if self.figures is None:
            return start | {"missing": self.missing}
        return start | {"seconds": self.seconds} | self.figures.to_json()

    def metrics(self) -> dict[str, Any]:
        """As eval/...; what was not measured is absent."""
        figures = self.figures
        if figures is None:
            return {}
        values: dict[str, Any] = {"version": self.version, "seconds": self.seconds, "truncated": figures.truncated}
        values |= {"tokens": figures.tokens_mean, "turns": figures.turns}
        values |= {f"errors/{kind}": count for kind, count in figures.errors.items()}
        for k, estimate in figures.pass_at.items():
            values["reward" if k == 1 else f"pass@{k}"] = estimate.value
            if k == 1 and estimate.error is not None:
                values["reward_error"] = estimate.error
        return {f"eval/{name}": value for name, value in values.items()}


class Evaluator(Protocol):
    """Runs one evaluation at a time."""

    def start(self, weights: Weights) -> None:
        """Begin; only when the one before has its outcome."""
        ...

    def wait(self, timeout_s: float) -> Outcome | None:
        """The outcome of what was started, once; None when it takes longer than timeout_s from now."""
        ...

    def close(self) -> None:
        """End every process; may be called again."""
        ...


class VersionMeter:
    """An engine and environments that take over a version, measure it, and wait for the next."""

    def __init__(self, setup: RunSetup, plan: Plan) -> None:
        self._plan = plan
        self._worker, _ = build_rollout_worker(setup)

    def measure(self, weights: Weights) -> Outcome:
        """Raises WeightDeliveryError when other weights arrived than were sent, and what sampling raises."""
        started = time.perf_counter()
        self._worker.publish(weights)
        results = list(evaluate(self._worker, self._plan.items(weights.version), weights.version))
        figures = summarise(results, default_ks(self._plan.samples))
        return Outcome(weights.version, weights.digest, time.perf_counter() - started, figures)

    def close(self) -> None:
        self._worker.close()


class InlineEvaluator:
    """In turn with everything else; what an evaluation raises ends the run."""

    def __init__(self, setup: RunSetup, plan: Plan) -> None:
        self._meter = VersionMeter(setup, plan)
        self._outcome: Outcome | None = None

    def start(self, weights: Weights) -> None:
        self._outcome = self._meter.measure(weights)

    def wait(self, timeout_s: float) -> Outcome | None:
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        self._meter.close()


class Evaluations:
    """report: hears each outcome once, also that of one that is missing."""

    def __init__(self, evaluator: Evaluator, every: int, updates: int, report: Callable[[Outcome], None]) -> None:
        self._evaluator = evaluator
        self._every, self._updates = every, updates
        self._report = report
        self._running: Weights | None = None
        self._last: Weights | None = None  # of the last update, while it waits for the one that runs
        self._skipped = self._missing = 0

    def after_update(self, weights: Weights) -> dict[str, Any]:
        """Metrics of an evaluation that arrived; begins the one that is due. Waits for nothing."""
        arrived = self._take(0.0)
        if weights.version % self._every == 0 or weights.version == self._updates:
            if self._running is None:
                self._start(weights)
                arrived = arrived or self._take(0.0)  # inline it is there already
            elif weights.version == self._updates:
                self._last = weights
            else:
                self._skipped += 1
        counts = {"eval/skipped": self._skipped, "eval/missing": self._missing}
        return counts | (arrived.metrics() if arrived is not None else {})

    def finish(self, timeout_s: float) -> None:
        """Wait for what still runs, timeout_s in all."""
        deadline = time.monotonic() + timeout_s
        while self._running is not None:
            if self._take(max(0.0, deadline - time.monotonic())) is None:
                for weights in filter(None, (self._running, self._last)):
                    reason = f"not finished {timeout_s:g} s after the last update (runtime.timeout_s)"
                    self._report(Outcome(weights.version, weights.digest, missing=reason))
                return
            if self._last is not None:
                self._start(self._last)
                self._last = None

    def close(self) -> None:
        self._evaluator.close()

    def _start(self, weights: Weights) -> None:
        self._evaluator.start(weights)
        self._running = weights

    def _take(self, timeout_s: float) -> Outcome | None:
        if self._running is None or (outcome := self._evaluator.wait(timeout_s)) is None:
            return None
        self._running = None
        self._missing += outcome.figures is None
        self._report(outcome)
        return outcome


def prepare_evaluation(setup: RunSetup) -> tuple[RunSetup, Plan]:
    """What an evaluator of this run is built from. Raises as make_plan does."""
    recipe = evaluation_recipe(setup.recipe)
    plan = make_plan(recipe, setup.model_folder, recipe.evaluation.samples, recipe.evaluation.limit)
    return replace(setup, recipe=recipe, trainer_folder=None, kv_tokens=plan.kv_tokens), plan


def evaluation_recipe(recipe: Recipe) -> Recipe:
    """The run's recipe with the task and the sampling of its evaluations in place of those of its rollouts."""
    own = recipe.evaluation
    task = own.task or recipe.task.model_copy(update={"seed": recipe.task.seed + 1})
    sampling = {key: getattr(own, key) for key in ("temperature", "max_new_tokens") if getattr(own, key) is not None}
    if recipe.runtime.driver == "inline":
        sampling["threads"] = recipe.learner.threads  # one process: the learner must find its number again
    return recipe.model_copy(update={"task": task, "rollout": recipe.rollout.model_copy(update=sampling)})
