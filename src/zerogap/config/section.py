"""The base of every section of the recipe: strict, frozen, no unknown key."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _exponent_form(cls, values: Any) -> Any:
        """YAML 1.1 reads 3e-4 as text; where a number belongs, it means one."""
        if not isinstance(values, dict):
            return values
        numbers = {name for name, field in cls.model_fields.items() if field.annotation is float}
        return {key: _as_number(value) if key in numbers else value for key, value in values.items()}


def _as_number(value: Any) -> Any:
    """The number that a text in exponent form spells (3e-4); anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value):
        return float(value)
    return value
