"""A run that fails before its first update leaves its folder as it found it; nothing of a user's is touched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.support import Recorder, metrics, tiny_recipe
from zerogap.env.task import TaskError
from zerogap.model import CheckpointError
from zerogap.model.fetch import FetchError
from zerogap.runtime import prepare, start
from zerogap.runtime.folder import RunFolderError, new_run_folder
from zerogap.runtime.train import train


def fail(error: BaseException) -> Any:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    "error", [FetchError("no network"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
)
def test_a_failed_preparation_does_not_block_the_next_try(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exists: bool
) -> None:
    run_dir = tmp_path / "runs" / "one"
    if exists:
        run_dir.mkdir(parents=True)
    recipe = tiny_recipe(tiny_model, train__updates=1, warm_start={"steps": 1, "examples_per_step": 2})
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "train_sft", fail(error))
        with pytest.raises(type(error)):
            train(recipe, run_dir)
    assert list(tmp_path.rglob("*")) == ([tmp_path / "runs", run_dir] if exists else [])
    assert train(recipe, run_dir)["updates"] == 1


def test_refused_before_anything_loads(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python too: no warm start on a task without solutions, no model folder without a tokenizer."""
    monkeypatch.setattr(start, "prepare_model", fail(AssertionError("something was prepared")))
    unsolved = tiny_recipe(
        tiny_model, task={"name": "rush_hour", "size": 20}, warm_start={"steps": 1, "examples_per_step": 2}
    )
    with pytest.raises(TaskError, match="no worked solutions"):
        train(unsolved, tmp_path / "run")
    broken = tmp_path / "model"
    shutil.copytree(tiny_model, broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        train(tiny_recipe(broken), tmp_path / "run")
    assert list(tmp_path.iterdir()) == [broken]


def test_an_engine_that_does_not_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no room"):
        train(tiny_recipe(tiny_model), tmp_path / "run", build_backend=fail(OSError("no room")))
    assert list(tmp_path.iterdir()) == []


def test_a_run_with_an_update_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    def interrupt(line: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_recipe(tiny_model), tmp_path / "run", observer=Recorder(interrupt))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
    assert (tmp_path / "run" / "logs" / "driver.log").is_file()


def test_a_used_folder_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="already holds a run"), new_run_folder(tmp_path):
        pass
    with pytest.raises(RunFolderError, match="is a file"), new_run_folder(tmp_path / "notes.txt"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_files_beside_the_folder_stay(tmp_path: Path) -> None:
    """Folders made on the way go only while they are empty; a link is removed, not followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    with pytest.raises(KeyError), new_run_folder(tmp_path / "runs" / "one"):
        (tmp_path / "runs" / "beside").touch()
        (tmp_path / "runs" / "one" / "link").symlink_to(outside)
        raise KeyError
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["beside"]
    assert (outside / "kept").exists()
