"""What an evaluation asks: prompts that fit the model, how each is sampled, how much KV cache that takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerogap.config import Recipe
from zerogap.env.task import Example, TaskError, make_task
from zerogap.runtime.backend import Item
from zerogap.runtime.evaluation.figures import PromptResult
from zerogap.runtime.prompts import prompt_rules
from zerogap.runtime.rollout_worker import RolloutWorker
from zerogap.trajectory import GroupRequest, SamplingParams


@dataclass(frozen=True)
class Plan:
    """Picklable. prompts: (token ids, example) of those that leave room for an answer; too_long: count of the others.

    samples: answers per prompt. kv_tokens: size of the engine's cache.
    """

    prompts: list[tuple[tuple[int, ...], Example]]
    too_long: int
    samples: int
    sampling: SamplingParams
    kv_tokens: int

    def items(self, version: int) -> list[Item]:
        """The requests, none of which any other version may serve a token of."""
        return [
            (GroupRequest(e.prompt_id, e.prompt_id, ids, self.samples, self.sampling, version), e)
            for ids, e in self.prompts
        ]

    def digest(self) -> str:
        """SHA-256 of what is asked and graded: it changes with the file, the template or the tokenizer."""
        asked = [[example.prompt_id, ids, example.payload] for ids, example in self.prompts]
        return hashlib.sha256(json.dumps(asked, default=str, sort_keys=True).encode()).hexdigest()


def make_plan(recipe: Recipe, model_folder: Path, samples: int, limit: int) -> Plan:
    """The first `limit` examples of recipe.task, sampled as recipe.rollout says (where a temperature of 0 is allowed).

    Raises TaskError, also when no prompt fits the model; RecipeError when the KV cache holds no answer.
    """
    task = make_task(recipe.task)
    rules = prompt_rules(recipe, model_folder, task)
    examples = [task.example(index) for index in range(min(limit, len(task)))]
    prompts = [(tuple(rules.render(example)), example) for example in examples]
    fitting = [(ids, example) for ids, example in prompts if len(ids) <= rules.longest]
    if not fitting:
        raise TaskError(
            f"all {len(prompts)} prompts are longer than the context of {model_folder} and rollout.kv_cache_mb leave "
            f"room for ({rules.longest} tokens); shorten the prompts or choose another model"
        )
    return Plan(fitting, len(prompts) - len(fitting), samples, rules.sampling, rules.kv_tokens)


def evaluate(worker: RolloutWorker, items: list[Item], version: int) -> Iterator[PromptResult]:
    """Each prompt's result as soon as it is there. The worker must hold the weights of `version`, and nothing else may
    use it meanwhile. Raises RunFailed when a token is of another version."""
    worker.submit(items)
    while worker.has_work():
        for group in worker.step():
            yield PromptResult.of(group, version)
