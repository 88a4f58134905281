"""--dry-run: the resolved recipe and what the run will need, with nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from zerogap.cli.estimate import PROCESS_BYTES, estimate_needs
from zerogap.cli.main import main
from zerogap.cli.model_size import SMOLLM2_135M, ModelSize
from zerogap.config import CreateModel, Recipe, load_recipe, parse_recipe
from zerogap.model.config import DecoderConfig
from zerogap.model.create import create_model

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def recipe_with(**sections: dict[str, object]) -> Recipe:
    base: dict[str, object] = {"name": "r", "model": {"fetch": "smollm2-135m"}, "task": {"name": "chain_sum"}}
    return parse_recipe(base | sections)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each recipe in recipes/ is valid, its task exists, and the printed recipe is the same recipe again. Models and
    data that a recipe names and the user has to bring are stood in for by small ones; so is the cpython tool, which not
    every machine can isolate."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(path)
    changes = ["train.lag=8", "learner.learning_rate=3e-4"]
    if recipe.model.path is not None:
        create_model(CreateModel(hidden_size=16, num_heads=1, num_kv_heads=1), ["a"], tmp_path / recipe.model.path, 0)
    if recipe.task.jsonl is not None:
        data = tmp_path / recipe.task.jsonl
        data.parent.mkdir()
        data.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    if recipe.task.file is not None:
        changes.append(f"task.file={RECIPES[0].parents[1] / recipe.task.file}")
    if recipe.task.tools is not None:
        changes.append("task.tools.backend=monty")
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(path), "--dry-run", *changes]) == 0
    printed = capsys.readouterr().out
    again = parse_recipe(yaml.safe_load(printed))
    assert again == load_recipe(path, changes)
    for fact in ("# parameters", "# cores", "# memory", "KV cache", "# disk", "# tokens per update", "# lag"):
        assert fact in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["train", str(RECIPES[0].with_name("tiny.yaml")), "--dry-run", "--json", "--output-dir", "elsewhere"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["recipe"]["output_dir"] == "elsewhere"
    assert answer["needs"]["parameters"] > 100_000


def test_the_file_of_an_environment_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = {"name": "r", "model": {"create": {}}, "task": {"file": "mine.py"}}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    Path("mine.py").write_text(
        "def examples():\n    return [{'question': 'q'}]\n\ndef grade(payload, text): return 1\n"
    )
    assert main(["train", "r.yaml", "--dry-run"]) == 0
    Path("mine.py").write_text("def examples():\n    return [1 / 0]\n\ndef grade(payload, text): return 1\n")
    assert main(["train", "r.yaml", "--dry-run"]) != 0
    assert f"{tmp_path / 'mine.py'}:2: ZeroDivisionError" in capsys.readouterr().err


def test_parameters_of_smollm2() -> None:
    """134,515,008 is what the published checkpoint holds."""
    assert ModelSize.from_config(SMOLLM2_135M).parameters == 134_515_008


def test_untied_head_and_head_dim_count() -> None:
    config = {**SMOLLM2_135M, "tie_word_embeddings": False}
    assert ModelSize.from_config(config).parameters == 134_515_008 + 49152 * 576
    wide = ModelSize.from_config({**SMOLLM2_135M, "head_dim": 128})
    assert (wide.num_heads, wide.num_kv_heads, wide.head_dim) == (9, 3, 128)


QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
R1_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_4B, 4.02), (R1_1_5B, 1.78)])
def test_the_models_of_the_published_recipes_are_supported(config: dict[str, object], billions: float) -> None:
    """Figures of the published config.json files."""
    assert DecoderConfig.from_hf(config).num_layers == config["num_hidden_layers"]
    assert ModelSize.from_config(config).parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_turns_count() -> None:
    task: dict[str, object] = {"name": "chain_sum", "max_turns": 3, "tools": {}}
    needs = estimate_needs(recipe_with(task=task, rollout={"group_size": 4, "max_new_tokens": 10}))
    once = estimate_needs(recipe_with(rollout={"group_size": 4, "max_new_tokens": 10}))
    assert needs.tokens_per_update == 3 * once.tokens_per_update and needs.kv_cache_bytes > once.kv_cache_bytes


def test_tokens_and_lag() -> None:
    needs = estimate_needs(
        recipe_with(rollout={"group_size": 4, "max_new_tokens": 10}, train={"groups_per_update": 3, "lag": 5})
    )
    assert needs.sequences_per_update == 12
    assert needs.tokens_per_update == 120
    assert needs.lag_tokens == 600


def test_memory_follows_the_recipe() -> None:
    """More lag keeps more weight versions; bf16 halves KV cache and snapshots; masters and Adam stay fp32."""
    base = estimate_needs(recipe_with(train={"lag": 2}))
    version = 134_515_008 * 4
    lagged = estimate_needs(recipe_with(train={"lag": 4}, audit={"weights_memory_mb": 2000}))
    assert lagged.snapshot_bytes - base.snapshot_bytes == version  # a third older one fits, the fourth does not
    assert lagged.stored_bytes == lagged.disk_bytes - base.disk_bytes == version
    unaudited = estimate_needs(recipe_with(train={"lag": 4}, audit={"share": 0}))
    assert (unaudited.snapshot_bytes, unaudited.stored_bytes) == (2 * version, 0)
    assert base.kv_cache_bytes == 64 * (128 + 64) * 2 * 30 * 192 * 4  # max_running of an assumed prompt and an answer

    model = {"fetch": "smollm2-135m", "dtype": "bfloat16"}
    half = estimate_needs(recipe_with(model=model, train={"lag": 2}))
    assert half.kv_cache_bytes * 2 == base.kv_cache_bytes
    assert half.snapshot_bytes * 2 == base.snapshot_bytes
    assert half.learner_bytes > 16 * 134_515_008


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_memory_budget_becomes_whole_pages(dtype: str, width: int) -> None:
    """100 MB in pages of 16 tokens of SmolLM2, with no byte above the budget and no page left out."""
    model = {"fetch": "smollm2-135m", "dtype": dtype}
    needs = estimate_needs(recipe_with(model=model, rollout={"kv_cache_mb": 100, "page_size": 16}))
    page = 16 * 2 * 30 * 192 * width
    assert needs.kv_pages == 100_000_000 // page
    assert needs.kv_cache_bytes == needs.kv_pages * page
    assert f"{needs.kv_pages:,} pages of 16 tokens" in "\n".join(needs.lines())


@pytest.mark.parametrize(("kernels", "padded_dim"), [("aligned", 16), ("standard", 8)])
def test_a_page_is_what_the_kernel_family_makes_of_it(kernels: str, padded_dim: int) -> None:
    """The aligned kernels round the values' head_dim up to 16."""
    create = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3}
    recipe = recipe_with(model={"create": create, "kernels": kernels}, rollout={"page_size": 8})
    page, _ = ModelSize.from_recipe(recipe).kv_budget(recipe)
    assert page == 3 * 8 * 2 * (8 + padded_dim) * 4


def test_the_engine_may_have_its_own_arithmetic() -> None:
    """Pages and the engine's weights are in its dtype; snapshots, which travel, in the learner's."""
    parameters = 134_515_008
    plain = estimate_needs(recipe_with())
    assert (plain.engine_arithmetic, plain.learner_arithmetic, plain.aligned) == (*["aligned float32"] * 2, True)
    assert plain.worker_bytes - plain.kv_cache_bytes - PROCESS_BYTES == 3 * 4 * parameters
    for rollout, bytes_per_parameter in (
        ({"dtype": "bfloat16"}, 2 + 2 + 4 + 2),  # weights, panels, the next version as sent and as converted
        ({"kernels": "int8"}, 4 + 1 + 4),
        ({"kernels": "standard"}, 4 + 4),
    ):
        needs = estimate_needs(recipe_with(rollout=rollout))
        assert needs.worker_bytes - needs.kv_cache_bytes - PROCESS_BYTES == bytes_per_parameter * parameters
        assert needs.kv_cache_bytes == plain.kv_cache_bytes // (2 if "dtype" in rollout else 1)
        assert (needs.snapshot_bytes, needs.learner_bytes) == (plain.snapshot_bytes, plain.learner_bytes)
        assert not needs.aligned
        engine = f"{rollout.get('kernels', 'aligned')} {rollout.get('dtype', 'float32')}"
        assert needs.lines()[0].endswith(f"engine {engine}, learner aligned float32 (aligned: no)")


def test_a_budget_without_room_for_an_answer_is_refused_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """65 tokens need 3 pages of 32, of 1,474,560 bytes each; 4.42 MB is 2 pages, 4.43 MB is enough."""
    monkeypatch.chdir(tmp_path)
    smollm2 = str(next(path for path in RECIPES if path.stem == "smollm2"))
    command = ["train", smollm2, "model.dtype=float32", "rollout.max_new_tokens=64"]
    assert main([*command, "rollout.kv_cache_mb=4.42"]) == 2
    message = capsys.readouterr().err
    for words in ("rollout.kv_cache_mb 4.42", "rollout.max_new_tokens 64", "2 pages of 32", "at least 4.43"):
        assert words in message
    assert list(tmp_path.iterdir()) == []
    assert main([*command, "rollout.kv_cache_mb=4.43", "--dry-run"]) == 0


def test_the_recipe_sets_the_context() -> None:
    model = {"fetch": "smollm2-135m", "max_position_embeddings": 16384}
    assert ModelSize.from_recipe(recipe_with(model=model)).context == 16384
    assert ModelSize.from_recipe(recipe_with()).context == 8192


def test_activation_checkpointing_counts_inputs_of_layers() -> None:
    plain, checkpointed = (
        estimate_needs(recipe_with(learner={"micro_batch_tokens": 4096, "activation_checkpointing": on}))
        for on in (False, True)
    )
    layer = 4 * 576 + 2 * 960 + 576 + 3 * 1536
    assert plain.learner_bytes - checkpointed.learner_bytes == 4096 * 4 * (30 * layer - (30 * 2 * 576 + layer))


def test_a_sequence_longer_than_the_micro_batch_counts_whole() -> None:
    long, longer = (
        estimate_needs(recipe_with(rollout={"max_new_tokens": new}, learner={"micro_batch_tokens": 64}))
        for new in (1000, 2000)
    )
    assert longer.learner_bytes - long.learner_bytes == 1000 * 30 * (4 * 576 + 2 * 960 + 576 + 3 * 1536) * 4


def test_notes_when_it_does_not_fit() -> None:
    needs = estimate_needs(recipe_with(rollout={"workers": 500, "threads": 4, "kv_cache_mb": 1_000_000}))
    notes = [line for line in needs.lines() if line.startswith("note:")]
    assert needs.cores == 2001
    assert len(notes) == 2
    assert "rollout.workers" in notes[0] and "rollout.kv_cache_mb" in notes[1]
