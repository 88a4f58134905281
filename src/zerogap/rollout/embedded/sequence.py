"""The things the scheduler moves: token sequences with KV pages, and the group that owns them. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from zerogap.trajectory import NOT_SAMPLED, FinishReason, GroupRequest, Trajectory

Order = tuple[int, int]  # (arrival of the group, place within it); smaller is older and goes first


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
        return (self.group.arrival, 2 * self.group.waiting[0].index)


class Sample(Sequence):
    """One trajectory in the making: the prompt and what was sampled so far, with logprobs and versions.

    started: it ran at least once (with on_update "finish" it then ends on the same weights).
    """

    def __init__(self, group: Group, index: int) -> None:
        super().__init__(list(group.request.prompt_token_ids))
        self.group = group
        self.index = index
        self.started = False
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.sampling = group.request.sampling
        self._order = (group.arrival, 2 * index + 1)
        self._key = (self.sampling.seed, group.request.prompt_id, index)

    @property
    def order(self) -> Order:
        return self._order

    @property
    def sampled(self) -> list[int]:
        return self.tokens[len(self.group.request.prompt_token_ids) :]

    def key(self) -> tuple[int, int, int, int]:
        """What the sampler draws the next token from: (seed, prompt id, sample index, position of the token)."""
        return (*self._key, len(self.tokens))

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def trajectory(self, reason: FinishReason, contract: str) -> Trajectory:
        request = self.group.request
        prompt = len(request.prompt_token_ids)
        return Trajectory(
            token_ids=self.tokens,
            loss_mask=[0] * prompt + [1] * (len(self.tokens) - prompt),
            logprobs=[0.0] * prompt + self.logprobs,
            versions=[NOT_SAMPLED] * prompt + self.versions,
            finish_reason=reason,
            prompt_id=request.prompt_id,
            group_id=request.group_id,
            sample_index=self.index,
            sampling=request.sampling,
            contract=contract,
        )


class Group:
    """A request with its prefix and samples. waiting: samples without pages, oldest first."""

    def __init__(self, request: GroupRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.prefix = Prefix(self, list(request.prompt_token_ids[:-1]))
        self.samples = [Sample(self, index) for index in range(request.n)]
        self.waiting = list(self.samples)
