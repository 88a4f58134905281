"""Rollout speed: the embedded engine against transformers.generate with a static batch, same model, same prompts.

    OMP_NUM_THREADS=1 python benchmarks/rollout.py FOLDER [--samples 1] [--dtype float32 bfloat16] [--json]

Each measurement runs in its own process, ours and theirs by turns (A B A B ...), so that neither inherits the other's
memory or clock. --samples 8 asks for groups, as RL does: 4 prompts, each sampled 8 times. What is timed: prompts in,
32 x 128 new tokens out, sampled at temperature 1 from the whole distribution, end of sequence ignored on both sides.
Loading is not timed; one short warm-up is made before.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REQUESTS = 32
NEW_TOKENS = 128
SUBJECTS = ("a man and his dog", "the sea at night", "how bread is made", "a very small town")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder, for example what `zerogap model fetch smollm2-135m` prints")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--samples", type=int, default=1, help="requests that share a prompt (default 1: none do)")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side (default 3)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a markdown table")
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)  # what a child process measures
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps({"seconds": measure(args.one, args)}))
        return
    results = [compare(dtype, args) for dtype in args.dtype]
    print(json.dumps({"machine": _machine(), "results": results}) if args.json else _table(results, args))


def compare(dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median tokens/s of both sides and their ratio."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_number in range(args.rounds):
        for side in SIDES:
            seconds = _measure_in_child(side, dtype, args)
            rates[side].append(args.requests * args.new_tokens / seconds)
            print(f"{dtype} {side} round {round_number + 1}: {rates[side][-1]:,.1f} tokens/s", file=sys.stderr)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "dtype": dtype,
        "requests": args.requests,
        "samples": args.samples,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "tokens_per_s": rates,
        "median_tokens_per_s": medians,
        "ratio": medians["zerogap"] / medians["transformers"],
    }


def measure(side: str, args: argparse.Namespace) -> float:
    """Seconds for all requests, in this process."""
    import torch

    torch.set_num_threads(args.threads)
    generate = SIDES[side](args)
    generate(2)
    began = time.perf_counter()
    sampled = generate(args.new_tokens)
    seconds = time.perf_counter() - began
    if sampled != args.requests * args.new_tokens:
        raise SystemExit(f"{side} sampled {sampled} tokens, not {args.requests} x {args.new_tokens}")
    return seconds


def prepare_zerogap(args: argparse.Namespace) -> Callable[[int], int]:
    """Load; returns the function that samples that many tokens for each request and counts them."""
    from zerogap.model.chat import load_tokenizer
    from zerogap.model.checkpoint import load_decoder
    from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
    from zerogap.trajectory import GroupRequest, SamplingParams

    decoder = load_decoder(args.model, "aligned", args.dtype[0])
    decoder.eos_token_ids = ()  # as transformers' min_new_tokens: every request runs to its full length
    prompts = _prompt_ids(load_tokenizer(args.model), args.requests // args.samples)
    config = EngineConfig(max_running=args.requests, max_context=max(map(len, prompts)) + args.new_tokens)
    engine = EmbeddedEngine(decoder, None, config)

    def generate(new_tokens: int) -> int:
        for index, ids in enumerate(prompts):
            sampling = SamplingParams(max_new_tokens=new_tokens)
            engine.submit(GroupRequest(index, index, tuple(ids), args.samples, sampling))
        sampled = 0
        while engine.has_work():
            sampled += sum(trajectory.num_sampled for trajectory in engine.step())
        return sampled

    return generate


def prepare_transformers(args: argparse.Namespace) -> Callable[[int], int]:
    """As prepare_zerogap: a static, left-padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    from zerogap.model.chat import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    dtype = getattr(torch, args.dtype[0])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, local_files_only=True).eval()
    prompts = [ids for ids in _prompt_ids(tokenizer, args.requests // args.samples) for _ in range(args.samples)]
    longest = max(map(len, prompts))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokens_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])

    def generate(new_tokens: int) -> int:
        with torch.inference_mode():
            output_BT = model.generate(
                input_ids=tokens_BT,
                attention_mask=mask_BT,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=pad,
            )
        return int(output_BT[:, longest:].numel())

    return generate


SIDES = {"zerogap": prepare_zerogap, "transformers": prepare_transformers}


def _prompt_ids(tokenizer: Any, requests: int) -> list[list[int]]:
    """Prompts of slightly different lengths, the same on both sides."""
    from zerogap.model.chat import render_prompt

    texts = [f"Write {index + 1} sentences about {SUBJECTS[index % len(SUBJECTS)]}." for index in range(requests)]
    return [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def _measure_in_child(side: str, dtype: str, args: argparse.Namespace) -> float:
    options = ["--requests", args.requests, "--samples", args.samples, "--threads", args.threads]
    options += ["--new-tokens", args.new_tokens]
    command = [sys.executable, __file__, args.model, "--one", side, "--dtype", dtype, *map(str, options)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(answer.stdout.splitlines()[-1])["seconds"])


def _table(results: list[dict[str, Any]], args: argparse.Namespace) -> str:
    groups = f" ({args.samples} of each prompt)" if args.samples > 1 else ""
    setting = f"{args.requests} requests{groups} x {args.new_tokens} new tokens, {args.threads} thread(s)"
    lines = [
        f"{_machine()}; {setting}, median of {args.rounds}",
        "",
        "| dtype | zerogap tokens/s | transformers.generate tokens/s | ratio |",
        "|---|---|---|---|",
    ]
    for result in results:
        medians = result["median_tokens_per_s"]
        ours, theirs = medians["zerogap"], medians["transformers"]
        lines.append(f"| {result['dtype']} | {ours:,.0f} | {theirs:,.0f} | {result['ratio']:.2f} |")
    return "\n".join(lines)


def _machine() -> str:
    """The CPU's name (Linux) or the architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    main()
