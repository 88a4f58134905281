"""The dimensions of a recipe's model, before it is loaded or even made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.bench.models import SHAPES
from zerogap.cli.preflight import read_model_config
from zerogap.config import CreateModel, Recipe

ASSUMED_PROMPT_TOKENS = 128  # the run itself measures the task's prompts; see runtime.prompts.prompt_rules
CHARACTER_VOCABULARY = 64  # a character tokenizer's rough size, before the task's text has been read
SMOLLM2_135M = SHAPES["smollm2"] | {"max_position_embeddings": 8192, "tie_word_embeddings": True}


@dataclass(frozen=True)
class ModelSize:
    """The dimensions that decide memory: parameters, heads, what a layer keeps for the backward pass, context."""

    parameters: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int
    hidden_size: int
    layer_activations_per_token: int
    context: int

    @staticmethod
    def from_config(config: dict[str, Any]) -> ModelSize:
        """From the keys of a Hugging Face config.json (biases and QK-norm are too small to count)."""
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        intermediate = config["intermediate_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        q_size, kv_size = heads * head_dim, kv_heads * head_dim
        layer = hidden * (q_size + 2 * kv_size) + q_size * hidden + 3 * hidden * intermediate + 2 * hidden
        embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
        return ModelSize(
            parameters=embeddings + layers * layer + hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=layers,
            hidden_size=hidden,
            # saved for the backward: two norms and residuals, qkv before and after rotary, attention, gate|up, product
            layer_activations_per_token=4 * hidden + 2 * (q_size + 2 * kv_size) + q_size + 3 * intermediate,
            context=config.get("max_position_embeddings", 2048),
        )

    @staticmethod
    def from_recipe(recipe: Recipe) -> ModelSize:
        model = recipe.model
        if model.create is not None:
            return ModelSize.from_config(_created(model.create))
        config = SMOLLM2_135M if model.path is None else read_model_config(Path(model.path), key="model.path")
        if model.max_position_embeddings is not None:
            config = {**config, "max_position_embeddings": model.max_position_embeddings}
        return ModelSize.from_config(config)

    def kv_budget(self, recipe: Recipe) -> tuple[int, int]:
        """(bytes of a page of KV cache, pages). RecipeError when rollout.kv_cache_mb holds too few."""
        from zerogap.kernels import AttentionShape
        from zerogap.runtime.kv_memory import default_pages, page_bytes, pages_in_budget

        shape = AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim)
        page = page_bytes(recipe.engine_arithmetic, self.layers, shape, recipe.rollout.page_size)
        pages = pages_in_budget(recipe.rollout, page)
        if pages is None:
            pages = default_pages(recipe.rollout, ASSUMED_PROMPT_TOKENS, self.context, recipe.task.turn_limit)
        return page, pages


def _created(spec: CreateModel) -> dict[str, Any]:
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": CHARACTER_VOCABULARY if spec.tokenizer == "characters" else spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": True,
    }
