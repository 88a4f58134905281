"""One rollout of any engine, as a file holds it: our own schema, checked field by field.

A record is a mapping with `token_ids`, `loss_mask` and `logprobs` (one entry per token, prompt included), and optional
`version` or `versions`, `temperature`, `finish_reason`, `group_id`, `prompt_id`, `sample_index`, `segment`. See
docs/audit.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from zerogap.trajectory import NOT_SAMPLED, FinishReason, SamplingParams, Trajectory


class RolloutFileError(Exception):
    """A rollout that cannot be audited; the message names the file, the line, the field and the fix."""


@dataclass(frozen=True)
class Rollout:
    """line: where it stands in its file, from 1 (Parquet: row, .pt: sample). A log-probability that the file leaves out
    (null) or that is no finite number stays in the trajectory as it is: the audit reports it, it is never dropped.
    trained: the weight version that was trained on it (k), None where the file does not say."""

    line: int
    trajectory: Trajectory
    trained: int | None = None


def parse_rollout(record: Mapping[str, Any], line: int, temperature: float) -> Rollout:
    """temperature: of rollouts whose record has none. Raises RolloutFileError, which names the field only."""
    ids = _integers(record, "token_ids", least=0)
    mask = _integers(record, "loss_mask", least=0)
    logprobs = _logprobs(record)
    for name, values in (("loss_mask", mask), ("logprobs", logprobs)):
        if len(values) != len(ids):
            raise RolloutFileError(
                f"field {name!r} has {len(values)} entries, but 'token_ids' has {len(ids)}; one entry per token, "
                "prompt and tool tokens included"
            )
    if any(value > 1 for value in mask):
        raise RolloutFileError(f"field 'loss_mask' holds {max(mask)}; use 1 for a sampled token, 0 for any other")
    if not any(mask):
        raise RolloutFileError("field 'loss_mask' has no 1: no token of this rollout was sampled; leave the line out")
    if mask[0]:
        raise RolloutFileError("field 'loss_mask' is 1 at position 0, but nothing precedes that token; add the prompt")
    return Rollout(
        line,
        Trajectory(
            token_ids=ids,
            loss_mask=mask,
            logprobs=[logprob if sampled else 0.0 for logprob, sampled in zip(logprobs, mask, strict=True)],
            versions=_versions(record, mask),
            # Engines name their own reasons; the report shows them as they are.
            finish_reason=cast(FinishReason, str(record.get("finish_reason") or "unknown")),
            prompt_id=_integer(record, "prompt_id", 0),
            group_id=_integer(record, "group_id", line),
            sample_index=_integer(record, "sample_index", 0),
            segment=_integer(record, "segment", 0),
            sampling=SamplingParams(temperature=_temperature(record, temperature)),
        ),
        _trained(record),
    )


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    if name not in record:
        raise RolloutFileError(f"field {name!r} is missing (the record has: {', '.join(sorted(record)) or 'nothing'})")
    values = record[name]
    if not isinstance(values, list):
        raise RolloutFileError(f"field {name!r} is {type(values).__name__}, not a list")
    return values


def _integers(record: Mapping[str, Any], name: str, least: int) -> list[int]:
    values = _list(record, name)
    for position, value in enumerate(values):
        if not isinstance(value, int) or value < least:
            raise RolloutFileError(f"field {name!r} holds {value!r} at position {position}, not an integer >= {least}")
    return [int(value) for value in values]


def _integer(record: Mapping[str, Any], name: str, default: int) -> int:
    value = record.get(name, default)
    if not isinstance(value, int) or value < 0:
        raise RolloutFileError(f"field {name!r} is {value!r}, not an integer >= 0")
    return int(value)


def _logprobs(record: Mapping[str, Any]) -> list[float]:
    values = _list(record, "logprobs")
    for position, value in enumerate(values):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise RolloutFileError(
                f"field 'logprobs' holds {value!r} at position {position}, not a number (null where there is none)"
            )
    return [math.nan if value is None else float(value) for value in values]


def _versions(record: Mapping[str, Any], mask: list[int]) -> list[int]:
    """`versions` (one per token) or `version` (of the rollout); 0 where the file has neither."""
    if "versions" in record:
        versions = _integers(record, "versions", least=NOT_SAMPLED)
        if len(versions) != len(mask):
            raise RolloutFileError(f"field 'versions' has {len(versions)} entries, but 'token_ids' has {len(mask)}")
        unnamed = next((p for p, sampled in enumerate(mask) if sampled and versions[p] == NOT_SAMPLED), None)
        if unnamed is not None:
            raise RolloutFileError(f"field 'versions' is {NOT_SAMPLED} at position {unnamed}, which was sampled")
    else:
        versions = [_integer(record, "version", 0)] * len(mask)
    return [version if sampled else NOT_SAMPLED for version, sampled in zip(versions, mask, strict=True)]


def _temperature(record: Mapping[str, Any], default: float) -> float:
    """`temperature`, or that of `sampling` as a run's own trajectories have it."""
    sampling = record.get("sampling")
    nested = sampling.get("temperature", default) if isinstance(sampling, Mapping) else default
    value = record.get("temperature", nested)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise RolloutFileError(f"field 'temperature' is {value!r}, not a number >= 0")
    return float(value)


def _trained(record: Mapping[str, Any]) -> int | None:
    """A run's own trajectories name the update that consumed them: update k + 1 trains version k."""
    info = record.get("info")
    update = info.get("update") if isinstance(info, Mapping) else None
    return update - 1 if isinstance(update, int) and update > 0 else None
