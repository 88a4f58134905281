"""From a position in the shuffled stream of prompts to the group request that an engine gets.

A prompt that leaves no room for one sampled token is skipped and counted before groups are numbered, so the lag
arithmetic never sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from zerogap.config import Recipe, Rollout
from zerogap.env.python_tool import tool_schemas
from zerogap.env.task import Example, Task
from zerogap.model.chat import load_tokenizer
from zerogap.model.checkpoint import read_json
from zerogap.model.config import DecoderConfig
from zerogap.model.turns import ChatTurns
from zerogap.runtime.backend import Item, RunFailed
from zerogap.runtime.kv_memory import default_pages, page_bytes, pages_in_budget
from zerogap.trajectory import GroupRequest, SamplingParams

PROMPTS_MEASURED = 64  # how many prompts are rendered to size the KV cache


class Stream(Protocol):
    """Position in the run -> index of a prompt (env/stream.py)."""

    def __getitem__(self, position: int) -> int: ...


class PromptSource:
    """Yields groups in order; remembers where each unconsumed group came from, for the checkpoint (see `cursor`)."""

    def __init__(
        self,
        task: Task,
        stream: Stream,
        render: Callable[[Example], list[int]],
        max_prompt_tokens: int,
        group_size: int,
        sampling: SamplingParams,
        position: int = 0,
        skipped: int = 0,
    ) -> None:
        self._task = task
        self._stream = stream
        self._render = render
        self._max_prompt_tokens = max_prompt_tokens
        self._group_size = group_size
        self._sampling = sampling
        self._position = position
        self.skipped = skipped
        self._cursors: dict[int, tuple[int, int]] = {}

    def request(self, group_id: int, min_version: int) -> Item:
        """The next prompt that fits, as group `group_id`. RunFailed when a whole epoch does not fit."""
        self._cursors[group_id] = (self._position, self.skipped)
        for _ in range(len(self._task)):
            position = self._position
            self._position += 1
            index = self._stream[position]
            example = self._task.example(index)
            token_ids = self._render(example)
            if len(token_ids) > self._max_prompt_tokens:
                self.skipped += 1
                continue
            epoch = position // len(self._task)
            sampling = replace(self._sampling, seed=epoch_seed(self._sampling.seed, epoch))
            request = GroupRequest(group_id, index, tuple(token_ids), self._group_size, sampling, min_version)
            return request, example
        raise RunFailed(
            f"all {len(self._task)} prompts of the task are longer than {self._max_prompt_tokens} tokens, the most "
            "that the model's context and rollout.kv_cache_mb leave room for; shorten the prompts, raise "
            "rollout.kv_cache_mb or choose another model"
        )

    def cursor(self, group_id: int) -> tuple[int, int]:
        """(stream position, prompts skipped) from which group_id and all later groups can be admitted again.
        Forgets the groups before it."""
        for old in [g for g in self._cursors if g < group_id]:
            del self._cursors[old]
        return self._cursors.get(group_id, (self._position, self.skipped))


def epoch_seed(seed: int, epoch: int) -> int:
    """The sampler's seed in one pass over the prompts: a prompt seen again must not meet the same random numbers."""
    if epoch == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} epoch {epoch}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class PromptRules:
    """What follows from recipe, model and task for every prompt. longest: most tokens of one. kv_tokens: size of an
    engine's KV cache."""

    turns: ChatTurns
    longest: int
    kv_tokens: int
    sampling: SamplingParams

    def render(self, example: Example) -> list[int]:
        return self.turns.prompt(example.messages)


def prompt_rules(recipe: Recipe, model_folder: Path, task: Task) -> PromptRules:
    """RecipeError when the KV cache of rollout.kv_cache_mb holds no answer."""
    rollout = recipe.rollout
    turns = ChatTurns(load_tokenizer(model_folder), tool_schemas(recipe.task))
    model = DecoderConfig.from_hf(read_json(model_folder, "config.json"))
    page = page_bytes(recipe.engine_arithmetic, model.num_layers, model.shape, rollout.page_size)
    pages = pages_in_budget(rollout, page)
    if pages is None:
        first = (turns.prompt(task.example(index).messages) for index in range(min(len(task), PROMPTS_MEASURED)))
        longest = max(map(len, first))
        pages = default_pages(rollout, longest, model.max_position_embeddings, recipe.task.turn_limit)
    kv_tokens = pages * rollout.page_size
    sampling = SamplingParams(rollout.max_new_tokens, rollout.temperature, tuple(rollout.stop), recipe.seed)
    return PromptRules(turns, max_prompt_tokens(rollout, model.max_position_embeddings, kv_tokens), kv_tokens, sampling)


def max_prompt_tokens(rollout: Rollout, context: int, cache_tokens: int) -> int:
    """Longest prompt that an engine with this cache accepts. A sequence of n tokens caches n - 1 of them."""
    capacity = cache_tokens // rollout.page_size * rollout.page_size
    if capacity >= context - 1:
        return context - 1
    return capacity + 1 - rollout.max_new_tokens
