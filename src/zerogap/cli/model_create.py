"""`zerogap model create`: a small decoder with random weights and a tokenizer made on a task's text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from zerogap.cli.arguments import add_task_arguments, command_parser, parse_pairs, task_from_arguments
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap model create models/tiny --task chain_sum --params min_terms=2 max_terms=2
  zerogap model create models/small --task chain_sum hidden_size=256 num_layers=6 num_heads=8
  zerogap model create models/bpe --data questions.jsonl tokenizer=bpe vocab_size=2048
  zerogap model create models/as-in-recipe --recipe recipes/tiny.yaml"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("model create", "Make a small decoder (random weights) and a tokenizer.", EXAMPLES)
    parser.add_argument("folder", metavar="DIR", help="where to put it; must not exist")
    parser.add_argument("sizes", nargs="*", metavar="key=value", help="keys of model.create (docs/recipe.md)")
    add_task_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    from zerogap.cli.preflight import check_task
    from zerogap.config import load_recipe, parse_recipe

    folder = Path(args.folder)
    if folder.exists():
        raise BadInput(f"{folder} exists; give a new folder")
    task = task_from_arguments(args)
    create = parse_pairs(args.sizes)
    if args.recipe is not None:
        recipe = load_recipe(args.recipe)
        create = (recipe.model.create.model_dump() if recipe.model.create is not None else {}) | create
    # The recipe's own checks and messages, also for the sizes given here.
    values = {"name": "create", "model": {"create": create}, "task": task.model_dump(), "seed": args.seed}
    recipe = parse_recipe(values, source="model create")
    check_task(task)

    from zerogap.env.task import make_task
    from zerogap.runtime.prepare import create_for_task

    assert recipe.model.create is not None
    made = create_for_task(recipe.model.create, make_task(task), folder, args.seed)
    print(json.dumps({"model": str(made)}) if args.json else str(made))
    return 0
