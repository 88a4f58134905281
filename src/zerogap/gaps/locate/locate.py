"""The same tokens through two sides: the first stage, rollout and position whose bits differ, in one sentence.

Each sequence is run alone, once by the first side, which is recorded, and twice by the second: on its own values from
the start (cumulative: where a difference begins and how it grows), and with every operation fed what the first side's
was (isolated: which operations differ by themselves).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.schema import Rollout
from zerogap.gaps.locate.differences import Comparison, Difference
from zerogap.gaps.locate.stages import DecoderSide, Side, Stage, record

TOKENS = 1024  # run by each side, in all
RECORDING_BYTES = 2**30  # most memory for the recording of one sequence
LAST = Stage(None, "logprobs")
NAMED = 4  # most stages that the sentence lists
FAR = 50  # times the median of all that differ; torch's fp32 log_softmax over 49,152 tokens of SmolLM2 reaches 13


@dataclass(frozen=True)
class Located:
    """cumulative, isolated: by stage, in the order of the forward pass. tokens: rows that were run, in all."""

    first_side: str
    second_side: str
    rollouts: int
    tokens: int
    cumulative: dict[Stage, Difference]
    isolated: dict[Stage, Difference]

    @property
    def first(self) -> Stage | None:
        """The stage at which the two sides part; None where no bit differs."""
        return next((stage for stage, difference in self.cumulative.items() if difference.unequal), None)

    @property
    def outliers(self) -> list[Stage]:
        """Where a difference is more than rounding, most likely: stages that, fed the same inputs, differ FAR more than
        the median of all that do."""
        sizes = {stage: found.relative for stage, found in self.isolated.items() if found.unequal}
        return [stage for stage, size in sizes.items() if size > FAR * median(sizes.values())]

    def to_dict(self) -> dict[str, Any]:
        return {
            "first_side": self.first_side,
            "second_side": self.second_side,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "sentence": sentence(self),
            "first": None
            if self.first is None
            else {**self.first._asdict(), **vars(self.cumulative[self.first].first)},
            "outliers": [stage._asdict() for stage in self.outliers],
            "stages": [
                {
                    **stage._asdict(),
                    "values": difference.values,
                    "cumulative": difference.to_dict(),
                    "isolated": self.isolated[stage].to_dict(),
                }
                for stage, difference in self.cumulative.items()
            ],
        }


def locate(
    first: DecoderSide, second: Side, rollouts: Sequence[Rollout], progress: Callable[[int], None] = lambda count: None
) -> Located:
    """Compare two sides on at most TOKENS tokens of the first of these rollouts. What of a rollout does not fit is cut
    off at its end, which changes nothing before it.

    progress: told how many tokens are done since the last call.
    """
    cumulative, isolated = Comparison(isolated=False), Comparison(isolated=True)
    chosen = _within_budget(first, rollouts)
    for rollout, tokens in sorted(chosen, key=lambda pair: pair[0].line):
        token_ids = rollout.trajectory.token_ids[: tokens + 1]
        temperature = rollout.trajectory.sampling.logprob_temperature
        recording = record(first, token_ids, temperature)
        for comparison in (cumulative, isolated):
            comparison.begin(rollout.line, recording)
            second.run(token_ids, temperature, comparison)
        progress(tokens)
    return Located(
        first.name,
        second.name,
        len(chosen),
        sum(tokens for _, tokens in chosen),
        cumulative.differences,
        isolated.differences,
    )


def by_gap(rescored: Rescored) -> list[Rollout]:
    """The rollouts of an audit, those with the largest KERNEL gap at a token first."""
    split = rescored.split
    gap_N = split.kernel_N.abs().nan_to_num(math.inf, math.inf)
    largest_R = torch.zeros(len(rescored.rollouts), dtype=torch.float64)
    largest_R.scatter_reduce_(0, split.owners_N, gap_N, "amax")
    return [rescored.rollouts[i] for i in largest_R.argsort(descending=True, stable=True).tolist()]


def _within_budget(side: DecoderSide, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, int]]:
    """(rollout, how many of its rows are run)."""
    row_bytes = sum(output.nbytes for output in record(side, rollouts[0].trajectory.token_ids[:2], 1.0).values())
    longest = max(1, RECORDING_BYTES // row_bytes)
    chosen, left = [], TOKENS
    for rollout in rollouts:
        rows = min(len(rollout.trajectory.token_ids) - 1, longest, left)
        if rows:
            chosen.append((rollout, rows))
            left -= rows
    return chosen


def sentence(located: Located) -> str:
    """Where it begins, what becomes of it, and which operations differ by themselves."""
    sides = f"{located.first_side} and {located.second_side}"
    tokens = f"{located.tokens:,} tokens of {located.rollouts:,} rollouts"
    stage = located.first
    if stage is None:
        return f"No difference between {sides}: equal bits at all {len(located.cumulative)} stages ({tokens})."
    place, end = located.cumulative[stage].first, located.cumulative[LAST]
    assert place is not None
    return (
        f"First difference between {sides} ({tokens}): {stage}, position {place.position} of line {place.line}: "
        f"{place.unequal:,} of {place.values:,} values, at most {place.largest:.2g}; at the logprobs "
        + (f"at most {end.largest:.2g}. " if end.unequal else "no bit. ")
        + f"Fed the same inputs, {_by_themselves(located)}."
    )


def _by_themselves(located: Located) -> str:
    differ = [stage for stage, difference in located.isolated.items() if difference.unequal]
    count = f"{len(differ)} of {len(located.isolated)} stages differ"
    if len(differ) <= NAMED:
        return f"{count}: {'; '.join(map(str, differ))}"
    usual = f"(relative difference {median(located.isolated[stage].relative for stage in differ):.1e})"
    far = located.outliers
    if not far:
        return f"{count}, none far more than the others {usual}"
    named = ", ".join(f"{stage} ({located.isolated[stage].relative:.1e})" for stage in far[:NAMED])
    more = f" and {len(far) - NAMED} more" if len(far) > NAMED else ""
    return f"{count}, far more than the others {usual}: {named}{more}"
