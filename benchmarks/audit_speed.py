"""How long an audit takes: `zerogap audit` of N rollouts of T sampled tokens, timed from outside.

    python benchmarks/audit_speed.py [--model DIR] [--dtype float32 bfloat16] [--rollouts 1000] [--tokens 256]

Rollouts come in groups of 8 behind one prompt of 32 tokens. Their tokens are random and their log-probabilities wrong,
so every token differs and every cause is tried: the longest that an audit of one model can take. Without --model it
is SmolLM2-135M (fetched into the cache). Processor seconds per thread say more than seconds where other work runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from zerogap.model.checkpoint import read_json
from zerogap.model.fetch import fetch_model

GROUP, PROMPT = 8, 32


def write_rollouts(path: Path, vocab: int, rollouts: int, tokens: int) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for index in range(rollouts):
            if index % GROUP == 0:
                prompt = draw.choices(range(vocab), k=PROMPT)
            record = {
                "token_ids": prompt + draw.choices(range(vocab), k=tokens),
                "loss_mask": [0] * PROMPT + [1] * tokens,
                "logprobs": [0.0] * PROMPT + [-1.0] * tokens,
                "group_id": index // GROUP,
                "finish_reason": "length",
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    model = args.model or fetch_model("smollm2-135m")
    vocab = read_json(model, "config.json")["vocab_size"]
    print("| model | dtype | rollouts | sampled tokens | threads | s | processor s / threads |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        write_rollouts(path, vocab, args.rollouts, args.tokens)
        for dtype in args.dtype:
            command = [sys.executable, "-m", "zerogap.cli", "audit", path, "--model", model, "--dtype", dtype, "--json"]
            started = time.perf_counter()
            process = subprocess.Popen([*map(str, command), "--threads", str(args.threads)], stdout=subprocess.PIPE)
            assert process.stdout is not None
            answer = json.loads(process.stdout.read())
            _, _, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - started
            spent = (usage.ru_utime + usage.ru_stime) / args.threads
            cells = (model.name, dtype, answer["rollouts"], answer["checked"], args.threads)
            print(f"| {' | '.join(map(str, cells))} | {seconds:.0f} | {spent:.0f} |")


if __name__ == "__main__":
    main()
