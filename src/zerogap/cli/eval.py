"""`zerogap eval`: sample a model's answers to a task with the embedded engine and grade them.

The weights do not change while it runs, so every token belongs to one version, which is reported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerogap.cli.arguments import add_task_arguments, command_parser, task_from_arguments
from zerogap.cli.errors import BadInput

if TYPE_CHECKING:
    from zerogap.env.task import Example, Task
    from zerogap.trajectory import Trajectory

MAX_RUNNING = 64
MAX_BATCHED_TOKENS = 1024
PAGE_SIZE = 32

EXAMPLES = """  zerogap eval --model runs/tiny/final --recipe recipes/tiny.yaml
      the recipe's task, with examples that training has not drawn
  zerogap eval --model FOLDER --task chain_sum --params min_terms=2 max_terms=2 --samples 4
  zerogap eval --model FOLDER --data gsm8k_test.jsonl --limit 100 --temperature 0 --max-new-tokens 256
  zerogap eval --model FOLDER --task chain_sum --json"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("eval", "Mean reward (pass@1 as the mean over samples) of a model on a task.", EXAMPLES)
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model folder")
    add_task_arguments(parser)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="answers per prompt (default 1)")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="first N examples (default 200)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (default 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most likely token (default 1)")
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
    _check_numbers(args)
    settings = task_from_arguments(args, seed_offset=1)
    from zerogap.cli.preflight import check_model, check_task

    check_model(Path(args.model), key="--model")
    check_task(settings)
    from zerogap.env.task import make_task

    result = evaluate(args, make_task(settings))
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


def evaluate(args: argparse.Namespace, task: Task) -> Evaluation:
    import torch

    from zerogap.model.chat import load_tokenizer, render_prompt
    from zerogap.model.checkpoint import load_decoder
    from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
    from zerogap.trajectory import GroupRequest, SamplingParams

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    decoder = load_decoder(args.model, args.kernels, args.dtype)
    tokenizer = load_tokenizer(args.model)
    examples = {index: task.example(index) for index in range(min(args.limit, len(task)))}
    prompts = {index: render_prompt(tokenizer, example.messages) for index, example in examples.items()}
    fitting = {i: ids for i, ids in prompts.items() if len(ids) < decoder.config.max_position_embeddings}
    if not fitting:
        raise BadInput(f"every prompt is longer than the context of {args.model} (or there is none)")

    longest = max(len(ids) for ids in fitting.values()) + args.max_new_tokens
    context = min(longest, decoder.config.max_position_embeddings)
    engine = EmbeddedEngine(
        decoder,
        tokenizer,
        EngineConfig(
            max_running=MAX_RUNNING,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            page_size=PAGE_SIZE,
            kv_tokens=MAX_RUNNING * -(-context // PAGE_SIZE) * PAGE_SIZE,
            max_context=context,
        ),
    )
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    for index, ids in fitting.items():
        engine.submit(GroupRequest(index, index, tuple(ids), args.samples, sampling))

    trajectories: list[Trajectory] = []
    began = time.monotonic()
    with _progress_bar(len(fitting) * args.samples) as advance:
        while engine.has_work():
            finished = engine.step()
            trajectories += finished
            advance(len(finished))
    seconds = time.monotonic() - began

    rewards = _grade(trajectories, task, examples, tokenizer, decoder.eos_token_ids)
    means = [statistics.fmean(values) for values in rewards.values() if values]
    if not means:
        raise RuntimeError("the grader failed on every answer")
    graded = sum(len(values) for values in rewards.values())
    tokens = sum(t.num_sampled for t in trajectories)
    return Evaluation(
        model=str(args.model),
        version=_one_version(trajectories),
        prompts=len(fitting),
        prompts_too_long=len(prompts) - len(fitting),
        samples=args.samples,
        reward=statistics.fmean(means),
        reward_error=statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None,
        grader_errors=len(trajectories) - graded,
        truncated=sum(t.truncated for t in trajectories) / len(trajectories),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
    )


def _grade(
    trajectories: list[Trajectory],
    task: Task,
    examples: dict[int, Example],
    tokenizer: Any,
    eos_token_ids: tuple[int, ...],
) -> dict[int, list[float]]:
    """Rewards by prompt. An answer on which the grader fails is left out (counted by the caller), never 0."""
    from zerogap.env.task import GradeError

    rewards: dict[int, list[float]] = {index: [] for index in examples}
    for trajectory in trajectories:
        ids = [token for token in trajectory.sampled_token_ids if token not in eos_token_ids]
        try:
            reward = task.grade(examples[trajectory.prompt_id], tokenizer.decode(ids, skip_special_tokens=True))
        except GradeError:
            continue
        rewards[trajectory.prompt_id].append(reward)
    return rewards


def _one_version(trajectories: list[Trajectory]) -> int:
    versions = {v for t in trajectories for v, mask in zip(t.versions, t.loss_mask, strict=True) if mask}
    if len(versions) != 1:
        raise RuntimeError(f"an evaluation must measure one policy, but its tokens name versions {sorted(versions)}")
    return versions.pop()


@contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    """A bar on stderr while it is a terminal; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("answers", total=total)
        yield lambda count: progress.advance(bar, count)


def _check_numbers(args: argparse.Namespace) -> None:
    for option, least in (("samples", 1), ("limit", 1), ("max_new_tokens", 1), ("temperature", 0), ("threads", 1)):
        value = getattr(args, option)
        if value is not None and not value >= least:
            raise BadInput(f"--{option.replace('_', '-')} {value} must be at least {least}")
    if args.temperature == 0 and args.samples > 1:
        raise BadInput(f"--samples {args.samples} with --temperature 0 would repeat one answer; use --samples 1")
