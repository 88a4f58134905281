"""`zerogap eval`: sample a model's answers to a task with the embedded engine and grade them.

The weights do not change while it runs, so every token belongs to one version, which is reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerogap.cli.arguments import add_task_arguments, command_parser, task_from_arguments
from zerogap.cli.errors import BadInput
from zerogap.cli.progress import progress_bar

if TYPE_CHECKING:
    from zerogap.config import Task
    from zerogap.trajectory import Trajectory

MAX_RUNNING = 64

EXAMPLES = """  zerogap eval --model runs/tiny/final_model --recipe recipes/tiny.yaml
      the recipe's task and its rollout.max_new_tokens, stop and temperature; a reasoning-gym task generates other
      examples than in training (task.seed + 1), a JSONL file is scored on its own lines
  zerogap eval --model FOLDER --task chain_sum --params min_terms=2 max_terms=2 --samples 4
  zerogap eval --model FOLDER --data gsm8k_test.jsonl --limit 100 --temperature 0 --max-new-tokens 256
  zerogap eval --model FOLDER --task chain_sum --json"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", "Mean reward (pass@1 as the mean over samples) of a model on a task.", EXAMPLES)
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model folder")
    add_task_arguments(parser)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="first N examples (default 200)")
    parser.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="longest answer (default: the recipe's, else 64)"
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
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kernels", choices=("aligned", "standard"), default="aligned")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


@dataclass(frozen=True)
class Evaluation:
    """reward_error: standard error of the mean over prompts; None with one prompt. truncated: share of answers."""

    model: str
    version: int
    prompts: int
    prompts_too_long: int
    samples: int
    reward: float
    reward_error: float | None
    grader_errors: int
    truncated: float
    tokens: int
    tokens_per_s: float


def run(args: argparse.Namespace) -> int:
    _take_defaults(args)
    _check_numbers(args)
    settings = task_from_arguments(args, seed_offset=1)
    from zerogap.cli.preflight import check_model, check_task

    check_model(Path(args.model), key="--model")
    check_task(settings)

    result = evaluate(args, settings)
    if args.json:
        print(json.dumps(asdict(result)))
        return 0
    error = "" if result.reward_error is None else f" +- {result.reward_error:.4f} (standard error)"
    print(f"reward      {result.reward:.4f}{error}")
    print(f"answers     {result.prompts:,} prompts x {result.samples}, truncated {result.truncated:.1%}")
    print(f"tokens      {result.tokens:,} at {result.tokens_per_s:,.0f}/s, all of weight version {result.version}")
    if result.prompts_too_long:
        print(f"skipped     {result.prompts_too_long:,} prompts longer than the model's context")
    if result.grader_errors:
        print(f"not graded  {result.grader_errors:,} answers: the grader failed")
    return 0


def evaluate(args: argparse.Namespace, settings: Task) -> Evaluation:
    import torch

    from zerogap.env.make import open_host
    from zerogap.env.task import make_task
    from zerogap.model.chat import load_tokenizer, render_prompt
    from zerogap.model.checkpoint import load_decoder
    from zerogap.model.turns import ChatTurns
    from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
    from zerogap.runtime.rollout_worker import RolloutWorker
    from zerogap.trajectory import GroupRequest, SamplingParams

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    decoder = load_decoder(args.model, args.kernels, args.dtype)
    tokenizer = load_tokenizer(args.model)
    task = make_task(settings)
    examples = [task.example(index) for index in range(min(args.limit, len(task)))]
    prompts = [(example, tuple(render_prompt(tokenizer, example.messages))) for example in examples]
    limit = decoder.config.max_position_embeddings
    fitting = [(example, ids) for example, ids in prompts if len(ids) < limit]
    if not fitting:
        raise BadInput(f"all {len(prompts)} prompts are longer than the context of {args.model} ({limit} tokens)")

    context = min(max(len(ids) for _, ids in fitting) + args.max_new_tokens, limit)
    config = EngineConfig(max_running=MAX_RUNNING, max_context=context)
    worker = RolloutWorker(
        EmbeddedEngine(decoder, tokenizer, config), open_host(settings, in_process=False), ChatTurns(tokenizer)
    )
    sampling = SamplingParams(args.max_new_tokens, args.temperature, tuple(args.stop), args.seed)
    worker.submit([(GroupRequest(e.prompt_id, e.prompt_id, ids, args.samples, sampling), e) for e, ids in fitting])
    trajectories: list[Trajectory] = []
    try:
        with progress_bar("prompts", len(fitting)) as advance:
            while worker.has_work():
                for group in worker.step():
                    trajectories += group.trajectories
                    advance(1)
    finally:
        worker.close()
    return _summarise(args, trajectories, too_long=len(prompts) - len(fitting), seconds=worker.stats().busy_s)


def _summarise(args: argparse.Namespace, trajectories: list[Trajectory], too_long: int, seconds: float) -> Evaluation:
    """An answer on which the grader fails is in no mean (never 0); each prompt counts alike."""
    rewards: dict[int, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            rewards.setdefault(trajectory.prompt_id, []).append(trajectory.reward)
    if not rewards:
        raise RuntimeError(f"the grader failed on every answer; the first: {trajectories[0].error}")
    means = [statistics.fmean(values) for values in rewards.values()]
    tokens = sum(t.num_sampled for t in trajectories)
    return Evaluation(
        model=str(args.model),
        version=_one_version(trajectories),
        prompts=len({t.prompt_id for t in trajectories}),
        prompts_too_long=too_long,
        samples=args.samples,
        reward=statistics.fmean(means),
        reward_error=statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None,
        grader_errors=sum(t.error is not None for t in trajectories),
        truncated=sum(t.truncated for t in trajectories) / len(trajectories),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
    )


def _one_version(trajectories: list[Trajectory]) -> int:
    versions = {v for t in trajectories for v, mask in zip(t.versions, t.loss_mask, strict=True) if mask}
    if len(versions) != 1:
        raise RuntimeError(f"an evaluation must measure one policy, but its tokens name versions {sorted(versions)}")
    return versions.pop()


def _take_defaults(args: argparse.Namespace) -> None:
    """Sampling as in training, where the command line does not say otherwise."""
    from zerogap.config import Rollout, load_recipe

    rollout = Rollout.model_validate({}) if args.recipe is None else load_recipe(args.recipe).rollout
    for key in ("max_new_tokens", "temperature", "stop"):
        if getattr(args, key) is None:
            setattr(args, key, getattr(rollout, key))


def _check_numbers(args: argparse.Namespace) -> None:
    for option, least in (("samples", 1), ("limit", 1), ("max_new_tokens", 1), ("temperature", 0), ("threads", 1)):
        value = getattr(args, option)
        if value is not None and not value >= least:
            raise BadInput(f"--{option.replace('_', '-')} {value} must be at least {least}")
    if not math.isfinite(args.temperature):
        raise BadInput(f"--temperature {args.temperature} must be a finite number")
    if "" in args.stop:
        raise BadInput("--stop '' would end every answer at once; leave it out")
    if args.temperature == 0 and args.samples > 1:
        raise BadInput(f"--samples {args.samples} with --temperature 0 would repeat one answer; use --samples 1")
