"""Turns a schedule into tensors: one batched forward, logits of the last rows, sampling. Owns the KV cache."""

from __future__ import annotations

from itertools import chain

import torch

from zerogap.kernels import RowBatch
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.sequence import Sample, Sequence


class ModelRunner:
    """pages, page_size: size of the KV cache."""

    def __init__(self, decoder: Decoder, pages: int, page_size: int) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self._cache = decoder.new_cache(pages, page_size)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._cache)

    def copy_page(self, source: int, target: int) -> None:
        self.decoder.kernels.copy_page(self._cache, source, target)

    @torch.no_grad()
    def run(self, batch: list[tuple[Sequence, int]], version: int) -> list[tuple[Sample, int, float]]:
        """Compute the rows; (sample, token, logprob) for each sample whose tokens are now all computed."""
        for sequence, _ in batch:
            if sequence.kv_version != version:  # cannot happen while a swap drops every page; never go on if it does
                raise RuntimeError(f"KV of weight version {sequence.kv_version} met a forward of version {version}")
        rows = RowBatch.paged([(s.computed, n) for s, n in batch], [s.pages for s, _ in batch], self.page_size)
        tokens = chain.from_iterable(s.tokens[s.computed : s.computed + n] for s, n in batch)
        hidden_TH = self.decoder.hidden(torch.tensor(list(tokens), dtype=torch.int64), rows, self._cache)

        asked: list[Sample] = []
        last_rows: list[int] = []
        row = -1
        for sequence, n in batch:
            row += n
            if isinstance(sequence, Sample) and sequence.remaining == n:
                asked.append(sequence)
                last_rows.append(row)
        if not asked:
            return []
        hidden_BH = hidden_TH if len(asked) == rows.num_rows else hidden_TH[torch.tensor(last_rows)]
        return self._sample(asked, self.decoder.logits(hidden_BH))

    def _sample(self, asked: list[Sample], logits_BV: torch.Tensor) -> list[tuple[Sample, int, float]]:
        """One call of the sampler for each temperature in the batch."""
        by_temperature: dict[float, list[int]] = {}
        for i, sample in enumerate(asked):
            by_temperature.setdefault(sample.group.request.sampling.temperature, []).append(i)
        drawn: list[tuple[Sample, int, float]] = []
        for temperature, chosen in by_temperature.items():
            part_BV = logits_BV if len(chosen) == len(asked) else logits_BV[torch.tensor(chosen)]
            samples = [asked[i] for i in chosen]
            keys_B4 = torch.tensor([sample.key() for sample in samples], dtype=torch.int64)
            tokens_B, logprobs_B = self.decoder.sample(part_BV, keys_B4, temperature)
            drawn.extend(zip(samples, tokens_B.tolist(), logprobs_B.tolist(), strict=True))
        return drawn
