"""Arguments that several commands share: the parser's form, `key=value` pairs, where a task comes from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zerogap.cli.errors import BadInput

if TYPE_CHECKING:
    from zerogap.config import Task


def command_parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"zerogap {command}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """`["min_terms=2", ...]` -> {"min_terms": 2, ...}; values are read as YAML."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise BadInput(f"{pair!r} must have the form key=value")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadInput(f"{pair!r}: the value is not valid YAML: {error}") from error
    return values


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--task", metavar="NAME", help="a reasoning-gym dataset, for example chain_sum")
    source.add_argument("--data", metavar="FILE", help="a JSONL file with `question` and `answer` in each line")
    source.add_argument("--recipe", metavar="RECIPE", help="take the task from this recipe")
    parser.add_argument(
        "--params", nargs="+", default=[], metavar="KEY=VALUE", help="parameters of the dataset (with --task)"
    )
    parser.add_argument("--task-seed", type=int, metavar="N", help="seed of the examples that reasoning-gym generates")


def task_from_arguments(args: argparse.Namespace, seed_offset: int = 0) -> Task:
    """The config.Task that the shared arguments describe.

    seed_offset: added to the recipe's (or default) task seed unless --task-seed is given, so that an evaluation of a
    reasoning-gym task meets examples drawn from another seed than training's. The lines of a file stay what they are.
    """
    from zerogap.config import Task, load_recipe

    if args.params and args.task is None:
        raise BadInput("--params belong to --task")
    if args.recipe is not None:
        task = load_recipe(args.recipe).task
    elif args.data is not None:
        if not Path(args.data).is_file():
            raise BadInput(f"--data {args.data}: no such file")
        task = Task.model_validate({"jsonl": args.data})
    else:
        task = Task.model_validate({"name": args.task, "params": parse_pairs(args.params)})
    seed = task.seed + seed_offset if args.task_seed is None else args.task_seed
    return task.model_copy(update={"seed": seed})
