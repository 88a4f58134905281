"""`zerogap train`: read the recipe, refuse what cannot run, then hand over to runtime.train."""

from __future__ import annotations

import argparse
import json
import sys

from zerogap.cli.arguments import command_parser

EXAMPLES = """  zerogap train recipes/tiny.yaml
      the small model: made on the spot, warm-started, then trained; results in runs/tiny
  zerogap train recipes/tiny.yaml --dry-run
      print the resolved recipe and what the run will need; nothing is loaded or written
  zerogap train recipes/tiny.yaml --output-dir runs/lag8 train.lag=8 learner.learning_rate=3e-4
      any key of the recipe can be changed by its dotted name (docs/recipe.md lists them)
  zerogap train recipes/tiny.yaml --resume
      go on from the newest checkpoint of runs/tiny
  zerogap train recipes/tiny.yaml train.lag=0
      synchronous: every token is trained on the weights that sampled it"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("train", "Train a language model by asynchronous REINFORCE Zero.", EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file; see recipes/ and docs/recipe.md")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="change a key of the recipe")
    parser.add_argument("--output-dir", metavar="D", help="run folder (default: output_dir, or runs/<name>)")
    parser.add_argument("--max-steps", type=int, metavar="N", help="stop after N updates in all; --resume goes on")
    parser.add_argument("--resume", action="store_true", help="go on from the run folder's newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print recipe and needs, then end")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout (the steps go to stderr)")
    return parser


def run(args: argparse.Namespace) -> int:
    from zerogap.cli.errors import BadInput
    from zerogap.cli.preflight import check_recipe_inputs
    from zerogap.config import dump_recipe, load_recipe
    from zerogap.runtime.folder import check_run_dir

    if args.max_steps is not None and args.max_steps < 1:
        raise BadInput(f"--max-steps {args.max_steps} must be at least 1")
    recipe = load_recipe(args.recipe, args.overrides)
    if args.output_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": args.output_dir})
    check_run_dir(recipe.run_dir, args.resume)
    check_recipe_inputs(recipe)

    if args.dry_run:
        from zerogap.cli.estimate import estimate_needs

        needs = estimate_needs(recipe)
        if args.json:
            print(json.dumps({"recipe": recipe.model_dump(mode="json"), "needs": needs.to_json()}))
        else:
            print(dump_recipe(recipe))
            print("\n".join(f"# {line}" for line in needs.lines()))
        return 0

    from zerogap.cli.display import Display
    from zerogap.runtime.train import train

    updates = recipe.train.updates if args.max_steps is None else min(args.max_steps, recipe.train.updates)
    with Display(updates, aligned=recipe.aligned, stderr=args.json) as display:
        summary = train(recipe, recipe.run_dir, resume=args.resume, max_steps=args.max_steps, observer=display)
        display.summary(summary | {"run_dir": str(recipe.run_dir)})
    if args.json:
        json.dump(display.final, sys.stdout)
        print()
    return 0
