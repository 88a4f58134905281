"""The file of an evaluation, one JSON object a line: its settings first, then each finished prompt. Resumable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from zerogap.runtime.evaluation.figures import Answer, PromptResult


class ResultsFileError(ValueError):
    """A file that cannot be written to, or not be gone on with; the message names the key or line, and the fix."""


class ResultsFile:
    """Open for appending; every result is on disk as a whole line before the next. A context manager.

    settings: all that the answers follow from; plain values. resume: go on with the file, whose settings must be these;
    `done` then holds its results. A torn last line (a write that was interrupted) is dropped.
    Raises ResultsFileError, the file untouched.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self.done: list[PromptResult] = []
        if path.exists() and not resume:
            raise ResultsFileError(f"--output {path} exists; add --resume to go on with it, or give another file")
        if resume and not path.is_file():
            raise ResultsFileError(f"--resume: {path} does not exist; leave --resume out to begin it")
        written = path.read_bytes() if resume else b""
        whole = written[: written.rfind(b"\n") + 1]
        lines = [_parse(path, number, line) for number, line in enumerate(whole.splitlines(), start=1)]
        if lines:
            _compare(path, lines[0], json.loads(json.dumps(settings)))
            self.done = [_result(path, number, line) for number, line in enumerate(lines[1:], start=2)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
        except OSError as error:
            raise ResultsFileError(f"--output {path} cannot be written: {error}") from error
        self._file.truncate(len(whole))
        if not lines:
            self._write({"settings": settings})

    def add(self, result: PromptResult) -> None:
        self._write(asdict(result))

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, value: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ResultsFileError(
            f"{path}:{number}: not a line of an evaluation ({error}); give another --output"
        ) from None
    if not isinstance(values, dict):
        raise ResultsFileError(f"{path}:{number}: not a line of an evaluation; give another --output")
    return values


def _compare(path: Path, header: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """All must be equal; the first difference is named."""
    before = header.get("settings")
    if not isinstance(before, dict):
        raise ResultsFileError(f"{path}:1: no settings of an evaluation; give another --output")
    for key in [*settings, *sorted(before.keys() - settings.keys())]:
        if before.get(key) != settings.get(key):
            raise ResultsFileError(
                f"--resume: {path} was begun with {key} {before.get(key)!r}, now it is {settings.get(key)!r}; an "
                "evaluation cannot mix them: repeat the first command, or give another --output"
            )


def _result(path: Path, number: int, line: dict[str, Any]) -> PromptResult:
    try:
        return PromptResult(line["prompt_id"], line["version"], [Answer(**answer) for answer in line["answers"]])
    except (KeyError, TypeError) as error:
        raise ResultsFileError(f"{path}:{number}: not a prompt's result ({error}); give another --output") from None
