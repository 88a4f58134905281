"""`zerogap bench step`: a whole RL step, the aligned run against the standard run of the same recipe."""

from __future__ import annotations

import argparse

from zerogap.cli.bench import answer, bench_parser, check_counts, check_model_argument
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap bench step --recipe recipes/tiny.yaml
  zerogap bench step --recipe recipes/tiny.yaml --recipe recipes/smollm2.yaml --rounds 5 --dtype bfloat16
  zerogap bench step --recipe recipes/tiny.yaml train.lag=0 rollout.group_size=16
      any key of the recipe can be changed by its dotted name"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Seconds per update of the whole loop (sampling, grading, audit, learner, publication) on the inline driver:\n"
        "the recipe with aligned kernels and with stock torch, from the same weights and seed, update by update in\n"
        "turn. The ratio is seconds of the aligned run / seconds of the standard run."
    )
    parser = bench_parser("step", description, EXAMPLES, peers=("torch",), rounds=9)
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="change a key of the recipe")
    parser.add_argument("--recipe", action="append", metavar="RECIPE", help="YAML file; may be given several times")
    parser.add_argument("--model", metavar="DIR", help="start from this folder, without the recipe's warm start")
    return parser


def run(args: argparse.Namespace) -> int:
    check_counts(args)
    if not args.recipe:
        raise BadInput("--recipe was not given; for example --recipe recipes/tiny.yaml")
    check_model_argument(args)
    from zerogap.cli.preflight import check_recipe_inputs
    from zerogap.config import load_recipe

    for path in args.recipe:
        check_recipe_inputs(load_recipe(path, args.overrides))
    from zerogap.bench.step import StepSetting, compare

    setting = StepSetting(
        model=args.model,
        recipes=tuple(args.recipe),
        overrides=tuple(args.overrides),
        dtypes=tuple(args.dtype),
        threads=args.threads,
        rounds=args.rounds,
    )
    return answer(args, lambda progress: compare(setting, progress))
