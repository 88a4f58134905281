"""In which order prompts are used: every prompt once per epoch, each epoch in a new order, random access by position.

The order depends only on (length, seed), so a resumed run goes on at a position without replaying the ones before.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random


class PromptStream:
    """Maps a position (0, 1, 2, ... without end) to a prompt index in [0, length)."""

    _KEPT_EPOCHS = 2  # asynchronous readers stay near one place; at an epoch's border they need two orders

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"a prompt stream needs at least one prompt, got length {length}")
        self._length = length
        self._seed = seed
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    def __getitem__(self, position: int) -> int:
        """Prompt index at `position` >= 0."""
        if position < 0:
            raise IndexError(f"position {position} of a prompt stream must be >= 0")
        epoch, offset = divmod(position, self._length)
        return self._order(epoch)[offset]

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(self._length))
            # A string seed is hashed with SHA-512: the same order in every process, and epochs are independent.
            Random(f"prompts:{self._seed}:{epoch}").shuffle(order)
            self._orders[epoch] = order
            while len(self._orders) > self._KEPT_EPOCHS:
                self._orders.popitem(last=False)
        return order
