"""`zerogap bench context`: how the time of prefill, decode and learner step grows with the context."""

from __future__ import annotations

import argparse

from zerogap.cli.bench import add_model_arguments, answer, bench_parser, check_counts, model_setting

EXAMPLES = """  zerogap bench context --shape tiny
      random weights of a tiny shape, up to 16,384 tokens, two minutes
  zerogap bench context --model FOLDER --dtype bfloat16 --tokens 2048 4096 8192 --rounds 1
  zerogap bench context --model FOLDER --part engine
      prefill and decode only: the learner step of a long sequence takes several times as long"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Time of one sequence at several lengths, without a peer: prefill and decode of the embedded engine, and a\n"
        "learner step (forward and backward, with activation checkpointing). The growth is the ratio of times when\n"
        "the context doubles; attention alone has 4 for prefill and learner step, 2 for a decoded token. A model\n"
        "whose context is shorter is given a longer one, in a copy of its config.json."
    )
    parser = bench_parser("context", description, EXAMPLES, rounds=3)
    add_model_arguments(parser)
    parser.add_argument(
        "--tokens",
        nargs="+",
        type=int,
        default=[2048, 4096, 8192, 16384],
        metavar="N",
        help="lengths of the sequence (default 2048 4096 8192 16384)",
    )
    parser.add_argument(
        "--new-tokens", type=int, default=64, metavar="N", help="sampled after them to time decode (default 64)"
    )
    parser.add_argument(
        "--part", nargs="+", choices=("engine", "learner"), default=["engine", "learner"], help="default: both"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    check_counts(args, "tokens", "new_tokens")
    model = model_setting(args)
    from zerogap.bench.context import ContextSetting, measure

    setting = ContextSetting(
        **model,
        tokens=tuple(sorted(set(args.tokens))),
        new_tokens=args.new_tokens,
        parts=tuple(dict.fromkeys(args.part)),
    )
    return answer(args, lambda progress: measure(setting, progress))
