"""What a person sees of a run: a live view on a terminal, plain lines elsewhere. One line for every update.

It only shows; numbers are made in the learner and the runtime and are kept in the run folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zerogap.cli.format import sparkline, step_line, summary_rows, verdict
from zerogap.runtime.observer import Observer

SPARKLINE_WIDTH = 60
PLAIN_PROGRESS_SECONDS = 10.0  # how often a stage reports where there is no live bar


class Display(Observer):
    """Observer of a run on a console; a context manager that leaves the terminal as it found it.

    total: updates of the run, or None where no updates are made.
    aligned: False marks every verdict with `aligned: no` (Recipe.aligned).
    stderr: keep stdout free for the JSON answer.
    """

    def __init__(self, total: int | None, aligned: bool, stderr: bool = False, console: Console | None = None) -> None:
        self.final: dict[str, Any] = {}
        self._total = total
        self._aligned = aligned
        self._console = console or Console(stderr=stderr, highlight=False)
        self._live: Live | None = None
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
        )
        self._stage: _Stage | None = None
        self._updates_bar: Any = None
        self._rewards: list[float] = []
        self._latest: Mapping[str, Any] = {}

    def __enter__(self) -> Display:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self._view, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.final and error is None:
            self._print_summary()

    def stage(self, name: str, total: int | None = None) -> None:
        """A phase before or beside the updates begins (making the model, warm start, grading)."""
        self.stage_end()
        bar = self._bars.add_task(name, total=total, text="") if self._live is not None else None
        self._stage = _Stage(name, total, bar)
        if self._live is None:
            self._line(name + (f": {total:,} steps" if total else ""))

    def progress(self, done: int, text: str = "") -> None:
        """`done` of the stage's total, with a few words (a loss, a file name)."""
        stage = self._stage
        if stage is None:
            return
        stage.done, stage.text = done, text
        if stage.bar is not None:
            self._bars.update(stage.bar, completed=done, text=text)
        elif time.monotonic() - stage.reported >= PLAIN_PROGRESS_SECONDS:
            stage.reported = time.monotonic()
            self._line(f"{stage.name}: {done:,}{f'/{stage.total:,}' if stage.total else ''}  {text}".rstrip())

    def stage_end(self) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        if stage.bar is not None:
            self._bars.remove_task(stage.bar)
        seconds = time.monotonic() - stage.began
        self._line(f"{stage.name}: done in {seconds:.1f} s  {stage.text}".rstrip())

    def step(self, metrics: dict[str, Any]) -> None:
        """One optimizer update: one line, always."""
        self._latest = metrics
        if "reward/mean" in metrics:
            self._rewards.append(float(metrics["reward/mean"]))
        if self._live is not None:
            if self._updates_bar is None:
                self._updates_bar = self._bars.add_task("updates", total=self._total, text="")
            self._bars.update(self._updates_bar, completed=metrics["step"])
        unequal = self._aligned and metrics.get("bitwise/unequal", 0)
        self._line(step_line(metrics, self._total, self._aligned), style="bold red" if unequal else "")

    def warning(self, text: str) -> None:
        self._line(f"warning: {text}", style="yellow")

    def summary(self, summary: dict[str, Any]) -> None:
        """Kept, and shown as a table when the display ends."""
        self.final = dict(summary)

    def _line(self, text: str, style: str = "") -> None:
        """soft_wrap: a line is one line in a log file however long; no markup, so `[` stays itself."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _view(self) -> Group:
        """The live part under the step lines."""
        latest, facts = self._latest, []
        if self._rewards:
            history = sparkline(self._rewards, SPARKLINE_WIDTH)
            facts.append(Text(f"reward  {history}  {self._rewards[0]:.3f} to {self._rewards[-1]:.3f}", style="green"))
        if latest:
            parts = [verdict(latest, self._aligned)]
            for label, key, form in (
                ("lag", "lag/mean", ".1f"),
                ("max", "lag/max", ".0f"),
                ("kl k3", "kl/k3", ".1e"),
                ("ess", "ess/all", ".2f"),
                ("engine tok/s", "throughput/engine_tokens_per_s", ",.0f"),
                ("learner tok/s", "throughput/learner_tokens_per_s", ",.0f"),
            ):
                if key in latest:
                    parts.append(f"{label} {latest[key]:{form}}")
            facts.append(Text("  ".join(parts), style="cyan"))
        return Group(*facts, self._bars)

    def _print_summary(self) -> None:
        rows = summary_rows(self.final)
        if not self._console.is_terminal:
            width = max(len(label) for label, _ in rows)
            for label, value in rows:
                self._line(f"{label:<{width}}  {value}")
            return
        table = Table(show_header=False)
        for label, value in rows:
            style = "bold red" if label.startswith("bits unequal") and value != "0" and self._aligned else ""
            table.add_row(label, Text(value, style=style))
        self._console.print(table)


class _Stage:
    """A phase under way and when it was last reported."""

    def __init__(self, name: str, total: int | None, bar: Any) -> None:
        self.name, self.total, self.bar = name, total, bar
        self.done, self.text = 0, ""
        self.began = self.reported = time.monotonic()
