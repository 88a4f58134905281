"""Recipes read from YAML with overrides, checked, and written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from zerogap.config.explain import explain
from zerogap.config.recipe import Recipe


class RecipeError(ValueError):
    """A recipe that cannot run; the message names each key, its value and the fix."""


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and apply dotted overrides (`learner.learning_rate=3e-4`).

    Raises RecipeError with one message that lists every violation.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"recipe {path} does not exist; see the recipes/ folder for examples")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {path} must be a mapping of sections, got {type(values).__name__}")
    for override in overrides or []:
        _apply_override(values, override)
    return parse_recipe(values, source=str(path))


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a mapping against the typed recipe; RecipeError lists all violations."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        lines = [explain(e) for e in error.errors()]
        raise RecipeError(f"{source}: {len(lines)} problem(s)\n" + "\n".join(f"  - {line}" for line in lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {override!r} must have the form section.key=value")
    node = values
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"override {override!r}: {parent} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: the value is not valid YAML: {error}") from error
