"""`zerogap audit`: rollouts of a run or of any engine against the learner's own numbers; both gaps, and the cause."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerogap.cli.arguments import command_parser
from zerogap.cli.audit_locate import locate_against, parse_side
from zerogap.cli.errors import BadInput
from zerogap.cli.progress import progress_bar
from zerogap.gaps.audit.importers import IMPORTERS, read_rollouts  # without torch, as --help must be

if TYPE_CHECKING:
    from zerogap.gaps.audit.rescore import Models

TOKEN_BUDGET = 4096  # packed rows per forward: memory, not bits

# Keys of config.json that must agree in all weights of a model.
SHAPE = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")

EXAMPLES = """  zerogap audit runs/tiny
      a run folder: tokens whose weights are still there (start model, checkpoints)
  zerogap audit rollouts.jsonl --model FOLDER
      rollouts of any engine against the weights that sampled them: KERNEL
  zerogap audit rollouts.parquet --model TRAINED --behaviour-model SAMPLED --temperature 0.7
      two models: weight lag and KERNEL, told apart
  zerogap audit rollouts.jsonl --model 5=V5 --behaviour-model 3=V3 --behaviour-model 4=V4 --html audit.html
      several versions, as the file names them; docs/audit.md has the format
  zerogap audit rollouts.jsonl --model 5=V5 --candidate-model 3=V3 --candidate-model 4=V4
      were these weights delivered? the candidates are tried as what the engine really had, whole and in part
  zerogap audit rollouts.jsonl --model FOLDER --locate transformers:bfloat16
      and the first operation, layer and position at which transformers parts from our forward"""


def build_parser() -> argparse.ArgumentParser:
    description = (
        "Score sampled tokens again with the learner's forward, compare with what the engine recorded, bit by bit,\n"
        "and say what the gap is: weight lag (LAG), or anything else between the two (KERNEL), and its cause.\n"
        "Exit code 0: the audit is done, whatever it found (--json has the counts); 2: the input does not fit."
    )
    parser = command_parser("audit", description, EXAMPLES)
    parser.add_argument("source", metavar="RUN|FILE", help="a run folder, or rollouts as .jsonl, .parquet or .pt")
    parser.add_argument("--model", metavar="[V=]DIR", help="the weights that are trained (alone: that sampled, too)")
    parser.add_argument(
        "--behaviour-model", action="append", default=[], metavar="[V=]DIR", help="the weights that sampled"
    )
    parser.add_argument(
        "--candidate-model", action="append", default=[], metavar="V=DIR", help="other weights that may have sampled"
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of records without one (1.0)")
    parser.add_argument("--kernels", choices=("aligned", "standard"), help="default aligned; of a run: its own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default float32; of a run: its own")
    importers = ("auto", *IMPORTERS)
    parser.add_argument("--importer", choices=importers, default="auto", help="format of the file (default auto)")
    parser.add_argument(
        "--locate", metavar="SIDE[:DTYPE]", help="aligned, standard or transformers: where their numbers part from ours"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file, too")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    source = Path(args.source)
    if not source.exists():
        raise BadInput(f"{source} does not exist; give a run folder or a file of rollouts")
    threads = len(os.sched_getaffinity(0)) if args.threads is None else args.threads
    if threads < 1:
        raise BadInput(f"--threads {threads} must be at least 1")
    if args.temperature < 0:
        raise BadInput(f"--temperature {args.temperature} must be at least 0")
    if args.html is not None and not Path(args.html).parent.is_dir():
        raise BadInput(f"--html {args.html}: folder {Path(args.html).parent} does not exist")
    other = None if args.locate is None else parse_side(args.locate)
    if source.is_file():
        models = _models(args)
    others = _candidates(args)

    import torch

    from zerogap.gaps.audit.analysis import analyse
    from zerogap.gaps.audit.candidates import Candidates
    from zerogap.gaps.audit.diagnosis import diagnose
    from zerogap.gaps.audit.rescore import rescore
    from zerogap.gaps.audit.verdict import verdict
    from zerogap.kernels.native import keep_memory

    torch.set_num_threads(threads)
    keep_memory()
    left_out, kernels, dtype, engine = 0, args.kernels or "aligned", args.dtype or "float32", None
    if source.is_dir():
        if args.model or args.behaviour_model or others:
            raise BadInput(f"{source} is a run folder and has its own weights; give the file in it to use --model")
        from zerogap.runtime.audited_run import read_run

        found = read_run(source)
        rollouts, models, left_out = found.rollouts, found.models, found.left_out
        kernels, dtype, engine = args.kernels or found.kernels, args.dtype or found.dtype, found.engine
    else:
        rollouts = read_rollouts(source, args.importer, args.temperature)
    with progress_bar("rollouts scored", len(rollouts)) as advance:
        rescored = rescore(rollouts, models, kernels, dtype, TOKEN_BUDGET, advance)
    report = analyse(rescored, _decoder_of_text(models))
    with progress_bar("causes tried", 100) as advance:
        findings = diagnose(rescored, Candidates.of(models, others, kernels, dtype), advance)
    text = verdict(report, findings)
    answer = {
        "source": str(source),
        "verdict": text,
        "kernels": kernels,
        "dtype": dtype,
        "engine": engine,
        "aligned": None if engine is None else engine == f"{kernels} {dtype}" == f"aligned {dtype}",
        "tokens_without_weights": left_out,
        **report.to_dict(),
        "findings": [vars(finding) for finding in findings],
        "located": None if other is None else locate_against(other, rescored, models),
    }
    if args.html is not None:
        from zerogap.gaps.audit.report_html import to_html

        Path(args.html).write_text(to_html(answer), encoding="utf-8")
    if args.json:
        print(json.dumps(_without_infinities(answer), allow_nan=False))
    else:
        from zerogap.cli.audit_text import show

        show(answer)
    return 0


def _without_infinities(value: Any) -> Any:
    """null for every number that is none or infinite (a ratio that overflows, a side with broken values): JSON has no
    such numbers, and most readers refuse them."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _models(args: argparse.Namespace) -> Models:
    """--model and --behaviour-model, each folder checked. BadInput where the two do not fit together."""
    from zerogap.cli.preflight import read_model_config
    from zerogap.gaps.audit.rescore import Models

    if args.model is None:
        raise BadInput("--model was not given: the folder of the weights to compare with")
    learner_version, learner = _folder(args.model)
    behaviour = dict(_folder(text) for text in args.behaviour_model)
    if len(behaviour) != len(args.behaviour_model) or (None in behaviour and len(behaviour) > 1):
        raise BadInput("--behaviour-model: several folders need a version each, every version once: 3=DIR 4=DIR")
    for key, folder in (("--model", learner), *(("--behaviour-model", folder) for folder in behaviour.values())):
        read_model_config(folder, key)
    if learner_version is not None and behaviour.get(learner_version, learner) != learner:
        raise BadInput(f"version {learner_version} is given twice: {learner} and {behaviour[learner_version]}")
    if learner_version is not None and (newest := max(filter(None, behaviour), default=0)) > learner_version:
        raise BadInput(
            f"--behaviour-model {newest}={behaviour[newest]} is newer than --model {learner_version}; --model is what "
            "trains on the tokens, so no token can be newer: were the two swapped?"
        )
    if not behaviour:
        return Models({learner_version: learner})
    return Models(behaviour, learner, learner_version)


def _candidates(args: argparse.Namespace) -> dict[int, Path]:
    """--candidate-model, each folder checked: it must be the model of --model, with other weights."""
    from zerogap.cli.preflight import read_model_config

    found: dict[int, Path] = {}
    for text in args.candidate_model:
        version, folder = _folder(text)
        if version is None or version in found:
            raise BadInput(f"--candidate-model {text}: each needs a version of its own: 3=DIR")
        own = args.model and read_model_config(_folder(args.model)[1], "--model")
        other = read_model_config(folder, "--candidate-model")
        different = own and next((key for key in SHAPE if own.get(key) != other.get(key)), None)
        if different:
            raise BadInput(
                f"--candidate-model {text}: {different} is {other.get(different)}, that of --model is "
                f"{own.get(different)}; a candidate has the same shape and other weights"
            )
        found[version] = folder
    return found


def _folder(text: str) -> tuple[int | None, Path]:
    """`3=DIR` -> (3, DIR); `DIR` -> (None, DIR)."""
    number, separator, folder = text.partition("=")
    return (int(number), Path(folder)) if separator and number.isdigit() else (None, Path(text))


def _decoder_of_text(models: Models) -> Callable[[Sequence[int]], str] | None:
    from zerogap.model.checkpoint import read_tokenizer

    tokenizer = read_tokenizer(next(iter(models.behaviour.values())))
    if tokenizer is None:
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
