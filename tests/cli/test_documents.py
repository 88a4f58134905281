"""README, Makefile and docs name only what exists, and the recipe reference is current."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zerogap.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]


def test_recipe_reference_is_current() -> None:
    """Otherwise run: python docs/make_recipe_reference.py"""
    script = "import make_recipe_reference as m; print(m.make_page(), end='')"
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT / "docs", capture_output=True, text=True, check=True
    )
    assert answer.stdout == (ROOT / "docs" / "recipe.md").read_text()


def test_every_key_of_the_recipe_says_what_follows() -> None:
    rows = [line for line in (ROOT / "docs" / "recipe.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.rsplit("|", 2)[-2].strip() == ""] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    for words in re.findall(r"\bzerogap ((?:(?:model|bench) )?[a-z]+)\b(?=[ `\n])", "\n".join(_code(text))):
        assert words in COMMANDS, words
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z]+)\b", "\n".join(_code(text))):
        assert target in targets, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_in_pages_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
    for name in re.findall(r"\b(?:recipes|benchmarks|docs)/[\w.]+\.(?:yaml|py|md)\b", text):
        assert (ROOT / name).exists(), name


def test_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    """The example itself compares recorded and scored log-probabilities."""
    folder = tmp_path / "model"
    assert main(["model", "create", str(folder), "--task", "chain_sum", "num_layers=1"]) == 0
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert example is not None
    code = example.group(1)
    assert code.count("runs/tiny-001/final_model") == 1 and "assert recorded == scored.tolist()" in code
    exec(code.replace("runs/tiny-001/final_model", str(folder)), {})


def test_no_machine_paths() -> None:
    for page in PAGES:
        assert not re.search(r"/work/|/tmp/|\.\./shared", page.read_text()), page


def test_make_train_uses_a_fresh_numbered_folder(tmp_path: Path) -> None:
    """A second `make train` neither fails nor overwrites: with 001 and 002 there, it trains into 003."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("pyproject.toml", "CMakeLists.txt"):
        (tmp_path / name).touch()
    for number in ("001", "002"):
        (tmp_path / "runs" / f"tiny-{number}").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "zerogap"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()
    command = ["make", "--no-print-directory", "train", "ARGS=train.lag=8 --json"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    expected = ["train", "recipes/tiny.yaml", "--output-dir", "runs/tiny-003", "train.lag=8", "--json"]
    assert shlex.split(answer.stdout) == expected


def test_makefile_parses_every_target() -> None:
    for target in ("train", "test", "lint", "bench", "clean"):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, check=True)


def _code(text: str) -> list[str]:
    """Fenced blocks and inline code."""
    return re.findall(r"```.*?```", text, flags=re.DOTALL) + re.findall(r"`[^`\n]+`", text)
