"""Recipes: bad input gets one clear message before anything loads (field case 2 among it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerogap.config import Recipe, RecipeError, dump_recipe, load_recipe, parse_recipe
from zerogap.config.objective import PpoClip, ReinforceZero

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


def test_refused_sampling_keys_and_a_bad_temperature_are_listed_together() -> None:
    text = problem(rollout={"top_p": 0.9, "top_k": 3, "temperature": 0})
    assert "3 problem(s)" in text
    assert all(f"rollout.{key}: " in text for key in ("top_p", "top_k", "temperature"))


@pytest.mark.parametrize(
    ("temperature", "words"),
    [
        (0, "must be > 0 in training (greedy is for eval)"),
        (-1.0, "must be > 0 in training"),
        (float("nan"), "rollout.temperature: Input should be a finite number"),
        (float("inf"), "rollout.temperature: Input should be a finite number"),
        (1e-6, "temperature 1e-06 must be at least 0.001: below, sampling is greedy in effect"),
    ],
)
def test_temperature_must_be_positive(temperature: float, words: str) -> None:
    assert words in problem(rollout={"temperature": temperature})
    assert parse_recipe(MINIMAL | {"rollout": {"temperature": 1e-3}}).rollout.temperature == 1e-3


def test_numbers_are_finite() -> None:
    assert "learner.learning_rate: Input should be a finite number (got inf)" in problem(
        learner={"learning_rate": float("inf")}
    )
    assert "finite" in problem(runtime={"timeout_s": "1e999"})


def test_an_empty_stop_string_is_refused() -> None:
    assert "rollout.stop: an empty stop string" in problem(rollout={"stop": ["END", ""]})


def test_another_context_belongs_to_a_given_checkpoint() -> None:
    yarn = {"rope_type": "yarn", "factor": 2.0}
    for key, value in (("max_position_embeddings", 16384), ("rope_scaling", yarn)):
        assert "model.create.max_position_embeddings" in problem(model={"create": {}, key: value})
        assert parse_recipe(MINIMAL | {"model": {"fetch": "smollm2-135m", key: value}}).model.changes_context


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "linear"}, "model.rope_scaling.factor: required"),
        ({"rope_type": "dynamic", "factor": 2.0}, "'linear', 'yarn' or 'llama3' (got 'dynamic')"),
        ({"rope_type": "linear", "factor": 0.5}, "greater than or equal to 1 (got 0.5)"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0}, "linear does not know beta_fast"),
        ({"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}, "yarn does not know low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs low_freq_factor and high_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fats": 16.0}, "did you mean 'beta_fast'?"),
    ],
)
def test_rope_scaling_has_the_keys_of_its_type(scaling: dict[str, object], words: str) -> None:
    assert words in problem(model={"fetch": "smollm2-135m", "rope_scaling": scaling})


def test_wrong_types_and_sources() -> None:
    assert "train.updates" in problem(train={"updates": "many"})
    assert "exactly one of path, create, fetch" in problem(model={"create": {}, "path": "there"})
    assert "exactly one of name" in problem(task={"name": "chain_sum", "jsonl": "file"})
    assert "given: name, file" in problem(task={"name": "chain_sum", "file": "a.py"})
    assert "given: none" in problem(task={})
    assert "params belong to name (reasoning-gym), file or" in problem(task={"jsonl": "a.jsonl", "params": {"x": 1}})
    assert "max_turns 3: an episode of name has one turn" in problem(task={"name": "chain_sum", "max_turns": 3})
    assert "file reads the answer itself" in problem(task={"file": "a.py", "answer_pattern": "(.*)"})
    assert "scored in one turn" in problem(task={"verifiers": "x", "tools": {}})
    assert "task.call_timeout_s" in problem(task={"name": "chain_sum", "call_timeout_s": 0})
    assert "task.max_error_share" in problem(task={"name": "chain_sum", "max_error_share": 1.5})
    assert "multiple of num_kv_heads" in problem(model={"create": {"num_heads": 4, "num_kv_heads": 3}})
    assert "name: required" in str(_parse_error({"model": {"create": {}}, "task": {"name": "chain_sum"}}))


def test_an_episode_has_one_turn_unless_a_file_makes_environments() -> None:
    def turns(**task: object) -> int:
        return parse_recipe({"name": "r", "model": {"fetch": "smollm2-135m"}, "task": task}).task.turn_limit

    assert turns(name="chain_sum") == turns(jsonl="a.jsonl") == 1
    assert turns(file="a.py") == 16 and turns(file="a.py", max_turns=3) == 3


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("learner", "learning_rate", True),
        ("learner", "learning_rate", "0.1"),
        ("train", "lag", True),
        ("train", "updates", "300"),
        ("train", "updates", 3.0),
        ("logging", "tensorboard", "yes"),
        ("logging", "tensorboard", 1),
        ("rollout", "stop", "END"),
        ("rollout", "stop", [1]),
        ("rollout", "page_size", "32"),
        ("runtime", "driver", 1),
        ("task", "params", [1]),
        ("task", "instruction", 3),
    ],
)
def test_values_of_another_type_are_refused(section: str, key: str, value: object) -> None:
    """YAML's yes is no lag of 1, and a quoted number is a text."""
    base = {"name": "chain_sum"} if section == "task" else {}
    assert f"{section}.{key}" in problem(**{section: {**base, key: value}})


def test_integers_stand_for_numbers_and_dumps_parse_again() -> None:
    recipe = parse_recipe(
        MINIMAL
        | {
            "rollout": {"temperature": 1, "stop": ["1e3"], "page_size": 8},
            "task": {"name": "chain_sum", "params": {"operators": ["+"], "text": "1e3", "many": 2}},
            "warm_start": {"learning_rate": 1},
        }
    )
    assert recipe.rollout.temperature == 1.0 and type(recipe.rollout.temperature) is float
    assert parse_recipe(recipe.model_dump()) == recipe == parse_recipe(recipe.model_dump(mode="json"))


def test_exponent_form_is_a_number_only_where_a_number_belongs(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: 1e3\nmodel: {create: {}}\n"
        "task: {name: chain_sum, instruction: 2e5, params: {word: 1e3}}\n"
        "rollout: {stop: [1e3]}\nlearner: {learning_rate: 3e-4, epsilon: 1E-9}\nwarm_start: {learning_rate: 2e-3}\n"
    )
    recipe = load_recipe(path, ["audit.share=1e-1"])
    assert (recipe.name, recipe.task.instruction, recipe.rollout.stop) == ("1e3", "2e5", ["1e3"])
    assert recipe.task.params == {"word": "1e3"}
    assert (recipe.learner.learning_rate, recipe.learner.epsilon, recipe.audit.share) == (3e-4, 1e-9, 0.1)
    assert recipe.warm_start is not None and recipe.warm_start.learning_rate == 2e-3
    path.write_text(dump_recipe(recipe))
    assert load_recipe(path) == recipe


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
    with pytest.raises(RecipeError, match=r"override 'train.lag=\[': the value is not valid YAML"):
        load_recipe(path, ["train.lag=["])
    assert load_recipe(path, ["rollout.kv_cache_mb="]).rollout.kv_cache_mb is None
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
    path.write_bytes(b"name: caf\xe9")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(path)
    path.write_text("- 1")
    with pytest.raises(RecipeError, match="must be a mapping"):
        load_recipe(path)


def test_an_objective_has_its_own_keys() -> None:
    assert parse_recipe(MINIMAL).learner.objective == ReinforceZero()
    recipe = parse_recipe(MINIMAL | {"learner": {"objective": {"name": "ppo_clip", "eps_high": "28e-2"}}})
    assert recipe.learner.objective == PpoClip(name="ppo_clip", eps_low=0.2, eps_high=0.28, normalize_std=False)
    assert parse_recipe(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"name": "ppo_clip", "eps_lo": 0.1}, "learner.objective.eps_lo: unknown key; did you mean 'eps_low'?"),
        ({"name": "reinforce_zero", "normalize_std": True}, "learner.objective.normalize_std: unknown key"),
        ({"name": "reinforce"}, "learner.objective.name: 'reinforce' is none of reinforce_zero, ppo_clip, "),
        ({"eps_low": 0.1}, "learner.objective: name is required, one of reinforce_zero, ppo_clip, "),
        ({"name": "cispo", "eps_low": 1.5}, "learner.objective.eps_low: Input should be less than or equal to 1"),
        ({"name": "geometric_gate", "low": 0.9}, "learner.objective.high: required, but missing"),
        ({"name": "product_gate", "low": 2.0, "high": 0.5}, "learner.objective: low 2.0 must not be above high 0.5"),
    ],
)
def test_objectives_are_strict(objective: dict[str, Any], words: str) -> None:
    assert words in problem(learner={"objective": objective})


@pytest.mark.parametrize("sections", [{"learner": {"lora_rank": 8}}, {"model": {"create": {}, "adapter": "x"}}])
def test_adapters_are_refused(sections: dict[str, Any]) -> None:
    """Field case 20: an adapter that nothing delivers would look like staleness, so asking for one fails at start."""
    text = problem(**sections)
    assert "adapters (LoRA) are not supported" in text and "merge the adapter into its base model" in text


def test_config_loads_without_torch() -> None:
    code = "import sys, zerogap.config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
