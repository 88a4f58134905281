"""Line files with a limit, the cut of a resume, and files that are whole or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.fakes import fake_trajectory
from tests.runtime.support import tiny_recipe
from zerogap.runtime.backend import FinishedGroup
from zerogap.runtime.records import Records, read_metrics, summarize, write_atomically
from zerogap.trajectory import Trajectory


def groups(*ids: int) -> list[FinishedGroup]:
    return [FinishedGroup(g, [fake_trajectory(g, [0, 0])]) for g in ids]


def test_size_limit_keeps_whole_lines_from_the_start(tmp_path: Path) -> None:
    size = len(groups(0)[0].trajectories[0].to_json()) + len('"update":1') + 1
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=2.5 * size / 1e6)
    records.step({"step": 1}, groups(0, 1, 2, 3))
    records.close()
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()
    assert [Trajectory.from_json(line).group_id for line in lines] == [0, 1]
    assert Trajectory.from_json(lines[0]).info == {"update": 1}


def test_a_group_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Half of a group would read as a group of another size."""
    pair = FinishedGroup(0, [fake_trajectory(0, [0], 0), fake_trajectory(0, [0], 1)])
    size = len(pair.trajectories[0].to_json()) + len('"update":1') + 1
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=1.5 * size / 1e6)
    records.step({"step": 1}, [pair])
    records.close()
    assert (tmp_path / "trajectories.jsonl").read_text() == ""


def test_resume_of_a_full_file_leaves_no_hole(tmp_path: Path) -> None:
    """Group 1 did not fit; group 2 is small enough for what is left, but is not written after a resume either."""
    size = len(groups(0)[0].trajectories[0].to_json()) + len('"update":1') + 1
    megabytes = 2.5 * size / 1e6
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=megabytes)
    records.step({"step": 1}, [*groups(0), FinishedGroup(1, [fake_trajectory(1, [0] * 200)])])
    records.close()
    records = Records(tmp_path, start_step=1, first_group=2, tensorboard=False, trajectories_mb=megabytes)
    records.step({"step": 2}, groups(2))
    records.close()
    kept = [json.loads(line)["group_id"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert kept == [0]


def test_no_trajectories_when_the_limit_is_zero(tmp_path: Path) -> None:
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=0)
    records.step({"step": 1}, groups(0))
    records.close()
    assert not (tmp_path / "trajectories.jsonl").exists()


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=1)
    records.step({"step": 1}, groups(0))
    assert read_metrics(tmp_path) == [{"step": 1}]
    records.close()


def test_resume_cuts_after_the_step_and_goes_on(tmp_path: Path) -> None:
    records = Records(tmp_path, 0, 0, tensorboard=False, trajectories_mb=1)
    for step in (1, 2, 3):
        records.step({"step": step}, groups(step - 1))
    records.close()
    with (tmp_path / "trajectories.jsonl").open("a") as handle:
        handle.write('{"group_id": 1, "torn')
    records = Records(tmp_path, start_step=2, first_group=2, tensorboard=False, trajectories_mb=1)
    records.step({"step": 3}, groups(2))
    records.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    kept = [json.loads(line)["group_id"] for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()]
    assert kept == [0, 1, 2]


def test_summary_figures(tmp_path: Path) -> None:
    """First and last 10% of updates; rates weighted by sampled tokens and by the learner's rows."""
    lines = [
        {
            "step": k + 1,
            "reward/mean": k / 10,
            "lag/max": float(k % 4),
            "bitwise/checked": 5,
            "bitwise/unequal": 0,
            "dropped": 0,
            "prompts/skipped": k,
            "errors/ungraded": 1.0,
            "tokens/sampled": 100,
            "throughput/engine_tokens_per_s": 50.0 if k else 100.0,
            "tokens/trained": 10.0,
            "tokens/learner_rows": 30.0 if k else 300.0,
            "throughput/learner_tokens_per_s": 30.0 if k else 100.0,
        }
        for k in range(20)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarize(tmp_path, 12.34, tmp_path / "final_model", tiny_recipe(tmp_path))
    assert summary["reward_first"] == pytest.approx(0.05) and summary["reward_last"] == pytest.approx(1.85)
    assert (summary["lag_max"], summary["bits_checked"], summary["bits_unequal"]) == (3, 100, 0)
    assert summary["engine_tokens_per_s"] == pytest.approx(2000 / (1 + 19 * 2))
    assert summary["learner_tokens_per_s"] == pytest.approx((300 + 19 * 30) / (3 + 19 * 1))
    assert summary["tokens_trained"] == 200 and isinstance(summary["tokens_trained"], int)
    assert (summary["prompts_skipped"], summary["errors"], summary["seconds"]) == (19, 20, 12.3)


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "dropped": 0, "prompts/skipped": 0}) + "\n")
    summary = summarize(tmp_path, 1.0, tmp_path / "final_model", tiny_recipe(tmp_path))
    assert summary["engine_tokens_per_s"] is summary["learner_tokens_per_s"] is summary["reward_first"] is None


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
