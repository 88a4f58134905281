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

    peer: str
    tokens: int
    sequence: int

    @property
    def request(self) -> dict[str, int]:
        """One measurement, as a side is asked for it."""
        return {"tokens": self.tokens, "sequence": self.sequence}


def compare(setting: LearnerSetting, progress: Progress) -> Report:
    """Tokens/s of ours and of the peer, by turns."""
    machine = describe(setting.threads, progress)
    rows = []
    with model_folder(setting) as folder:
        judged = setting.peer == "transformers" and setting.threads == 1 and is_smollm2(folder)
        for dtype in setting.dtypes:
            progress(f"learner, {dtype}")
            commands = {"zerogap": zerogap_command(folder, dtype, "aligned")}
            if setting.peer == "transformers":
                commands[setting.peer] = python_command("peers:serve_learning", folder=str(folder), dtype=dtype)
            else:
                commands[setting.peer] = zerogap_command(folder, dtype, "standard")
            with running(commands, setting.threads, progress) as sides:
                _warm_up(sides, setting, LOSS_TOLERANCE[dtype])
                answers = by_turns(sides, setting.rounds, lambda _: setting.request, progress)
            rows.append(_row(dtype, answers, "seconds", setting, BARS[dtype] if judged else None))
    return _report(f"zerogap against {setting.peer}", "zerogap", setting.peer, machine, rows, setting)


def scaling(setting: LearnerSetting, progress: Progress) -> Report:
    """Ours on two threads against ours on one, by turns; wall time of both."""
    machine = describe(SCALING_THREADS, progress)
    rows = []
    with model_folder(setting) as folder:
        for dtype in setting.dtypes:
            progress(f"learner on 1 and {SCALING_THREADS} threads, {dtype}")
            command = zerogap_command(folder, dtype, "aligned")
            with (
                running({"1 thread": command}, 1, progress) as one,
                running({f"{SCALING_THREADS} threads": command}, SCALING_THREADS, progress) as two,
            ):
                _warm_up(one | two, setting, LOSS_TOLERANCE[dtype])
                answers = by_turns(two | one, setting.rounds, lambda _: setting.request, progress)
            rows.append(_row(dtype, answers, "wall_s", setting, SCALING_BAR if is_smollm2(folder) else None))
    return _report("zerogap, 2 threads against 1", "2 threads", "1 thread", machine, rows, setting)


def checkpointing(setting: LearnerSetting, progress: Progress) -> Report:
    """Ours with activation checkpointing against ours without, by turns. SideFailed unless both losses are equal."""
    machine = describe(setting.threads, progress)
    rows = []
    with model_folder(setting) as folder:
        for dtype in setting.dtypes:
            progress(f"learner with and without activation checkpointing, {dtype}")
            commands = {
                "with": zerogap_command(folder, dtype, "aligned", activation_checkpointing=True),
                "without": zerogap_command(folder, dtype, "aligned"),
            }
            with running(commands, setting.threads, progress) as sides:
                _warm_up(sides, setting, tolerance=0.0)
                answers = by_turns(sides, setting.rounds, lambda _: setting.request, progress)
            rows.append(_row(dtype, answers, "seconds", setting))
    return _report("with activation checkpointing against without", "with", "without", machine, rows, setting)


def serve_zerogap(
    channel: Channel, folder: str, dtype: str, kernels: str, activation_checkpointing: bool = False
) -> None:
    """Set up as the learner of a run is. A request is the `tokens` and `sequence` of a setting."""
    keep_memory()
    decoder = load_decoder(folder, kernels, dtype, trainable=True)
    decoder.activation_checkpointing = activation_checkpointing
    masters = [weight.master for weight in decoder.weights.values() if weight.master is not None]

    def run(tokens: int, sequence: int) -> dict[str, Any]:
        tokens_BT = token_batch(Path(folder), tokens, sequence)
        solutions = [Solution(row, [0] + [1] * (len(row) - 1)) for row in tokens_BT.tolist()]
        for master in masters:
            master.grad = None
        return {"loss": backward_sft(decoder, solutions, micro_batch_tokens=tokens_BT.numel())}

    channel.serve(run)


def token_batch(folder: Path, tokens: int, sequence: int) -> torch.Tensor:
    """int64 [tokens / sequence, sequence + 1], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(read_config(folder)["vocab_size"], (tokens // sequence, sequence + 1), generator=generator)


def zerogap_command(folder: Path, dtype: str, kernels: str, activation_checkpointing: bool = False) -> list[str]:
    return python_command(
        "learner:serve_zerogap",
        folder=str(folder),
        dtype=dtype,
        kernels=kernels,
        activation_checkpointing=activation_checkpointing,
    )


def _warm_up(sides: dict[str, Side], setting: LearnerSetting, tolerance: float) -> None:
    """One measurement each that does not count. SideFailed when the losses differ by more than this share."""
    losses = {name: side.ask(setting.request)["loss"] for name, side in sides.items()}
    first = next(iter(losses.values()))
    if any(abs(loss - first) > tolerance * abs(first) for loss in losses.values()):
        raise SideFailed(f"the sides do not compute the same loss: {losses}")


def _row(dtype: str, answers: Answers, time: str, setting: LearnerSetting, bar: float | None = None) -> dict[str, Any]:
    """The first side against the second; `time` is the key of the answers that counts."""
    ours, theirs = (setting.tokens / median(several, time) for several in answers.values())
    ours_peak, theirs_peak = (median(several, "peak_gb") for several in answers.values())
    row = {"dtype": dtype, "ours": ours, "peer": theirs, "ratio": ours / theirs, "cpu_share": cpu_share(answers)}
    row |= {"ours_peak_gb": ours_peak, "peer_peak_gb": theirs_peak}
    return row | ({} if bar is None else {"bar": bar_text(bar, at_least=True)})


def _report(
    sides: str, ours: str, theirs: str, machine: dict[str, Any], rows: list[dict[str, Any]], setting: LearnerSetting
) -> Report:
    columns = (
        ("dtype", "dtype", ""),
        ("ours", f"{ours} tokens/s", ",.1f"),
        ("peer", f"{theirs} tokens/s", ",.1f"),
        ("ratio", "ratio of tokens/s", ".2f"),
        ("bar", "bar", ""),
        ("ours_peak_gb", f"{ours} peak GB", ".2f"),
        ("peer_peak_gb", f"{theirs} peak GB", ".2f"),
        CPU_SHARE,
    )
    title = f"learner: {sides}; forward + backward of {setting.tokens:,} tokens in sequences of {setting.sequence}"
    return Report(f"{title}, median of {setting.rounds}", machine, columns, rows)
