"""Learning speed: forward and backward of packed tokens, ours and a peer on the same model and tokens.

Timed: sequences of equal length, mean negative log-likelihood of every next token, gradients of all weights; no
optimizer step. Both losses are compared, so that a side which computes something else is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerogap.bench.machine import describe
from zerogap.bench.models import ModelSetting, is_smollm2, model_folder, read_config
from zerogap.bench.report import CPU_SHARE, Report, bar_text
from zerogap.bench.serve import Channel
from zerogap.bench.sides import (
    Answers,
    Progress,
    Side,
    SideFailed,
    by_turns,
    cpu_share,
    median,
    python_command,
    running,
)
from zerogap.kernels.native import keep_memory
from zerogap.learner.sft import Solution, backward_sft
from zerogap.model.checkpoint import load_decoder

BARS = {"float32": 1.8, "bfloat16": 1.3}  # tokens/s against transformers, SmolLM2, one thread
SCALING_BAR = 1.8  # two threads against one
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # relative; the sides round differently
SCALING_THREADS = 2


@dataclass(frozen=True)
class LearnerSetting(ModelSetting):
    """tokens: of one measurement, as sequences of `sequence`. peer: transformers, or torch (our program on stock
    kernels)."""

    tokens: int
    sequence: int


def compare(setting: LearnerSetting, progress: Progress) -> Report:
    """Tokens/s of ours and of the peer, by turns."""
    machine = describe(setting.threads, progress)
    rows = []
    with model_folder(setting) as folder:
        judged = setting.peer == "transformers" and setting.threads == 1 and is_smollm2(folder)
        for dtype in setting.dtypes:
            progress(f"learner, {dtype}")
            commands = {"zerogap": _command("aligned", folder, dtype, setting)}
            commands[setting.peer] = _command(setting.peer, folder, dtype, setting)
            with running(commands, setting.threads, progress) as sides:
                _warm_up(sides, dtype)
                answers = by_turns(sides, setting.rounds, lambda _: {}, progress)
            ours, theirs = (setting.tokens / median(answers[name], "seconds") for name in commands)
            bar = BARS[dtype] if judged else None
            rows.append({"dtype": dtype, "ours": ours, "peer": theirs, "ratio": ours / theirs} | _rest(bar, answers))
    return _report(
        f"zerogap against {setting.peer}", "zerogap tokens/s", f"{setting.peer} tokens/s", machine, rows, setting
    )


def scaling(setting: LearnerSetting, progress: Progress) -> Report:
    """Ours on two threads against ours on one, by turns; wall time of both."""
    machine = describe(SCALING_THREADS, progress)
    rows = []
    with model_folder(setting) as folder:
        for dtype in setting.dtypes:
            progress(f"learner on 1 and {SCALING_THREADS} threads, {dtype}")
            command = _command("aligned", folder, dtype, setting)
            with (
                running({"1 thread": command}, 1, progress) as one,
                running({f"{SCALING_THREADS} threads": command}, SCALING_THREADS, progress) as two,
            ):
                _warm_up(one | two, dtype)
                answers = by_turns(two | one, setting.rounds, lambda _: {}, progress)
            more, single = (setting.tokens / median(answers[name], "wall_s") for name in (*two, *one))
            bar = SCALING_BAR if is_smollm2(folder) else None
            rows.append({"dtype": dtype, "ours": more, "peer": single, "ratio": more / single} | _rest(bar, answers))
    return _report("zerogap, 2 threads against 1", "2 threads tokens/s", "1 thread tokens/s", machine, rows, setting)


def serve_zerogap(channel: Channel, folder: str, dtype: str, kernels: str, tokens: int, sequence: int) -> None:
    """Set up as the learner of a run is."""
    keep_memory()
    decoder = load_decoder(folder, kernels, dtype, trainable=True)
    masters = [weight.master for weight in decoder.weights.values() if weight.master is not None]
    tokens_BT = token_batch(Path(folder), tokens, sequence)
    solutions = [Solution(row, [0] + [1] * (len(row) - 1)) for row in tokens_BT.tolist()]

    def run() -> dict[str, Any]:
        for master in masters:
            master.grad = None
        return {"loss": backward_sft(decoder, solutions, micro_batch_tokens=tokens_BT.numel())}

    channel.serve(run)


def token_batch(folder: Path, tokens: int, sequence: int) -> torch.Tensor:
    """int64 [tokens / sequence, sequence + 1], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(read_config(folder)["vocab_size"], (tokens // sequence, sequence + 1), generator=generator)


def _command(side: str, folder: Path, dtype: str, setting: LearnerSetting) -> list[str]:
    common: dict[str, Any] = {
        "folder": str(folder),
        "dtype": dtype,
        "tokens": setting.tokens,
        "sequence": setting.sequence,
    }
    if side == "transformers":
        return python_command("peers:serve_learning", **common)
    return python_command("learner:serve_zerogap", kernels={"torch": "standard"}.get(side, side), **common)


def _warm_up(sides: dict[str, Side], dtype: str) -> None:
    """One measurement each that does not count. SideFailed when the losses differ by more than rounding."""
    losses = {name: side.ask({})["loss"] for name, side in sides.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > LOSS_TOLERANCE[dtype] * abs(first) for loss in losses.values()):
        raise SideFailed(f"the sides do not compute the same loss in {dtype}: {losses}")


def _rest(bar: float | None, answers: Answers) -> dict[str, Any]:
    """The last cells of a row."""
    return {"cpu_share": cpu_share(answers)} | ({} if bar is None else {"bar": bar_text(bar, at_least=True)})


def _report(
    sides: str, ours: str, theirs: str, machine: dict[str, Any], rows: list[dict[str, Any]], setting: LearnerSetting
) -> Report:
    columns = (
        ("dtype", "dtype", ""),
        ("ours", ours, ",.1f"),
        ("peer", theirs, ",.1f"),
        ("ratio", "ratio of tokens/s", ".2f"),
        ("bar", "bar", ""),
        CPU_SHARE,
    )
    title = f"learner: {sides}; forward + backward of {setting.tokens:,} tokens in sequences of {setting.sequence}"
    return Report(f"{title}, median of {setting.rounds}", machine, columns, rows)
