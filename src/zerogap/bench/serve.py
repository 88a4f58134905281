"""The child's end of a side: one process, requests in as JSON lines on stdin, answers out on what was stdout.

    python -m zerogap.bench.serve MODULE:FUNCTION JSON     calls FUNCTION(channel, **JSON)

The function loads what it needs and warms up, says `ready`, then answers requests until there are no more. What it
prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Watch:
    """The time of a turn. On one thread it is processor time, which is what a side that is pinned to one core takes on
    an idle machine, and which others who take the core do not lengthen. On several threads it is wall time."""

    def __init__(self) -> None:
        self.threads = int(os.environ["OMP_NUM_THREADS"])
        self.start()

    def start(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """seconds since the start, wall_s in any case, and cpu_share: processor time / (wall time x threads)."""
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        seconds = processor if self.threads == 1 else wall
        return {"seconds": seconds, "wall_s": wall, "cpu_share": processor / wall / self.threads}


def peak_gb() -> float:
    """The largest resident memory of this process so far, in GB. (getrusage would count its parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024e-9 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


class Channel:
    """Requests and answers of one side. Both are dicts that JSON can carry."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def receive(self) -> dict[str, Any] | None:
        """The next request, or None when the parent wants no more."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def serve(self, run: Callable[..., dict[str, Any]], **facts: Any) -> None:
        """Say ready, with `facts`; then answer each request with what run(**request) returns, what a Watch read, and
        peak_gb."""
        watch = Watch()
        self.send(facts)
        while (request := self.receive()) is not None:
            watch.start()
            answer = run(**request)
            self.send(watch.read() | {"peak_gb": peak_gb()} | answer)


def main() -> None:
    channel = Channel()
    threads = int(os.environ["OMP_NUM_THREADS"])
    import torch

    torch.set_num_threads(threads)
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)(channel, **json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
