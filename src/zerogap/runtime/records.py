"""What a run leaves on disk besides weights: metrics, TensorBoard, trajectories, evaluations, summary.json.

Files that are replaced as a whole are written beside their place and renamed; line files are flushed per update.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from zerogap.config import Recipe
from zerogap.runtime.backend import FinishedGroup

METRICS, TRAJECTORIES, EVALUATIONS = "metrics.jsonl", "trajectories.jsonl", "evaluations.jsonl"
SUMMARY = "summary.json"


class Records:
    """Open files of a run. start_step > 0 (a resume) first cuts off what came after that step.

    trajectories_mb: most megabytes of trajectories.jsonl; whole groups only. After the first that does not fit none is
    written, also not by a resumed run: a hole in the middle would look like a lost group.
    """

    def __init__(
        self, run_dir: Path, start_step: int, first_group: int, tensorboard: bool, trajectories_mb: float
    ) -> None:
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        _keep_lines(run_dir / METRICS, lambda line: line["step"] <= start_step)
        _keep_lines(run_dir / EVALUATIONS, lambda line: line["version"] <= start_step)
        last = _keep_lines(run_dir / TRAJECTORIES, lambda line: line["group_id"] < first_group)
        self._metrics: IO[str] = (run_dir / METRICS).open("a", encoding="utf-8")
        self._room = int(trajectories_mb * 1e6)
        self._trajectories: IO[str] | None = None
        if self._room:
            self._trajectories = (run_dir / TRAJECTORIES).open("a", encoding="utf-8")
            full = last is not None and last["group_id"] != first_group - 1
            self._room = 0 if full else self._room - self._trajectories.tell()
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)

    def step(self, metrics: dict[str, Any], groups: Sequence[FinishedGroup]) -> None:
        """One line of metrics, and the trajectories that were trained (see Trajectory.from_json). Their info.update is
        the update that consumed them: update k + 1 trains version k."""
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()
        if self._trajectories is not None:
            for group in groups:
                for trajectory in group.trajectories:
                    trajectory.info["update"] = metrics["step"]
                self._write_group("".join(trajectory.to_json() + "\n" for trajectory in group.trajectories))
            self._trajectories.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if isinstance(value, int | float) and name != "step" and not name.startswith("eval/"):
                    self._tensorboard.add_scalar(name, value, metrics["step"])

    def evaluation(self, line: dict[str, Any], metrics: dict[str, Any]) -> None:
        """A line of evaluations.jsonl. TensorBoard shows the metrics at the version that was measured, not at the
        update in whose line of metrics.jsonl they arrived."""
        with (self._run_dir / EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, line["version"])

    def close(self) -> None:
        self._metrics.close()
        if self._trajectories is not None:
            self._trajectories.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write_group(self, lines: str) -> None:
        size = len(lines.encode())
        if size <= self._room:
            self._room -= size
            self._trajectories.write(lines)  # type: ignore[union-attr]
        else:
            self._room = 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]


def _read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / EVALUATIONS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def summarize(run_dir: Path, seconds: float, final_model: Path, recipe: Recipe) -> dict[str, Any]:
    """The figures of summary.json, from all lines of metrics.jsonl (a resumed run's earlier ones included).

    reward_first and reward_last are means over the first and last 10% of updates; rates are sampled tokens over the
    time in engines, and rows through the model (prompts included) over the time in updates. ratio_dev_peak and
    ratio_chi2_peak are the largest value of any update over the median of all. What was never measured is null.
    """
    lines = read_metrics(run_dir)
    evaluations = _read_evaluations(run_dir)
    measured = [line for line in evaluations if "missing" not in line]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    tenth = max(1, len(rewards) // 10)
    return {
        "updates": len(lines),
        "tokens_trained": int(sum(line.get("tokens/trained", 0) for line in lines)),
        "reward_first": _mean(rewards[:tenth]),
        "reward_last": _mean(rewards[-tenth:]),
        "bits_checked": sum(line.get("bitwise/checked", 0) for line in lines),
        "bits_unequal": sum(line.get("bitwise/unequal", 0) for line in lines),
        "lag_max": int(max((line["lag/max"] for line in lines if "lag/max" in line), default=0)),
        "ratio_dev_peak": _peak_to_median([line["ratio/dev"] for line in lines if "ratio/dev" in line]),
        "ratio_chi2_peak": _peak_to_median([line["ratio/chi2"] for line in lines if "ratio/chi2" in line]),
        "dropped": sum(line["dropped"] for line in lines),
        "engine_tokens_per_s": _rate(lines, "tokens/sampled", "throughput/engine_tokens_per_s"),
        "learner_tokens_per_s": _rate(lines, "tokens/learner_rows", "throughput/learner_tokens_per_s"),
        "evaluations": len(measured),
        "evaluations_missing": len(evaluations) - len(measured),
        "eval_reward": measured[-1]["reward"] if measured else None,
        "seconds": round(seconds, 1),
        "final_model": str(final_model),
        "aligned": recipe.aligned,
        "kernels": recipe.model.kernels,
        "dtype": recipe.model.dtype,
        "engine_kernels": recipe.engine_arithmetic.kernels,
        "engine_dtype": recipe.engine_arithmetic.dtype,
        "prompts_skipped": lines[-1]["prompts/skipped"] if lines else 0,
        "errors": int(sum(line.get("errors/ungraded", 0) for line in lines)),
    }


def write_atomically(path: Path, text: str) -> None:
    """The file holds all of `text` or what it held before."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.rename(path)


def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Drop lines from the first unwanted or torn one on. Returns the last one kept, None when there is none."""
    if not path.is_file():
        return None
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            keep = line.endswith("\n") and wanted(json.loads(line))
        except json.JSONDecodeError:
            keep = False
        if not keep:
            break
        kept.append(line)
    write_atomically(path, "".join(kept))
    last: dict[str, Any] | None = json.loads(kept[-1]) if kept else None
    return last


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _peak_to_median(values: Sequence[float]) -> float | None:
    """None where the median is 0 (a run whose ratios are exactly 1)."""
    median = statistics.median(values) if values else 0.0
    return max(values) / median if median else None


def _rate(lines: Sequence[dict[str, Any]], tokens: str, rate: str) -> float | None:
    """Tokens per second over the lines that measured it, each weighted by its tokens."""
    measured = [(line[tokens], line[rate]) for line in lines if line.get(rate) and line.get(tokens)]
    seconds = sum(count / per_second for count, per_second in measured)
    return sum(count for count, _ in measured) / seconds if seconds else None
