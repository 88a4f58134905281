"""Recipes: bad input gets one clear message before anything loads (field case 2 among it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerogap.config import Recipe, RecipeError, dump_recipe, load_recipe, parse_recipe

MINIMAL: dict[str, Any] = {"name": "x", "model": {"create": {}}, "task": {"name": "chain_sum"}}


def problem(**sections: Any) -> str:
    with pytest.raises(RecipeError) as error:
        parse_recipe(MINIMAL | sections)
    return str(error.value)


def test_minimal_recipe_has_defaults_and_round_trips(tmp_path: Path) -> None:
    recipe = parse_recipe(MINIMAL)
    assert recipe.train.lag == 2
    assert recipe.run_dir == Path("runs/x")
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


def test_unknown_keys_name_the_nearest() -> None:
    text = problem(learner={"learning_rte": 1e-3}, modle={})
    assert "learner.learning_rte: unknown key; did you mean 'learning_rate'?" in text
    assert "modle: unknown key; did you mean 'model'?" in text
    assert "2 problem(s)" in text
    assert "known keys: " in problem(train={"zzzzzz": 1})
    assert "model.create.hidden_sise: unknown key; did you mean 'hidden_size'?" in problem(
        model={"create": {"hidden_sise": 3}}
    )


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_truncated_sampling_is_refused(key: str) -> None:
    """Field case 2: a kept set on one side makes the ratio carry its mass; the knob is refused by name."""
    text = problem(rollout={key: 0.9})
    assert key in text
    assert "refused in training" in text


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature: float) -> None:
    assert "temperature" in problem(rollout={"temperature": temperature})


def test_wrong_types_and_sources() -> None:
    assert "train.updates" in problem(train={"updates": "many"})
    assert "exactly one of path, create, fetch" in problem(model={"create": {}, "path": "there"})
    assert "exactly one of name" in problem(task={"name": "chain_sum", "jsonl": "file"})
    assert "multiple of num_kv_heads" in problem(model={"create": {"num_heads": 4, "num_kv_heads": 3}})
    assert "name: required" in str(_parse_error({"model": {"create": {}}, "task": {"name": "chain_sum"}}))


def _parse_error(values: dict[str, Any]) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        parse_recipe(values)
    return error.value


def test_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(parse_recipe(MINIMAL)))
    recipe: Recipe = load_recipe(path, ["learner.learning_rate=3e-4", "rollout.stop=[END]", "train.lag=64"])
    assert recipe.learner.learning_rate == 3e-4
    assert recipe.rollout.stop == ["END"]
    assert recipe.train.lag == 64
    with pytest.raises(RecipeError, match=r"section\.key=value"):
        load_recipe(path, ["nonsense"])
    with pytest.raises(RecipeError, match="is a value, not a section"):
        load_recipe(path, ["name.deeper=1"])
    with pytest.raises(RecipeError, match="did you mean 'lag'"):
        load_recipe(path, ["train.lagg=1"])


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(path)
    path.write_text("- 1")
    with pytest.raises(RecipeError, match="must be a mapping"):
        load_recipe(path)


def test_config_loads_without_torch() -> None:
    code = "import sys, zerogap.config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
