"""`zerogap sft`: the recipe's warm start alone, ending in a model folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zerogap.cli.arguments import command_parser

EXAMPLES = """  zerogap sft recipes/tiny.yaml
      make (or load) the recipe's model, run its warm_start section, leave a model in runs/tiny-sft/start_model
  zerogap sft recipes/tiny.yaml --output-dir runs/warm warm_start.steps=500
  zerogap train recipes/tiny.yaml model.create=null warm_start=null model.path=runs/tiny-sft/start_model
      then train from the folder that sft printed"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("sft", "Supervised steps on worked solutions that the recipe's task generates.", EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file with a warm_start section")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="change a key of the recipe")
    parser.add_argument("--output-dir", metavar="D", help="output folder (default: runs/<name>-sft)")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout (progress goes to stderr)")
    return parser


def run(args: argparse.Namespace) -> int:
    from zerogap.cli.errors import BadInput
    from zerogap.cli.preflight import check_recipe_inputs
    from zerogap.config import load_recipe
    from zerogap.runtime.folder import check_run_dir, new_run_folder

    recipe = load_recipe(args.recipe, args.overrides)
    if recipe.warm_start is None:
        raise BadInput(f"recipe {args.recipe} has no warm_start section; add one, or give warm_start.steps=200")
    output = Path(args.output_dir or f"runs/{recipe.name}-sft")
    check_run_dir(output, resume=False)
    check_recipe_inputs(recipe)

    from zerogap.cli.display import Display
    from zerogap.runtime.prepare import prepare_model

    aligned = recipe.model.kernels == "aligned"
    with new_run_folder(output), Display(None, aligned=aligned, stderr=args.json) as display:
        folder = prepare_model(recipe, output, display)
    print(json.dumps({"model": str(folder)}) if args.json else str(folder))
    return 0
