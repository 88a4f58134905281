"""model create, model info, sft and eval on a model made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tests.cli.conftest import CREATE
from zerogap.cli.arguments import parse_pairs
from zerogap.cli.main import main
from zerogap.cli.model_info import describe


def test_create_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new"
    assert main(["model", "create", str(folder), "--task", "chain_sum", "--json", *CREATE]) == 0
    assert json.loads(capsys.readouterr().out) == {"model": str(folder)}
    assert (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def test_info(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "info", str(model), "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["supported"] is True and info["why_not"] is None
    assert info["architecture"] == "LlamaForCausalLM"
    assert info["parameters"] == sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
    assert info["dtypes"] == ["F32"] and info["context"] == 128 and info["chat_template"] is True
    assert main(["model", "info", str(model)]) == 0
    assert "supported     yes" in capsys.readouterr().out


def test_info_says_why_not(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    save_file(load_file(model / "model.safetensors"), tmp_path / "model.safetensors")
    assert describe(tmp_path)["why_not"].startswith("architecture MambaForCausalLM is not supported")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(tmp_path)["why_not"] == "has no tokenizer.json (a fast tokenizer is needed)"
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 7)
    assert main(["model", "info", str(tmp_path)]) == 2
    assert "not a readable safetensors file" in capsys.readouterr().err


def test_failed_sft_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worked solutions longer than the context are found only in the warm start; the next try is not blocked."""
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "small",
        "model": {"create": parse_pairs(CREATE)},
        "task": {"name": "chain_sum", "size": 20},
        "warm_start": {"steps": 1, "examples_per_step": 2},
    }
    Path("small.yaml").write_text(yaml.safe_dump(recipe))
    for _ in range(2):
        assert main(["sft", "small.yaml", "model.create.max_position_embeddings=8"]) == 1
        assert "longer than the model's context of 8 tokens" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    assert main(["sft", "small.yaml"]) == 0


def test_sft_then_eval_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "small",
        "model": {"create": parse_pairs(CREATE)},
        "task": {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}},
        "warm_start": {"steps": 3, "examples_per_step": 4},
    }
    Path("small.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["sft", "small.yaml", "--json", "warm_start.warmup_steps=1"]) == 0
    captured = capsys.readouterr()
    folder = json.loads(captured.out)["model"]
    assert Path(folder).is_relative_to("runs/small-sft")
    assert "warm start: done" in captured.err
    assert main(["eval", "--model", folder, "--recipe", "small.yaml", "--limit", "2", "--max-new-tokens", "4"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["sft", "small.yaml"]) == 2
    assert "runs/small-sft already holds a run" in capsys.readouterr().err
