"""A small model of the command line's own making, for the commands that want one."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerogap.cli.main import main

CREATE = ["hidden_size=32", "intermediate_size=64", "num_layers=1", "max_position_embeddings=128"]
PARAMS = ["--params", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    assert main(["model", "create", str(folder), *CREATE, "--task", "chain_sum", *PARAMS]) == 0
    return folder
