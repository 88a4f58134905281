"""`model` of the recipe: where the weights come from, their context and their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from zerogap.config.section import Section


@dataclass(frozen=True)
class Arithmetic:
    """What a program computes with: kernel family (zerogap.kernels.get_kernels), dtype of weights and activations."""

    kernels: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.kernels} {self.dtype}"


class CreateModel(Section):
    """A small decoder with random weights and a tokenizer built on the task's text."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream: num_heads times an even head size."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the MLP."""
    num_layers: int = Field(4, ge=1)
    """Decoder blocks."""
    num_heads: int = Field(4, ge=1)
    """Query heads per layer."""
    num_kv_heads: int = Field(2, ge=1)
    """Key-value heads; fewer than num_heads makes the KV cache smaller (GQA). Must divide num_heads."""
    max_position_embeddings: int = Field(512, ge=8)
    """Context: longest prompt plus answer. A longer prompt is skipped and counted."""
    tokenizer: Literal["characters", "bpe"] = "characters"
    """characters: one token per character of the task's text. bpe: byte-level BPE trained on it."""
    vocab_size: int = Field(1024, ge=300)
    """bpe only: size of the vocabulary to train."""

    @model_validator(mode="after")
    def _heads(self) -> CreateModel:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_heads {self.num_heads} times an even head size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class RopeScaling(Section):
    """Rotary positions stretched for a longer context, under the names of a Hugging Face config.json."""

    rope_type: Literal["linear", "yarn", "llama3"]
    """linear: all frequencies divided by factor. yarn, llama3: only those that turn seldom in the original context."""
    factor: float = Field(ge=1)
    """Longest context over the original one."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """yarn, llama3: the context that the model was trained with; default: the checkpoint's own."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: what cos and sin are multiplied by; default: 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(None, gt=0)
    """yarn: pairs that turn more often in the original context are kept; default: 32."""
    beta_slow: float | None = Field(None, gt=0)
    """yarn: pairs that turn less often are stretched; default: 1."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3, required: pairs that turn less often in the original context are stretched."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3, required: pairs that turn more often are kept."""

    @model_validator(mode="after")
    def _keys_of_the_type(self) -> RopeScaling:
        given = self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        known = {
            "linear": set(),
            "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        }[self.rope_type]
        if foreign := sorted(given - known):
            raise ValueError(f"rope_type {self.rope_type} does not know {', '.join(foreign)}; remove it")
        if self.rope_type == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise ValueError("rope_type llama3 needs low_freq_factor and high_freq_factor")
        return self


class Model(Section):
    """Exactly one of path, create, fetch says where the weights come from."""

    path: str | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer)."""
    create: CreateModel | None = None
    fetch: Literal["smollm2-135m"] | None = None
    """A model that `zerogap model fetch` knows; downloaded once into the cache."""
    max_position_embeddings: int | None = Field(None, ge=8)
    """Context of the model, instead of its config.json's: longest prompt plus answer."""
    rope_scaling: RopeScaling | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and activations, in the engines too unless rollout.dtype is set; masters, logprobs are fp32."""
    kernels: Literal["aligned", "standard"] = "aligned"
    """Kernel family, in the engines too unless rollout.kernels is set. standard is stock torch, not bitwise: the run
    then says `aligned: no`."""

    @field_validator("kernels", mode="before")
    @classmethod
    def _kernels(cls, value: Any) -> Any:
        if value == "int8":
            raise ValueError("int8 weights have no gradient, so no learner computes on them; set rollout.kernels=int8")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        given = [k for k in ("path", "create", "fetch") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, create, fetch (given: {', '.join(given) or 'none'})")
        if self.create is not None and self.changes_context:
            raise ValueError(
                "max_position_embeddings and rope_scaling change a given checkpoint; the context of a created model is "
                "model.create.max_position_embeddings"
            )
        return self

    @property
    def arithmetic(self) -> Arithmetic:
        """The learner's."""
        return Arithmetic(self.kernels, self.dtype)

    @property
    def changes_context(self) -> bool:
        return self.max_position_embeddings is not None or self.rope_scaling is not None
