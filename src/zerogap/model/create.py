"""A small Llama with random weights and a tokenizer made for the task's text, as a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from zerogap.config import CreateModel
from zerogap.model.checkpoint import hf_names, replace_folder
from zerogap.model.config import DecoderConfig

PAD, BOS, EOS, UNK = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, UNK]
END_OF_TURN = "\n"

# Few tokens per prompt: no role names, a turn ends with a line break, an answer with the end mark.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def create_model(spec: CreateModel, texts: Iterable[str], folder: str | Path, seed: int) -> Path:
    """Write config, fp32 weights, tokenizer, chat template and generation config to `folder`; returns it.

    texts: what the tokenizer must be able to spell (questions, solutions). seed: of the weights.
    The folder appears whole or not at all; an existing one is replaced.
    """
    folder = Path(folder)
    tokenizer = _character_tokenizer(texts) if spec.tokenizer == "characters" else _bpe(texts, spec.vocab_size)
    config = DecoderConfig(
        architecture="llama",
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.hidden_size // spec.num_heads,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
    )
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))
    }
    with replace_folder(folder) as temporary:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=PAD,
            unk_token=UNK,
            model_max_length=spec.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(str(temporary))
        save_file(_random_tensors(config, seed), temporary / "model.safetensors", metadata={"format": "pt"})
        _write_json(temporary / "config.json", {**config.to_hf(), **ids, "dtype": "float32", "torch_dtype": "float32"})
        _write_json(temporary / "generation_config.json", ids)
    return folder


def _character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One token per character that occurs; others become the unknown token. Decodes exactly what it can spell."""
    characters = sorted({character for text in texts for character in text} | {END_OF_TURN})
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def _bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: spells any text; digits stay apart so that numbers have one spelling."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _random_tensors(config: DecoderConfig, seed: int) -> dict[str, torch.Tensor]:
    """fp32 tensors under their Hugging Face names. Norms are 1; matrices are normal with std 1 / sqrt(columns), which
    small models learn from several times faster than from the usual 0.02; what writes to the residual is smaller."""
    generator = torch.Generator().manual_seed(seed)
    hidden, shape = config.hidden_size, config.shape
    sizes = {
        "embed_tokens": (config.vocab_size, hidden),
        "q_proj": (shape.q_size, hidden),
        "k_proj": (shape.kv_size, hidden),
        "v_proj": (shape.kv_size, hidden),
        "o_proj": (hidden, shape.q_size),
        "gate_proj": (config.intermediate_size, hidden),
        "up_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
    }
    tensors = {}
    for names in hf_names(config).values():
        for name in names:
            module = name.split(".")[-2]
            if module not in sizes:
                tensors[name] = torch.ones(hidden)
                continue
            rows_columns = sizes[module]
            writers = 2 * config.num_layers if module in ("o_proj", "down_proj") else 1
            std = 1 / math.sqrt(rows_columns[1] * writers)
            tensors[name] = torch.empty(rows_columns).normal_(0.0, std, generator=generator)
    return tensors


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
