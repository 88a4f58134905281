"""The bits bar: every sampled token scored again by the learner on the weights of its own version, compared as bits.

    OMP_NUM_THREADS=1 python benchmarks/bits.py {tiny,smollm2} [--dtype float32 bfloat16] [--lag 0 8 64] [--tokens N]

A real run of the recipe on the inline driver, made hard on purpose: all groups audited, KV pages so few that samples
are preempted, prefill cut into small chunks, prompts shared by their group, random batch make-up, and engines that stay
a full window ahead of the learner, with weights swapped in the middle of trajectories (so at lag L > 0 tokens are L and
L - 1 updates old when they are trained). It ends after `--tokens` checked tokens. The table says how often each of
these really happened, how large LAG was, and the largest KERNEL, which is 0; exit code 1 if any bit differs, if the
weights did not move, or if the lag was never reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from zerogap.config import Recipe, load_recipe
from zerogap.runtime.backend import FinishedGroup, RunSetup
from zerogap.runtime.inline import InlineBackend, build_inline_backend
from zerogap.runtime.living import Living
from zerogap.runtime.train import train
from zerogap.trajectory import NOT_SAMPLED

RECIPES = Path(__file__).parents[1] / "recipes"
HARD = [
    "audit.share=1",
    "audit.on_unequal=warn",
    "rollout.page_size=8",
    "rollout.max_batched_tokens=48",
    "train.updates=1000",
    "checkpoint.every=0",
    "logging.tensorboard=false",
]
OVERRIDES = {
    "tiny": ["rollout.max_running=48"],
    # Long answers and rewards that differ (text that contains the answer earns a part): weights really move.
    "smollm2": [
        "warm_start=null",
        "task.system_prompt=Explain every step at length.",
        "rollout.max_new_tokens=64",
        "rollout.max_running=12",
        "rollout.group_size=4",
        "train.groups_per_update=4",
    ],
}

CACHE_MB = {"tiny": 0.66, "smollm2": 29.5}  # in fp32: 320 and 640 tokens, far less than the samples ask for


class Enough(Exception):
    """The wanted number of tokens has been checked."""


class CountingBackend(InlineBackend):
    """Keeps the engine ahead, counts what the audit found and stops the run once `wanted` tokens are checked."""

    def __init__(self, setup: RunSetup, wanted: int) -> None:
        plain = build_inline_backend(setup)
        super().__init__(plain.workers, plain.learner, engine_steps_per_update=6)
        self.wanted = wanted
        self.engine = plain.workers[0].engine
        self.first_digest = plain.learner.decoder.digest()
        self.checked = self.unequal = self.updates = self.spanning = 0
        self.lines: list[dict[str, Any]] = []

    def train(self, groups: list[FinishedGroup], living: Living) -> None:
        # All but the newest batch of groups are finished; that one is cut by the update (see engine_steps_per_update).
        while len({group for group, _ in self.engine.pending()}) > self.learner.setup.recipe.train.groups_per_update:
            self._step_all()
        samples = [trajectory for group in groups for trajectory in group.trajectories]
        self.spanning += sum(len(set(t.versions) - {NOT_SAMPLED}) > 1 for t in samples)
        super().train(groups, living)
        assert self._update is not None
        self.lines.append(self._update.metrics)
        self.checked += self._update.metrics["bitwise/checked"]
        self.unequal += self._update.metrics["bitwise/unequal"]
        self.updates += 1
        print(f"update {self.updates}: {self.checked - self.unequal:,}/{self.checked:,}", file=sys.stderr, flush=True)
        if self.checked >= self.wanted and self.updates > 3 + self.learner.setup.recipe.train.lag:
            raise Enough


def measure(recipe: Recipe, tokens: int) -> dict[str, Any]:
    kept: list[CountingBackend] = []

    def build(setup: RunSetup) -> CountingBackend:
        kept.append(CountingBackend(setup, tokens))
        return kept[0]

    with tempfile.TemporaryDirectory() as folder, suppress(Enough):
        train(recipe, Path(folder) / "run", build_backend=build)
    backend = kept[0]
    engine = backend.engine.stats()
    return {
        "dtype": recipe.model.dtype,
        "lag": recipe.train.lag,
        "updates": backend.updates,
        "checked": backend.checked,
        "unequal": backend.unequal,
        "preemptions": engine["preemptions"],
        "prefix forks": engine["prefix_forks"],
        "samples over several versions": backend.spanning,
        "largest lag": int(max(line["lag/max"] for line in backend.lines)),
        "mean abs LAG": f"{backend.lines[-1]['gap/lag/abs_mean']:.1e}",
        "largest abs KERNEL": max(line["gap/kernel/max"] for line in backend.lines),
        "versions kept": int(max(line["weight_store/versions"] for line in backend.lines)),
        "weights moved": backend.learner.decoder.digest() != backend.first_digest,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(OVERRIDES))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--lag", nargs="+", type=int, default=[0, 8, 64])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="JSON instead of a markdown table")
    args = parser.parse_args()
    rows = []
    for dtype in args.dtype:
        for lag in args.lag:
            cache = f"rollout.kv_cache_mb={CACHE_MB[args.model] / (1 if dtype == 'float32' else 2)}"
            overrides = [*HARD, *OVERRIDES[args.model], cache, f"model.dtype={dtype}", f"train.lag={lag}"]
            recipe = load_recipe(RECIPES / f"{args.model}.yaml", overrides)
            rows.append({"model": args.model} | measure(recipe, args.tokens))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print("| " + " | ".join(rows[0]) + " |")
        print("|" + "---|" * len(rows[0]))
        for row in rows:
            print("| " + " | ".join(str(value) for value in row.values()) + " |")
    return int(any(row["unequal"] or not row["weights moved"] or row["largest lag"] < row["lag"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
