"""`zerogap bench learner`: forward and backward of packed tokens, ours against transformers."""

from __future__ import annotations

import argparse
import os

from zerogap.cli.bench import add_model_arguments, answer, bench_parser, check_counts, model_setting
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap bench learner
      random weights of SmolLM2-135M's shape, 8 sequences of 512 tokens, against transformers with SDPA
  zerogap bench learner --model FOLDER --dtype bfloat16 --rounds 5
  zerogap bench learner --peer torch
      our own program on stock torch kernels (model.kernels=standard)
  zerogap bench learner --scaling
      ours on two threads against ours on one
  zerogap bench learner --checkpointing --tokens 2048
      ours with learner.activation_checkpointing against ours without: time and peak memory"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Learning speed in tokens/s, forward and backward without the optimizer: ours and a peer on the same model\n"
        "and tokens, each in a process of its own, by turns, pinned to the same cores. The ratio is tokens/s of ours\n"
        "/ tokens/s of the peer. The losses of both sides are compared first."
    )
    parser = bench_parser("learner", description, EXAMPLES, peers=("transformers", "torch"), rounds=3)
    add_model_arguments(parser)
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="of one measurement (default 4096)")
    parser.add_argument("--sequence", type=int, default=512, metavar="N", help="tokens per sequence (default 512)")
    parser.add_argument("--scaling", action="store_true", help="no peer: two threads against one, wall time")
    parser.add_argument(
        "--checkpointing", action="store_true", help="no peer: with activation checkpointing against without"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    check_counts(args, "tokens", "sequence")
    if args.tokens % args.sequence:
        raise BadInput(f"--tokens {args.tokens} must be a multiple of --sequence {args.sequence}")
    if args.scaling and len(os.sched_getaffinity(0)) < 2:
        raise BadInput("--scaling needs two cores, this process may use one")
    if args.scaling and (args.threads != 1 or args.peer != "transformers"):
        raise BadInput("--scaling compares ours on two threads with ours on one; leave out --threads and --peer")
    if args.checkpointing and (args.scaling or args.peer != "transformers"):
        raise BadInput("--checkpointing compares ours with it and without; leave out --scaling and --peer")
    model = model_setting(args)
    from zerogap.bench.learner import LearnerSetting, checkpointing, compare, scaling

    setting = LearnerSetting(**model, peer=args.peer, tokens=args.tokens, sequence=args.sequence)
    measurement = checkpointing if args.checkpointing else scaling if args.scaling else compare
    return answer(args, lambda progress: measurement(setting, progress))
