"""When a turn ends, and why."""

from __future__ import annotations

from typing import Any

from zerogap.rollout.embedded.sequence import Sample
from zerogap.trajectory import FinishReason


class StopRule:
    """eos_token_ids end a turn at once (the sampled id stays). max_context: most tokens of a sequence, all turns.

    tokenizer: decodes the tail of a turn's sampled tokens for stop strings; None where no request has any.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], max_context: int, tokenizer: Any | None) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_context = max_context
        self.tokenizer = tokenizer

    def reason(self, sample: Sample) -> FinishReason | None:
        """Why the turn ends with its newest token; None: it goes on."""
        sampling = sample.sampling
        if sample.tokens[-1] in self.eos_token_ids:
            return "eos"
        if sampling.stop and self._has_stop_string(sample.turn, sampling.stop):
            return "stop_string"
        if len(sample.tokens) - sample.turn_start >= sampling.max_new_tokens:
            return "length"
        if len(sample.tokens) >= self.max_context:
            return "context"
        return None

    def _has_stop_string(self, sampled: list[int], stop: tuple[str, ...]) -> bool:
        assert self.tokenizer is not None
        # A token decodes to at least one byte, so a match that ends in the newest token lies within this many tokens.
        # Four more keep it clear of a character (or leading space) that the cut of the tail breaks.
        tail = max(len(text.encode()) for text in stop) + 4
        text = self.tokenizer.decode(sampled[-tail:], skip_special_tokens=False)
        return any(string in text for string in stop)
