"""Learner speed: forward and backward of packed tokens, ours against transformers (eager torch, SDPA), same model.

    OMP_NUM_THREADS=1 python benchmarks/learner.py [FOLDER] [--dtype float32 bfloat16] [--rounds 3] [--json]

Without a folder the model has random weights and the shape of SmolLM2-135M. Each side has a process of its own, ours
set up as the learner of a run is (kernels.native.keep_memory); they run by turns (A B A B ...) after one warm-up each.
What is timed: 4,096 tokens as 8 sequences of 512, mean negative log-likelihood of every next token, gradients of all
weights; no optimizer step. Both losses are compared, so that a side which computes something else is noticed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerogap.kernels.native import keep_memory
from zerogap.learner.sft import Solution, backward_sft
from zerogap.model.checkpoint import load_decoder

SHAPES = {
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative; the sides round differently


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="Hugging Face folder; default: random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="tiny only shows that the program runs")
    parser.add_argument("--kernels", choices=("aligned", "standard"), default="aligned")
    parser.add_argument("--dtype", nargs="+", choices=tuple(LOSS_TOLERANCE), default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sequence (default 512)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side (default 3)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a markdown table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder) if args.folder else random_model(SHAPES[args.shape], Path(scratch))
        results = [compare(folder, dtype, args) for dtype in args.dtype]
    print(json.dumps({"machine": machine(), "results": results}) if args.json else table(results))


def random_model(shape: dict[str, int], folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    values = {"tie_word_embeddings": True, "max_position_embeddings": 8192, "rope_parameters": rope}
    LlamaForCausalLM(LlamaConfig.from_dict(shape | values)).save_pretrained(folder)
    return folder


def compare(folder: Path, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s of both sides by turns, and the median of the ratios of the rounds."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    sequences = args.tokens // args.sequence
    tokens_BT = torch.randint(vocabulary, (sequences, args.sequence + 1), generator=generator)
    sides = {
        "zerogap": Side(prepare_zerogap, args.threads, folder, dtype, args.kernels, tokens_BT),
        "transformers": Side(prepare_transformers, args.threads, folder, dtype, tokens_BT),
    }
    losses = {name: side.run()[0] for name, side in sides.items()}  # the warm-up
    if abs(losses["zerogap"] / losses["transformers"] - 1) > LOSS_TOLERANCE[dtype]:
        raise SystemExit(f"the sides do not compute the same loss in {dtype}: {losses}")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(args.rounds):
        for name, side in sides.items():
            rates[name].append(sequences * args.sequence / side.run()[1])
            print(f"{dtype} {name} round {round_number + 1}: {rates[name][-1]:,.1f} tokens/s", file=sys.stderr)
    for side in sides.values():
        side.close()
    ratios = [ours / theirs for ours, theirs in zip(rates["zerogap"], rates["transformers"], strict=True)]
    return {
        "dtype": dtype,
        "kernels": args.kernels,
        "tokens": sequences * args.sequence,
        "sequence": args.sequence,
        "threads": args.threads,
        "loss": losses,
        "tokens_per_s": rates,
        "median_tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(ratios),
    }


class Side:
    """One competitor in a process of its own. prepare(*arguments) -> the function to time, which returns the loss."""

    def __init__(self, prepare: Callable[..., Callable[[], float]], threads: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, prepare, threads, arguments), daemon=True)
        self.process.start()

    def run(self) -> tuple[float, float]:
        """(loss, seconds) of one forward and backward."""
        self.connection.send("run")
        loss, seconds = self.connection.recv()
        return loss, seconds

    def close(self) -> None:
        self.connection.send("stop")
        self.process.join()


def serve(
    connection: Any, prepare: Callable[..., Callable[[], float]], threads: int, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    run = prepare(*arguments)
    while connection.recv() == "run":
        began = time.perf_counter()
        loss = run()
        connection.send((loss, time.perf_counter() - began))


def prepare_zerogap(folder: Path, dtype: str, kernels: str, tokens_BT: torch.Tensor) -> Callable[[], float]:
    """Load; returns the function that computes loss and gradients once and returns the loss."""
    keep_memory()
    decoder = load_decoder(folder, kernels, dtype, trainable=True)
    masters = [weight.master for weight in decoder.weights.values() if weight.master is not None]
    solutions = [Solution(tokens, [0] + [1] * (len(tokens) - 1)) for tokens in tokens_BT.tolist()]

    def run() -> float:
        for master in masters:
            master.grad = None
        return backward_sft(decoder, solutions, micro_batch_tokens=tokens_BT.numel())

    return run


def prepare_transformers(folder: Path, dtype: str, tokens_BT: torch.Tensor) -> Callable[[], float]:
    """As prepare_zerogap: a batch of equal lengths, so that SDPA needs no mask."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    ).train()

    def run() -> float:
        model.zero_grad(set_to_none=True)
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        return float(loss.detach())

    return run


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"{machine()}; forward + backward, {results[0]['tokens']:,} packed tokens, {results[0]['threads']} thread(s)",
        "",
        "| dtype | kernels | zerogap tokens/s | transformers tokens/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        ours, theirs = (result["median_tokens_per_s"][name] for name in ("zerogap", "transformers"))
        lines.append(
            f"| {result['dtype']} | {result['kernels']} | {ours:,.1f} | {theirs:,.1f} | {result['ratio']:.2f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """The CPU's name (Linux) or the architecture, and the torch version that both sides use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
