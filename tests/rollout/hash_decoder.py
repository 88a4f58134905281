"""A decoder whose "forward" is an exact hash of what the KV cache holds: any paging or scheduling fault shows.

Integer arithmetic only, so it is batch invariant whatever the kernels do, and fast enough for property tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.helpers import tiny_config
from zerogap.kernels import RowBatch, Weight
from zerogap.kernels.step import EagerStep, Model, Step
from zerogap.model.decoder import Decoder

MIX = np.uint64(0x9E3779B97F4A7C15)
VOCAB = 61


class PageCopier:
    """What the engine itself asks of a kernel family."""

    def record(self, model: Model, cache: list[Any], page_size: int) -> Step:
        return EagerStep(model, cache, page_size)

    def copy_page(self, cache: list[Any], source: int, target: int) -> None:
        for pages in cache:
            pages[target] = pages[source]


class HashDecoder(Decoder):
    """Its one weight decides what is written to the cache. nan_at: a prefix length whose logprob is that value."""

    def __init__(self, weight: int = 1, eos: tuple[int, ...] = (), context: int = 256) -> None:
        self.config = tiny_config(vocab_size=VOCAB, max_position_embeddings=context)
        self.kernels: Any = PageCopier()
        self.weights = {"embed": Weight(torch.tensor([weight])), "extra": Weight(torch.tensor([weight]))}
        self.vocab = VOCAB
        self.eos_token_ids = eos
        self.layers = []
        self._packed = False
        self.nan_at: dict[int, float] = {}
        self.forwards: list[tuple[int, ...]] = []  # rows of each sequence, per forward

    def pack(self) -> None:
        pass

    def contract_digest(self) -> str:
        return "hash"

    def new_cache(self, pages: int, page_size: int) -> list[Any]:
        return [np.random.default_rng(0).integers(1, 2**62, (pages, page_size)).astype(np.uint64)]

    def hidden(self, tokens_T: torch.Tensor, rows: RowBatch, cache: list[Any] | None = None) -> torch.Tensor:
        """int64 [T, 2]: hash of the cached prefix up to the row, and the row's position."""
        self.forwards.append(rows.lengths)
        assert cache is not None
        weight = sum(int(w.data) << (32 * i) for i, w in enumerate(self.weights.values()))
        flat = cache[0].reshape(-1)
        with np.errstate(over="ignore"):
            written = (tokens_T.numpy().astype(np.uint64) + np.uint64(1)) * MIX ^ np.uint64(weight)
            slots = rows.slots_T.numpy()
            assert len(np.unique(slots)) == len(slots), "two rows write to one slot"
            flat[slots] = written
            out = []
            starts = rows.starts_Sp1.tolist()
            for s, first in enumerate(rows.first_positions_S.tolist()):
                last = first + starts[s + 1] - starts[s]
                positions = np.arange(last)
                pages = rows.pages_SP[s].numpy()[positions // rows.page_size]
                keys = flat[pages * rows.page_size + positions % rows.page_size]
                powers = np.cumprod(np.full(last, MIX | np.uint64(1)))
                hashes = np.cumsum(keys * powers)[first:last]
                out.append(np.stack([hashes.astype(np.int64), positions[first:last]], axis=1))
        return torch.from_numpy(np.concatenate(out))

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        return hidden_BH

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = [], []
        for (hashed, position), key in zip(logits_BV.tolist(), keys_B4.tolist(), strict=True):
            assert key[3] == position + 1, "the key's position is that of the new token"
            mixed = hash((hashed, *key, temperature)) % (1 << 61)
            tokens.append(mixed % VOCAB)
            logprobs.append(self.nan_at.get(position + 1, -float(mixed >> 40) / 2**18))
        return torch.tensor(tokens), torch.tensor(logprobs, dtype=torch.float32)
