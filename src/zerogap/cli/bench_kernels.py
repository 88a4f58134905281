"""`zerogap bench kernels`: single operations, ours against stock torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from zerogap.bench.kernel_list import OPS, ROWS, SMOLLM2, KernelShapes, KernelsSetting, model_shapes
from zerogap.cli.bench import answer, bench_parser, check_counts
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap bench kernels
      every operation at the shapes of SmolLM2-135M, one thread, two minutes
  zerogap bench kernels --op linear --dtype bfloat16 --rows 1 32
  zerogap bench kernels --op attention head --rounds 9 --json
  zerogap bench kernels --model FOLDER
      at the shapes of another model; only its config.json is read"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Time of single operations: the aligned kernels against the fastest stock torch kernel (MKL, oneDNN, SDPA),\n"
        "in one process, call by call in turn. The ratio is time of ours / time of the peer."
    )
    parser = bench_parser("kernels", description, EXAMPLES, peers=("torch",), rounds=5)
    parser.add_argument(
        "--model", metavar="DIR", help="take the shapes from this folder's config.json (default: SmolLM2-135M)"
    )
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

    setting = KernelsSetting(
        shapes=SMOLLM2 if args.model is None else _shapes(Path(args.model)),
        dtypes=tuple(args.dtype),
        ops=tuple(args.op),
        rows=tuple(args.rows),
        threads=args.threads,
        rounds=args.rounds,
    )
    return answer(args, lambda progress: compare(setting, progress))


def _shapes(folder: Path) -> KernelShapes:
    """BadInput unless the folder has the config.json of a decoder."""
    from zerogap.model.checkpoint import CheckpointError, read_decoder_config
    from zerogap.model.config import UnsupportedModel

    try:
        return model_shapes(read_decoder_config(folder), folder.resolve().name)
    except (CheckpointError, UnsupportedModel) as error:
        raise BadInput(f"--model: {error}") from error
