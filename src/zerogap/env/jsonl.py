"""Tasks from a JSON Lines file with `question` and `answer`, graded by math-verify.

`answer` may be the value alone or a worked solution that ends in `#### value` (GSM8K). An optional `solution`
holds the worked solution where `answer` is the value alone.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from math_verify import parse, verify

from zerogap import config
from zerogap.env.task import Example, GradeError, TaskError, Wording

FINAL_ANSWER_MARK = "####"

# math-verify warns once that its own time limits are off. They are off on purpose (see JsonlTask.grade).
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)


@dataclass(frozen=True)
class _Record:
    line: int
    question: str
    answer: str
    steps: str | None


class JsonlTask:
    """See zerogap.env.task.Task. Lines are read and checked when the task is made; blank lines are skipped."""

    def __init__(self, settings: config.Task) -> None:
        assert settings.jsonl is not None
        self._wording = Wording(settings)
        self._path = Path(settings.jsonl).expanduser()
        self._records = _read(self._path)

    def __len__(self) -> int:
        return len(self._records)

    def example(self, index: int) -> Example:
        record = self._records[index]
        return Example(index, self._wording.messages(record.question), record.answer)

    def grade(self, example: Example, text: str) -> float:
        """1.0 if math-verify finds the sampled answer equal to the file's, else 0.0."""
        answer = self._wording.answer(text)
        if answer is None:
            return 0.0
        try:
            # The time limits of math-verify are signal alarms, which fail outside the main thread.
            gold = parse(_as_math(example.payload), parsing_timeout=None, raise_on_error=True)
            found = parse(answer, parsing_timeout=None, raise_on_error=True)
            equal = verify(gold, found, timeout_seconds=None, raise_on_error=True)
        except Exception as error:
            raise GradeError(
                f"math-verify failed on prompt {example.prompt_id}: answer {answer[:200]!r} against "
                f"{example.payload!r}: {type(error).__name__}: {error}"
            ) from error
        if not gold:
            line = self._records[example.prompt_id].line
            raise GradeError(f"{self._path}:{line}: answer {example.payload!r} holds nothing that math-verify can read")
        return float(equal)

    def solution(self, example: Example) -> str:
        record = self._records[example.prompt_id]
        if record.steps is not None:
            worked = f"{record.steps}\n{FINAL_ANSWER_MARK} {record.answer}"
            if self.grade(example, worked) == 1.0:
                return worked
        return self._wording.with_steps(record.steps, record.answer)


def _as_math(answer: str) -> str:
    """The gold answer so that LaTeX without delimiters (`\\frac{1}{2}`) is read as LaTeX."""
    return f"${answer}$" if "\\" in answer and "$" not in answer else answer


def _read(path: Path) -> list[_Record]:
    if not path.is_file():
        raise TaskError(f"task.jsonl {path} does not exist; give a file of lines with `question` and `answer`")
    records = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    records.append(_record(path, number, line))
    except UnicodeDecodeError as error:
        raise TaskError(f"task.jsonl {path} is not UTF-8 text: {error}") from error
    if not records:
        raise TaskError(f"task.jsonl {path} has no lines; it needs at least one with `question` and `answer`")
    return records


def _record(path: Path, number: int, line: str) -> _Record:
    where = f"{path}:{number}"
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise TaskError(f"{where}: a JSON object with `question` and `answer` is needed, got {type(values).__name__}")
    question, answer = _text(where, values, "question"), _text(where, values, "answer")
    steps, mark, final = answer.rpartition(FINAL_ANSWER_MARK)
    if mark:
        answer = final.strip()
        if not answer:
            raise TaskError(f"{where}: field `answer` has nothing after {FINAL_ANSWER_MARK}")
    if "solution" in values:
        steps = _text(where, values, "solution")
    return _Record(number, question, answer, steps.strip() or None)


def _text(where: str, values: dict[str, Any], field: str) -> str:
    if field not in values:
        raise TaskError(f"{where}: field `{field}` is missing (found: {', '.join(map(str, values)) or 'none'})")
    value = values[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TaskError(f"{where}: field `{field}` must be a text or a number, got {value!r}")
    text = str(value).strip()
    if not text:
        raise TaskError(f"{where}: field `{field}` is empty")
    return text
