"""The growth of `zerogap bench context`, on times that are given."""

from __future__ import annotations

import pytest

from zerogap.bench.context import with_growth


def test_growth_is_that_of_one_doubling() -> None:
    """From 1,000 to 4,000 tokens the context doubles twice."""
    times = {"decode": {1000: 1.0, 4000: 2.25, 8000: 4.5}, "prefill": {1000: 0.5, 4000: 8.0, 8000: 24.0}}
    rows = [
        {"program": program, "context": context, "seconds": seconds}
        for program, several in times.items()
        for context, seconds in several.items()
    ]
    found = with_growth(rows)
    assert [(row["program"], row["context"]) for row in found] == [
        (program, context) for program in ("prefill", "decode") for context in (1000, 4000, 8000)
    ]
    assert [row["growth"] for row in found if "growth" in row] == pytest.approx([4.0, 3.0, 1.5, 2.0])
    assert [row.get("bar") for row in found] == [None, "<= 4.00", "<= 4.00", None, "<= 2.00", "<= 2.00"]
