"""What an audit reports: unequal bits, both gaps in numbers, tables by position, length, age and reason, worst tokens.

Log-ratios are learner over behaviour, in float64 and without a bound. Tokens whose recorded log-probability is no
finite number are counted and named, and are in no mean. What was not measured is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerogap.gaps.audit.rescore import UNKNOWN, Rescored
from zerogap.gaps.split import Split, gap_statistics
from zerogap.learner.statistics import ratio_statistics, sequence_statistics
from zerogap.trajectory import Trajectory

WORST = 10
CONTEXT_TOKENS = 12  # shown before a worst token


@dataclass(frozen=True)
class Row:
    """One group of tokens. gap: mean of |log-ratio| (total), kernel: of its KERNEL part, worst: largest |log-ratio|.
    gap and worst are of the tokens whose LAG was measured, None without one; of all where LAG was not asked for."""

    group: str
    tokens: int
    unequal: int
    gap: float | None
    kernel: float
    worst: float | None


@dataclass(frozen=True)
class WorstToken:
    """position: index into the rollout's token ids. text, context: decoded where there is a tokenizer, else ids."""

    line: int
    position: int
    token_id: int
    text: str
    context: str
    version: int
    recorded: float
    rescored: float
    log_ratio: float


@dataclass(frozen=True)
class Report:
    """statistics: names as in a run's metrics, of the tokens whose LAG was measured; gap/kernel/* of all. tables: by
    what, then rows. non_finite: (line, position). without_lag: tokens whose LAG was asked for and not measured."""

    rollouts: int
    checked: int
    unequal: int
    non_finite: list[tuple[int, int]]
    lag_measured: bool
    without_lag: int
    statistics: dict[str, float]
    tables: dict[str, list[Row]]
    worst: list[WorstToken]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def analyse(rescored: Rescored, decode: Callable[[Sequence[int]], str] | None) -> Report:
    """decode: token ids to text; None where there is no tokenizer."""
    split, finite_N = rescored.split, rescored.finite_N
    lines = [rollout.line for rollout in rescored.rollouts]
    bad = zip(split.owners_N[~finite_N].tolist(), split.positions_N[~finite_N].tolist(), strict=True)
    kept, lagged_N = _select(split, finite_N), rescored.lagged_N[finite_N]
    lag_measured = bool(lagged_N.any())
    compared_N = lagged_N if lag_measured else torch.ones_like(lagged_N)
    statistics = _statistics(_select(kept, compared_N), lag_measured)
    statistics |= {name: value for name, value in _statistics(kept, False).items() if name.startswith("gap/kernel/")}
    return Report(
        rollouts=len(lines),
        checked=split.checked,
        unequal=split.unequal,
        non_finite=[(lines[owner], position) for owner, position in bad],
        lag_measured=lag_measured,
        without_lag=int((~lagged_N).sum()) if rescored.lag_asked else 0,
        statistics=statistics,
        tables=_tables(kept, compared_N),
        worst=_worst(kept, lines, decode),
    )


def _statistics(split: Split, lag_measured: bool) -> dict[str, float]:
    """Without LAG where it was not measured, and without ages where nothing says the version that was trained."""
    ages_known = lag_measured and bool((split.trained_N != UNKNOWN).all())
    statistics = ratio_statistics(split.total_N, split.ages_N.clamp(min=0))
    statistics |= sequence_statistics(split.total_N, split.owners_N) | gap_statistics(split)
    aged = ("lag/", "ess/age_", "gap/total/age_", "gap/lag/age_", "gap/kernel/age_")
    left_out = (*(() if ages_known else aged), *(() if lag_measured else ("gap/lag/",)))
    return {name: value for name, value in statistics.items() if not name.startswith(left_out)}


def _select(split: Split, chosen_N: torch.Tensor) -> Split:
    tensors = (split.owners_N, split.positions_N, split.versions_N, split.recorded_N, split.own_N, split.current_N)
    return Split(split.trajectories, split.trained_N[chosen_N], *(tensor[chosen_N] for tensor in tensors))


def _tables(split: Split, compared_N: torch.Tensor) -> dict[str, list[Row]]:
    """compared_N: bool, tokens whose total counts (the others have KERNEL only)."""
    places_N = _sampled_index(split)
    lengths = [trajectory.num_sampled for trajectory in split.trajectories]
    owners = split.owners_N.tolist()
    labels: dict[str, list[tuple[int, str]]] = {
        "position": [_bucket(place + 1) for place in places_N.tolist()],
        "length": [_bucket(lengths[owner]) for owner in owners],
        "version": [(version, str(version)) for version in split.versions_N.tolist()],
        "finish reason": [(0, split.trajectories[owner].finish_reason) for owner in owners],
    }
    tables = {by: _rows(split, compared_N, values) for by, values in labels.items()}
    aged_N = compared_N & (split.trained_N != UNKNOWN)
    if bool(aged_N.any()):
        aged = _select(split, aged_N)
        tables["age"] = _rows(aged, aged_N[aged_N], [(age, str(age)) for age in aged.ages_N.tolist()])
    return tables


def _sampled_index(split: Split) -> torch.Tensor:
    """int64 [N]: how many sampled tokens of its rollout stand before each token."""
    counts: list[list[int]] = []
    for trajectory in split.trajectories:
        before, seen = [], 0
        for sampled in trajectory.loss_mask:
            before.append(seen)
            seen += sampled
        counts.append(before)
    places = zip(split.owners_N.tolist(), split.positions_N.tolist(), strict=True)
    return torch.tensor([counts[owner][position] for owner, position in places], dtype=torch.int64)


def _bucket(number: int) -> tuple[int, str]:
    """1, 2, 3-4, 5-8, 9-16, ...: the key to sort by, and the text."""
    last = 1 << (number - 1).bit_length()
    first = last // 2 + 1
    return last, str(last) if first >= last else f"{first}-{last}"


def _rows(split: Split, compared_N: torch.Tensor, labels: list[tuple[int, str]]) -> list[Row]:
    total_N, kernel_N, unequal_N = split.total_N.abs(), split.kernel_N.abs(), split.unequal_N
    members: dict[tuple[int, str], list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    rows = []
    for (_, text), indices in sorted(members.items()):
        chosen = torch.tensor(indices)
        part_N = total_N[chosen][compared_N[chosen]]
        mean, largest = (float(part_N.mean()), float(part_N.max())) if part_N.numel() else (None, None)
        unequal = int(unequal_N[chosen].sum())
        rows.append(Row(text, len(indices), unequal, mean, float(kernel_N[chosen].mean()), largest))
    return rows


def _worst(split: Split, lines: list[int], decode: Callable[[Sequence[int]], str] | None) -> list[WorstToken]:
    """Largest |log-ratio| first; equal tokens are none of them."""
    size_N = split.total_N.abs()
    order = size_N.argsort(descending=True, stable=True)[:WORST].tolist()
    return [_worst_token(split, index, lines, decode or str) for index in order if size_N[index] > 0]


def _worst_token(split: Split, index: int, lines: list[int], decode: Callable[[Sequence[int]], str]) -> WorstToken:
    owner, position = int(split.owners_N[index]), int(split.positions_N[index])
    trajectory: Trajectory = split.trajectories[owner]
    ids = trajectory.token_ids
    return WorstToken(
        line=lines[owner],
        position=position,
        token_id=ids[position],
        text=decode([ids[position]]),
        context=decode(ids[max(0, position - CONTEXT_TOKENS) : position]),
        version=int(split.versions_N[index]),
        recorded=float(split.recorded_N[index]),
        rescored=float(split.current_N[index]),
        log_ratio=float(split.total_N[index]),
    )
