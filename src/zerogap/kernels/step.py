"""One step of an engine: rows in, the next token of every sequence that asks for one out.

The step of a model is defined once, by its own forward pass (`EagerStep`). A family may record it and replay it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zerogap.kernels.rows import RowBatch

Key = tuple[int, int, int, int]  # seed, prompt id, sample index, position: see Kernels.sample


@dataclass(frozen=True)
class StepBatch:
    """T rows of S sequences, one after another, of which B draw a token. Plain lists: no tensor is made for a step.

    first_positions_S, lengths_S: position of the first row, and the number of rows (>= 1), of each sequence.
    page_tables_S: the pages of each sequence, in order; they hold at least its positions up to its last row.
    asked_B: index in 0..T-1 of each row that draws, with its key and its temperature (0 = most likely token).
    """

    tokens_T: list[int]
    first_positions_S: list[int]
    lengths_S: list[int]
    page_tables_S: list[list[int]]
    asked_B: list[int]
    keys_B: list[Key]
    temperatures_B: list[float]


Step = Callable[[StepBatch], tuple[list[int], list[float]]]  # the B drawn tokens and their logprobs


class Model(Protocol):
    """What a step uses of a decoder."""

    kernels: Any

    def hidden(self, tokens_T: torch.Tensor, rows: RowBatch, cache: list[Any] | None = None) -> torch.Tensor: ...

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor: ...

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class EagerStep:
    """The step as separate operations on tensors: every family can, and what a recorded step must equal as bits."""

    def __init__(self, model: Model, cache: list[Any], page_size: int) -> None:
        self._model = model
        self._cache = cache
        self._page_size = page_size

    @torch.no_grad()
    def __call__(self, batch: StepBatch) -> tuple[list[int], list[float]]:
        spans = list(zip(batch.first_positions_S, batch.lengths_S, strict=True))
        rows = RowBatch.paged(spans, batch.page_tables_S, self._page_size)
        hidden_TH = self._model.hidden(torch.tensor(batch.tokens_T, dtype=torch.int64), rows, self._cache)
        tokens_B, logprobs_B = [0] * len(batch.asked_B), [0.0] * len(batch.asked_B)
        if not batch.asked_B:
            return tokens_B, logprobs_B
        logits_BV = self._model.logits(hidden_TH[torch.tensor(batch.asked_B)])
        keys_B4 = torch.tensor(batch.keys_B, dtype=torch.int64)
        for temperature in dict.fromkeys(batch.temperatures_B):  # one call of the sampler for each
            chosen = [i for i, t in enumerate(batch.temperatures_B) if t == temperature]
            tokens, logprobs = self._model.sample(logits_BV[chosen], keys_B4[chosen], temperature)
            for i, token, logprob in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True):
                tokens_B[i], logprobs_B[i] = token, logprob
        return tokens_B, logprobs_B
