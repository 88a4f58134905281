"""What the engine refuses because it could never be served, each with what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerogap.rollout.embedded.sequence import MAX_SAMPLES
from zerogap.rollout.engine import ContextFull
from zerogap.trajectory import GroupRequest


@dataclass(frozen=True)
class Limits:
    """max_context, cache_tokens: most tokens of a sequence; of the KV cache. can_stop: there may be stop strings."""

    vocab_size: int
    max_context: int
    cache_tokens: int
    can_stop: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the newest token's keys and values are never needed."""
        return min(self.max_context, self.cache_tokens + 1)

    def check_request(self, request: GroupRequest) -> None:
        """Raises ValueError, for a prompt that is too long ContextFull."""
        sampling, prompt = request.sampling, request.prompt_token_ids
        where = f"group {request.group_id}, prompt {request.prompt_id}"
        self.check_tokens(where, prompt)
        problem = None
        if not 1 <= request.n <= MAX_SAMPLES or sampling.max_new_tokens < 1:
            problem = f"n {request.n} and max_new_tokens {sampling.max_new_tokens} must be >= 1, n <= {MAX_SAMPLES}"
        elif not 0 <= sampling.temperature < math.inf:
            problem = f"temperature {sampling.temperature} must be >= 0 and finite (0 = most likely token)"
        elif not 0 <= sampling.seed < 2**63:
            problem = f"seed {sampling.seed} must lie in 0..2**63 - 1"
        elif "" in sampling.stop:
            problem = "stop holds an empty string, which every text contains; remove it"
        elif sampling.stop and not self.can_stop:
            problem = f"stop {sampling.stop} needs an engine with a tokenizer"
        elif min(len(prompt) + sampling.max_new_tokens, self.max_context) > self.longest:
            problem = (
                f"{len(prompt)} prompt tokens and max_new_tokens {sampling.max_new_tokens} need "
                f"{min(len(prompt) + sampling.max_new_tokens, self.max_context) - 1} tokens of KV, the cache has "
                f"{self.cache_tokens}; raise kv_tokens or lower max_new_tokens"
            )
        if problem:
            raise ValueError(f"{where}: {problem}")

    def check_tokens(self, where: str, tokens: Sequence[int], before: int = 0) -> None:
        """Whether a token can be sampled after these, which follow `before` others. Raises ValueError, ContextFull."""
        if not tokens:
            raise ValueError(f"{where}: no token ids; give at least one")
        if not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            raise ValueError(f"{where}: token ids {min(tokens)}..{max(tokens)} must lie in 0..{self.vocab_size - 1}")
        count = before + len(tokens)
        for name, limit in (("max_context", self.max_context), ("kv_tokens + 1 =", self.cache_tokens + 1)):
            if count >= limit:
                raise ContextFull(f"{where}: {count} tokens leave no room for one more in {name} {limit}")
