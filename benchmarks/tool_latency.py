"""Slow tools beside quick ones: sampled tokens/s of a whole asynchronous run, with and without a latency.

    python benchmarks/tool_latency.py [--delay 1.0] [--lag 32] [--updates 120] [--rounds 2]

Episodes of two turns on a small model with random weights; the tool of every second prompt takes --delay seconds. The
same run with and without it in turn (A B A B); medians of the rate after the first lag + 2 updates.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from zerogap.config import parse_recipe
from zerogap.runtime.records import read_metrics
from zerogap.runtime.train import train

ENVIRONMENT = """
import asyncio
from zerogap.env.environment import Step

def examples(seed, size):
    return [{"question": f"{i} + {i}", "payload": i, "solution": str(2 * i)} for i in range(size)]

class Environment:
    def __init__(self, delay):
        self.delay = delay

    async def reset(self, example):
        self.slow, self.turns = example.payload % 2 == 1, 0
        return example.messages

    async def step(self, action):
        self.turns += 1
        if self.turns == 2:
            return Step([], float(len(action) % 2), True, False, {})
        await asyncio.sleep(self.delay if self.slow else 0.0)
        return Step([{"role": "tool", "content": "1 + 1"}], 0.0, False, False, {})

    async def close(self):
        pass
"""


def recipe(folder: Path, delay: float, lag: int, updates: int) -> Any:
    (folder / "latency.py").write_text(ENVIRONMENT)
    size = {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return parse_recipe(
        {
            "name": "latency",
            "model": {"create": {**size, "max_position_embeddings": 128}},
            "task": {"file": str(folder / "latency.py"), "params": {"delay": delay}, "size": 1000},
            # Random weights seldom end a turn by themselves; digits do it soon.
            "rollout": {"group_size": 8, "max_new_tokens": 24, "max_running": 64, "stop": ["7", "8", "9"]},
            "learner": {"learning_rate": 1e-5},
            "train": {"updates": updates, "groups_per_update": 8, "lag": lag, "min_ess": 0.0},
            "logging": {"tensorboard": False, "trajectories_mb": 0},
            "audit": {"share": 0.05},
        }
    )


def tokens_per_s(folder: Path, name: str, delay: float, lag: int, updates: int) -> tuple[float, float]:
    """(trained tokens/s, seconds per update in which an engine had nothing to sample) once the pipeline is full."""
    train(recipe(folder, delay, lag, updates), folder / name)
    lines = read_metrics(folder / name)[lag + 2 :]
    seconds = sum(line["time/step_s"] for line in lines)
    idle = sum(line.get("wait/environment_s", 0.0) for line in lines) / len(lines)
    return sum(line["tokens/trained"] for line in lines) / seconds, idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=1.0, help="seconds (default 1)")
    parser.add_argument("--lag", type=int, default=32, help="train.lag (default 32)")
    parser.add_argument("--updates", type=int, default=120, help="of each run (default 120)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default 2)")
    args = parser.parse_args()
    rates: dict[float, list[float]] = {0.0: [], args.delay: []}
    print("| latency of every second tool call | tokens/s, each round | engine idle, s per update |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for delay in rates:
                rate, idle = tokens_per_s(Path(temporary), f"run-{number}-{delay:g}", delay, args.lag, args.updates)
                rates[delay].append(rate)
                print(f"| {delay:g} s | {rate:,.0f} | {idle:.3f} |", flush=True)
    ratio = statistics.median(rates[args.delay]) / statistics.median(rates[0.0])
    print(f"\nmedian with latency / without: {ratio:.2f}")


if __name__ == "__main__":
    main()
