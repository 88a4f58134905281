"""The peer's sides on transformers: eager torch with SDPA, and `generate` with a static batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from zerogap.bench.learner import token_batch
from zerogap.bench.serve import Channel


def serve_learning(channel: Channel, folder: str, dtype: str) -> None:
    """Forward and backward of a batch of equal lengths, so that SDPA needs no mask."""
    model = _load(folder, dtype).train()

    def run(tokens: int, sequence: int) -> dict[str, Any]:
        tokens_BT = token_batch(Path(folder), tokens, sequence)
        model.zero_grad(set_to_none=True)
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        return {"loss": float(loss.detach())}

    channel.serve(run)


def serve_generation(channel: Channel, folder: str, dtype: str) -> None:
    """A static, left-padded batch. No log-probabilities are asked for, which is less than RL needs."""
    model = _load(folder, dtype).eval()

    def run(prompts: list[list[int]], samples: int, new_tokens: int) -> dict[str, Any]:
        rows = [ids for ids in prompts for _ in range(samples)]
        longest = max(map(len, rows))
        with torch.inference_mode():
            output_BT = model.generate(
                input_ids=torch.tensor([[0] * (longest - len(ids)) + ids for ids in rows]),
                attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return {"sampled": int(output_BT[:, longest:].numel())}

    channel.serve(run)


def _load(folder: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
