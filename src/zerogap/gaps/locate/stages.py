"""A forward pass, stage by stage: names of the stages, and a kernel family that shows every output to a watcher.

The model is not defined a second time: the decoder's own forward runs, on kernels that are looked at.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NamedTuple, Protocol, cast

import torch

from zerogap.kernels import Kernels, RowBatch, Weight
from zerogap.model.decoder import Decoder

SHOWN_BY_WEIGHT = ("rms_norm", "linear")  # named after their weight: input_norm, qkv, o, ..., norm
SHOWN = (*SHOWN_BY_WEIGHT, "embedding", "head_norm", "rotary", "attention", "silu_mul", "logits", "logprobs")
OF_NO_LAYER = ("embedding", "logits", "logprobs")


class Stage(NamedTuple):
    """layer: None before the first and after the last. name: an operation, or the weight that tells it from others."""

    layer: int | None
    name: str

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"


class Watch(Protocol):
    def __call__(self, stage: Stage, output: torch.Tensor, column: int = 0) -> torch.Tensor:
        """output: [T, ...], one row per position, overwritten later. column: where it begins in the rows of its stage,
        of which it may be a part. Returns what the forward pass goes on with, of the same shape and dtype."""
        ...


class Side(Protocol):
    """One way of computing a model."""

    name: str

    def run(self, token_ids: list[int], temperature: float, watch: Watch) -> None:
        """One sequence of at least two tokens; a row for each but the last, which is only predicted."""
        ...


class DecoderSide:
    """Our decoder, on its own kernels."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.dtype = str(decoder.dtype).removeprefix("torch.")
        self.name = f"{decoder.kernels.name} {self.dtype}"

    @torch.no_grad()
    def run(self, token_ids: list[int], temperature: float, watch: Watch) -> None:
        watched = copy(self.decoder)
        watched.kernels = cast(Kernels, WatchedKernels(self.decoder, watch))
        tokens = torch.tensor(token_ids)
        hidden_TH = watched.hidden(tokens[:-1], RowBatch.pack([len(tokens) - 1]))
        watched.logits(hidden_TH)
        watched.logprobs(hidden_TH, tokens[1:], temperature)


class WatchedKernels:
    """The kernels of a decoder, called through; each output passes a watcher. Everything else is the family's own."""

    def __init__(self, decoder: Decoder, watch: Watch) -> None:
        self._kernels = decoder.kernels
        self._names = {id(weight): name for name, weight in decoder.weights.items()}
        self._watch = watch
        self._layer: int | None = None

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self._kernels, operation)
        if operation not in SHOWN:
            return method
        if operation == "rms_norm":
            return self._rms_norm

        def shown(operand: torch.Tensor, *arguments: Any) -> torch.Tensor:
            return self._watch(self._stage(operation, arguments), method(operand, *arguments))

        return shown

    def _rms_norm(
        self, x_TH: torch.Tensor, weight: Weight, eps: float, residual_TH: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two outputs: the sum that the residual stream becomes, where there is one, and the normed rows."""
        stage = self._stage("rms_norm", (weight,))
        y_TH, sum_TH = self._kernels.rms_norm(x_TH, weight, eps, residual_TH)
        if residual_TH is not None:
            sum_TH = self._watch(before_norm(stage), sum_TH)
        return self._watch(stage, y_TH), sum_TH

    def _stage(self, operation: str, arguments: tuple[Any, ...]) -> Stage:
        if operation in OF_NO_LAYER:
            return Stage(None, operation)
        if operation in SHOWN_BY_WEIGHT:
            *layer, operation = self._names[id(arguments[0])].removeprefix("layers.").split(".")
            self._layer = int(layer[0]) if layer else None
        return Stage(self._layer, operation)


def before_norm(stage: Stage) -> Stage:
    """The residual stream that a norm reads."""
    return Stage(stage.layer, f"residual at {stage.name}")


Recording = dict[Stage, torch.Tensor]


def record(side: DecoderSide, token_ids: list[int], temperature: float) -> Recording:
    """Every output of one of our sides on one sequence, in order, as clones."""
    recording: Recording = {}

    def keep(stage: Stage, output: torch.Tensor, column: int = 0) -> torch.Tensor:
        recording[stage] = output.clone()
        return output

    side.run(token_ids, temperature, keep)
    return recording
