"""`zerogap eval`: sample a model's answers to a task with the embedded engine, grade them, and estimate pass@k.

The weights do not change while it runs; that every token belongs to their version is checked, and stated.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerogap.cli.arguments import add_task_arguments, command_parser, task_from_arguments
from zerogap.cli.errors import BadInput
from zerogap.cli.progress import progress_bar

if TYPE_CHECKING:
    from zerogap.config import Recipe
    from zerogap.runtime.evaluation.figures import Figures, PromptResult
    from zerogap.runtime.evaluation.plan import Plan

EXAMPLES = """  zerogap eval --model runs/tiny/final_model --recipe recipes/tiny.yaml
      the recipe's task and its rollout.max_new_tokens, stop and temperature; a reasoning-gym task generates other
      examples than in training (task.seed + 1), a JSONL file is scored on its own lines
  zerogap eval --model FOLDER --task chain_sum --params min_terms=2 max_terms=2 --samples 4
  zerogap eval --model FOLDER --data aime24.jsonl --samples 16 --max-new-tokens 4096 --output aime24_answers.jsonl
      pass@1, 2, 4, 8, 16; the file gets a line for each finished prompt
  zerogap eval --model FOLDER --data aime24.jsonl --samples 16 --max-new-tokens 4096 --output aime24_answers.jsonl \\
      --resume
      go on with that file after an interruption
  zerogap eval --model FOLDER --data gsm8k_test.jsonl --limit 100 --temperature 0 --max-new-tokens 256
  zerogap eval --model FOLDER --task chain_sum --json"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", "pass@k of a model on a task, of one version of its weights.", EXAMPLES)
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model folder")
    add_task_arguments(parser)
    parser.add_argument(
        "--tools", choices=("python",), help="let the model run Python before it answers (a recipe says it itself)"
    )
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument(
        "--k", type=int, nargs="+", metavar="K", help="pass@k for these k, at most N (default 1, 2, 4, ... up to N)"
    )
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="first N examples (default 200)")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="longest answer, of each turn (default: the recipe's, else 64)"
    )
    parser.add_argument(
        "--temperature", type=float, help="0 takes the most likely token (default: the recipe's, else 1)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="a string that ends an answer; may be given again (default: the recipe's, else none)",
    )
    parser.add_argument("--seed", type=int, help="seed of the sampler (default: the recipe's, else 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the recipe's, else float32")
    parser.add_argument("--kernels", choices=("aligned", "standard"), help="default: the recipe's, else aligned")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--output", metavar="FILE", help="write all answers as JSON Lines, a prompt a line")
    parser.add_argument("--resume", action="store_true", help="go on with the --output file; same settings only")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    recipe = _recipe(args)
    _check_arguments(args, recipe)
    from zerogap.cli.preflight import check_model, check_task

    check_model(Path(args.model), key="--model")
    check_task(recipe.task)
    from zerogap.runtime.evaluation.figures import default_ks, summarise
    from zerogap.runtime.evaluation.plan import make_plan

    plan = make_plan(recipe, Path(args.model), args.samples, args.limit)
    results, weights, tokens_per_s = _evaluate(args, recipe, plan)
    figures = summarise(results, sorted(set(args.k or default_ks(args.samples)) | {1}))
    if not figures.pass_at:
        raise RuntimeError(f"the grader failed on every answer; the first: {results[0].answers[0].error}")
    if args.json:
        own = {"model": args.model, "weights": weights, "prompts_too_long": plan.too_long, "tokens_per_s": tokens_per_s}
        print(json.dumps(own | figures.to_json()))
    else:
        _print(figures, weights, plan.too_long, tokens_per_s)
    return 0


def _recipe(args: argparse.Namespace) -> Recipe:
    """Sampling and arithmetic as the recipe has them, where the command line does not say otherwise."""
    from zerogap.config import load_recipe, parse_recipe
    from zerogap.config.tools import Tools

    task = task_from_arguments(args, seed_offset=1)
    if args.tools is not None:
        if args.recipe is not None:
            raise BadInput("--tools belongs to --task or --data; with --recipe the recipe's task.tools says it")
        task = task.model_copy(update={"tools": Tools.model_validate({})})
    if args.recipe is None:
        model = {"path": args.model, "dtype": "float32"}
        recipe = parse_recipe({"name": "eval", "model": model, "task": task.model_dump()})
    else:
        recipe = load_recipe(args.recipe).model_copy(update={"task": task})
    given = {key: getattr(args, key) for key in ("max_new_tokens", "temperature", "stop", "threads")}
    rollout = {key: value for key, value in given.items() if value is not None}
    arithmetic = {key: getattr(args, key) for key in ("kernels", "dtype") if getattr(args, key) is not None}
    changes: dict[str, Any] = {
        "model": recipe.model.model_copy(update=arithmetic),
        "rollout": recipe.rollout.model_copy(update=rollout | dict.fromkeys(arithmetic)),  # the engine's own give way
    }
    return recipe.model_copy(update=changes if args.seed is None else changes | {"seed": args.seed})


def _check_arguments(args: argparse.Namespace, recipe: Recipe) -> None:
    for option, least in (("samples", 1), ("limit", 1), ("max_new_tokens", 1), ("temperature", 0), ("threads", 1)):
        value = getattr(args, option)
        if value is not None and not value >= least:
            raise BadInput(f"--{option.replace('_', '-')} {value} must be at least {least}")
    if not math.isfinite(recipe.rollout.temperature):
        raise BadInput(f"--temperature {args.temperature} must be a finite number")
    if "" in recipe.rollout.stop:
        raise BadInput("--stop '' would end every answer at once; leave it out")
    if recipe.rollout.temperature == 0 and args.samples > 1:
        raise BadInput(f"--samples {args.samples} with --temperature 0 would repeat one answer; use --samples 1")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise BadInput(f"--seed {args.seed} must lie in 0..2**63 - 1")
    for k in args.k or ():
        if not 1 <= k <= args.samples:
            raise BadInput(f"--k {k} must lie in 1..{args.samples}, the answers per prompt (--samples)")
    if args.resume and args.output is None:
        raise BadInput("--resume goes on with a file: name it with --output")


def _evaluate(args: argparse.Namespace, recipe: Recipe, plan: Plan) -> tuple[list[PromptResult], str, float | None]:
    """(results, digest of the weights, tokens per second in the engine: None where the file held all answers)."""
    import torch

    from zerogap.runtime.backend import RunSetup
    from zerogap.runtime.checkpoint import recorded_version
    from zerogap.runtime.evaluation.plan import evaluate
    from zerogap.runtime.evaluation.results_file import ResultsFile
    from zerogap.runtime.rollout_worker import build_rollout_worker

    if args.threads is None:
        threads = {"threads": torch.get_num_threads()}
        recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=threads)})
    version = recorded_version(Path(args.model))
    setup = RunSetup(recipe, Path(), Path(args.model), start_version=version, kv_tokens=plan.kv_tokens)
    with ExitStack() as stack:
        worker, identity = build_rollout_worker(setup)
        stack.callback(worker.close)
        file, results = None, []
        if args.output is not None:
            settings = _settings(args, recipe, plan) | {
                "weights": identity.weights,
                "contract": identity.contract_digest,
            }
            file = stack.enter_context(ResultsFile(Path(args.output), settings, args.resume))
            results = file.done
        done = {result.prompt_id for result in results}
        advance = stack.enter_context(progress_bar("prompts", len(plan.prompts)))
        advance(len(done))
        items = [item for item in plan.items(version) if item[0].prompt_id not in done]
        for result in evaluate(worker, items, version):
            if file is not None:
                file.add(result)
            results.append(result)
            advance(1)
        stats = worker.stats()
    return results, identity.weights, stats.sampled_tokens / stats.busy_s if stats.busy_s else None


def _settings(args: argparse.Namespace, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """All that answers and rewards follow from, beside the weights; in the order in which differences are named."""
    rollout = recipe.rollout
    settings = {"samples": args.samples, "limit": args.limit, "seed": recipe.seed}
    settings |= {key: getattr(rollout, key) for key in ("max_new_tokens", "temperature", "stop")}
    settings |= {f"task.{key}": value for key, value in recipe.task.model_dump(mode="json").items()}
    return settings | {"prompts": plan.digest()}


def _print(figures: Figures, weights: str, too_long: int, tokens_per_s: float | None) -> None:
    for k, estimate in figures.pass_at.items():
        error = "" if estimate.error is None else f" +- {estimate.error:.4f} (standard error)"
        less = "" if estimate.prompts == figures.prompts else f", of {estimate.prompts:,} prompts"
        print(f"{f'pass@{k}':<11} {estimate.value:.4f}{error}{less}{' = mean reward' if k == 1 else ''}")
    print(f"answers     {figures.prompts:,} prompts x {figures.samples}, truncated {figures.truncated:.1%}")
    rate = "" if tokens_per_s is None else f" at {tokens_per_s:,.0f}/s"
    turns = "" if figures.turns == 1 else f" in {figures.turns:.1f} turns"
    print(f"tokens      {figures.tokens:,}{rate}, {figures.tokens_mean:,.1f} an answer{turns}")
    print(f"weights     all tokens of version {figures.version}, SHA-256 {weights[:16]}")
    if too_long:
        print(f"skipped     {too_long:,} prompts longer than the model's context")
    if figures.errors:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in figures.errors.items())
        print(f"not graded  {counts}: in no mean")
