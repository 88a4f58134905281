"""What a run tells whoever watches it. The base class hears everything and does nothing: display, tests, notebooks."""

from __future__ import annotations

from typing import Any


class Observer:
    """Override what you want to see. Calls come from one thread, in order; they must return quickly."""

    def stage(self, name: str, total: int | None = None) -> None:
        """A stage begins (fetch, warm start, train, ...); total: its number of units, None when unknown."""

    def progress(self, done: int, text: str = "") -> None:
        """`done` units of the current stage are complete."""

    def stage_end(self) -> None:
        """The current stage is over."""

    def step(self, metrics: dict[str, Any]) -> None:
        """One optimizer update, with its line of metrics.jsonl."""

    def warning(self, text: str) -> None:
        """Something a person should know; the run goes on."""

    def summary(self, values: dict[str, Any]) -> None:
        """The run has ended well: the content of summary.json."""
