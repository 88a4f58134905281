"""Tasks from reasoning-gym: any of its datasets by name and parameters, each with its own scorer."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import random
import warnings
from typing import Any

with warnings.catch_warnings():  # a library below reasoning-gym compiles with SyntaxWarnings on its first import
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

from zerogap import config
from zerogap.env.derivations import derive
from zerogap.env.task import Example, GradeError, TaskError, Wording

_OWN_KEYS = ("seed", "size")  # keys of the task section, not parameters
# These iterate over sets of strings, so their examples change with Python's hash seed, which each process draws anew.
_HASH_ORDERED = (
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
# Where a dataset accepts many answers, `answer` may be empty and an accepted one lies in the metadata.
_ACCEPTED_ANSWER_KEYS = ("example_answer", "possible_answer", "example_correct_answer")

# Scorers that raise this when the text is not in the answer's form (a word where a number is due) instead of returning
# 0: there the policy is at fault, not the grader. Any other exception, and any from another scorer, is a GradeError.
_UNREADABLE: dict[str, type[Exception]] = {
    "prime_factorization": ValueError,
    "boxnet": TypeError,
    "game_of_life": KeyError,
}


class ReasoningTask:
    """See zerogap.env.task.Task. Name and parameters are checked at once; the dataset is built at first use.

    Examples are generated one by one from (task.seed, index); nothing is downloaded.
    """

    def __init__(self, settings: config.Task) -> None:
        assert settings.name is not None
        self._wording = Wording(settings)
        self._name = settings.name
        self._size = settings.size
        self._settings = _dataset_config(settings)
        self._built: ProceduralDataset | None = None
        if self._name in _HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
            warnings.warn(
                f"the examples of task {self._name!r} depend on Python's hash seed: set PYTHONHASHSEED=0 in the "
                "environment to get the same prompts in every process and after --resume",
                stacklevel=3,
            )

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}  # some datasets hold what cannot be pickled

    @property
    def _dataset(self) -> ProceduralDataset:
        if self._built is None:
            try:
                self._built = DATASETS[self._name][0](config=self._settings)
            except Exception as error:
                raise TaskError(f"task.name {self._name!r} cannot be built: {error}") from error
        return self._built

    def example(self, index: int) -> Example:
        if not 0 <= index < self._size:
            raise IndexError(f"example {index} of task {self._name!r} is outside 0..{self._size - 1}")
        entry = self._entry(index)
        return Example(index, self._wording.messages(entry["question"]), entry)

    def _entry(self, index: int) -> dict[str, Any]:
        # A few generators draw from Python's global generator; it is set for this one item, then put back.
        state = random.getstate()
        random.seed(f"{self._settings.seed}:{index}")
        try:
            entry: dict[str, Any] = self._dataset[index]
        finally:
            random.setstate(state)
        return entry

    def grade(self, example: Example, text: str) -> float:
        answer = self._wording.answer(text)
        if answer is None:
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, example.payload))
        except Exception as error:
            if isinstance(error, _UNREADABLE.get(self._name, ())):
                return 0.0
            raise GradeError(
                f"the scorer of {self._name!r} failed on prompt {example.prompt_id}, answer {answer[:200]!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def solution(self, example: Example) -> str:
        answer = self._accepted_answer(example)
        return self._wording.with_steps(derive(self._name, example.payload, answer), answer)

    def _accepted_answer(self, example: Example) -> str:
        entry = example.payload
        candidates = [entry["answer"], *(entry["metadata"].get(key) for key in _ACCEPTED_ANSWER_KEYS)]
        for candidate in candidates:
            if candidate is not None and self._dataset.score_answer(text := _as_text(candidate), entry) == 1.0:
                return text
        raise TaskError(
            f"reasoning-gym gives no answer that its own scorer of {self._name!r} accepts for prompt "
            f"{example.prompt_id}; this task has no worked solutions, so leave out warm_start"
        )


def _as_text(answer: Any) -> str:
    """An answer as a model writes it: structured ones as JSON."""
    if isinstance(answer, str):
        return answer
    return json.dumps(answer)


def _dataset_config(settings: config.Task) -> Any:
    """The checked configuration object of the dataset. Raises TaskError naming the key and what is known."""
    name = settings.name
    if name not in DATASETS:
        near = difflib.get_close_matches(str(name), DATASETS, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(DATASETS))}"
        raise TaskError(f"task.name {name!r} is not a reasoning-gym dataset; {hint}")
    config_class = DATASETS[name][1]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in _OWN_KEYS]
    for key in settings.params:
        if key in _OWN_KEYS:
            raise TaskError(f"task.params.{key}: write task.{key} instead")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TaskError(
                f"task.params.{key}: {name} has no such parameter; {hint}known: {', '.join(known) or 'none'}"
            )
    params = dict(settings.params)
    try:
        if name == "composite" and isinstance(params.get("datasets"), list):
            params["datasets"] = [DatasetSpec(**part) for part in params["datasets"]]
        made = config_class(**params, size=settings.size, seed=_spread(settings.seed))
        if hasattr(made, "validate"):
            made.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise TaskError(
            f"task.params of {name} do not fit: {error or type(error).__name__} (given: {params})"
        ) from error
    return made


def _spread(seed: int) -> int:
    """Seed for the dataset. It seeds example i with seed + i, so seeds 0 and 1 would share all examples but one:
    they are spread over 31 bits (an odd factor keeps them distinct)."""
    return seed * 2_654_435_761 % 2**31
