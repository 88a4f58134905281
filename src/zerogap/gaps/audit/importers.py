"""Rollouts of other frameworks in our schema: one small function per format, chosen by the fields of the first record.

Formats as their sources have them:
- prime-rl: PrimeIntellect-ai/prime-rl, src/prime_rl/trainer/rl/token_export.py (token_exports/step_N/rank_R.jsonl) and
  src/prime_rl/transport/types.py (TrainingSample: one flat sequence; before that, prompt and completion apart)
- trl: huggingface/trl, trl/trainer/grpo_trainer.py (what a `rollout_func` returns; the tensors of a generated batch)
  and trl/generation/vllm_generation.py (what `trl vllm-serve` answers: log-probabilities by rank)
- verl: volcengine/verl, verl/experimental/agent_loop/agent_loop.py (the DataProto of generate_sequences)
- molt: see molt.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.gaps.audit.molt import molt_records
from zerogap.gaps.audit.record_files import Record, json_records, parquet_records
from zerogap.gaps.audit.schema import Rollout, RolloutFileError, parse_rollout

Values = list[Any]  # one entry per token
READERS = {".parquet": parquet_records, ".pt": molt_records}  # any other file: JSON lines


def _itself(record: Record) -> Iterator[Record]:
    yield record


@dataclass(frozen=True)
class Importer:
    """fields: a record that has all of these is of this format. convert: one rollout to a record of our own schema.
    rollouts: those that one record holds, mostly one."""

    fields: frozenset[str]
    convert: Callable[[Record], dict[str, Any]]
    rollouts: Callable[[Record], Iterator[Record]] = _itself


def read_rollouts(path: Path, importer: str, temperature: float) -> list[Rollout]:
    """All rollouts of a .jsonl, .parquet or .pt file. importer: a name of IMPORTERS, or "auto".

    temperature: of rollouts whose record has none. Raises RolloutFileError with file, line and field.
    """
    rollouts: list[Rollout] = []
    chosen = None if importer == "auto" else importer
    for line, record in READERS.get(path.suffix, json_records)(path):
        where = f"{path} line {line}"
        try:
            chosen = chosen or recognise(record)
            for index, single in enumerate(IMPORTERS[chosen].rollouts(record)):
                if single is not record:
                    where = f"{path} line {line} completion {index}"
                rollouts.append(parse_rollout(IMPORTERS[chosen].convert(single), line, temperature))
        except RolloutFileError as error:
            raise RolloutFileError(f"{where}: {error}") from error
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


def _from_prime_rl_export(record: Record) -> dict[str, Any]:
    """A sequence of the trainer's export, every list at the token that it is of. `loss_mask` says which are trained."""
    ids = _field(record, "token_ids")
    positions = _field(record, "position_ids", len(ids)) if "position_ids" in record else list(range(len(ids)))
    if positions != list(range(len(ids))):
        raise RolloutFileError("field 'position_ids' does not count 0, 1, 2, ...: tokens before these are missing")
    mask = _field(record, "loss_mask", len(ids))
    return _flat(record, ids, mask, _field(record, "inference_logprobs", len(ids)))


def _from_prime_rl_sample(record: Record) -> dict[str, Any]:
    ids = _field(record, "token_ids")
    mask = _field(record, "mask", len(ids))
    flat = _flat(record, ids, mask, _field(record, "logprobs", len(ids)))
    return flat | _one_temperature(record, "temperatures", mask)


def _from_prime_rl_split(record: Record) -> dict[str, Any]:
    """Both masks say which tokens are trained; nothing is padded."""
    prompt, answer = _field(record, "prompt_ids"), _field(record, "completion_ids")
    mask = _field(record, "completion_mask", len(answer))
    recorded = _field(record, "completion_logprobs", len(answer))
    joined = _joined(record, prompt, answer, _field(record, "prompt_mask", len(prompt)) + mask, recorded)
    return joined | _one_temperature(record, "completion_temperatures", mask)


def _from_trl(record: Record) -> dict[str, Any]:
    """A row of `rollout_func` (`logprobs`, no padding) or of a batch (`sampling_per_token_logps`; `prompt_mask` and
    `completion_mask` are 0 at padding). `tool_mask` (also: `env_mask`) is 0 at tokens that a tool wrote."""
    prompt, answer = _field(record, "prompt_ids"), _field(record, "completion_ids")
    name = "logprobs" if "logprobs" in record else "sampling_per_token_logps"
    recorded = _of_sampled(record, name, answer)
    real = _mask(record, "prompt_mask", len(prompt)) + _mask(record, "completion_mask", len(answer))
    tool = "tool_mask" if record.get("tool_mask") is not None else "env_mask"
    return _joined(record, prompt, answer, [0] * len(prompt) + _mask(record, tool, len(answer)), recorded, real)


def _trl_rollouts(record: Record) -> Iterator[Record]:
    """A record may be a whole answer of the server or of `rollout_func`: P prompts and P * n completions, n by n."""
    completions = record.get("completion_ids")
    if not isinstance(completions, list) or not completions or not isinstance(completions[0], list):
        yield record
        return
    prompts, count = _field(record, "prompt_ids"), len(completions)
    if not prompts or count % len(prompts):
        raise RolloutFileError(f"field 'completion_ids' has {count} entries, which {len(prompts)} prompts cannot share")
    lists = {name: value for name, value in record.items() if isinstance(value, list) and len(value) == count}
    for index in range(count):
        single = {name: value[index] for name, value in lists.items()}
        yield {**record, **single, "prompt_ids": prompts[index * len(prompts) // count]}


def _of_sampled(record: Record, name: str, answer: Values) -> Values:
    """One log-probability per token, of a list of numbers, or of lists by rank that `logprob_token_ids` names."""
    values = _field(record, name, len(answer))
    if not any(isinstance(value, list) for value in values):
        return values
    if record.get("logprob_token_ids") is None:
        if any(not isinstance(value, list) or len(value) != 1 for value in values):
            raise RolloutFileError(
                f"field {name!r} holds several values a token, and 'logprob_token_ids', which says whose, is missing"
            )
        return [value[0] for value in values]
    chosen = []
    for position, (token, ranked, ids) in enumerate(
        zip(answer, values, _field(record, "logprob_token_ids", len(answer)), strict=True)
    ):
        if not isinstance(ranked, list) or not isinstance(ids, list) or token not in ids or len(ids) != len(ranked):
            raise RolloutFileError(
                f"field 'logprob_token_ids' is {ids!r} at position {position}: the sampled token {token} and one "
                f"value of {name!r} for each are needed"
            )
        chosen.append(ranked[ids.index(token)])
    return chosen


def _from_verl(record: Record) -> dict[str, Any]:
    """`prompts` padded on the left and `responses` on the right, told by `attention_mask` over both and not by the
    padding id, which may be that of a sampled end mark. `response_mask` is 0 at tool tokens and padding."""
    prompt, answer = _field(record, "prompts"), _field(record, "responses")
    attended = _field(record, "attention_mask", len(prompt) + len(answer))
    sampled = _field(record, "response_mask", len(answer))
    recorded = _field(record, "rollout_log_probs", len(answer))
    return _joined(record, prompt, answer, [0] * len(prompt) + sampled, recorded, attended)


def _from_molt(record: Record) -> dict[str, Any]:
    """`attention_mask` is 0 at padding; `action_mask` and `rollout_log_probs` begin with the second token."""
    ids = _field(record, "sequences")
    real = _field(record, "attention_mask", len(ids))
    sampled = [0, *_field(record, "action_mask", len(ids) - 1)]
    recorded = [0.0, *_field(record, "rollout_log_probs", len(ids) - 1)]
    return _flat(record, ids, sampled, recorded, real)


IMPORTERS = {
    name: Importer(frozenset(fields), *functions)
    for name, fields, *functions in (
        ("zerogap", ("token_ids", "loss_mask", "logprobs"), _from_own),
        ("prime-rl", ("token_ids", "loss_mask", "inference_logprobs"), _from_prime_rl_export),
        ("prime-rl-sample", ("token_ids", "mask", "logprobs", "temperatures"), _from_prime_rl_sample),
        ("prime-rl-split", ("prompt_ids", "completion_ids", "completion_logprobs"), _from_prime_rl_split),
        ("verl", ("prompts", "responses", "rollout_log_probs"), _from_verl),
        ("trl", ("prompt_ids", "completion_ids", "logprobs"), _from_trl, _trl_rollouts),
        ("trl-batch", ("prompt_ids", "completion_ids", "sampling_per_token_logps"), _from_trl, _trl_rollouts),
        ("molt", ("sequences", "attention_mask", "action_mask", "rollout_log_probs"), _from_molt),
    )
}


def _field(record: Record, name: str, length: int | None = None) -> Values:
    values = record.get(name)
    if not isinstance(values, list):
        raise RolloutFileError(f"field {name!r} is {'missing' if values is None else 'not a list'}")
    if length is not None and len(values) != length:
        raise RolloutFileError(f"field {name!r} has {len(values)} entries, but it must have {length}, one per token")
    return values


def _kept(values: Values, mask: Values) -> Values:
    return [value for value, keep in zip(values, mask, strict=True) if keep]


def _mask(record: Record, name: str, length: int) -> Values:
    """An optional mask: 1 everywhere where the record has none."""
    return [1] * length if record.get(name) is None else _field(record, name, length)


def _joined(
    record: Record, prompt: Values, answer: Values, mask: Values, recorded: Values, real: Values | None = None
) -> dict[str, Any]:
    """As _flat, with prompt and answer apart. recorded: of the answer; mask and real: of both."""
    return _flat(record, prompt + answer, mask, [0.0] * len(prompt) + recorded, real)


def _flat(record: Record, ids: Values, mask: Values, recorded: Values, real: Values | None = None) -> dict[str, Any]:
    """One flat sequence in our own schema. real: 0 at padding, None where nothing is padded."""
    lists = {"token_ids": ids, "loss_mask": [int(bool(sampled)) for sampled in mask], "logprobs": recorded}
    if real is not None:
        lists = {name: _kept(values, real) for name, values in lists.items()}
    common = ("version", "temperature", "finish_reason")
    return {name: record[name] for name in common if record.get(name) is not None} | lists


def _one_temperature(record: Record, name: str, mask: Values) -> dict[str, float]:
    """The temperature of the sampled tokens, which must be one; nothing where the record has no such list."""
    if record.get(name) is None:
        return {}
    values = sorted(set(_kept(_field(record, name, len(mask)), mask)))
    if len(values) > 1:
        raise RolloutFileError(f"field {name!r} has several values at sampled tokens ({values}); one is scored")
    return {"temperature": values[0]} if values else {}
