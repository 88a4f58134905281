"""Time against context: prefill, decode and a learner step of one sequence at several lengths; no peer.

Engine and learner are loaded one after the other, so that memory holds only one of them.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerogap.bench.learner import token_batch, zerogap_command
from zerogap.bench.machine import describe
from zerogap.bench.models import ModelSetting, model_folder, read_config
from zerogap.bench.report import CPU_SHARE, Report, bar_text
from zerogap.bench.serve import Channel, Watch
from zerogap.bench.sides import Progress, by_turns, median, python_command, running
from zerogap.model.checkpoint import load_decoder
from zerogap.model.context import change_context
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, SamplingParams

# Most growth of the time when the context doubles: that of attention alone, over all pairs of tokens or for one token.
BARS = {"prefill": 4.0, "decode": 2.0, "learner step": 4.0}


@dataclass(frozen=True)
class ContextSetting(ModelSetting):
    """tokens: of the sequence, ascending. new_tokens: sampled after them to time decode. parts: engine, learner."""

    tokens: tuple[int, ...]
    new_tokens: int
    parts: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Context that the model needs. The prefill samples a token, too."""
        return self.tokens[-1] + 1 + self.new_tokens


def measure(setting: ContextSetting, progress: Progress) -> Report:
    """A row for every dtype, program and length."""
    machine = describe(setting.threads, progress)
    rows: list[dict[str, Any]] = []
    with _long_model(setting) as folder:
        for dtype in setting.dtypes:
            for part in setting.parts:
                with running({part: _command(part, folder, dtype, setting)}, setting.threads, progress) as sides:
                    sides[part].ask(_asking(part, setting.tokens[0])(0))
                    found: list[dict[str, Any]] = []
                    for tokens in setting.tokens:
                        progress(f"{part}, {dtype}, {tokens:,} tokens")
                        answers = by_turns(sides, setting.rounds, _asking(part, tokens), progress)[part]
                        found += [{"dtype": dtype} | row for row in _rows(answers, tokens, setting)]
                rows += with_growth(found)
    title = f"context: one sequence, decode of {setting.new_tokens} more tokens, median of {setting.rounds}"
    return Report(title, machine, COLUMNS, rows, NOTES)


COLUMNS = (
    ("dtype", "dtype", ""),
    ("program", "program", ""),
    ("context", "context", ",d"),
    ("seconds", "seconds", ",.4f"),
    ("tokens_per_s", "tokens/s", ",.0f"),
    ("growth", "growth per doubling", ".2f"),
    ("bar", "bar", ""),
    ("peak_gb", "peak GB", ".2f"),
    CPU_SHARE,
)
NOTES = [
    "prefill ends with the first sampled token; decode is the tokens after it. learner step is forward and backward "
    "with activation checkpointing. growth = ratio of times for twice the context. peak GB is the largest resident "
    "memory of the program's process up to that row, model and libraries included."
]


def with_growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows program by program, each but the first of a program with its growth against the one before, as if the
    context had doubled, and the bar for it."""
    found = []
    for program, most in BARS.items():
        several = [row for row in rows if row["program"] == program]
        found += several[:1]
        for before, row in itertools.pairwise(several):
            doublings = math.log2(row["context"] / before["context"])
            growth = (row["seconds"] / before["seconds"]) ** (1 / doublings)
            found.append(row | {"growth": growth, "bar": bar_text(most, at_least=False)})
    return found


def serve_engine(channel: Channel, folder: str, dtype: str, max_context: int, new_tokens: int) -> None:
    """A request is the `tokens` of a prompt; the answer: prefill_s, and decode_s of `new_tokens`."""
    decoder = load_decoder(folder, "aligned", dtype)
    decoder.eos_token_ids = ()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=1, max_context=max_context))

    def run(tokens: int) -> dict[str, Any]:
        (ids,) = token_batch(Path(folder), tokens, tokens).tolist()
        sampled = engine.stats()["sampled_tokens"]
        watch = Watch()
        engine.submit(GroupRequest(0, 0, tuple(ids[:tokens]), 1, SamplingParams(max_new_tokens=1 + new_tokens)))
        while engine.stats()["sampled_tokens"] == sampled:
            engine.step()
        prefill = watch.read()
        watch.start()
        while engine.has_work():
            engine.step()
        return {"prefill_s": prefill["seconds"], "decode_s": watch.read()["seconds"]}

    channel.serve(run)


def _rows(answers: list[dict[str, Any]], tokens: int, setting: ContextSetting) -> list[dict[str, Any]]:
    """What one length took: prefill and decode of the engine, or the learner step."""
    engine = {"prefill": ("prefill_s", tokens), "decode": ("decode_s", setting.new_tokens)}
    programs = engine if "prefill_s" in answers[0] else {"learner step": ("seconds", tokens)}
    rest = {"context": tokens, "peak_gb": median(answers, "peak_gb"), "cpu_share": median(answers, "cpu_share")}
    rows = []
    for program, (key, count) in programs.items():
        seconds = median(answers, key)
        rows.append(rest | {"program": program, "seconds": seconds, "tokens_per_s": count / seconds})
    return rows


def _command(part: str, folder: Path, dtype: str, setting: ContextSetting) -> list[str]:
    if part == "learner":
        return zerogap_command(folder, dtype, "aligned", activation_checkpointing=True)
    return python_command(
        "context:serve_engine",
        folder=str(folder),
        dtype=dtype,
        max_context=setting.longest,
        new_tokens=setting.new_tokens,
    )


def _asking(part: str, tokens: int) -> Callable[[int], dict[str, Any]]:
    """The same request in every round."""
    return lambda _: {"tokens": tokens} | ({"sequence": tokens} if part == "learner" else {})


@contextmanager
def _long_model(setting: ContextSetting) -> Iterator[Path]:
    """The model, its context raised where it is too short. Its rotary angles are then those beyond what it was trained
    on, which take the same time."""
    with model_folder(setting) as folder, tempfile.TemporaryDirectory() as scratch:
        trained = read_config(folder).get("max_position_embeddings", 0)
        short = trained < setting.longest
        yield change_context(folder, Path(scratch) / "long", setting.longest, None) if short else folder
