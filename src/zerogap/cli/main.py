"""Dispatch: find the command, parse its arguments, turn every outcome into an exit code and one clear message.

Exit codes: 0 done, 1 the run failed, 2 bad input, 130 interrupted. Each command lives in its own module with
`build_parser() -> ArgumentParser` and `run(args) -> int`; the module is imported only when its command is given.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from zerogap.cli.errors import BadInput

COMMANDS = {
    "train": ("train", "train a language model by asynchronous REINFORCE Zero"),
    "sft": ("sft", "warm start: supervised steps on worked solutions of the recipe's task"),
    "eval": ("eval", "pass@k and mean reward of a model on a task"),
    "audit": ("audit", "rollouts of a run or of any engine: unequal bits, both gaps, the cause"),
    "model create": ("model_create", "make a small decoder with random weights and a tokenizer"),
    "model fetch": ("model_fetch", "download a small model into the cache"),
    "model info": ("model_info", "what a model folder holds and whether zerogap can run it"),
    "bench kernels": ("bench_kernels", "speed of single operations against stock torch"),
    "bench rollout": ("bench_rollout", "speed of sampling against transformers or vLLM"),
    "bench learner": ("bench_learner", "speed of forward and backward against transformers"),
    "bench context": ("bench_context", "how time grows with the context, up to 16,384 tokens"),
    "bench step": ("bench_step", "speed of a whole RL step, aligned against standard kernels"),
    "doctor": ("doctor", "what this machine has and what follows from it"),
}

# By name, since most of these classes live in modules that --help must not load.
BAD_INPUT = (
    "BadInput",
    "RecipeError",
    "TaskError",
    "CheckpointError",
    "UnsupportedModel",
    "RunFolderError",
    "RolloutFileError",
    "ResultsFileError",
)

EXAMPLES = """examples:
  zerogap doctor
  zerogap train recipes/tiny.yaml
  zerogap train recipes/tiny.yaml --dry-run train.lag=8 learner.learning_rate=3e-4
  zerogap eval --model runs/tiny/final_model --recipe recipes/tiny.yaml

`zerogap COMMAND --help` explains a command. Set ZEROGAP_TRACEBACK=1 to see where an error came from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code (argparse itself exits with 2 on wrong options)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if len(arguments) == 2 and arguments[1] in ("-h", "--help") and _family(arguments[0]):
        print(_overview(_family(arguments[0])))
        return 0
    if arguments[0] == "--version":
        print(f"zerogap {_version()}")
        return 0
    try:
        name, rest = _split_command(arguments)
        command = importlib.import_module(f"zerogap.cli.{COMMANDS[name][0]}")
        parser: argparse.ArgumentParser = command.build_parser()
        code: int = command.run(parser.parse_intermixed_args(rest))
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `zerogap ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("ZEROGAP_TRACEBACK") == "1":
            traceback.print_exc()
        own = type(error).__module__.startswith("zerogap.")  # written for people; others need their class to be read
        print(f"zerogap: error: {'' if own else f'{type(error).__name__}: '}{error}", file=sys.stderr)
        return 2 if type(error).__name__ in BAD_INPUT and own else 1


def _split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name (one or two words) and what follows it; BadInput names the nearest known command."""
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            return name, arguments[words:]
    family = _family(arguments[0])
    if family:
        raise BadInput(f"{arguments[0]!r} needs one more word: {', '.join(family)}")
    near = difflib.get_close_matches(arguments[0], list(COMMANDS), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"commands: {', '.join(COMMANDS)}"
    raise BadInput(f"unknown command {arguments[0]!r}; {hint}")


def _family(word: str) -> list[str]:
    """The commands of two words that begin with this one."""
    return [name for name in COMMANDS if name.startswith(word + " ")]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("zerogap")
    except PackageNotFoundError:
        return "(not installed)"


def _overview(names: Sequence[str] = tuple(COMMANDS)) -> str:
    width = max(len(name) for name in names) + 2
    lines = [f"  {name:<{width}}{COMMANDS[name][1]}" for name in names]
    return (
        "usage: zerogap COMMAND [options]\n\n"
        "Asynchronous RL of language models in which the sampling engine and the learner compute the same bits.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n" + EXAMPLES
    )
