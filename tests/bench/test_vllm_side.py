"""vllm_side.py under a python whose vLLM is a stand-in: arguments, protocol, and what is asked of vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from zerogap.bench.rollout import COLUMNS, VLLM_SIDE
from zerogap.bench.sides import running
from zerogap.cli.main import main

FAKE_PYTHON = """#!{python}
import json, runpy, sys, types
module = types.ModuleType("vllm")
module.__version__ = "0.0-fake"
class SamplingParams:
    def __init__(self, **options):
        assert options["ignore_eos"] and options["temperature"] == 1.0 and options["logprobs"] == 0
        self.n, self.max_tokens = options["n"], options["max_tokens"]
class LLM:
    def __init__(self, **options):
        print("vllm talks", json.dumps(options))
        assert options["enforce_eager"] and options["skip_tokenizer_init"] and options["kv_cache_memory_bytes"] > 0
        self.most, self.longest = options["max_num_seqs"], options["max_model_len"]
    def generate(self, prompts, sampling, use_tqdm):
        assert len(prompts) * sampling.n <= self.most
        assert max(len(p["prompt_token_ids"]) for p in prompts) + sampling.max_tokens <= self.longest
        one = types.SimpleNamespace(token_ids=[0] * (sampling.max_tokens - {missing}))
        return [types.SimpleNamespace(outputs=[one] * sampling.n) for _ in prompts]
module.LLM, module.SamplingParams = LLM, SamplingParams
sys.modules["vllm"] = module
assert sys.argv[1] == "-I"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def fake_python(tmp_path: Path, missing: int = 0) -> str:
    path = tmp_path / "python"
    path.write_text(FAKE_PYTHON.replace("{python}", sys.executable).replace("{missing}", str(missing)))
    path.chmod(0o755)
    return str(path)


def test_protocol(tmp_path: Path) -> None:
    command = [fake_python(tmp_path), "-I", str(VLLM_SIDE), "folder", "bfloat16", "eager", "4", "16", "4096"]
    with running({"vllm": command}, 1, lambda _: None) as sides:
        assert sides["vllm"].facts == {"vllm": "0.0-fake"}
        answer = sides["vllm"].ask({"prompts": [[1, 2], [3]], "samples": 2, "new_tokens": 5})
    assert answer["sampled"] == 20 and answer["seconds"] > 0


@pytest.mark.slow
def test_command_against_the_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--peer", "vllm", "--vllm-python", fake_python(tmp_path), "--shape", "tiny", "--dtype", "float32"]
    options += ["--batch", "2", "4", "--samples", "2", "--new-tokens", "3", "--rounds", "1"]
    assert main(["bench", "rollout", *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["machine"]["vllm"] == "0.0-fake"
    assert [(row["peer"], row["batch"]) for row in result["rows"]] == [("vllm eager", 2), ("vllm eager", 4)]
    assert all(set(row) <= {key for key, _, _ in COLUMNS} for row in result["rows"])


@pytest.mark.slow
def test_a_side_that_samples_too_little_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--peer", "vllm", "--vllm-python", fake_python(tmp_path, missing=1), "--shape", "tiny"]
    options += ["--dtype", "float32", "--batch", "2", "--new-tokens", "3", "--rounds", "1"]
    assert main(["bench", "rollout", *options]) == 1
    assert "vllm eager sampled 4 tokens where 6 were asked for" in capsys.readouterr().err
