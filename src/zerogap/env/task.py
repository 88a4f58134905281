"""What a task is: numbered examples to ask, a grader, worked solutions for a warm start. And the door to all of them.

A task never sees tokens: it hands out chat messages and gets the sampled text back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from zerogap import config
from zerogap.trajectory import Message


class TaskError(ValueError):
    """A task that cannot be made from the recipe; the message names the key or the line, the value and the fix."""


class GradeError(RuntimeError):
    """The grader itself failed. Never a reward of 0: that would train the policy on a fault of ours."""


@dataclass(frozen=True)
class Example:
    """One prompt.

    prompt_id: its index in the task.
    messages: the opening messages, the question last.
    payload: whatever the grader needs (picklable, it may be graded in another process).
    """

    prompt_id: int
    messages: list[Message]
    payload: Any


Grade = Callable[[Example, str], float]  # a task's `grade`


class Task(Protocol):
    """Numbered prompts with a grader. `example(i)` is a pure function of the recipe's task section and i."""

    def __len__(self) -> int: ...

    def example(self, index: int) -> Example:
        """Prompt `index`, 0 <= index < len(task)."""
        ...

    def grade(self, example: Example, text: str) -> float:
        """Reward of the sampled text, usually in [0, 1]. Raises GradeError when the grader fails."""
        ...

    def solution(self, example: Example) -> str | list[Message]:
        """A text that this task's grader gives 1.0, with steps where the task can derive them; or of several turns all
        messages after the question, from the policy's first to its last.

        Raises TaskError where no solution is known.
        """
        ...


def make_task(settings: config.Task) -> Task:
    """The task of a recipe. Raises TaskError for an unknown name or parameter, or a file that does not fit."""
    # Imported here, so that a JSONL run does not load reasoning-gym, nor the other sympy and math-verify.
    if settings.jsonl is not None:
        from zerogap.env.jsonl import JsonlTask

        return JsonlTask(settings)
    if settings.file is not None:
        from zerogap.env.file_task import FileTask

        task = FileTask(settings)
        task.example(0)  # runs the file's `examples` once: what is wrong with them is said now
        return task
    if settings.verifiers is not None:
        from zerogap.env.verifiers_task import VerifiersTask

        return VerifiersTask(settings)
    from zerogap.env.reasoning import ReasoningTask

    return ReasoningTask(settings)


class Wording:
    """How questions are put and answers are found in the sampled text: the keys of the recipe that tasks share."""

    def __init__(self, settings: config.Task) -> None:
        self._system_prompt = settings.system_prompt
        self._instruction = settings.instruction
        self._pattern: re.Pattern[str] | None = None
        if settings.answer_pattern is not None:
            try:
                self._pattern = re.compile(settings.answer_pattern)
            except re.error as error:
                raise TaskError(f"task.answer_pattern {settings.answer_pattern!r} is not a pattern: {error}") from error
            if self._pattern.groups < 1:
                raise TaskError(
                    f"task.answer_pattern {settings.answer_pattern!r} has no group; put ( ) around the answer"
                )

    def messages(self, question: str) -> list[Message]:
        content = question if self._instruction is None else f"{question}\n{self._instruction}"
        system = [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]
        return [*system, {"role": "user", "content": content}]

    def answer(self, text: str) -> str | None:
        """The part of a sampled text that is graded, stripped: first group of the last match of answer_pattern, or
        the whole text without a pattern. None where the pattern does not match: the policy gave no answer."""
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        return (matches[-1].group(1) or "").strip()

    def with_steps(self, steps: str | None, answer: str) -> str:
        """A solution in which `answer()` finds exactly `answer`, after the steps where a pattern allows any.

        Raises TaskError when none of the usual ways to state an answer fits the pattern.
        """
        if self._pattern is None:
            return answer
        before = [] if steps is None else [steps, *(f"{steps}\n{stated}" for stated in _STATED)]
        forms = [form.replace("{}", answer) for form in [*before, *_STATED]]
        for form in forms:
            if self.answer(form) == answer.strip():
                return form
        raise TaskError(
            f"no worked solution fits task.answer_pattern {self._pattern.pattern!r} for the answer {answer!r}; "
            f"make the pattern match one of {', '.join(repr(s) for s in _STATED)}, or leave out warm_start"
        )


_STATED = ("#### {}", "<answer>{}</answer>", "\\boxed{{}}", "Answer: {}", "The answer is {}", "= {}", "{}")
