"""What pydantic found wrong, in words that name the key, its value and the fix."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

from zerogap.config.learner import Learner
from zerogap.config.recipe import Recipe

ADAPTER_WORDS = ("lora", "adapter", "peft")
REFUSED_SAMPLING_KEYS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def explain(error: Any) -> str:
    """One line for one entry of ValidationError.errors() of a Recipe."""
    location = [str(part) for part in error["loc"]]
    if location[:2] == ["learner", "objective"]:
        del location[2:3]  # pydantic puts the objective's name between the section and its key
    key = ".".join(location) or "recipe"
    if location[:-1] == ["rollout"] and location[-1] in REFUSED_SAMPLING_KEYS:
        return (
            f"{key}: refused in training: it changes the distribution that tokens are drawn from, so the ratio would "
            "carry the kept probability mass; remove the key (temperature is supported)"
        )
    if error["type"] == "extra_forbidden":
        if any(word in location[-1].lower() for word in ADAPTER_WORDS):
            return (
                f"{key}: adapters (LoRA) are not supported: all weights are trained, and all are delivered to the "
                "engines; merge the adapter into its base model, give that as model.path, and remove the key"
            )
        known = _known_keys([str(part) for part in error["loc"][:-1]])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{key}: required, but missing"
    if error["type"] == "union_tag_not_found":
        return f"{key}: name is required, one of {', '.join(_sections(Learner, 'objective'))}"
    if error["type"] == "union_tag_invalid":
        return f"{key}.name: {error['ctx']['tag']!r} is none of {', '.join(_sections(Learner, 'objective'))}"
    message = error["msg"].removeprefix("Value error, ")
    own = error["type"] == "value_error"  # written above, with the value in it
    return f"{key}: {message}" + ("" if own else f" (got {error.get('input')!r})")


def _known_keys(location: list[str]) -> list[str]:
    """Keys of the section at a location as pydantic writes it: with the name of a section among several."""
    model: Any = Recipe
    parts = iter(location)
    for part in parts:
        sections = _sections(model, part)
        model = next(iter(sections.values())) if len(sections) == 1 else sections[next(parts)]
    return list(model.model_fields)


def _sections(model: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """The sections that a key may hold, by their `name` where there are several."""
    annotation = model.model_fields[key].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    if len(sections) == 1:
        return {key: sections[0]}
    return {section.model_fields["name"].annotation.__args__[0]: section for section in sections}  # type: ignore[union-attr]
