"""The training loop.

Who produces: the engines, from the groups that this loop admits. Who consumes: the learner, one batch of
`groups_per_update` groups per update, in order of admission. Who unblocks whom: an update publishes a version, which
admits the next batch of groups (admission.py); a group that finishes may complete the learner's next batch. The loop
never waits while it could admit or train, and whatever it waits for is already on its way.

With the Ray backend engines and learner work at the same time; with the inline backend the same lines run in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from zerogap.runtime.admission import Admission
from zerogap.runtime.backend import Backend, FinishedGroup, Item, RunFailed, Weights
from zerogap.runtime.living import Living
from zerogap.runtime.meter import Meter
from zerogap.runtime.queue import TrajectoryQueue

OnUpdate = Callable[[Weights, dict[str, Any], list[FinishedGroup]], None]


class Prompts(Protocol):
    skipped: int

    def request(self, group_id: int, min_version: int) -> Item: ...


def run_loop(
    backend: Backend,
    prompts: Prompts,
    admission: Admission,
    version: int,
    updates: int,
    timeout_s: float,
    on_update: OnUpdate,
    hold_lag: bool = False,
) -> None:
    """Train from weights `version` until `updates`.

    hold_lag: new weights wait until the engines have finished all they were given, and the learner waits with its next
    batch for that: so each batch is sampled by one version and trained exactly `lag` updates later (the first batches
    earlier), while engines and learner still work at the same time.

    on_update(weights, metrics, groups) is called after each update, when the new version is published (with hold_lag it
    may still wait for the engines) and the learner is idle (so it may ask the backend to save). Raises RunFailed when
    nothing happens for timeout_s.
    """
    queue = TrajectoryQueue(admission.groups_per_update, version * admission.groups_per_update)
    in_flight: dict[int, int] = {}  # group -> its min_version
    training: list[FinishedGroup] = []  # the batch that the learner works on; empty while it is idle
    unpublished: Weights | None = None
    published = version
    meter = Meter(backend.stats())

    while version < updates:
        # Producer: every group that the lag bound allows at the published version.
        items = [prompts.request(group, admission.min_version(group)) for group in admission.admit(published)]
        if items:
            backend.submit(items)
            in_flight.update((request.group_id, request.min_version) for request, _ in items)

        # Consumer: the next batch in line, once all of it is there.
        if not training and queue.ready and unpublished is None:
            training = queue.take()
            admission.check(training, version)
            backend.train(training, Living(queue.versions(), min(in_flight.values(), default=None)))

        # Wait for either side.
        waited_from = time.monotonic()
        events = backend.wait(timeout_s)
        meter.waited(time.monotonic() - waited_from, learner_idle=not training, engines_idle=not in_flight)
        if not events:
            raise RunFailed(_stuck(timeout_s, version, bool(training), queue.missing(), sorted(in_flight)))
        for group in events.finished:
            del in_flight[group.group_id]
            queue.put(group)

        # An update ended: publish first (engines go on), then everything that is only record keeping.
        if events.update is not None:
            version += 1
            if events.update.version != version:
                raise RunFailed(f"the learner is at version {events.update.version}, the loop at {version}")
            unpublished = events.update.weights if version < updates else None
        if unpublished is not None and not (hold_lag and in_flight):
            backend.publish(unpublished)
            published, unpublished = unpublished.version, None
        if events.update is not None:
            metrics = events.update.metrics | meter.read(backend.stats())
            metrics |= {
                "queue/in_flight": len(in_flight),
                "queue/finished": len(queue),
                "prompts/skipped": prompts.skipped,
                "dropped": 0,  # nothing generated is thrown away: see admission.py
            }
            groups, training = training, []
            on_update(events.update.weights, metrics, groups)


def _stuck(timeout_s: float, version: int, training: bool, missing: list[int], in_flight: list[int]) -> str:
    waits_for = f"the learner's update of version {version}" if training else f"groups {missing} of the next batch"
    return (
        f"nothing happened for {timeout_s:g} s (runtime.timeout_s): the loop at version {version} waits for "
        f"{waits_for}; groups with the engines: {in_flight}; see the logs folder "
        "of the run, or raise runtime.timeout_s"
    )
