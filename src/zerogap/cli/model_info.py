"""`zerogap model info`: what a model folder holds, and whether zerogap can run it. Reads headers, no weights."""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

from zerogap.cli.arguments import command_parser
from zerogap.cli.errors import BadInput

EXAMPLES = """  zerogap model info runs/tiny/final_model
  zerogap model info FOLDER --json"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("model info", "Architecture, size, tokenizer, context, and what is unsupported.", EXAMPLES)
    parser.add_argument("folder", metavar="DIR", help="a Hugging Face model folder")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    info = describe(Path(args.folder))
    if args.json:
        print(json.dumps(info))
        return 0
    print(f"architecture  {info['architecture']}")
    print(f"parameters    {info['parameters']:,} in {info['tensors']:,} tensors ({', '.join(info['dtypes'])})")
    print(f"context       {info['context']} tokens")
    print(f"tokenizer     {info['tokenizer_ids']} ids, chat template: {'yes' if info['chat_template'] else 'no'}")
    print(f"supported     {'yes' if info['supported'] else 'no: ' + info['why_not']}")
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """Facts of a folder; `supported` False comes with `why_not`. BadInput when it is no model folder."""
    from zerogap.cli.preflight import check_model, read_model_config

    config = read_model_config(folder, key="model info")
    tensors = [entry for path in sorted(folder.glob("*.safetensors")) for entry in safetensors_header(path).values()]
    tokenizer_ids = count_tokenizer_ids(folder)
    why_not: str | None = None
    try:
        check_model(folder, key="model info")
    except BadInput as error:
        why_not = str(error).removeprefix("model info: ").removeprefix(f"{folder}: ").removeprefix(f"{folder} ")
    return {
        "folder": str(folder),
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "parameters": sum(math.prod(entry["shape"]) for entry in tensors),
        "tensors": len(tensors),
        "dtypes": sorted({entry["dtype"] for entry in tensors}),
        "context": config.get("max_position_embeddings"),
        "tokenizer_ids": tokenizer_ids,
        "chat_template": has_chat_template(folder),
        "supported": why_not is None,
        "why_not": why_not,
    }


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape} of a safetensors file (8 bytes of length, then JSON)."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise BadInput(f"{path} is not a readable safetensors file (cut short?): {error}") from error


def count_tokenizer_ids(folder: Path) -> int | None:
    """Ids that the tokenizer owns, or None without tokenizer.json."""
    from zerogap.model.checkpoint import read_tokenizer

    tokenizer = read_tokenizer(folder)
    return None if tokenizer is None else int(tokenizer.get_vocab_size(with_added_tokens=True))


def has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8")).get("chat_template"))
