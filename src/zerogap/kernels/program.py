"""Records an engine step of the aligned kernels once and replays it in one native call (csrc/program.h).

There is no second definition of the model here: the decoder's own methods run once, on tensors of zero rows, with a
`Forward` whose native calls are appended to a program. What is replayed is the same calls of the same kernels.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Protocol

import torch

from zerogap.kernels.aligned_forward import Forward
from zerogap.kernels.native import sampler_inverse_temperature
from zerogap.kernels.rows import RowBatch
from zerogap.kernels.step import Model, StepBatch
from zerogap.kernels.weight import Weight


class HasForward(Protocol):
    forward: Forward


class Recorder(Forward):
    """A `Forward` on tensors of zero rows, which stand for the arrays and the values of any step.

    Its `native` is the program. The address or size of a stand-in is a symbol that each run resolves; everything else
    (weights, rotary tables, caches) is recorded as it is, and kept alive in `held`.
    """

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.held: list[torch.Tensor] = []
        self._symbols: dict[int, tuple[Any, tuple[str, ...]]] = {}  # by id: address, names of the sizes
        self._free: dict[tuple[int, str], list[Any]] = {}  # buffers that no value needs any more

    def stand_in(self, tensor: torch.Tensor, array: str, *sizes: str) -> torch.Tensor:
        """From now on the tensor means this array of the step, with these sizes (names of csrc/program.h)."""
        self.held.append(tensor)
        self._symbols[id(tensor)] = (self.native.array(array), sizes)
        return tensor

    def address(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._symbols:
            return self._symbols[id(tensor)][0]
        if tensor.numel() == 0:
            raise ValueError(
                f"kernels: a step used a {tuple(tensor.shape)} tensor that no kernel made, so it cannot be recorded; "
                "use only operations of zerogap.kernels in the forward pass"
            )
        self.held.append(tensor)
        return tensor.data_ptr()

    def size(self, tensor: torch.Tensor, dimension: int = 0) -> Any:
        _, sizes = self._symbols.get(id(tensor), (None, ()))
        return self.native.size(sizes[dimension]) if dimension < len(sizes) else tensor.shape[dimension]

    def new(self, rows_of: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        count = self._symbols[id(rows_of)][1][0]
        value = torch.empty(0, width, dtype=dtype)
        kind = (width * value.element_size(), count)
        free = self._free.setdefault(kind, [])
        buffer = free.pop() if free else self.native.buffer(kind[0], self.native.size(count))
        self._symbols[id(value)] = (buffer, (count,))
        # Calls are recorded in the order they run, so no later one can read a value that Python has let go.
        weakref.finalize(value, self._release, id(value), kind).atexit = False
        return value

    def sample(
        self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows have their own temperatures; the results are what `run` returns."""
        self.native.sample(
            self.address(logits_BV),
            logits_BV.shape[1],
            self.address(keys_B4),
            self.native.array("inverse_temperatures"),
            self.native.array("drawn"),
            self.native.array("logprobs"),
            self.size(logits_BV),
            vocab,
        )
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32)

    def _release(self, identity: int, kind: tuple[int, str]) -> None:
        self._free[kind].append(self._symbols.pop(identity)[0])


class RecordedStep:
    """`EagerStep` of the same arguments, as bits; one native call, the GIL released. One thread at a time.

    kernels: the family whose native calls are recorded; a shallow copy of it and of the model does the recording.
    """

    def __init__(self, kernels: HasForward, model: Model, cache: list[Any], page_size: int) -> None:
        self._program = kernels.forward.native.program(page_size)
        recorder = Recorder(self._program)
        recording = copy.copy(model)
        recording.kernels = copy.copy(kernels)
        recording.kernels.forward = recorder

        rows = RowBatch.paged([], [], page_size)
        recorder.stand_in(rows.positions_T, "positions", "rows")
        recorder.stand_in(rows.starts_Sp1, "starts")
        recorder.stand_in(rows.first_positions_S, "first_positions", "sequences")
        recorder.stand_in(rows.pages_SP, "pages", "sequences", "pages_per_sequence")
        recorder.stand_in(rows.slots_T, "slots", "rows")
        tokens_T = recorder.stand_in(torch.empty(0, dtype=torch.int64), "tokens", "rows")
        asked_B = recorder.stand_in(torch.empty(0, dtype=torch.int64), "asked", "asked")
        keys_B4 = recorder.stand_in(torch.empty(0, 4, dtype=torch.int64), "keys", "asked")
        with torch.no_grad():
            hidden_TH = recording.hidden(tokens_T, rows, cache)
            hidden_BH = recorder.embedding(asked_B, Weight(hidden_TH))  # picks the rows that ask
            recording.sample(recording.logits(hidden_BH), keys_B4, 1.0)
        self._held = recorder.held

    def __call__(self, batch: StepBatch) -> tuple[list[int], list[float]]:
        return self._program.run(
            batch.tokens_T,
            batch.first_positions_S,
            batch.lengths_S,
            batch.page_tables_S,
            batch.asked_B,
            batch.keys_B,
            [sampler_inverse_temperature(temperature) for temperature in batch.temperatures_B],
        )
