"""Bad input: one clear message on stderr, exit code 2, nothing loaded, nothing written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from zerogap.cli.main import COMMANDS, main

RECIPE = {
    "name": "small",
    "model": {"create": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1}},
    "task": {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A valid recipe in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    return "small.yaml"


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that must end with exit code 2 and no output."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("zerogap: error: ")
    return captured.err


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lagg=3", "train.lagg: unknown key; did you mean 'lag'?"),
        ("learner.learning_rate=fast", "learner.learning_rate: "),
        ("train.updates=many", "train.updates: "),
        ("rollout.temperature=0", "temperature 0.0 must be > 0 in training"),
        ("rollout.temperature=-1", "temperature -1.0 must be > 0 in training"),
        ("rollout.top_p=0.9", "rollout.top_p: refused in training"),
        ("rollout.repetition_penalty=1.1", "rollout.repetition_penalty: refused in training"),
        ("model.path=somewhere", "give exactly one of path, create, fetch (given: path, create)"),
        ("task.name=chain_sums", "nearest: chain_sum"),
        ("task.params.digits=3", "chain_sum has no such parameter"),
        ("train.lag=[", "override 'train.lag=[': the value is not valid YAML"),
        ("train.lag=yes", "train.lag: Input should be a valid integer (got True)"),
        ("train.lag", "must have the form section.key=value"),
    ],
)
def test_wrong_key_or_value(recipe: str, override: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in failure(["train", recipe, override], capsys)
    assert not Path("runs").exists()


def test_all_problems_of_a_recipe_are_listed_at_once(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(["train", recipe, "train.lag=-1", "audit.shares=1", "learner.beta1=2"], capsys)
    assert "3 problem(s)" in message
    assert all(key in message for key in ("train.lag:", "audit.shares:", "learner.beta1:"))


def test_missing_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe nowhere.yaml does not exist" in failure(["train", "nowhere.yaml"], capsys)


def test_adapter_folder(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Field case 20: refused before anything loads, although an adapter folder has no config.json to look at."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    message = failure(["train", recipe, "model.create=null", "model.path=adapter"], capsys)
    assert "model.path: adapter holds an adapter (adapter_config.json): adapters (LoRA) are not supported" in message


def test_missing_model_folder(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(["train", recipe, "model.create=null", "model.path=nowhere"], capsys)
    assert "model.path: model folder nowhere does not exist" in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "no config.json"),
        ("{", "not valid JSON"),
        ('{"architectures": ["MambaForCausalLM"]}', "architecture MambaForCausalLM is not supported; supported: Llama"),
        ('{"architectures": ["LlamaForCausalLM"]}', "lacks the key"),
    ],
)
def test_folder_that_is_no_model(
    recipe: str, config: str | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("model")
    folder.mkdir()
    (folder / "model.safetensors").touch()
    if config is not None:
        (folder / "config.json").write_text(config)
    assert expected in failure(["train", recipe, "model.create=null", "model.path=model"], capsys)


def test_pickle_weights_are_not_read(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").touch()
    message = failure(["train", recipe, "model.create=null", "model.path=model"], capsys)
    assert "has no *.safetensors" in message


def small_model(recipe: str, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["model", "create", "model", "--recipe", recipe]) == 0
    capsys.readouterr()
    return Path("model")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json is not a readable tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 9), "not a readable safetensors file"),
        (lambda folder: drop_tensor(folder, "model.norm.weight"), "tensor 'model.norm.weight' is missing"),
    ],
    ids=["no tokenizer", "broken tokenizer", "broken weights", "missing tensor"],
)
def test_broken_model_folder(
    recipe: str, damage: Callable[[Path], object], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by headers, before a run folder is made; so it is for eval and for `model info`'s verdict."""
    damage(small_model(recipe, capsys))
    assert expected in failure(["train", recipe, "model.create=null", "model.path=model"], capsys)
    assert expected in failure(["eval", "--model", "model", "--task", "chain_sum"], capsys)
    assert not Path("runs").exists()


def drop_tensor(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_warm_start_of_a_task_without_solutions(recipe: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["task.name=rush_hour", "task.params={}", "warm_start.steps=3"]
    message = failure([command, recipe, *overrides, *(["--dry-run"] if command == "train" else [])], capsys)
    assert "this task has no worked solutions, so leave out warm_start" in message
    assert not Path("runs").exists()


def test_used_output_directory(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    used = Path("runs/small")
    used.mkdir(parents=True)
    (used / "metrics.jsonl").write_text("{}\n")
    message = failure(["train", recipe], capsys)
    assert "runs/small already holds a run" in message and "--resume" in message and "--output-dir" in message
    assert [path.name for path in used.iterdir()] == ["metrics.jsonl"]


def test_resume_without_a_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "runs/small holds no run" in failure(["train", recipe, "--resume"], capsys)
    assert not Path("runs").exists()


def test_sft_without_warm_start(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no warm_start section" in failure(["sft", recipe], capsys)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "nowhere", "--task", "chain_sum"], "--model: model folder nowhere does not exist"),
        (["--model", "m", "--task", "chain_sum", "--samples", "0"], "--samples 0 must be at least 1"),
        (["--model", "m", "--task", "chain_sum", "--temperature", "-1"], "--temperature -1.0 must be at least 0"),
        (["--model", "m", "--task", "chain_sum", "--temperature", "nan"], "--temperature nan must be at least 0"),
        (["--model", "m", "--task", "chain_sum", "--temperature", "inf"], "--temperature inf must be a finite number"),
        (["--model", "m", "--task", "chain_sum", "--stop", ""], "--stop '' would end every answer at once"),
        (["--model", "m", "--task", "chain_sum", "--temperature", "0", "--samples", "2"], "would repeat one answer"),
        (["--model", "m", "--task", "chain_sum", "--seed", "-1"], "--seed -1 must lie in 0"),
        (["--model", "m", "--task", "chain_sum", "--samples", "4", "--k", "1", "8"], "--k 8 must lie in 1..4"),
        (["--model", "m", "--task", "chain_sum", "--resume"], "--resume goes on with a file: name it with --output"),
        (["--model", "m", "--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such file"),
        (["--model", "m", "--task", "chain_sum", "--params", "terms"], "'terms' must have the form key=value"),
    ],
)
def test_eval_arguments(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in failure(["eval", *arguments], capsys)


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'?" in failure(["trian"], capsys)
    assert "model create, model fetch, model info" in failure(["model"], capsys)
    assert "model 'gpt-5' is unknown; known: smollm2-135m" in failure(["model", "fetch", "gpt-5"], capsys)


def test_model_create_does_not_replace_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "exists; give a new folder" in failure(["model", "create", str(tmp_path), "--task", "chain_sum"], capsys)
    new = str(tmp_path / "new")
    message = failure(["model", "create", new, "--task", "chain_sum", "hidden_size=30", "layers=2"], capsys)
    assert "model.create.layers: unknown key; did you mean 'num_layers'?" in message
    assert not Path(new).exists()


def test_failure_of_a_command_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that fails says what failed without a traceback, unless one is asked for."""

    def fail(args: object) -> int:
        raise RuntimeError("worker 0 died")

    monkeypatch.setattr("zerogap.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "zerogap: error: RuntimeError: worker 0 died\n"
    monkeypatch.setenv("ZEROGAP_TRACEBACK", "1")
    assert main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("zerogap.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_names_only_folders_that_runs_make(capsys: pytest.CaptureFixture[str]) -> None:
    """Sub-folders of runs/<name> in any help text are those of docs/architecture.md that hold a model."""
    texts = []
    for command in ("", *COMMANDS):
        with suppress(SystemExit):
            main([*command.split(), "--help"])
        texts.append(capsys.readouterr().out)
    named = re.findall(r"runs/[\w.-]+/([\w.-]+)", "".join(texts))
    assert set(named) == {"final_model", "start_model"}
    assert "leave a model in runs/tiny-sft/start_model" in "".join(texts)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_teaches_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert f"  zerogap {command} " in capsys.readouterr().out.partition("examples:")[2] + " "


def test_help_and_errors_load_nothing_heavy() -> None:
    """--help and a recipe error must not wait for torch, Ray or pydantic's neighbours."""
    script = (
        "import json, sys\n"
        "from zerogap.cli.main import main\n"
        "codes = [main(['--help']), main(['train', 'nowhere.yaml'])]\n"
        "heavy = [m for m in ('torch', 'ray', 'transformers', 'rich', 'reasoning_gym') if m in sys.modules]\n"
        "print(json.dumps([codes, heavy]))\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout.splitlines()[-1]) == [[0, 2], []]
