"""The recorded step gives the bits of the eager one: any supported model, any batch, every instruction set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import tiny_decoder
from tests.kernels.reference import DTYPES
from zerogap.kernels.aligned import AlignedKernels
from zerogap.kernels.native import load_variant, runnable
from zerogap.kernels.program import RecordedStep
from zerogap.kernels.step import EagerStep, StepBatch
from zerogap.model.decoder import Decoder

PAGES, PAGE_SIZE = 40, 8
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-biases": {"tie_word_embeddings": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True, "hidden_size": 64, "head_dim": 16},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "num_kv_heads": 4, "tie_word_embeddings": False},
    "odd": {"hidden_size": 33, "intermediate_size": 21, "head_dim": 10, "num_heads": 3, "num_kv_heads": 1},
}


def batches(lengths: list[int], chunk: int, temperatures: list[float]) -> list[StepBatch]:
    """Prompts of these lengths cut into chunks, then two decode rows each, in steps that mix the two."""
    per_sequence = -(-(max(lengths) + 2) // PAGE_SIZE)
    tables = [list(range(s * per_sequence, (s + 1) * per_sequence))[::-1] for s in range(len(lengths))]
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = [torch.randint(0, 61, (n + 2,), generator=generator).tolist() for n in lengths]
    computed = [0] * len(lengths)
    steps = []
    while any(done < n + 2 for done, n in zip(computed, lengths, strict=True)):
        step = StepBatch([], [], [], [], [], [], [])
        for s, prompt in enumerate(lengths):
            first = computed[s]
            rows = min(chunk, prompt - first) if first < prompt else min(1, prompt + 2 - first)
            if rows == 0:
                continue
            step.tokens_T.extend(tokens[s][first : first + rows])
            step.first_positions_S.append(first)
            step.lengths_S.append(rows)
            step.page_tables_S.append(tables[s])
            computed[s] += rows
            if computed[s] >= prompt:
                step.asked_B.append(len(step.tokens_T) - 1)
                step.keys_B.append((3, s, 0, computed[s]))
                step.temperatures_B.append(temperatures[s % len(temperatures)])
        steps.append(step)
    return steps


def both(decoder: Decoder) -> tuple[RecordedStep, EagerStep]:
    caches = [decoder.new_cache(PAGES, PAGE_SIZE) for _ in range(2)]
    kernels = decoder.kernels
    assert isinstance(kernels, AlignedKernels)
    return RecordedStep(kernels, decoder, caches[0], PAGE_SIZE), EagerStep(decoder, caches[1], PAGE_SIZE)


def patterns(result: tuple[list[int], list[float]]) -> tuple[list[int], list[int]]:
    tokens, logprobs = result
    return tokens, torch.tensor(logprobs, dtype=torch.float32).view(torch.int32).tolist()


@pytest.mark.parametrize("variant", runnable())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.integers(1, 48),
    temperatures=st.lists(st.sampled_from([1.0, 0.7, 0.0]), min_size=1, max_size=3),
    packed=st.booleans(),
)
def test_recorded_step_has_the_bits_of_the_eager_one(
    model: str,
    dtype: torch.dtype,
    variant: str,
    lengths: list[int],
    chunk: int,
    temperatures: list[float],
    packed: bool,
) -> None:
    decoder = tiny_decoder(dtype=dtype, **MODELS[model])
    decoder.kernels = AlignedKernels(load_variant(variant))
    if packed:
        decoder.pack()
    recorded, eager = both(decoder)
    steps = batches(lengths, chunk, temperatures)
    results = [(patterns(recorded(step)), patterns(eager(step))) for step in steps]
    assert [ours for ours, _ in results] == [theirs for _, theirs in results]
    assert sum(len(ours[0]) for ours, _ in results) == 3 * len(lengths)


def test_a_step_in_which_no_row_asks_fills_the_cache() -> None:
    decoder = tiny_decoder()
    recorded, eager = both(decoder)
    prompt = StepBatch([5, 6, 7], [0], [3], [[2]], [], [], [])
    last = StepBatch([8], [3], [1], [[2]], [0], [(0, 0, 0, 4)], [1.0])
    assert recorded(prompt) == eager(prompt) == ([], [])
    assert patterns(recorded(last)) == patterns(eager(last))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_T": [1, 2]}, "more or fewer tokens than rows"),
        ({"lengths_S": [0]}, "no rows, or rows without a page"),
        ({"first_positions_S": [8]}, "no rows, or rows without a page"),
        ({"first_positions_S": []}, "differ in length"),
        ({"temperatures_B": []}, "differ in length"),
        ({"asked_B": [1]}, "asks for a row that it does not compute"),
    ],
)
def test_lists_that_do_not_fit_are_refused_before_a_kernel_runs(change: dict[str, Any], message: str) -> None:
    decoder = tiny_decoder()
    recorded, _ = both(decoder)
    good = StepBatch([1], [0], [1], [[0]], [0], [(0, 0, 0, 1)], [1.0])
    with pytest.raises(ValueError, match=message):
        recorded(replace(good, **change))
    assert len(recorded(good)[0]) == 1


class Foreign(Decoder):
    """Its forward pass holds an operation that is no kernel of ours."""

    def hidden(self, *args: Any) -> torch.Tensor:
        return super().hidden(*args) * 2


def test_a_forward_pass_that_leaves_the_kernels_is_not_recorded() -> None:
    decoder = tiny_decoder()
    foreign = Foreign(decoder.config, decoder.kernels, decoder.weights)
    with pytest.raises(ValueError, match="that no kernel made, so it cannot be recorded"):
        both(foreign)
