"""Turns a schedule into one step of the model: rows, pages and sampling keys as lists. Owns the KV cache."""

from __future__ import annotations

from zerogap.kernels.step import Step, StepBatch
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.sequence import Sample, Sequence


class ModelRunner:
    """pages, page_size: size of the KV cache."""

    def __init__(self, decoder: Decoder, pages: int, page_size: int) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self._cache = decoder.new_cache(pages, page_size)
        self._recorded: tuple[int, Step] | None = None  # weight version, the step recorded on it

    @property
    def cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._cache)

    def copy_page(self, source: int, target: int) -> None:
        self.decoder.kernels.copy_page(self._cache, source, target)

    def run(self, batch: list[tuple[Sequence, int]], version: int) -> list[tuple[Sample, int, float]]:
        """Compute the rows; (sample, token, logprob) for each sample whose tokens are now all computed."""
        step = StepBatch([], [], [], [], [], [], [])
        asked: list[Sample] = []
        for sequence, rows in batch:
            if sequence.kv_version != version:  # cannot happen while a swap drops every page; never go on if it does
                raise RuntimeError(f"KV of weight version {sequence.kv_version} met a forward of version {version}")
            first, tokens = sequence.computed, sequence.tokens
            last = first + rows
            step.tokens_T.extend(tokens[first:last])
            step.first_positions_S.append(first)
            step.lengths_S.append(rows)
            step.page_tables_S.append(sequence.pages)
            if last == len(tokens) and isinstance(sequence, Sample):
                asked.append(sequence)
                step.asked_B.append(len(step.tokens_T) - 1)
                step.keys_B.append(sequence.key())
                step.temperatures_B.append(sequence.sampling.temperature)
        tokens_B, logprobs_B = self._step(version)(step)
        return list(zip(asked, tokens_B, logprobs_B, strict=True))

    def _step(self, version: int) -> Step:
        """Recorded anew for each version of the weights, so that no address of older ones is left (field case 19)."""
        if self._recorded is None or self._recorded[0] != version:
            self._recorded = None  # the old one goes first, with what it keeps alive
            self._recorded = version, self.decoder.kernels.record(self.decoder, self._cache, self.page_size)
        return self._recorded[1]
