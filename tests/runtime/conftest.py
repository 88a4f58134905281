"""One tiny model folder for all runtime tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.support import TASK
from zerogap.config import CreateModel, Task
from zerogap.env.task import make_task
from zerogap.runtime.prepare import create_for_task


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = CreateModel(
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=128,
    )
    return create_for_task(spec, make_task(Task(**TASK)), tmp_path_factory.mktemp("model") / "tiny", seed=0)
