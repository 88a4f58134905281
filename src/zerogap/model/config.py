"""What a decoder is: the dense Llama, Qwen2 and Qwen3 families, read from and written to a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerogap.kernels import AttentionShape
from zerogap.model.rope import ROPE_KEYS, rotary_tables

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class UnsupportedModel(ValueError):
    """A model that this decoder does not compute; the message names it and lists what is supported."""


@dataclass(frozen=True)
class DecoderConfig:
    architecture: str  # "llama" | "qwen2" | "qwen3"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # rope_type and its keys (model/rope.py); None: the default
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim)

    @staticmethod
    def from_hf(config: dict[str, Any]) -> DecoderConfig:
        """From the content of config.json (transformers 4 and 5 spellings). Raises UnsupportedModel."""
        names = config.get("architectures") or []
        name = names[0] if names else f"model_type {config.get('model_type')!r}"
        if name not in ARCHITECTURES:
            raise UnsupportedModel(f"architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}")
        family = ARCHITECTURES[name]
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method")
            raise UnsupportedModel(f"quantization_config ({method}) is not supported; give unquantised safetensors")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported; supported: silu")
        if config.get("use_sliding_window"):
            raise UnsupportedModel("use_sliding_window true is not supported; supported: full attention")
        heads = config["num_attention_heads"]
        bias = bool(config.get("attention_bias", False))
        rope_theta, rope_scaling = _rope(config)
        return DecoderConfig(
            architecture=family,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else bias,
            o_bias=False if family == "qwen2" else bias,
            mlp_bias=bool(config.get("mlp_bias", False)) if family == "llama" else False,
            qk_norm=family == "qwen3",
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 read alike."""
        architecture = next(k for k, v in ARCHITECTURES.items() if v == self.architecture)
        rope: dict[str, Any] = dict(self.rope_scaling or {"rope_type": "default"})
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
        }
        if self.architecture != "qwen2":
            config["attention_bias"] = self.qkv_bias
        if self.architecture == "llama":
            config["mlp_bias"] = self.mlp_bias
        return config

    def rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [max_position_embeddings, head_dim / 2]."""
        return rotary_tables(self.max_position_embeddings, self.head_dim, self.rope_theta, self.rope_scaling)


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, scaling or None) of a config.json. Raises UnsupportedModel."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_KEYS:
        raise UnsupportedModel(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_KEYS)}")
    required, optional = ROPE_KEYS[rope_type]
    missing = [key for key in required if rope.get(key) is None]
    if missing:
        raise UnsupportedModel(f"rope type {rope_type!r} needs {', '.join(missing)}, which config.json does not give")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UnsupportedModel(
            f"partial_rotary_factor {share} is not supported; supported: 1 (whole heads are rotated)"
        )
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = {key: rope[key] for key in (*required, *optional) if rope.get(key) is not None}
    return theta, {"rope_type": rope_type, **scaling} if scaling else None
