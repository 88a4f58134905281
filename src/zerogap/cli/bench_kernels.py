"""`zerogap bench kernels`: single operations, ours against stock torch."""

from __future__ import annotations

import argparse

from zerogap.bench.kernel_list import OPS, ROWS, KernelsSetting
from zerogap.cli.bench import answer, bench_parser, check_counts

EXAMPLES = """  zerogap bench kernels
      every operation at the shapes of SmolLM2-135M, one thread, two minutes
  zerogap bench kernels --op linear --dtype bfloat16 --rows 1 32
  zerogap bench kernels --op attention head --rounds 9 --json"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Time of single operations: the aligned kernels against the fastest stock torch kernel (MKL, oneDNN, SDPA),\n"
        "in one process, call by call in turn. The ratio is time of ours / time of the peer."
    )
    parser = bench_parser("kernels", description, EXAMPLES, peers=("torch",), rounds=5)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS), help="default: all")
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=list(ROWS),
        metavar="M",
        help="rows of the linear products (default: 1 to 4096)",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    check_counts(args, "rows")
    from zerogap.bench.kernels import compare

    setting = KernelsSetting(tuple(args.dtype), tuple(args.op), tuple(args.rows), args.threads, args.rounds)
    return answer(args, lambda progress: compare(setting, progress))
