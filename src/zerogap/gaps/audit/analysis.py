"""What an audit reports: unequal bits, both gaps in numbers, tables by position, length, age and reason, worst tokens.

Log-ratios are learner over behaviour, in float64 and without a bound. Tokens whose recorded log-probability is no
finite number are counted and named, and are in no mean. What was not measured is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.split import Split, gap_statistics
from zerogap.learner.statistics import ratio_statistics, sequence_statistics
from zerogap.trajectory import Trajectory

WORST = 10
CONTEXT_TOKENS = 12  # shown before a worst token


@dataclass(frozen=True)
class Row:
    """One group of tokens. gap: mean of |log-ratio| (total), kernel: of its KERNEL part, worst: largest |log-ratio|."""

    group: str
    tokens: int
    unequal: int
    gap: float
    kernel: float
    worst: float


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
    """statistics: names as in a run's metrics. tables: by what, then rows. non_finite: (line, position)."""

    rollouts: int
    checked: int
    unequal: int
    non_finite: list[tuple[int, int]]
    lag_measured: bool
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
    kept = _select(split, finite_N)
    statistics = ratio_statistics(kept.total_N, (kept.version - kept.versions_N).clamp(min=0))
    statistics |= sequence_statistics(kept.total_N, kept.owners_N) | gap_statistics(kept)
    return Report(
        rollouts=len(lines),
        checked=split.checked,
        unequal=split.unequal,
        non_finite=[(lines[owner], position) for owner, position in bad],
        lag_measured=rescored.lag_measured,
        statistics={name: value for name, value in statistics.items() if _measured(name, rescored)},
        tables=_tables(kept, rescored.ages_known),
        worst=_worst(kept, lines, decode),
    )


def _measured(name: str, rescored: Rescored) -> bool:
    """False for LAG without a second model, and for ages without its version."""
    if name.startswith(("lag/", "ess/age_")) or "/age_" in name:
        return rescored.ages_known
    return rescored.lag_measured or not name.startswith("gap/lag/")


def _select(split: Split, chosen_N: torch.Tensor) -> Split:
    tensors = (split.owners_N, split.positions_N, split.versions_N, split.recorded_N, split.own_N, split.current_N)
    return Split(split.trajectories, split.version, *(tensor[chosen_N] for tensor in tensors))


def _tables(split: Split, ages_known: bool) -> dict[str, list[Row]]:
    places_N = _sampled_index(split)
    lengths = [trajectory.num_sampled for trajectory in split.trajectories]
    owners = split.owners_N.tolist()
    labels: dict[str, list[tuple[int, str]]] = {
        "position": [_bucket(place + 1) for place in places_N.tolist()],
        "length": [_bucket(lengths[owner]) for owner in owners],
        "version": [(version, str(version)) for version in split.versions_N.tolist()],
        "finish reason": [(0, split.trajectories[owner].finish_reason) for owner in owners],
    }
    if ages_known:
        labels["age"] = [(age, str(age)) for age in (split.version - split.versions_N).tolist()]
    return {by: _rows(split, values) for by, values in labels.items()}


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


def _rows(split: Split, labels: list[tuple[int, str]]) -> list[Row]:
    total_N, kernel_N, unequal_N = split.total_N.abs(), split.kernel_N.abs(), split.unequal_N
    members: dict[tuple[int, str], list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    rows = []
    for (_, text), indices in sorted(members.items()):
        chosen = torch.tensor(indices)
        part_N = total_N[chosen]
        unequal = int(unequal_N[chosen].sum())
        rows.append(
            Row(text, len(indices), unequal, float(part_N.mean()), float(kernel_N[chosen].mean()), float(part_N.max()))
        )
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
