"""The things the scheduler moves: token sequences with KV pages, and the group that owns them. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from zerogap.trajectory import NOT_SAMPLED, FinishReason, GroupRequest, Trajectory

Order = tuple[int, int]  # (arrival of the group, place within it); smaller is older and goes first
# The sampler's key has 32 bits for both: sample index below, segment above.
MAX_SAMPLES, MAX_SEGMENTS = 1 << 20, 1 << 12


class Sequence(ABC):
    """Tokens, of which the first `computed` have their keys and values in `pages`.

    kv_version: version of the weights that filled the pages (meaningful while there are pages).
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.computed = 0
        self.pages: list[int] = []
        self.kv_version = NOT_SAMPLED

    @property
    def remaining(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.computed

    @property
    @abstractmethod
    def order(self) -> Order:
        """Its age among all that hold pages."""


class Prefix(Sequence):
    """The prompt of a group without its last token: computed once, forked by every sample, never sampled.

    It has the age of the oldest sample that still waits to fork it, and goes just before that one.
    """

    def __init__(self, group: Group, tokens: list[int]) -> None:
        super().__init__(tokens)
        self.group = group

    @property
    def order(self) -> Order:
        return (self.group.arrival, 2 * next(sample.index for sample in self.group.waiting if sample.forks))


class Sample(Sequence):
    """One trajectory in the making: the prompt, what was sampled and what was put in, with logprobs and versions.

    state: "running": it has a slot of the batch, and pages. "waiting" for a slot, or "parked" between two turns until
        its caller says how it goes on: with pages or without.
    started: it ran at least once (with on_update "finish" it then ends on the same weights).
    turn_start: how many tokens precede the sampled ones of this turn.
    prefix: what it may fork; None after a restart on another prompt.
    """

    def __init__(self, group: Group, index: int) -> None:
        super().__init__([])
        self.group = group
        self.index = index
        self.state: Literal["waiting", "running", "parked"] = "waiting"
        self.started = False
        self.sampling = group.request.sampling
        self._order = (group.arrival, 2 * index + 1)
        self.begin(list(group.request.prompt_token_ids), 0)
        self.prefix: Prefix | None = group.prefix

    def begin(self, prompt: list[int], segment: int) -> None:
        """At the first turn of a segment, from this prompt."""
        self.tokens, self.computed, self.prefix = prompt, 0, None
        self.logprobs, self.versions = [0.0] * len(prompt), [NOT_SAMPLED] * len(prompt)
        self.turn_start = len(prompt)
        self.segment = segment
        self._key = (self.sampling.seed, self.group.request.prompt_id, segment * MAX_SAMPLES + self.index)

    @property
    def order(self) -> Order:
        return self._order

    @property
    def forks(self) -> bool:
        """Whether it would begin with its group's prefix."""
        return self.prefix is not None and not self.pages

    @property
    def turn(self) -> list[int]:
        """What was sampled in this turn."""
        return self.tokens[self.turn_start :]

    def key(self) -> tuple[int, int, int, int]:
        """What the sampler draws the next token from: (seed, prompt id, segment and sample index, its position)."""
        return (*self._key, len(self.tokens))

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend(self, token_ids: list[int]) -> None:
        """Tokens that were not sampled; the next turn begins after them."""
        self.tokens += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [NOT_SAMPLED] * len(token_ids)
        self.turn_start = len(self.tokens)

    def trajectory(self, reason: FinishReason, contract: str) -> Trajectory:
        request = self.group.request
        return Trajectory(
            token_ids=list(self.tokens),
            loss_mask=[int(version != NOT_SAMPLED) for version in self.versions],
            logprobs=list(self.logprobs),
            versions=list(self.versions),
            finish_reason=reason,
            prompt_id=request.prompt_id,
            group_id=request.group_id,
            sample_index=self.index,
            sampling=request.sampling,
            segment=self.segment,
            contract=contract,
        )


class Group:
    """A request with its prefix and samples. waiting: samples that wait for a slot, oldest first."""

    def __init__(self, request: GroupRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.prefix = Prefix(self, list(request.prompt_token_ids[:-1]))
        self.samples = [Sample(self, index) for index in range(request.n)]
        self.waiting = list(self.samples)
