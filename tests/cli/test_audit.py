"""`zerogap audit` from the command line: files of our engine and of transformers, two models, a report as HTML."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch

from zerogap.cli.main import main
from zerogap.policy import Policy

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of one shape."""
    folder = tmp_path_factory.mktemp("models")
    names = [folder / "first", folder / "second"]
    for seed, name in enumerate(names):
        assert main(["model", "create", str(name), "--task", "chain_sum", "--seed", str(seed), "num_layers=1"]) == 0
    return names


@pytest.fixture(scope="module")
def rollouts(models: list[Path]) -> Path:
    policy = Policy.load(models[0], dtype="float32")
    prompts = [policy.tokenizer.encode(f"{number} + 1 =") for number in range(3)]
    path = models[0].parent / "rollouts.jsonl"
    path.write_text("".join(t.to_json() + "\n" for t in policy.generate(prompts, n=2, max_new_tokens=12)))
    return path


def audit(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["audit", *map(str, arguments), "--json", "--threads", "1"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # no NaN, no Infinity
    return answer


def test_one_model_measures_kernel_only(
    models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = audit(capsys, rollouts, "--model", models[0], "--html", tmp_path / "a.html")
    assert answer["unequal"] == 0 < answer["checked"]
    assert answer["verdict"].startswith("No KERNEL gap")
    assert not any("lag" in name or "age" in name for name in answer["statistics"])
    page = (tmp_path / "a.html").read_text()
    assert escape(answer["verdict"]) in page and "<svg" in page
    assert "src=" not in page and "http" not in page  # nothing is fetched


def test_two_models_tell_lag(models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = audit(capsys, rollouts, "--model", f"4={models[1]}", "--behaviour-model", f"0={models[0]}")
    assert answer["unequal"] == 0
    assert answer["verdict"].startswith("All of the gap is weight lag")
    assert answer["statistics"]["lag/max"] == 4
    assert [row["group"] for row in answer["tables"]["age"]] == ["4"]
    unnumbered = audit(capsys, rollouts, "--model", models[1], "--behaviour-model", models[0])
    assert unnumbered["statistics"]["gap/lag/abs_mean"] == answer["statistics"]["gap/lag/abs_mean"]
    assert "age" not in unnumbered["tables"] and "lag/max" not in unnumbered["statistics"]


def test_other_weights_are_no_named_cause(
    models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = audit(capsys, rollouts, "--model", models[1])
    assert answer["unequal"] == answer["checked"]
    assert "cause" in answer["verdict"] and "explains" in answer["verdict"]
    assert all(finding["explained"] < 0.9 for finding in answer["findings"])


def test_undelivered_weights_are_named_by_a_candidate(
    models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file claims weights that never came; with or without the version that it claims."""
    candidates = ("--candidate-model", f"3={models[0]}", "--candidate-model", f"4={models[1]}")
    answer = audit(capsys, rollouts, "--model", models[1], *candidates)
    assert answer["findings"][0]["cause"] == "weights of version 3"
    assert answer["findings"][0]["explained"] == 1 and "Cause: weights of version 3" in answer["verdict"]
    relabelled = rollouts.with_name("relabelled.jsonl")
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    for line in lines:
        line["versions"] = [5 if sampled else -1 for sampled in line["loss_mask"]]
    relabelled.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = audit(capsys, relabelled, "--model", f"5={models[1]}", *candidates)
    assert answer["findings"][0]["cause"] == "weights of version 3, 2 updates older than the file says"


def test_what_is_infinite_is_null(models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.loads(rollouts.read_text().splitlines()[0])
    line["logprobs"] = [-1000.0] * len(line["logprobs"])
    path = rollouts.with_name("overflow.jsonl")
    path.write_text(json.dumps(line) + "\n")
    answer = audit(capsys, path, "--model", models[0])
    assert answer["statistics"]["ratio/max"] is None and answer["statistics"]["gap/kernel/max"] > 900


def test_the_recipe_for_transformers_in_the_docs(
    models: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "audit.md").read_text(), flags=re.DOTALL)
    assert code is not None
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode("1 + 1 =")])
    with (tmp_path / "rollouts.jsonl").open("w") as file:
        exec(
            code.group(1),
            {"model": model, "tokenizer": tokenizer, "prompt": prompt, "file": file, "json": json, "torch": torch},
        )
    answer = audit(capsys, tmp_path / "rollouts.jsonl", "--model", models[0])
    assert answer["rollouts"] == 4
    assert 0 < answer["statistics"]["gap/kernel/max"] < 1e-4  # the same numbers by other kernels


def test_locate_against_another_side(
    models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = (rollouts, "--model", models[0])
    assert audit(capsys, *file)["located"] is None
    located = audit(capsys, *file, "--locate", "aligned")["located"]
    assert located["first"] is None and located["sentence"].startswith("No difference")
    located = audit(capsys, *file, "--locate", "transformers", "--html", tmp_path / "a.html")["located"]
    assert located["second_side"] == "transformers float32" and 0 < located["tokens"] <= 1024
    last = located["stages"][-1]
    assert last["name"] == "logprobs" and 0 < last["cumulative"]["largest"] < 1e-4
    page = (tmp_path / "a.html").read_text()
    assert escape(located["sentence"]) in page and "silu_mul" in page
    capsys.readouterr()
    command = ["audit", str(rollouts), "--model", str(models[0]), "--locate", "standard:bfloat16", "--threads", "1"]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "First difference between aligned float32 and standard bfloat16" in text and "isolated" in text


def test_the_report_for_the_eye(models: list[Path], rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["audit", str(rollouts), "--model", str(models[1]), "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "KERNEL:" in text and "worst tokens" in text and "finish reason" in text


def test_help_loads_no_torch() -> None:
    """Although it names the importers by reading their table."""
    script = "import sys, zerogap.cli.audit as a; a.build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.jsonl", "--model", "M"), "missing.jsonl does not exist"),
        (("FILE",), "--model was not given"),
        (("FILE", "--model", "nowhere"), "nowhere does not exist"),
        (("FILE", "--model", "M", "--behaviour-model", "M", "--behaviour-model", "M"), "need a version each"),
        (("FILE", "--model", "7=OTHER", "--behaviour-model", "7=M"), "version 7 is given twice"),
        (("FILE", "--model", "3=M", "--behaviour-model", "7=M"), "is newer than --model 3"),
        (("FILE", "--model", "M", "--candidate-model", "M"), "needs a version of its own"),
        (("FILE", "--model", "M", "--candidate-model", "3=nowhere"), "nowhere does not exist"),
        (("FILE", "--model", "M", "--candidate-model", "3=DEEP"), "num_hidden_layers is 2, that of --model is 1"),
        (("DIR", "--candidate-model", "7=M"), "has its own weights"),
        (("FILE", "--model", "M", "--html", "nowhere/a.html"), "folder nowhere does not exist"),
        (("FILE", "--model", "M", "--behaviour-model", "7=M"), "line 1: tokens of weight version 0"),
        (("FILE", "--model", "M", "--locate", "vllm"), "--locate vllm: use aligned, standard, transformers"),
        (("FILE", "--model", "M", "--locate", "standard:float16"), "--locate standard:float16: use"),
        (("DIR", "--model", "M"), "has its own weights"),
        (("DIR",), "trajectories.jsonl does not exist"),
    ],
)
def test_bad_input(
    models: list[Path],
    rollouts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    names = {"FILE": str(rollouts), "M": str(models[0]), "7=M": f"7={models[0]}", "DIR": str(tmp_path)}
    names |= {"7=OTHER": f"7={models[1]}", "3=M": f"3={models[0]}", "3=DEEP": f"3={tmp_path / 'deep'}"}
    if "3=DEEP" in arguments:
        assert main(["model", "create", str(tmp_path / "deep"), "--task", "chain_sum", "num_layers=2"]) == 0
    assert main(["audit", *(names.get(word, word) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_tokens_of_another_model_are_named(
    models: list[Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"token_ids": [1, 99999], "loss_mask": [0, 1], "logprobs": [0, -1.0]}) + "\n")
    assert main(["audit", str(path), "--model", str(models[0])]) == 2
    assert "line 1: token id 99999 at position 1" in capsys.readouterr().err
