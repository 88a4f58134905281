"""The parent's end: sides in child processes pinned to the same cores, asked by turns; medians of answers.

Every side stays loaded and sleeps while the other works, so neither inherits the other's memory or pays for loading.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

Progress = Callable[[str], None]
Answers = dict[str, list[dict[str, Any]]]  # of each side, in order

LAST_LINES = 12  # of a dead side's stderr that are shown


class SideFailed(RuntimeError):
    """A side's process ended early; the message holds the end of what it wrote."""


class Side:
    """One competitor in its own process. It speaks the protocol of serve.py; `facts` is what it said when ready."""

    def __init__(self, name: str, command: Sequence[str], threads: int, environment: Mapping[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        with _pinned(threads):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, **_thread_environment(threads), **environment},
            )
        self.facts: dict[str, Any] = {}

    def wait_ready(self) -> None:
        self.facts = self._answer()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request, usually with `seconds`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self._answer()

    def close(self) -> None:
        """End the process: it is told that no request follows, then stopped if it does not listen."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> SideFailed:
        code = self._process.wait()
        self._errors.seek(0)
        end = "\n  ".join(self._errors.read().splitlines()[-LAST_LINES:])
        return SideFailed(f"{self.name} ended with exit code {code}; the last lines it wrote:\n  {end}")


def python_command(function: str, **arguments: Any) -> list[str]:
    """Command of a side that is a function of ours, `module:name` inside zerogap.bench."""
    return [sys.executable, "-m", "zerogap.bench.serve", f"zerogap.bench.{function}", json.dumps(arguments)]


@contextmanager
def running(
    commands: Mapping[str, Sequence[str]],
    threads: int,
    progress: Progress,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[dict[str, Side]]:
    """All sides, loaded one after another, ready to be asked; ended with the block, whatever happens."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command in commands.items():
            progress(f"loading {name}")
            sides[name] = Side(name, command, threads, (environments or {}).get(name, {}))
            stack.callback(sides[name].close)
            sides[name].wait_ready()
        yield sides


def by_turns(
    sides: Mapping[str, Side], rounds: int, request: Callable[[int], dict[str, Any]], progress: Progress
) -> Answers:
    """A B A B ...: every side answers request(0), then every side request(1), and so on."""
    answers: Answers = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            answers[name].append(side.ask(request(number)))
            progress(f"round {number + 1}/{rounds} {name}: {answers[name][-1]['seconds']:.3f} s")
    return answers


def median(answers: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(answer[key] for answer in answers)


def cpu_share(answers: Answers) -> float:
    """Of the side that got least. Well below 1 on one thread: other programs had the core, and its caches."""
    return min(median(several, "cpu_share") for several in answers.values())


def cores(threads: int) -> list[int]:
    """The cores that every side is pinned to: the last ones, since the first one serves most interrupts."""
    return sorted(os.sched_getaffinity(0))[-threads:]


def _thread_environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(threads)) | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def _pinned(threads: int) -> Iterator[None]:
    """Processes started in the block inherit the cores of this thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores(threads))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
