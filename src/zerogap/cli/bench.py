"""What the `zerogap bench` commands share: common arguments, their checks, and the way out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerogap.bench.models import SHAPES
from zerogap.cli.arguments import command_parser
from zerogap.cli.errors import BadInput

if TYPE_CHECKING:
    from zerogap.bench.report import Report


def bench_parser(
    what: str, description: str, examples: str, rounds: int, peers: tuple[str, ...] = ()
) -> argparse.ArgumentParser:
    """Parser with the arguments of all of them; --peer where there are peers, the first one is the default."""
    parser = command_parser(f"bench {what}", description, examples)
    if peers:
        parser.add_argument(
            "--peer", choices=peers, default=peers[0], help=f"what to compare with (default {peers[0]})"
        )
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"], help="default: both"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each side (default 1)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"turns of each side (default {rounds})"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a markdown table on stdout")
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="Hugging Face folder (default: random weights of --shape)")
    parser.add_argument(
        "--shape", choices=SHAPES, default="smollm2", help="shape of the random weights (default smollm2, 135M)"
    )


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """BadInput when --threads, --rounds or one of `names` is below 1, or more threads are asked for than cores."""
    for name in ("threads", "rounds", *names):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value < 1:
                raise BadInput(f"--{name.replace('_', '-')} {value} must be at least 1")
    available = len(os.sched_getaffinity(0))
    if args.threads > available:
        raise BadInput(f"--threads {args.threads}: this process may use {available} core(s)")


def check_model_argument(args: argparse.Namespace) -> None:
    """BadInput unless --model, where given, is a folder that the decoder can compute."""
    if args.model is not None:
        from zerogap.cli.preflight import check_model

        check_model(Path(args.model), key="--model")


def model_setting(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a bench.models.ModelSetting. BadInput unless --model, where given, can be computed."""
    check_model_argument(args)
    return {
        "model": args.model,
        "shape": args.shape,
        "dtypes": tuple(args.dtype),
        "threads": args.threads,
        "rounds": args.rounds,
    }


def answer(args: argparse.Namespace, compare: Callable[[Callable[[str], None]], Report]) -> int:
    """Run the measurement with progress on stderr; its table or JSON goes to stdout."""
    report = compare(lambda text: print(text, file=sys.stderr, flush=True))
    print(report.to_json() if args.json else report.to_markdown())
    return 0
