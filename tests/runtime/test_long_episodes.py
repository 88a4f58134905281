"""Episodes of 16,384 tokens: turns with long tool texts, pages under a memory budget, checkpointing in the learner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.support import TASK, tiny_recipe, trajectories
from zerogap.config import CreateModel, Task
from zerogap.env import make
from zerogap.env.environment import Step
from zerogap.env.task import Example, make_task
from zerogap.runtime.prepare import create_for_task
from zerogap.runtime.train import train
from zerogap.trajectory import Message

CONTEXT = 16_384
TOOL_TEXT = 4_000  # characters, one token each


class LongTool:
    """Every turn is answered with a long text; it never ends by itself."""

    async def reset(self, example: Example) -> list[Message]:
        self.turns = 0
        return example.messages

    async def step(self, action: str) -> Step:
        self.turns += 1
        text = f"{self.turns} + "
        return Step([{"role": "tool", "content": text * (TOOL_TEXT // len(text))}], len(action) / 8, False, False, {})

    async def close(self) -> None:
        self.turns = 0


def test_the_tiny_model_at_16k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates; every sampled token, scored with the weights of its own version, has the engine's bits, though two
    episodes never fit into the pages at one time and all are prefilled again."""
    monkeypatch.setattr(make, "make_environments", lambda settings, shared: LongTool)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    spec = CreateModel(**size, max_position_embeddings=CONTEXT)
    model = create_for_task(spec, make_task(Task(**TASK)), tmp_path / "model", seed=0)
    recipe = tiny_recipe(
        model,
        rollout__group_size=2,
        rollout__max_new_tokens=8,
        rollout__stop=list("0123456789+ "),  # random weights seldom end a turn by themselves
        rollout__max_batched_tokens=1000,
        rollout__kv_cache_mb=2.4,  # 18,750 tokens
        learner__activation_checkpointing=True,
        learner__micro_batch_tokens=CONTEXT,
        train__groups_per_update=1,
        train__updates=2,
    )
    summary = train(recipe, tmp_path / "run")
    records = trajectories(tmp_path / "run")
    longest = max(len(record["token_ids"]) for record in records)
    assert CONTEXT - TOOL_TEXT < longest <= CONTEXT
    assert any(record["info"]["turns"] == 5 and record["finish_reason"] == "context" for record in records)
    assert summary["bits_unequal"] == 0
    assert summary["bits_checked"] == sum(sum(record["loss_mask"]) for record in records) > 10
