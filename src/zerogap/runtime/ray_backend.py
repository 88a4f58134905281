"""The run on Ray: one actor per engine, one for the learner, all of them working at the same time.

By default Ray is started embedded and listens on loopback only; recipe.runtime.ray_address joins a cluster.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from safetensors import safe_open

import zerogap
from zerogap.config import Recipe
from zerogap.runtime.backend import EngineStats, Events, FinishedGroup, Item, RunFailed, RunSetup, Update, Weights
from zerogap.runtime.identity import check_identities
from zerogap.runtime.living import Living
from zerogap.runtime.worker import LearnerActor, Report, RolloutActor

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # engines and learner are the run; Ray would put them behind everything else
    "RAY_prestart_worker_first_driver": "0",  # idle processes that our actors, with their own environment, cannot use
    "RAY_enable_worker_prestart": "0",
}
MAX_RESTARTS = 3
KEPT_VERSIONS = 5  # versions that engines, driver and learner may hold in the object store at one time
EVALUATED_VERSIONS = 2  # those that an evaluation measures and that the last one waits with
SPARE_STORE_BYTES = 256 * 2**20

log = logging.getLogger("zerogap")


@dataclass
class _Engine:
    """A rollout actor as the driver sees it. report: the answer that is waited for, None until it takes part.

    pending: groups it was given and has not returned, in order.
    counted: counters of the actors that served before it in this place and died.
    """

    index: int
    actor: Any
    report: Any = None
    pending: dict[int, Item] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    counted: EngineStats = field(default_factory=EngineStats)
    restarts: int = 0


class RayBackend:
    """Implements runtime.backend.Backend.

    An engine whose process dies is started again (at most MAX_RESTARTS times), brought to the newest weights and given
    its unfinished groups anew; a learner whose process dies ends the run.
    """

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self._timeout_s = setup.recipe.runtime.timeout_s
        self._owns_ray = start_ray(setup)
        self._engines: list[_Engine] = []
        self._learner: Any = None
        self._update: Any = None
        self._newest: Weights | None = None
        try:
            self._learner = ray.remote(**actor_options(setup.recipe.learner.threads))(LearnerActor).remote(setup)
            for index in range(setup.recipe.rollout.workers):  # one by one: whatever exists is known to `close`
                self._engines.append(_Engine(index, self._new_actor(index)))
            actors = [self._learner, *(engine.actor for engine in self._engines)]
            learner, *engines = self._get([actor.identity.remote() for actor in actors], "start")
            check_identities(setup.recipe, learner, engines)
            for engine in self._engines:
                engine.report = engine.actor.report.remote()
        except RayActorError as error:
            self.close()
            raise RunFailed(f"a process of the run did not start: {death_reason(error)}") from error
        except BaseException:
            self.close()
            raise

    def submit(self, items: Sequence[Item]) -> None:
        """Each group to the engine with the fewest unfinished ones."""
        batches: dict[int, list[Item]] = {}
        for item in items:
            engine = min(self._engines, key=lambda e: (len(e.pending), e.index))
            engine.pending[item[0].group_id] = item
            batches.setdefault(engine.index, []).append(item)
        for index, batch in batches.items():
            self._engines[index].actor.submit.remote(batch)

    def train(self, groups: list[FinishedGroup], living: Living) -> None:
        self._update = self._learner.update.remote(groups, living)

    def wait(self, timeout_s: float) -> Events:
        deadline = time.monotonic() + timeout_s
        events = Events()
        while not events and (left := deadline - time.monotonic()) > 0:
            waited = [engine.report for engine in self._engines]
            waited += [self._update] if self._update is not None else []
            if ray.wait(waited, num_returns=1, timeout=left)[0]:
                ready, _ = ray.wait(waited, num_returns=len(waited), timeout=0)  # all, so that none is passed over
            else:
                ready = []
            for reference in ready:
                if reference is self._update:
                    events.update = self._finish_update()
                else:
                    events.finished += self._collect(next(e for e in self._engines if e.report is reference))
        return events

    def publish(self, weights: Weights) -> None:
        self._newest = weights
        for engine in self._engines:
            engine.actor.publish.remote(weights, weights.tensors)

    def save_checkpoint(self, run_dir: Path, record: dict[str, Any], keep: int) -> Path:
        path: Path = self._ask_learner(self._learner.save_checkpoint.remote(run_dir, record, keep), "a checkpoint")
        return path

    def save_model(self, folder: Path) -> None:
        self._ask_learner(self._learner.save_model.remote(folder), "the final model")

    def stats(self) -> EngineStats:
        total = sum((engine.stats + engine.counted for engine in self._engines), EngineStats())
        return replace(total, workers=len(self._engines), restarts=sum(engine.restarts for engine in self._engines))

    def close(self) -> None:
        """Kills the actors; ends Ray when this backend started it."""
        if not ray.is_initialized():
            return
        for actor in [engine.actor for engine in self._engines] + [self._learner]:
            if actor is not None:
                ray.kill(actor, no_restart=True)
        self._engines, self._learner, self._update, self._newest = [], None, None, None
        if self._owns_ray:
            ray.shutdown()

    def _new_actor(self, index: int) -> Any:
        options = actor_options(self._setup.recipe.rollout.threads) | {"concurrency_groups": {"reports": 1}}
        return ray.remote(**options)(RolloutActor).remote(self._setup, index)

    def _finish_update(self) -> Update:
        reference, self._update = self._update, None
        update: Update = self._ask_learner(reference, "the update")
        return update

    def _collect(self, engine: _Engine) -> list[FinishedGroup]:
        try:
            report: Report = self._get(engine.report, f"rollout worker {engine.index}")
        except RayActorError as error:
            self._restart(engine, error)
            return []
        engine.stats = report.stats
        for group in report.finished:
            del engine.pending[group.group_id]
        engine.report = engine.actor.report.remote()
        return report.finished

    def _restart(self, engine: _Engine, error: RayActorError) -> None:
        """What the dead engine had finished but not reported is sampled again; what it reported is not."""
        pending = list(engine.pending.values())
        if engine.restarts == MAX_RESTARTS:
            raise RunFailed(
                f"rollout worker {engine.index} died {MAX_RESTARTS + 1} times; unfinished groups: "
                f"{sorted(engine.pending)}. See logs/rollout-{engine.index}.log in the run folder. Last: "
                f"{death_reason(error)}"
            ) from error
        engine.restarts += 1
        log.warning(
            "rollout worker %d died and is started again (%d of %d), unfinished groups %s: %s",
            engine.index,
            engine.restarts,
            MAX_RESTARTS,
            sorted(engine.pending),
            death_reason(error),
        )
        engine.counted += replace(engine.stats, kv_pages=0, kv_bytes=0)  # its cache is gone
        engine.stats = EngineStats()
        engine.actor = self._new_actor(engine.index)
        if self._newest is not None:
            engine.actor.publish.remote(self._newest, self._newest.tensors)
        engine.actor.submit.remote(pending)
        engine.report = engine.actor.report.remote()

    def _get(self, reference: Any, what: str) -> Any:
        """ray.get with the run's limit, and with errors that say who failed instead of a remote traceback."""
        try:
            return ray.get(reference, timeout=self._timeout_s)
        except GetTimeoutError as error:
            raise RunFailed(
                f"no answer within {self._timeout_s:g} s (runtime.timeout_s) while waiting for {what}; groups with the "
                f"engines: {sorted(group for engine in self._engines for group in engine.pending)}; see the logs folder"
            ) from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RunFailed):
                raise cause from None
            raise RunFailed(f"{what} failed: {type(cause).__name__}: {cause}") from error

    def _ask_learner(self, reference: Any, what: str) -> Any:
        """As _get. The learner's state dies with its process, so there is nothing to start again from here."""
        try:
            return self._get(reference, what)
        except RayActorError as error:
            raise RunFailed(
                f"the learner's process died during {what}; go on from the last checkpoint with --resume. "
                f"{death_reason(error)}"
            ) from error


def start_ray(setup: RunSetup) -> bool:
    """Start or join Ray unless this process already has; True when it did, so that closing the backend ends it."""
    if ray.is_initialized():
        return False
    recipe = setup.recipe
    # ray.init replaces the handler of SIGTERM; the run keeps its own.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    os.environ.update(RAY_ENVIRONMENT)
    # Ray binds every port to loopback, and not to all interfaces, when clusters are off. Its processes read the
    # variable when they start; this process has read it already when Ray was imported.
    ray_constants.ENABLE_RAY_CLUSTER = recipe.runtime.ray_address is not None
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(ray_constants.ENABLE_RAY_CLUSTER))
    if recipe.runtime.ray_address is not None:
        ray.init(address=recipe.runtime.ray_address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local",
            num_cpus=recipe.rollout.workers * recipe.rollout.threads + recipe.learner.threads,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_kept_versions(recipe) * _weight_bytes(setup.model_folder, recipe) + SPARE_STORE_BYTES,
            _node_ip_address="127.0.0.1",
        )
    if in_main_thread:
        signal.signal(signal.SIGTERM, handler)
    return True


def actor_options(threads: int) -> dict[str, Any]:
    """The actor imports the same zerogap as this process."""
    package = str(Path(zerogap.__file__).parents[1])
    path = os.pathsep.join(dict.fromkeys([package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    return {"num_cpus": threads, "max_restarts": 0, "runtime_env": {"env_vars": {"PYTHONPATH": path}}}


def death_reason(error: RayError) -> str:
    """One line of Ray's report: the exception that a constructor raised, or how the process ended."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]


def _kept_versions(recipe: Recipe) -> int:
    return KEPT_VERSIONS + (EVALUATED_VERSIONS if recipe.evaluation.every else 0)


def _weight_bytes(folder: Path, recipe: Recipe) -> int:
    """Bytes of one weight version in the run's dtype."""
    count = 0
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as handle:
            count += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return count * (4 if recipe.model.dtype == "float32" else 2)
