"""`zerogap bench` from the command line: each command prints a table with both sides; bad input is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers import tiny_config
from zerogap.bench.step import StepSetting, step_recipe
from zerogap.cli.main import COMMANDS, main
from zerogap.config import Arithmetic

RECIPE = {
    "name": "small",
    "model": {"create": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2}},
    "task": {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}},
    "warm_start": {"steps": 2, "examples_per_step": 2},
    "rollout": {"group_size": 2, "max_new_tokens": 4},
    "train": {"groups_per_update": 2},
}


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["kernels", "--op", "linear", "elementwise", "--rows", "1", "--dtype", "bfloat16", "--rounds", "1"]
    result = json.loads(run([*options, "--json"], capsys))
    assert [row["op"] for row in result["rows"]] == ["linear"] * 3 + ["rms_norm"] * 2 + ["silu_mul"] * 2
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["ours_us"] / row["peer_us"])
    assert result["title"] == "kernels at the shapes of SmolLM2-135M: ours against stock torch, medians of 1"
    machine = result["machine"]
    assert machine["peak_gflops"]["bfloat16"] > 0 < machine["dram_gb_s"] and machine["threads"] == 1


@pytest.mark.slow
def test_kernels_at_the_shapes_of_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(architecture="qwen3", qk_norm=True, hidden_size=48).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["kernels", "--model", str(tmp_path), "--op", "elementwise", "--dtype", "float32", "--rounds", "1"]
    table = run(options, capsys)
    assert f"at the shapes of {tmp_path.name}:" in table
    for start in ("rms_norm | float32 | M=32 48 |", "head_norm | float32 | M=4096 4/2 heads of 8 |"):
        assert f"| {start}" in table


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "has no config.json"),
        ("{", "is not valid JSON"),
        ("[]", "must hold a mapping"),
        ('{"architectures": ["LlamaForCausalLM"]}', "lacks the key 'num_attention_heads'"),
        ('{"architectures": ["GPT2LMHeadModel"]}', "architecture GPT2LMHeadModel is not supported; supported: Llama"),
    ],
)
def test_kernels_of_a_bad_folder(
    config: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["bench", "kernels", "--model", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "error: --model: " in captured.err and message in captured.err


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["transformers", "torch"])
def test_rollout(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["rollout", "--shape", "tiny", "--peer", peer, "--batch", "4", "--samples", "2", "--new-tokens", "3"]
    table = run([*options, "--rounds", "2"], capsys)
    assert "3 new tokens per sample, 2 of each prompt, median of 2" in table
    assert f"| float32 | {peer} | 4 | " in table and f"| bfloat16 | {peer} | 4 | " in table


@pytest.mark.slow
def test_learner(capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself compares the losses of the sides."""
    options = ["learner", "--shape", "tiny", "--tokens", "64", "--sequence", "16", "--rounds", "2"]
    rows = json.loads(run([*options, "--json"], capsys))["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    assert all(row["ratio"] == row["ours"] / row["peer"] and "bar" not in row for row in rows)
    assert "| 2 threads tokens/s | 1 thread tokens/s |" in run([*options, "--scaling", "--dtype", "float32"], capsys)


@pytest.mark.slow
def test_activation_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself checks that both losses are equal. Of two layers there is little to save."""
    options = ["learner", "--shape", "tiny", "--tokens", "64", "--sequence", "16", "--rounds", "1", "--json"]
    (row,) = json.loads(run([*options, "--checkpointing", "--dtype", "float32"], capsys))["rows"]
    assert row["ratio"] == row["ours"] / row["peer"] and min(row["ours_peak_gb"], row["peer_peak_gb"]) > 0.05


@pytest.mark.slow
def test_context(capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than the 8,192 tokens that the model's config.json allows."""
    options = ["context", "--shape", "tiny", "--tokens", "8256", "96", "--new-tokens", "4", "--rounds", "1", "--json"]
    rows = json.loads(run([*options, "--dtype", "bfloat16"], capsys))["rows"]
    assert [(row["program"], row["context"]) for row in rows] == [
        (program, context) for program in ("prefill", "decode", "learner step") for context in (96, 8256)
    ]
    assert [row.get("bar") for row in rows] == [None, "<= 4.00", None, "<= 2.00", None, "<= 4.00"]
    assert all(row["seconds"] > 0 and row["tokens_per_s"] > 0 and row["peak_gb"] > 0.05 for row in rows)
    (row,) = json.loads(run([*options, "--part", "learner", "--tokens", "96", "--dtype", "float32"], capsys))["rows"]
    assert row["program"] == "learner step" and "growth" not in row


@pytest.mark.slow
def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    options = ["step", "--recipe", str(recipe), "train.lag=1", "--rounds", "2", "--dtype", "float32", "--json"]
    (row,) = json.loads(run(options, capsys))["rows"]
    assert row["recipe"] == "small" and row["bar"] == "<= 1.00"
    for kernels in ("aligned", "standard"):
        parts = row[f"{kernels}_rollout_s"], row[f"{kernels}_learner_s"]
        assert min(parts) > 0 and max(parts) < row[f"{kernels}_seconds"]
        assert row[f"{kernels}_rows"] >= 4


def test_sides_of_a_step_are_the_named_arithmetic_in_engine_and_learner(tmp_path: Path) -> None:
    """Also of a recipe whose engines have their own."""
    recipe = tmp_path / "arm.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE | {"rollout": {"kernels": "int8", "dtype": "float32"}}))
    setting = StepSetting(None, (str(recipe),), (), ("bfloat16",), 1, 1)
    for kernels in ("aligned", "standard"):
        side = step_recipe(str(recipe), tmp_path, setting, "bfloat16", kernels)
        assert side.engine_arithmetic == side.model.arithmetic == Arithmetic(kernels, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernels", "--threads", "0"], "--threads 0 must be at least 1"),
        (["kernels", "--threads", "4096"], "--threads 4096: this process may use"),
        (["kernels", "--rows", "8", "-1"], "--rows -1 must be at least 1"),
        (["kernels", "--model", "nowhere"], "--model: model folder nowhere does not exist"),
        (["rollout", "--batch", "12", "--samples", "8"], "--batch 12 must be a multiple of --samples 8"),
        (["rollout", "--new-tokens", "0"], "--new-tokens 0 must be at least 1"),
        (["rollout", "--model", "nowhere"], "--model: model folder nowhere does not exist"),
        (["rollout", "--peer", "vllm"], "--vllm-python was not given; name the python"),
        (["rollout", "--peer", "vllm", "--vllm-python", "nowhere"], "--vllm-python nowhere is no program"),
        (["learner", "--tokens", "100", "--sequence", "64"], "--tokens 100 must be a multiple of --sequence 64"),
        (["learner", "--checkpointing", "--peer", "torch"], "leave out --scaling and --peer"),
        (["context", "--tokens", "4096", "0"], "--tokens 0 must be at least 1"),
        (["context", "--new-tokens", "0"], "--new-tokens 0 must be at least 1"),
        (["context", "--model", "nowhere"], "--model: model folder nowhere does not exist"),
        (["step"], "--recipe was not given; for example"),
        (["step", "--recipe", "nowhere.yaml"], "recipe nowhere.yaml does not exist"),
        ([], "'bench' needs one more word: bench kernels, bench rollout, bench learner, bench context, bench step"),
    ],
    ids=" ".join,
)
def test_bad_input(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ZEROGAP_VLLM_PYTHON", raising=False)
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


def test_help_of_the_family_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " in text] == [n for n in COMMANDS if n.startswith("bench ")]
