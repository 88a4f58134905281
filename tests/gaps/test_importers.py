"""Files of rollouts: each known format, and what is said of a file that does not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zerogap.gaps.audit.importers import IMPORTERS, read_rollouts
from zerogap.gaps.audit.schema import RolloutFileError
from zerogap.trajectory import NOT_SAMPLED, SamplingParams, Trajectory

OWN: dict[str, Any] = {
    "token_ids": [5, 6, 7, 8, 2],
    "loss_mask": [0, 0, 1, 0, 1],
    "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25],
    "version": 3,
    "temperature": 0.5,
    "finish_reason": "stop",
}
# The end mark 2 is also the padding id: only masks tell the two apart.
SAME: dict[str, dict[str, Any]] = {
    # A line of token_exports/step_N/rank_R.jsonl, with the columns that we do not read.
    "prime-rl": {
        "schema_version": 1,
        "step": 4,
        "export_step": 4,
        "rank": 0,
        "run_id": None,
        "env_name": "reverse-text",
        "token_ids": [5, 6, 7, 8, 2],
        "position_ids": [0, 1, 2, 3, 4],
        "loss_mask": [False, False, True, False, True],
        "advantages": [0.0, 0.0, 0.5, 0.0, 0.5],
        "inference_logprobs": [0.0, 0.0, -0.5, 0.0, -0.25],
        "trainer_logprobs": [0.0, -3.0, -0.51, -2.0, -0.26],
        "mismatch_kl": [None, None, 1e-4, None, 1e-4],
    },
    "prime-rl-sample": {
        "token_ids": [5, 6, 7, 8, 2],
        "mask": [False, False, True, False, True],
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25],
        "temperatures": [1.0, 1.0, 0.5, 1.0, 0.5],
        "env_name": "reverse-text",
    },
    "prime-rl-split": {
        "prompt_ids": [5, 6],
        "prompt_mask": [False, False],
        "completion_ids": [7, 8, 2],
        "completion_mask": [True, False, True],
        "completion_logprobs": [-0.5, 0.0, -0.25],
    },
    "trl": {"prompt_ids": [5, 6], "completion_ids": [7, 8, 2], "logprobs": [-0.5, 0.0, -0.25], "env_mask": [1, 0, 1]},
    "trl-batch": {
        "prompt_ids": [2, 2, 5, 6],
        "prompt_mask": [0, 0, 1, 1],
        "completion_ids": [7, 8, 2, 2],
        "completion_mask": [1, 1, 1, 0],
        "tool_mask": [1, 0, 1, 1],
        "sampling_per_token_logps": [-0.5, 0.0, -0.25, 0.0],
    },
    # One row that `trl vllm-serve` returned with logprobs=2: by rank, so that the sampled token may stand anywhere.
    "trl-ranked": {
        "prompt_ids": [5, 6],
        "completion_ids": [7, 8, 2],
        "logprobs": [[-0.5], [0.0], [-0.1, -0.25, -4.0]],
        "logprob_token_ids": [[7], [8], [9, 2, 7]],
        "env_mask": [1, 0, 1],
    },
    "trl-served": {
        "prompt_ids": [[5, 6]],
        "completion_ids": [[7, 8, 2]],
        "logprobs": [[[-0.5], [0.0], [-0.25]]],
        "logprob_token_ids": [[[7], [8], [2]]],
        "env_mask": [[1, 0, 1]],
    },
    "verl": {
        "prompts": [2, 2, 5, 6],
        "responses": [7, 8, 2, 2],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
        "response_mask": [1, 0, 1, 0],
        "rollout_log_probs": [-0.5, 0.0, -0.25, 0.0],
    },
}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refusal(path: Path, record: dict[str, Any], importer: str = "auto") -> str:
    """The error of a file whose first line is right and whose second is `record`."""
    with pytest.raises(RolloutFileError) as caught:
        read_rollouts(write(path / "r.jsonl", OWN if importer == "zerogap" else record, record), importer, 1.0)
    return str(caught.value)


def test_own_schema(tmp_path: Path) -> None:
    (rollout,) = read_rollouts(write(tmp_path / "r.jsonl", OWN), "auto", 1.0)
    t = rollout.trajectory
    assert rollout.line == 1
    assert (t.token_ids, t.loss_mask, t.logprobs) == (OWN["token_ids"], OWN["loss_mask"], OWN["logprobs"])
    assert t.versions == [NOT_SAMPLED, NOT_SAMPLED, 3, NOT_SAMPLED, 3]
    assert (t.sampling.temperature, t.finish_reason) == (0.5, "stop")


@pytest.mark.parametrize("importer", SAME)
@pytest.mark.parametrize("named", [True, False])
def test_each_format_is_recognised_and_means_the_same(tmp_path: Path, importer: str, named: bool) -> None:
    """Field case R10, too: where the end mark is the padding id, the sampled one keeps its place and its mask."""
    extra = {"version": 3, "temperature": 0.5, "finish_reason": "stop"}
    path = write(tmp_path / "r.jsonl", SAME[importer] | extra)
    name = importer if importer in IMPORTERS else "trl"
    assert read_rollouts(path, name if named else "auto", 1.0) == [
        *read_rollouts(write(tmp_path / "own.jsonl", OWN), "zerogap", 1.0)
    ]


def test_a_run_s_own_trajectories(tmp_path: Path) -> None:
    sampling = SamplingParams(4, 0.75)
    mask, versions = [0, 1, 1], [NOT_SAMPLED, 1, 2]
    trajectory = Trajectory([4, 5, 6], mask, [0.0, -1.5, -0.5], versions, "eos", 7, 9, 1, sampling)
    path = tmp_path / "trajectories.jsonl"
    path.write_text(trajectory.to_json() + "\n")
    (rollout,) = read_rollouts(path, "auto", 1.0)
    t = rollout.trajectory
    assert (t.versions, t.sampling.temperature, t.finish_reason) == (versions, 0.75, "eos")
    assert (t.group_id, t.prompt_id, t.sample_index) == (9, 7, 1)


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([OWN, OWN]), tmp_path / "r.parquet")
    rows = read_rollouts(tmp_path / "r.parquet", "auto", 1.0)
    assert rows == read_rollouts(write(tmp_path / "r.jsonl", OWN, OWN), "auto", 1.0)
    whole = (tmp_path / "r.parquet").read_bytes()
    for content in (b"no parquet", whole[: len(whole) // 2], whole[:-6], b""):
        (tmp_path / "broken.parquet").write_bytes(content)
        with pytest.raises(RolloutFileError, match=r"broken\.parquet is not a readable Parquet file"):
            read_rollouts(tmp_path / "broken.parquet", "auto", 1.0)
    damaged = bytearray(whole)
    damaged[4:60] = bytes(56)  # the footer is whole, a page is not
    (tmp_path / "broken.parquet").write_bytes(damaged)
    with pytest.raises(RolloutFileError, match=r"broken\.parquet is not a readable Parquet file"):
        read_rollouts(tmp_path / "broken.parquet", "auto", 1.0)


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_non_finite_logprobs_are_kept(tmp_path: Path, value: float | None) -> None:
    path = write(tmp_path / "r.jsonl", OWN, OWN | {"logprobs": [0.0, 0.0, value, 0.0, -0.25]})
    first, second = read_rollouts(path, "auto", 1.0)
    expected = math.nan if value is None else value
    assert first.trajectory.logprobs == OWN["logprobs"] and second.line == 2
    assert repr(second.trajectory.logprobs) == repr([0.0, 0.0, expected, 0.0, -0.25])
    assert second.trajectory.num_sampled == 2


def test_a_null_where_nothing_was_sampled_is_no_finding(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", OWN | {"logprobs": [None, None, -0.5, None, -0.25]})
    assert read_rollouts(path, "auto", 1.0)[0].trajectory.logprobs == OWN["logprobs"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [0, 0, 1, 0, 1, 1]}, "line 2: field 'loss_mask' has 6 entries, but 'token_ids' has 5"),
        ({"logprobs": [-0.5, -0.25]}, "line 2: field 'logprobs' has 2 entries"),
        ({"token_ids": [5, 6, "7", 8, 2]}, "line 2: field 'token_ids' holds '7' at position 2"),
        ({"token_ids": [5, 6, -7, 8, 2]}, "line 2: field 'token_ids' holds -7 at position 2"),
        ({"loss_mask": [0, 0, 2, 0, 1]}, "line 2: field 'loss_mask' holds 2"),
        ({"loss_mask": [0] * 5}, "line 2: field 'loss_mask' has no 1"),
        ({"loss_mask": [1] * 5}, "line 2: field 'loss_mask' is 1 at position 0"),
        ({"logprobs": [0, 0, "x", 0, 0]}, "line 2: field 'logprobs' holds 'x' at position 2"),
        ({"version": "3"}, "line 2: field 'version' is '3'"),
        ({"versions": [3, 3]}, "line 2: field 'versions' has 2 entries"),
        ({"versions": [-1, -1, -1, -1, 3]}, "line 2: field 'versions' is -1 at position 2"),
        ({"prompt_id": "a17"}, "line 2: field 'prompt_id' is 'a17'"),
        ({"group_id": None}, "line 2: field 'group_id' is None"),
        ({"temperature": -1.0}, r"line 2: field 'temperature' is -1.0"),
    ],
)
def test_a_field_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert message in refusal(tmp_path, OWN | change, "zerogap")


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    record = {name: value for name, value in OWN.items() if name != "logprobs"}
    assert "line 2: field 'logprobs' is missing" in refusal(tmp_path, record, "zerogap")


@pytest.mark.parametrize(("importer", "field"), [("verl", "response_mask"), ("verl", "attention_mask")])
def test_a_format_without_its_mask_is_refused(tmp_path: Path, importer: str, field: str) -> None:
    record = {name: value for name, value in SAME[importer].items() if name != field}
    assert f"line 1: field '{field}' is missing" in refusal(tmp_path, record)


@pytest.mark.parametrize(
    ("importer", "change", "message"),
    [
        ("prime-rl", {"position_ids": [3, 4, 5, 6, 7]}, "line 1: field 'position_ids' does not count"),
        ("prime-rl", {"inference_logprobs": [0.0]}, "line 1: field 'inference_logprobs' has 1 entries, but it must"),
        ("prime-rl-sample", {"temperatures": [1, 1, 0.5, 1, 0.6]}, "line 1: field 'temperatures' has several values"),
        ("trl-ranked", {"logprob_token_ids": None}, "line 1: field 'logprobs' holds several values a token"),
        ("trl-ranked", {"logprob_token_ids": [[7], [8], [9, 3, 7]]}, "is [9, 3, 7] at position 2: the sampled token 2"),
        ("trl-ranked", {"logprob_token_ids": [[7], [8], [9, 2]]}, "is [9, 2] at position 2"),
        ("trl-served", {"completion_ids": [[7], [8], [2]], "prompt_ids": [[5], [6]]}, "3 entries, which 2 prompts"),
        ("trl-served", {"completion_ids": [[7, 8, 2], [7]]}, "line 1 completion 0: field 'logprobs' has 1 entries"),
    ],
)
def test_a_field_of_another_format_is_named(
    tmp_path: Path, importer: str, change: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, SAME[importer] | change)


def test_prompts_of_an_answer_are_shared_by_their_completions(tmp_path: Path) -> None:
    """Two prompts, two completions each; the error of one names it."""
    answer = {
        "prompt_ids": [[5], [6, 6]],
        "completion_ids": [[7], [8, 2], [9], [2]],
        "logprobs": [[-1.0], [-2.0, -3.0], [-4.0], [-5.0]],
    }
    rollouts = read_rollouts(write(tmp_path / "r.jsonl", answer), "auto", 1.0)
    assert [r.trajectory.token_ids for r in rollouts] == [[5, 7], [5, 8, 2], [6, 6, 9], [6, 6, 2]]
    assert [r.trajectory.logprobs for r in rollouts][1] == [0.0, -2.0, -3.0]
    broken = answer | {"logprobs": [[-1.0], [-2.0], [-4.0], [-5.0]]}
    assert "line 1 completion 1: field 'logprobs' has 1 entries" in refusal(tmp_path, broken)


@pytest.mark.parametrize("record", [{"input": "1+1", "output": "2"}, {"prompt": "1+1", "completion": "2"}])
def test_text_is_refused(tmp_path: Path, record: dict[str, Any]) -> None:
    assert "are text" in refusal(tmp_path, record)


def test_text_that_is_no_utf8_names_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(OWN).encode() + b'\n{"finish_reason": "\xff"}\n')
    with pytest.raises(RolloutFileError, match=r"x\.jsonl line 2: byte 20 \(0xff\) is not UTF-8"):
        read_rollouts(path, "auto", 1.0)


def test_unknown_fields_broken_json_and_nothing(tmp_path: Path) -> None:
    assert "no known format has the fields tokens" in refusal(tmp_path, {"tokens": [1]})
    for text, message in (("{", "line 1: not valid JSON"), ("[1]", "line 1: holds a list"), ("", "holds no rollout")):
        (tmp_path / "x.jsonl").write_text(text)
        with pytest.raises(RolloutFileError, match=message):
            read_rollouts(tmp_path / "x.jsonl", "auto", 1.0)
