"""Tasks from any Python file: its function `examples`, and its function `grade` or its class `Environment`.

docs/environments.md shows such files.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from zerogap import config
from zerogap.env.environment import is_message
from zerogap.env.host import MakeEnvironment
from zerogap.env.single_turn import SingleTurn
from zerogap.env.task import Example, GradeError, TaskError, Wording
from zerogap.env.turn_limit import TurnLimit
from zerogap.env.user_file import UserFile, check_known, taken
from zerogap.trajectory import Message

_METHODS = {"reset": ("self", "example"), "step": ("self", "action"), "close": ("self",)}
_ITEM_KEYS = ("question", "messages", "payload", "solution")
_OWN_KEYS = ("seed", "size")  # keys of the task section, not parameters


class FileTask:
    """See zerogap.env.task.Task. The file is imported and checked at once, `examples` called at first use.

    Raises TaskError with the file's line.
    """

    def __init__(self, settings: config.Task) -> None:
        assert settings.file is not None
        self._wording = Wording(settings)
        self._file = file = UserFile(settings.file)
        self._examples = self._defined("examples", inspect.isfunction)
        self._grade = self._defined("grade", inspect.isfunction)
        self._environment = self._defined("Environment", inspect.isclass)
        if self._examples is None:
            raise TaskError(f"{file.where()} defines no function `examples`; add one that returns a list of examples")
        if (self._grade is None) == (self._environment is None):
            found = "neither" if self._grade is None else "both"
            raise TaskError(
                f"{file.where()} defines {found} of a function `grade(payload, text)` (one turn) and a class "
                "`Environment` (several); it needs one of them"
            )
        if self._grade is not None:
            file.check_parameters(self._grade, ("payload", "text"))
            if settings.max_turns is not None and settings.tools is None:
                raise TaskError(f"task.max_turns: an episode of {file.path} has one turn, graded by `grade`")
        if self._environment is not None:
            if settings.tools is not None:
                raise TaskError(
                    f"{file.where(self._environment)}: task.tools belongs to a file with `grade`; a class Environment "
                    "answers every turn itself"
                )
            self._check_methods(self._environment)
        self._settings = settings
        self._check_params()

    def __len__(self) -> int:
        return len(self._items)

    def example(self, index: int) -> Example:
        item, where = self._item(index), self._where(index)
        payload = item.get("payload")
        try:
            json.dumps(payload)
        except (TypeError, ValueError) as error:
            raise TaskError(
                f"{where}: `payload` must be plain (texts, numbers, lists, mappings), for it goes to another process: "
                f"{error}"
            ) from None
        return Example(index, self._messages(item, where), payload)

    def grade(self, example: Example, text: str) -> float:
        if self._grade is None:
            raise GradeError(f"{self._file.where(self._environment)}: an episode of Environment is graded by its steps")
        try:
            value: float = self._grade(example.payload, text)
        except Exception as error:
            raise GradeError(f"`grade` failed on prompt {example.prompt_id}, text {text[:200]!r}: {error}") from error
        return value

    def solution(self, example: Example) -> str | list[Message]:
        solution = self._item(example.prompt_id).get("solution")
        if isinstance(solution, str):
            return solution
        turns = solution if isinstance(solution, list) and all(map(is_message, solution)) else []
        if turns and turns[0]["role"] == turns[-1]["role"] == "assistant":
            return turns
        raise TaskError(
            f"{self._where(example.prompt_id)} has no `solution` (a text, or all messages after the question, the "
            "assistant's first and last); add it, or leave out warm_start"
        )

    def environments(self) -> MakeEnvironment:
        """What makes the environment of one episode."""
        if self._environment is None:
            return lambda: SingleTurn(self.grade)
        made, arguments, limit = self._environment, self._arguments(self._environment), self._settings.turn_limit
        return lambda: TurnLimit(made(**arguments), limit)

    # What the file defines

    def _defined(self, name: str, is_kind: Any) -> Any:
        value = self._file.get(name)
        if value is not None and not is_kind(value):
            raise TaskError(f"{self._file.where()}: `{name}` is a {type(value).__name__}; see docs/environments.md")
        return value

    def _check_methods(self, environment: type) -> None:
        for name, arguments in _METHODS.items():
            method = getattr(environment, name, None)
            if not inspect.iscoroutinefunction(method):
                what = (
                    f"lacks `async def {name}({', '.join(arguments)})`"
                    if method is None
                    else f"has {name} without async"
                )
                raise TaskError(f"{self._file.where(method or environment)}: class Environment {what}")
            self._file.check_parameters(method, arguments)

    def _arguments(self, function: Any) -> dict[str, Any]:
        """What `examples` or the class `Environment` takes of seed, size and params."""
        own = {key: getattr(self._settings, key) for key in _OWN_KEYS}
        return taken(function, {**own, **self._settings.params})

    def _check_params(self) -> None:
        for key in _OWN_KEYS:
            if key in self._settings.params:
                raise TaskError(f"task.params.{key}: write task.{key} instead")
        functions = [self._examples] if self._environment is None else [self._examples, self._environment]
        check_known(self._settings.params, functions, str(self._file.path))
        for function in functions:
            try:
                inspect.signature(function).bind(**self._arguments(function))
            except TypeError as error:
                raise TaskError(
                    f"{self._file.where(function)}: task.params do not fit {function.__name__}: {error}"
                ) from None

    # Its examples

    @cached_property
    def _items(self) -> Any:
        items = self._file.call(self._examples, **self._arguments(self._examples))
        where = self._file.where(self._examples)
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
            raise TaskError(f"{where}: examples returned a {type(items).__name__}; return a list (or a sequence)")
        if len(items) == 0:
            raise TaskError(f"{where}: examples returned none; a task needs at least one")
        return items

    def _item(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {self._file.path} is outside 0..{len(self) - 1}")
        item = self._file.call(lambda: self._items[index])
        if not isinstance(item, Mapping) or not item.keys() <= set(_ITEM_KEYS):
            raise TaskError(f"{self._where(index)} is {item!r:.200}; give a dict with keys of {', '.join(_ITEM_KEYS)}")
        if ("question" in item) == ("messages" in item):
            raise TaskError(f"{self._where(index)} needs either `question` (a text) or `messages` (a list)")
        return item

    def _messages(self, item: Mapping[str, Any], where: str) -> list[Message]:
        if "question" in item:
            if not isinstance(item["question"], str):
                raise TaskError(f"{where}: `question` must be a text, got {item['question']!r:.200}")
            return self._wording.messages(item["question"])
        messages = item["messages"]
        if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
            raise TaskError(f'{where}: `messages` must be a list of {{"role": text, "content": text}}')
        return messages

    def _where(self, index: int) -> str:
        return f"{self._file.where(self._examples)}: example {index}"
