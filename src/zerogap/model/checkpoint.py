"""Hugging Face folders in and out: safetensors only (no pickle, no remote code), single file or sharded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from zerogap.kernels import Weight, get_kernels
from zerogap.model.adapter import adapter_refusal
from zerogap.model.config import DecoderConfig
from zerogap.model.decoder import Decoder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class CheckpointError(ValueError):
    """A model folder that cannot be loaded; the message names the file or tensor and the fix."""


def hf_names(config: DecoderConfig) -> dict[str, list[str]]:
    """Our fused weight name -> the Hugging Face tensors that make it up, in row order."""
    names = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
    if not config.tie_word_embeddings:
        names["head"] = ["lm_head.weight"]
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        names[ours + "input_norm"] = [theirs + "input_layernorm.weight"]
        names[ours + "post_norm"] = [theirs + "post_attention_layernorm.weight"]
        names[ours + "qkv"] = [attention + f"{p}_proj.weight" for p in "qkv"]
        names[ours + "o"] = [attention + "o_proj.weight"]
        names[ours + "gate_up"] = [mlp + "gate_proj.weight", mlp + "up_proj.weight"]
        names[ours + "down"] = [mlp + "down_proj.weight"]
        if config.qkv_bias:
            names[ours + "qkv_bias"] = [attention + f"{p}_proj.bias" for p in "qkv"]
        if config.o_bias:
            names[ours + "o_bias"] = [attention + "o_proj.bias"]
        if config.mlp_bias:
            names[ours + "gate_up_bias"] = [mlp + "gate_proj.bias", mlp + "up_proj.bias"]
            names[ours + "down_bias"] = [mlp + "down_proj.bias"]
        if config.qk_norm:
            names[ours + "q_norm"] = [attention + "q_norm.weight"]
            names[ours + "k_norm"] = [attention + "k_norm.weight"]
    return names


def hf_rows(config: DecoderConfig, name: str, weight: torch.Tensor) -> list[torch.Tensor]:
    """Split one fused weight into the Hugging Face tensors of `hf_names`."""
    field = name.rsplit(".", 1)[-1].removesuffix("_bias")
    if field == "qkv":
        shape = config.shape
        return list(weight.split([shape.q_size, shape.kv_size, shape.kv_size]))
    return list(weight.chunk(2)) if field == "gate_up" else [weight]


def load_decoder(folder: str | Path, kernels: str, dtype: str, trainable: bool = False) -> Decoder:
    """Load a Hugging Face folder. dtype: "float32" or "bfloat16" (weights are cast to it).

    Raises CheckpointError (missing file or tensor) or UnsupportedModel (architecture, rope type).
    """
    folder = Path(folder)
    config, files = check_folder(folder)
    target = getattr(torch, dtype)
    handles = {name: safe_open(folder / name, "pt") for name in sorted(set(files.values()))}

    def tensor(name: str) -> torch.Tensor:
        value: torch.Tensor = handles[files[name]].get_tensor(name)
        return value.to(target)

    weights = {
        ours: Weight(torch.cat([tensor(n) for n in theirs]) if len(theirs) > 1 else tensor(theirs[0]), trainable)
        for ours, theirs in hf_names(config).items()
    }
    rows = weights["embed"].data.shape[0]
    if rows != config.vocab_size:
        raise CheckpointError(f"{folder}: embedding has {rows} rows, config.json says vocab_size {config.vocab_size}")
    return Decoder(config, get_kernels(kernels), weights, _tokenizer_size(folder), _eos_ids(folder))


def check_folder(folder: Path) -> tuple[DecoderConfig, dict[str, str]]:
    """The decoder of a folder, and tensor name -> file name, once both fit each other. Reads headers, no weights.

    Raises CheckpointError (missing or broken file, missing or unknown tensor) or UnsupportedModel.
    """
    if (refusal := adapter_refusal(folder)) is not None:
        raise CheckpointError(refusal)
    config = read_decoder_config(folder)
    files = _tensor_files(folder)
    expected = {theirs for group in hf_names(config).values() for theirs in group}
    absent = sorted(expected - files.keys())
    if absent:
        raise CheckpointError(f"{folder}: tensor {absent[0]!r} is missing from the safetensors files")
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = [n for n in files if n not in expected | tied and not n.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise CheckpointError(
            f"{folder}: tensor {unknown[0]!r} (and {len(unknown) - 1} more) is not part of {config.architecture}; "
            "adapters (LoRA) and quantised weights are not supported: merge them first"
        )
    return config, files


def read_decoder_config(folder: Path) -> DecoderConfig:
    """The decoder that config.json describes; weights need not be there. Raises as `check_folder` does."""
    values = read_json(folder, "config.json")
    try:
        return DecoderConfig.from_hf(values)
    except KeyError as error:
        raise CheckpointError(f"{folder / 'config.json'} lacks the key {error}") from error


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer.json, or None without one. CheckpointError when it is broken."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{path} is not a readable tokenizer (cut short?): {error}") from error


def check_tokenizer(folder: Path) -> None:
    """CheckpointError unless the folder has a readable tokenizer.json."""
    if read_tokenizer(folder) is None:
        raise CheckpointError(f"{folder} has no tokenizer.json (a fast tokenizer is needed)")


def save_decoder(decoder: Decoder, folder: str | Path, tokenizer_folder: str | Path | None = None) -> Path:
    """Write a folder that transformers loads; tokenizer and generation files are copied from `tokenizer_folder`.

    Written beside the target and renamed at the end: the folder is whole or absent. An existing one is replaced.
    """
    folder = Path(folder)
    config = decoder.config
    tensors: dict[str, torch.Tensor] = {}
    for ours, theirs in hf_names(config).items():
        parts = hf_rows(config, ours, decoder.weights[ours].data)
        tensors.update({n: part.contiguous() for n, part in zip(theirs, parts, strict=True)})
    config_json = config.to_hf()
    config_json["dtype"] = config_json["torch_dtype"] = str(decoder.dtype).removeprefix("torch.")
    if decoder.eos_token_ids:
        ids = list(decoder.eos_token_ids)
        config_json["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    with replace_folder(folder) as temporary:
        if tokenizer_folder is not None:
            for name in TOKENIZER_FILES:
                if (Path(tokenizer_folder) / name).is_file():
                    shutil.copyfile(Path(tokenizer_folder) / name, temporary / name)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
    return folder


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model folder; CheckpointError says which file is missing or broken."""
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {name}; a Hugging Face model folder is needed")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a mapping")
    return value


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the headers of the files that the index names, or of the only one."""
    if (folder / "model.safetensors.index.json").is_file():
        index = read_json(folder, "model.safetensors.index.json")
        names = sorted(set(index.get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: shard {missing[0]} named by the index is missing")
    else:
        names = ["model.safetensors"]
        if not (folder / names[0]).is_file():
            pickled = [p.name for p in folder.glob("*.bin")]
            hint = f" ({pickled[0]} is a pickle and is never loaded; convert it to safetensors)" if pickled else ""
            raise CheckpointError(f"{folder} has no model.safetensors{hint}")
    return {tensor: name for name in names for tensor in _tensor_names(folder / name)}


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, "pt") as handle:
            return list(handle.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file (cut short?): {error}") from error


def _tokenizer_size(folder: Path) -> int | None:
    """One more than the largest id, or None without a tokenizer."""
    tokenizer = read_tokenizer(folder)
    return None if tokenizer is None else max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _eos_ids(folder: Path) -> tuple[int, ...]:
    ids = read_json(folder, "config.json").get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        ids = read_json(folder, "generation_config.json").get("eos_token_id", ids)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)
