"""Worked steps for reasoning-gym datasets whose answer follows by a short derivation: text for a warm start.

Each derivation is checked against the dataset's answer; where it does not end there, no steps are given.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

_NUMBER = r"-?\d+(?:\.\d+)?"
_INNERMOST = re.compile(r"\(([^()]*)\)")
_TERM = re.compile(rf"({_NUMBER})\s*([*/])\s*({_NUMBER})")
_SUM = re.compile(rf"({_NUMBER})\s*([+-])\s*({_NUMBER})")


def derive(name: str, entry: dict[str, Any], answer: str) -> str | None:
    """Steps that end in `= answer`, one a line; None where no derivation of this dataset is known or it fails.

    entry: the dataset's item (`question`, `answer`, `metadata`).
    """
    metadata = entry["metadata"]
    if name in ("chain_sum", "decimal_chain_sum", "basic_arithmetic", "products"):
        steps = _reduce(metadata["expression"])
    elif name == "gcd" and len(metadata["numbers"]) == 2:
        steps = _euclid(*metadata["numbers"])
    else:
        return None
    return steps if steps is not None and _ends_in(steps, answer) else None


def _ends_in(steps: str, answer: str) -> bool:
    return steps.rpartition("= ")[2] == answer


def _reduce(expression: str) -> str | None:
    """One line per operation, in the order of precedence, with the value found: `2 + 3 = 5`."""
    lines = []
    while True:
        bracket = _INNERMOST.search(expression)
        start, part = (bracket.start(1), bracket.group(1)) if bracket else (0, expression)
        operation = _TERM.search(part) or _SUM.search(part)
        if operation is None:
            if bracket is None:
                break
            expression = expression[: bracket.start()] + part.strip() + expression[bracket.end() :]
            continue
        value = _apply(*operation.groups())
        if value is None:
            return None
        lines.append(f"{' '.join(operation.groups())} = {value}")
        expression = expression[: start + operation.start()] + value + expression[start + operation.end() :]
    return "\n".join(lines) or None


def _apply(left: str, operator: str, right: str) -> str | None:
    a, b = Decimal(left), Decimal(right)
    try:
        value = {"+": a + b, "-": a - b, "*": a * b}.get(operator)
        if value is None:
            value = (a / b).quantize(Decimal(1), ROUND_HALF_UP)
            if value * b != a:
                return None  # not an exact quotient: the rest would be rounding, not a derivation
    except InvalidOperation:
        return None
    return format(value, "f")


def _euclid(a: int, b: int) -> str:
    lines = []
    while b:
        lines.append(f"{a} mod {b} = {a % b}")
        a, b = b, a % b
    return "\n".join([*lines, f"gcd = {a}"])
