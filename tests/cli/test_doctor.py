"""doctor: facts, and what follows from them in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zerogap.cli.doctor import conclude
from zerogap.cli.main import main

FACTS: dict[str, Any] = {
    "cores": 2,
    "kernels_error": None,
    "kernels": "avx2",
    "torch": "2.13.0",
    "transformers": "5.0",
    "ray": "2.50",
    "vllm": None,
    "gpus": [],
}


def test_json_answer_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == (0 if answer["usable"] else 1)
    assert answer["usable"] is True, answer
    assert answer["kernels"] in answer["kernels_runnable"]
    assert set(answer["kernels_runnable"]) <= set(answer["kernels_built"])
    assert answer["cores"] >= 1 and answer["torch"].startswith("2.")


def test_text_answer_names_variant_and_cores(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    text = capsys.readouterr().out
    assert "kernels runnable" in text and "cores" in text
    assert any(line.startswith("- ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("change", "usable", "words"),
    [
        ({}, True, "run as avx2"),
        ({"kernels_error": "ImportError: no library"}, False, "model.kernels=standard"),
        ({"torch": None}, False, "torch is missing"),
        ({"ray": None}, True, "runtime.driver=inline"),
        ({"cores": 1}, True, "one core"),
        ({"gpus": ["H200"]}, True, "computes on the CPU only"),
        ({"vllm": "0.11"}, True, "embedded engine only"),
    ],
)
def test_what_follows(change: dict[str, Any], usable: bool, words: str) -> None:
    notes, answer = conclude(FACTS | change)
    assert answer is usable
    assert words in " ".join(notes)
