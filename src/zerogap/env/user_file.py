"""A Python file of the user: importing it and calling what it defines, with errors that name its lines."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from zerogap.env.task import TaskError

T = TypeVar("T")


class UserFile:
    """The file of task.file, imported. Its folder is put on sys.path, so that it may import what lies beside it.

    Raises TaskError where there is no such file, and where importing it fails.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_file():
            raise TaskError(f"task.file {path} does not exist; give a Python file (docs/environments.md)")
        if str(self.path.parent) not in sys.path:
            sys.path.append(str(self.path.parent))
        self._module = self.call(self._import)

    def _import(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"zerogap_task_{self.path.stem}", self.path)
        if spec is None or spec.loader is None:
            raise TaskError(f"task.file {self.path} is not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    def get(self, name: str) -> Any:
        """What the file calls `name`; None where it has nothing of that name."""
        return getattr(self._module, name, None)

    def where(self, of: Any = None) -> str:
        """The file, with the line that defines a function or class of it."""
        try:
            return f"task.file {self.path}:{inspect.getsourcelines(of)[1]}"
        except (OSError, TypeError):
            return f"task.file {self.path}"

    def call(self, function: Callable[..., T], **named: Any) -> T:
        """Run code of the file. What it raises becomes a TaskError with the line of the file that led to it."""
        try:
            return function(**named)
        except TaskError:
            raise
        except SyntaxError as error:
            raise TaskError(f"task.file {error.filename}:{error.lineno}: {error.msg}") from error
        except Exception as error:
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(self.path)]
            where = f"task.file {self.path}" + (f":{lines[-1]}" if lines else "")
            hint = "; install it where zerogap runs" if isinstance(error, ModuleNotFoundError) else ""
            raise TaskError(f"{where}: {type(error).__name__}: {error}{hint}") from error

    def check_parameters(self, function: Callable[..., Any], names: tuple[str, ...]) -> None:
        """TaskError unless a function or method takes these arguments by position."""
        try:
            inspect.signature(function).bind(*names)
        except TypeError as error:
            shown = f"{function.__qualname__}({', '.join(names)})"
            raise TaskError(f"{self.where(function)}: it must take {shown}: {error}") from None


def parameters(function: Callable[..., Any]) -> set[str] | None:
    """Names that a function takes by keyword; None: any (it has **)."""
    found = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def taken(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that the function takes."""
    names = parameters(function)
    return {key: value for key, value in values.items() if names is None or key in names}


def check_known(given: dict[str, Any], functions: list[Callable[..., Any]], where: str) -> None:
    """TaskError for a parameter that none of the functions takes; the message names the nearest."""
    known: set[str] = set()
    for function in functions:
        names = parameters(function)
        if names is None:
            return
        known |= names
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TaskError(
                f"task.params.{key}: {where} has no such parameter; {hint}known: {', '.join(sorted(known)) or 'none'}"
            )
