"""What the loop reports of itself: times, rates and waits between two updates."""

from __future__ import annotations

import time
from typing import Any

from zerogap.runtime.backend import EngineStats


class Meter:
    """Times and rates since the last `read`. stats: counters of the engines at the start."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats
        self._started = time.monotonic()
        self._rollout_s = 0.0
        self._learner_s = 0.0

    def waited(self, seconds: float, learner_idle: bool, engines_idle: bool) -> None:
        if learner_idle:
            self._rollout_s += seconds
        elif engines_idle:
            self._learner_s += seconds

    def read(self, stats: EngineStats) -> dict[str, Any]:
        """wait/rollout_s: the learner stood idle for want of a batch; wait/learner_s: the engines stood idle because
        the lag bound admits nothing before the next version; wait/environment_s: engines stood idle (summed over them)
        because every episode waited for its environment. Tokens/s count the time inside the engines only."""
        now = time.monotonic()
        metrics: dict[str, Any] = {
            "time/step_s": now - self._started,
            "wait/rollout_s": self._rollout_s,
            "wait/learner_s": self._learner_s,
            "queue/restarts": stats.restarts,
            "kv/pages": stats.kv_pages,
            "kv/bytes": stats.kv_bytes,
            "kv/preemptions": stats.preemptions - self._stats.preemptions,
        }
        environment_s = stats.environment_s - self._stats.environment_s
        if environment_s > 0:
            metrics["environment/seconds"] = environment_s
            metrics["wait/environment_s"] = stats.idle_s - self._stats.idle_s
        retried = stats.retried - self._stats.retried
        metrics |= {f"retries/{kind}": count for kind, count in sorted(retried.items())}
        tokens = stats.sampled_tokens - self._stats.sampled_tokens
        busy_s = stats.busy_s - self._stats.busy_s
        if tokens > 0 and busy_s > 0:
            metrics["throughput/engine_tokens_per_s"] = tokens / busy_s * stats.workers
            metrics["tokens/sampled"] = tokens
        self._stats, self._started, self._rollout_s, self._learner_s = stats, now, 0.0, 0.0
        return metrics
