"""Molt's rollout dump: pickled by a class of its name, read without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zerogap.gaps.audit.importers import read_rollouts
from zerogap.gaps.audit.molt import CLASS
from zerogap.gaps.audit.schema import RolloutFileError
from zerogap.trajectory import NOT_SAMPLED


@dataclass
class Experience:
    """The fields of Molt's class that a rollout dump fills (and one that it does not)."""

    sequences: Any = None
    attention_mask: Any = None
    action_mask: Any = None
    rollout_log_probs: Any = None
    advantages: Any = None
    truncated: Any = None
    prompts: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    heavy_ref: Any = None


@pytest.fixture
def molt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of Molt's name, for the time of writing."""
    module, name = CLASS.rsplit(".", 1)
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    monkeypatch.setattr(sys.modules[module], name, Experience, raising=False)
    monkeypatch.setattr(Experience, "__module__", module)
    yield


def sample(ids: list[int], mask: list[int], logprobs: list[float], padding: int = 0) -> Experience:
    """As Molt builds it: a batch of one, entries of steps one shorter than the tokens."""
    return Experience(
        sequences=torch.tensor([ids + [0] * padding]),
        attention_mask=torch.tensor([[1] * len(ids) + [0] * padding]),
        action_mask=torch.tensor([mask[1:] + [0] * padding]).bool(),
        rollout_log_probs=torch.tensor([logprobs[1:] + [0.0] * padding]),
        truncated=torch.tensor([padding == 0]),
        prompts=["five six"],
        info={"reward": torch.tensor([1.0])},
    )


def dump(path: Path, content: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Written, after which there is no Molt any more."""
    torch.save(content, path)
    monkeypatch.undo()
    return path


@pytest.mark.usefixtures("molt")
def test_a_dump_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case R10: the end mark 0 is also the padding id, and only the mask tells."""
    samples = [
        sample([5, 6, 7, 8, 2], [0, 0, 1, 0, 1], [0.0, 0.0, -0.5, 0.0, -0.25]),
        sample([5, 9, 0], [0, 1, 1], [0.0, -0.5, -2.0], padding=2),
    ]
    path = dump(tmp_path / "rollout_step3.pt", samples, monkeypatch)
    first, second = read_rollouts(path, "auto", 0.5)
    t = first.trajectory
    assert (t.token_ids, t.loss_mask) == ([5, 6, 7, 8, 2], [0, 0, 1, 0, 1])
    assert t.logprobs == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert t.versions == [NOT_SAMPLED, NOT_SAMPLED, 0, NOT_SAMPLED, 0]
    assert (t.finish_reason, t.sampling.temperature, first.line) == ("length", 0.5, 1)
    assert (second.trajectory.token_ids, second.trajectory.logprobs) == ([5, 9, 0], [0.0, -0.5, -2.0])
    assert (second.trajectory.finish_reason, second.line) == ("stop", 2)
    assert read_rollouts(path, "molt", 0.5) == [first, second]


@pytest.mark.usefixtures("molt")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sequences", r"sample 2: field 'sequences' is missing; newer Molt keeps it behind heavy_ref .*reload"),
        ("rollout_log_probs", r"sample 2: field 'rollout_log_probs' is missing; .*is_correction_level"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    samples = [sample([5, 6], [0, 1], [0.0, -0.5]) for _ in range(2)]
    setattr(samples[1], name, None)
    path = dump(tmp_path / "r.pt", samples, monkeypatch)
    with pytest.raises(RolloutFileError, match=message):
        read_rollouts(path, "auto", 1.0)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


@pytest.mark.usefixtures("molt")
def test_nothing_that_a_file_says_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harmful = sample([5, 6], [0, 1], [0.0, -0.5])
    harmful.heavy_ref = Harmful()
    path = dump(tmp_path / "r.pt", [harmful], monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RolloutFileError, match=r"r\.pt is no readable dump of Molt .*GLOBAL"):
        read_rollouts(path, "auto", 1.0)
    assert not (tmp_path / "harm").exists()


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump(tmp_path / "r.pt", {"sequences": torch.ones(1, 2)}, monkeypatch)
    with pytest.raises(RolloutFileError, match="holds a dict, not the list of"):
        read_rollouts(path, "auto", 1.0)
    for content in (path.read_bytes()[:-30], b"no pickle", b""):
        path.write_bytes(content)
        with pytest.raises(RolloutFileError, match=r"r\.pt is no readable dump of Molt"):
            read_rollouts(path, "auto", 1.0)
