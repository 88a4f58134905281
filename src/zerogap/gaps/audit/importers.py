"""Rollouts of other frameworks in our schema: one small function per format, chosen by the fields of the first record.

Formats as their sources have them:
- prime-rl: PrimeIntellect-ai/prime-rl, src/prime_rl/transport/types.py (TrainingExample)
- trl: huggingface/trl, trl/trainer/grpo_trainer.py (what a `rollout_func` returns; the tensors of a generated batch)
- verl: volcengine/verl, verl/experimental/agent_loop/agent_loop.py (the DataProto of generate_sequences)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.gaps.audit.schema import Rollout, RolloutFileError, parse_rollout

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Importer:
    """fields: a record that has all of these is of this format. convert: to a record of our own schema."""

    fields: frozenset[str]
    convert: Callable[[Record], dict[str, Any]]


def read_rollouts(path: Path, importer: str, temperature: float) -> list[Rollout]:
    """All rollouts of a .jsonl or .parquet file. importer: a name of IMPORTERS, or "auto".

    temperature: of rollouts whose record has none. Raises RolloutFileError with file, line and field.
    """
    rollouts: list[Rollout] = []
    chosen = None if importer == "auto" else importer
    for line, record in _records(path):
        try:
            chosen = chosen or recognise(record)
            rollouts.append(parse_rollout(IMPORTERS[chosen].convert(record), line, temperature))
        except RolloutFileError as error:
            raise RolloutFileError(f"{path} line {line}: {error}") from error
    if not rollouts:
        raise RolloutFileError(f"{path} holds no rollout")
    return rollouts


def recognise(record: Record) -> str:
    """The importer whose fields a record has. RolloutFileError when there is none, above all for dumps of text."""
    for name, importer in IMPORTERS.items():
        if importer.fields <= record.keys():
            return name
    for asked, framework in ((("input", "output"), "verl"), (("prompt", "completion"), "TRL")):
        if all(isinstance(record.get(name), str) for name in asked):
            raise RolloutFileError(
                f"fields {asked[0]!r} and {asked[1]!r} are text (a {framework} completion log?), and tokens made from "
                "text again need not be those that were sampled; dump token ids and log-probabilities instead"
            )
    formats = "; ".join(f"{name}: {', '.join(sorted(i.fields))}" for name, i in IMPORTERS.items())
    raise RolloutFileError(f"no known format has the fields {', '.join(sorted(record))} (needed are {formats})")


def _from_own(record: Record) -> dict[str, Any]:
    return dict(record)


def _from_prime_rl(record: Record) -> dict[str, Any]:
    """Both masks say which tokens are trained; nothing is padded."""
    prompt, answer = _field(record, "prompt_ids"), _field(record, "completion_ids")
    masks = [_field(record, "prompt_mask", len(prompt)), _field(record, "completion_mask", len(answer))]
    recorded = _field(record, "completion_logprobs", len(answer))
    return _joined(record, prompt, answer, [int(bool(m)) for mask in masks for m in mask], recorded)


def _from_trl(record: Record) -> dict[str, Any]:
    """A row of `rollout_func` (`logprobs`, no padding) or of a batch (`sampling_per_token_logps`; `prompt_mask` and
    `completion_mask` are 0 at padding). `tool_mask` (also: `env_mask`) is 0 at tokens that a tool wrote."""
    prompt, answer = _field(record, "prompt_ids"), _field(record, "completion_ids")
    name = "logprobs" if "logprobs" in record else "sampling_per_token_logps"
    recorded = _field(record, name, len(answer))
    real = _field(record, "completion_mask", len(answer)) if "completion_mask" in record else [1] * len(answer)
    tool = next((key for key in ("tool_mask", "env_mask") if record.get(key) is not None), None)
    sampled = [1] * len(answer) if tool is None else _field(record, tool, len(answer))
    if "prompt_mask" in record:
        prompt = _kept(prompt, _field(record, "prompt_mask", len(prompt)))
    sampled = [0] * len(prompt) + _kept(sampled, real)
    return _joined(record, prompt, _kept(answer, real), sampled, _kept(recorded, real))


def _from_verl(record: Record) -> dict[str, Any]:
    """`prompts` padded on the left and `responses` on the right, told by `attention_mask` over both and not by the
    padding id, which may be that of a sampled end mark. `response_mask` is 0 at tool tokens and padding."""
    prompt, answer = _field(record, "prompts"), _field(record, "responses")
    attended = _field(record, "attention_mask", len(prompt) + len(answer))
    sampled = _field(record, "response_mask", len(answer))
    recorded = _field(record, "rollout_log_probs", len(answer))
    real = attended[len(prompt) :]
    prompt = _kept(prompt, attended[: len(prompt)])
    mask = [0] * len(prompt) + _kept(sampled, real)
    return _joined(record, prompt, _kept(answer, real), mask, _kept(recorded, real))


IMPORTERS = {
    "zerogap": Importer(frozenset({"token_ids", "loss_mask", "logprobs"}), _from_own),
    "prime-rl": Importer(frozenset({"prompt_ids", "completion_ids", "completion_logprobs"}), _from_prime_rl),
    "verl": Importer(frozenset({"prompts", "responses", "rollout_log_probs"}), _from_verl),
    "trl": Importer(frozenset({"prompt_ids", "completion_ids", "logprobs"}), _from_trl),
    "trl-batch": Importer(frozenset({"prompt_ids", "completion_ids", "sampling_per_token_logps"}), _from_trl),
}


def _field(record: Record, name: str, length: int | None = None) -> list[Any]:
    values = record.get(name)
    if not isinstance(values, list):
        raise RolloutFileError(f"field {name!r} is {'missing' if values is None else 'not a list'}")
    if length is not None and len(values) != length:
        raise RolloutFileError(f"field {name!r} has {len(values)} entries, but it must have {length}, one per token")
    return values


def _kept(values: list[Any], mask: list[Any]) -> list[Any]:
    return [value for value, keep in zip(values, mask, strict=True) if keep]


def _joined(
    record: Record, prompt: list[Any], answer: list[Any], mask: list[int], recorded: list[Any]
) -> dict[str, Any]:
    common = ("version", "temperature", "finish_reason")
    return {name: record[name] for name in common if record.get(name) is not None} | {
        "token_ids": prompt + answer,
        "loss_mask": mask,
        "logprobs": [0.0] * len(prompt) + recorded,
    }


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """(line from 1, record) of each line that is not empty."""
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
        return
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except ValueError as error:
                raise RolloutFileError(f"{path} line {line}: not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise RolloutFileError(f"{path} line {line}: holds a {type(record).__name__}, not a mapping")
            yield line, record


def _parquet_records(path: Path) -> Iterator[tuple[int, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RolloutFileError(f"{path}: Parquet needs pyarrow; pip install 'zerogap[parquet]'") from error
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from enumerate(({k: v for k, v in row.items() if v is not None} for row in rows), 1)
    except pyarrow.ArrowInvalid as error:
        raise RolloutFileError(f"{path} is not a readable Parquet file: {error}") from error
