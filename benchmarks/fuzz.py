"""Not speed: the properties of `tests/properties/` on random cases, until the time is up or one of them fails.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py [--minutes 60] [--seed 0] [--json]
    OMP_NUM_THREADS=1 python benchmarks/fuzz.py --replay SEED

A batch of cases follows from its seed alone: seed, seed + 1, ... A failure prints the seed that repeats it and the
smallest case that still fails, and ends with exit code 1. Minutes are CPU minutes, so the program may be paused
(SIGSTOP, SIGCONT) and may share its machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

sys.path.insert(0, str(Path(__file__).parents[1]))  # the properties are those of the tests

from tests.properties.attention import attention_cases, check_attention
from tests.properties.decoders import check_decoder, check_gradients, decoder_cases, gradient_cases
from tests.properties.engines import check_engine, check_training, engine_cases, training_cases
from tests.properties.rows import check_rows, row_cases

# name -> (cases, check, share of the batches)
PROPERTIES: dict[str, tuple[SearchStrategy[Any], Callable[[Any], int], int]] = {
    "rows": (row_cases(), check_rows, 4),
    "attention": (attention_cases(), check_attention, 2),
    "decoder": (decoder_cases, check_decoder, 3),
    "gradients": (gradient_cases(), check_gradients, 2),
    "engine": (engine_cases, check_engine, 3),
    "training": (training_cases, check_training, 2),
}
CASES = 20  # of one batch
BATCH = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


class Tally:
    """cases and values compared, by property, with the CPU seconds they took. report: prints them once a minute."""

    def __init__(self) -> None:
        self.cases: Counter[str] = Counter()
        self.values: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._reported = time.process_time()

    def add(self, name: str, values: int, seconds: float) -> None:
        self.cases[name] += 1
        self.values[name] += values
        self.seconds[name] += seconds
        if time.process_time() - self._reported >= 60:
            self._reported = time.process_time()
            counts = ", ".join(f"{name} {count:,}" for name, count in self.cases.items())
            print(f"{self._reported / 60:.0f} CPU minutes: {counts}", file=sys.stderr, flush=True)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "property": name,
                "cases": self.cases[name],
                "values compared": self.values[name],
                "CPU seconds": round(self.seconds[name], 1),
            }
            for name in PROPERTIES
            if self.cases[name]
        ]


def batch(number: int, tally: Tally) -> None:
    """The cases of seed `number`. Raises what the smallest failing case raises."""
    names = list(PROPERTIES)
    (name,) = random.Random(number).choices(names, [PROPERTIES[n][2] for n in names])
    cases, check, _ = PROPERTIES[name]
    failed = False

    @seed(number)
    @BATCH
    @given(case=cases)
    def run(case: Any) -> None:
        nonlocal failed
        started = time.process_time()
        try:
            values = check(case)
        except Exception:
            if not failed:
                print(f"{name} FAILED; repeat it with --replay {number}. Shrinking ...", file=sys.stderr, flush=True)
            failed = True
            raise
        if not failed:
            tally.add(name, values, time.process_time() - started)

    run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="CPU minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first batch")
    parser.add_argument("--replay", type=int, metavar="SEED", help="only the batch of this seed")
    parser.add_argument("--json", action="store_true", help="JSON instead of a markdown table")
    args = parser.parse_args()
    tally, failed = Tally(), False
    first = args.seed if args.replay is None else args.replay
    number = first
    while number == first or (args.replay is None and time.process_time() < 60 * args.minutes):
        try:
            batch(number, tally)
        except Exception:
            traceback.print_exc()
            failed = True
            break
        number += 1
    rows = tally.rows()
    if args.json:
        outcome = {"first_seed": first, "batches": number - first, "failed_seed": number if failed else None}
        print(json.dumps(outcome | {"properties": rows}, indent=2))
    else:
        columns = ("property", "cases", "values compared", "CPU seconds")
        print("| " + " | ".join(columns) + " |")
        print("|" + "---|" * len(columns))
        for row in rows:
            print("| " + " | ".join(f"{row[c]:,}" if c != "property" else row[c] for c in columns) + " |")
        print(f"\nseeds {first} to {number}: " + (f"seed {number} failed" if failed else "no value differed"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
