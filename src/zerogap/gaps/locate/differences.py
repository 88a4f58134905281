"""Two sides compared stage by stage: unequal bits first, then how much, and the first row that differs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from zerogap.gaps.locate.stages import Recording, Stage


@dataclass(frozen=True)
class Place:
    """One row: line of its rollout, position in its token ids (of a log-probability: that of the token that it is of),
    how many of its values differ, and by how much."""

    line: int
    position: int
    unequal: int
    values: int
    largest: float


@dataclass
class Difference:
    """What differs at one stage, over all sequences. largest: of |second - first|, infinite where one of the two is no
    finite number. first: the first row that differs."""

    values: int = 0
    unequal: int = 0
    largest: float = 0.0
    first: Place | None = None
    _size_squared: float = 0.0
    _difference_squared: float = 0.0

    @property
    def relative(self) -> float:
        """|second - first| / |first|, as lengths of all values."""
        if not self._difference_squared:
            return 0.0
        if not self._size_squared or math.isinf(self.largest):
            return math.inf
        return math.sqrt(self._difference_squared / self._size_squared)

    def add(self, stage: Stage, line: int, first_TW: torch.Tensor, second_TW: torch.Tensor) -> None:
        """The rows of one sequence, of either dtype; compared as the fp32 numbers that they are exactly."""
        first_TW, second_TW = first_TW.float(), second_TW.float()
        unequal_TW = first_TW.view(torch.int32) != second_TW.view(torch.int32)
        self.values += unequal_TW.numel()
        self._size_squared += float(first_TW.nan_to_num(0.0, 0.0, 0.0).norm()) ** 2
        rows = unequal_TW.any(1).nonzero()[:, 0]
        if not len(rows):
            return
        # An infinity equal to the other is no difference, and any other is one without a size.
        size_TW = (second_TW - first_TW).abs().masked_fill(~unequal_TW, 0.0).nan_to_num(math.inf, math.inf)
        row = int(rows[0])
        self.unequal += int(unequal_TW.sum())
        self.largest = max(self.largest, float(size_TW.max()))
        self._difference_squared += float(size_TW.norm()) ** 2
        self.first = self.first or Place(
            line,
            row + (stage.name == "logprobs"),
            int(unequal_TW[row].sum()),
            unequal_TW.shape[1],
            float(size_TW[row].max()),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "unequal": self.unequal,
            "largest": self.largest,
            "relative": self.relative,
            "first": None if self.first is None else vars(self.first),
        }


class Comparison:
    """A watcher of the second side. isolated: it goes on with the first side's outputs, rounded to its own dtype, so
    that each of its operations is fed what the first side's was; else with its own.

    differences: by stage, in the first side's order, over all sequences so far.
    """

    def __init__(self, isolated: bool) -> None:
        self.isolated = isolated
        self.differences: dict[Stage, Difference] = {}
        self._line = 0
        self._recording: Recording = {}
        self._parts: dict[Stage, list[torch.Tensor]] = {}

    def begin(self, line: int, recording: Recording) -> None:
        """recording: the first side's, of the sequence that the second one is about to run."""
        self._line, self._recording = line, recording
        for stage in recording:
            self.differences.setdefault(stage, Difference())

    def __call__(self, stage: Stage, output: torch.Tensor, column: int = 0) -> torch.Tensor:
        first_TW = self._recording[stage].flatten(1) if output.dim() > 1 else self._recording[stage][:, None]
        parts = self._parts.setdefault(stage, [])
        parts.append(output.reshape(len(output), -1).clone())
        if sum(part.shape[1] for part in parts) == first_TW.shape[1]:
            self.differences[stage].add(stage, self._line, first_TW, torch.cat(self._parts.pop(stage), 1))
        if not self.isolated:
            return output
        width = output[0].numel()
        return first_TW[:, column : column + width].to(output.dtype, copy=True).reshape(output.shape)
