"""A model of transformers as a side: hooks on its modules, so that its own forward runs and not a copy of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask
from transformers.utils.logging import disable_progress_bar

from zerogap.gaps.locate.stages import Stage, Watch, before_norm

ATTENTION = "zerogap_watched"  # eager attention, whose queries, keys and output are looked at


class TransformersSide:
    """A Llama, Qwen2 or Qwen3 of transformers. vocab: ids below this can be sampled, as in our decoder."""

    def __init__(self, folder: Path, dtype: str, vocab: int) -> None:
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        disable_progress_bar()
        self.name = f"transformers {dtype}"
        self.vocab = vocab
        self.module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, local_files_only=True
        ).eval()

    @torch.no_grad()
    def run(self, token_ids: list[int], temperature: float, watch: Watch) -> None:
        tokens = torch.tensor(token_ids)
        with _hooks(self.module.model, watch):
            logits_TV = self.module(input_ids=tokens[None, :-1], use_cache=False, watch=watch).logits[0].float()
        logits_TV = watch(Stage(None, "logits"), logits_TV)[:, : self.vocab]
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        watch(Stage(None, "logprobs"), logprobs_TV.gather(1, tokens[1:, None])[:, 0])


@contextmanager
def _hooks(model: Any, watch: Watch) -> Iterator[None]:
    """Every stage but attention and the head. What transformers computes in parts lies side by side in ours."""
    handles = []

    def output(module: nn.Module, stage: Stage, column: int = 0) -> None:
        handles.append(module.register_forward_hook(lambda _module, _inputs, out: _show(watch, stage, out, column)))

    def input(module: nn.Module, stage: Stage) -> None:
        handles.append(
            module.register_forward_pre_hook(lambda _module, inputs: (_show(watch, stage, inputs[0]), *inputs[1:]))
        )

    output(model.embed_tokens, Stage(None, "embedding"))
    for i, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        if i:
            input(layer, before_norm(Stage(i, "input_norm")))
        output(layer.input_layernorm, Stage(i, "input_norm"))
        keys = attention.q_proj.out_features
        values = keys + attention.k_proj.out_features
        output(attention.q_proj, Stage(i, "qkv"))
        output(attention.k_proj, Stage(i, "qkv"), keys)
        output(attention.v_proj, Stage(i, "qkv"), values)
        if hasattr(attention, "q_norm"):
            output(attention.q_norm, Stage(i, "head_norm"))
            output(attention.k_norm, Stage(i, "head_norm"), keys)
            output(attention.v_proj, Stage(i, "head_norm"), values)  # no norm, but part of ours
        output(attention.o_proj, Stage(i, "o"))
        input(layer.post_attention_layernorm, before_norm(Stage(i, "post_norm")))
        output(layer.post_attention_layernorm, Stage(i, "post_norm"))
        output(mlp.gate_proj, Stage(i, "gate_up"))
        output(mlp.up_proj, Stage(i, "gate_up"), mlp.gate_proj.out_features)
        input(mlp.down_proj, Stage(i, "silu_mul"))
        output(mlp.down_proj, Stage(i, "down"))
    input(model.norm, before_norm(Stage(None, "norm")))
    output(model.norm, Stage(None, "norm"))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _attention(
    module: Any,
    query_1HTD: torch.Tensor,
    key_1HTD: torch.Tensor,
    value_1HTD: torch.Tensor,
    mask: torch.Tensor | None,
    watch: Watch,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager attention of the model's own file, after rotary, before the output projection."""
    operands, column = [], 0
    for operand_1HTD in (query_1HTD, key_1HTD, value_1HTD):
        shown_1THD = _show(watch, Stage(module.layer_idx, "rotary"), operand_1HTD.transpose(1, 2), column)
        operands.append(shown_1THD.transpose(1, 2))
        column += shown_1THD[0, 0].numel()
    eager = sys.modules[type(module).__module__].eager_attention_forward
    output_1THD, shares = eager(module, *operands, mask, **settings)
    return _show(watch, Stage(module.layer_idx, "attention"), output_1THD), shares


def _show(watch: Watch, stage: Stage, output_1TW: torch.Tensor, column: int = 0) -> torch.Tensor:
    return watch(stage, output_1TW[0].flatten(1), column).reshape(output_1TW.shape)
