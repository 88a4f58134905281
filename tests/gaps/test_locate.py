"""Where two sides part: a fault planted in one operation is found at its layer, operation, rollout and position, in
both modes; sides without one are equal; transformers lines up stage by stage."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import tiny_decoder
from zerogap.gaps.audit.rescore import Models, rescore
from zerogap.gaps.audit.schema import Rollout, parse_rollout
from zerogap.gaps.locate import locate as located_module
from zerogap.gaps.locate.differences import Difference
from zerogap.gaps.locate.locate import Located, by_gap, locate, sentence
from zerogap.gaps.locate.stages import DecoderSide, Stage
from zerogap.gaps.locate.transformers_side import TransformersSide
from zerogap.kernels import Weight
from zerogap.kernels.aligned import AlignedKernels
from zerogap.model import save_decoder
from zerogap.model.decoder import Decoder

LENGTHS = (9, 70, 31)  # tokens of lines 1, 2 and 3
LINE, ROW, COLUMN = 2, 20, 3  # where faults are planted
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True, "head_dim": 12},
}


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)
    return [
        parse_rollout(
            {
                "token_ids": torch.randint(0, 61, (length,), generator=generator).tolist(),
                "loss_mask": [0] + [1] * (length - 1),
                "logprobs": [-1.0] * length,
            },
            line=index + 1,
            temperature=0.7,
        )
        for index, length in enumerate(LENGTHS)
    ]


class BrokenKernels(AlignedKernels):
    """In the pass over rollout LINE, the given call of one operation (counted from 0) has one flipped bit in row ROW;
    or, `turn`: that call of rotary takes this row for the one behind it."""

    def __init__(self, operation: str, call: int, turn: bool = False) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        method = getattr(self, operation)

        def broken(operand: torch.Tensor, *arguments: Any) -> Any:
            hit = len(operand) == LENGTHS[LINE - 1] - 1 and self.calls[operation] == call
            self.calls[operation] += 1
            if hit and turn:
                positions = arguments[2].clone()
                positions[ROW] += 1
                return method(operand, *arguments[:2], positions, *arguments[3:])
            output = method(operand, *arguments)
            if hit:
                rows = output[0] if isinstance(output, tuple) else output
                rows.view(torch.int32)[ROW, ..., COLUMN if rows.dim() > 1 else None] ^= 1
            return output

        setattr(self, operation, broken)

    def embedding(self, tokens_T: torch.Tensor, weight: Weight) -> torch.Tensor:
        self.calls.clear()  # a new pass
        return super().embedding(tokens_T, weight)


def other_kernels(decoder: Decoder, kernels: AlignedKernels) -> DecoderSide:
    return DecoderSide(Decoder(decoder.config, kernels, decoder.weights, decoder.vocab, decoder.eos_token_ids))


def differing(differences: dict[Stage, Difference]) -> list[Stage]:
    return [stage for stage, difference in differences.items() if difference.unequal]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_itself(family: str, dtype: torch.dtype) -> None:
    decoder = tiny_decoder(dtype=dtype, **FAMILIES[family])
    located = locate(DecoderSide(decoder), DecoderSide(tiny_decoder(dtype=dtype, **FAMILIES[family])), rollouts())
    assert located.first is None and differing(located.isolated) == []
    rows = sum(LENGTHS) - len(LENGTHS)
    assert (located.rollouts, located.tokens) == (len(LENGTHS), rows)
    layers = decoder.config.num_layers
    assert len(located.cumulative) == 4 + layers * (12 if family == "qwen3" else 11)
    assert located.cumulative[Stage(1, "qkv")].values == rows * decoder.config.shape.qkv_size
    assert sentence(located).startswith("No difference between aligned")


@pytest.mark.parametrize(
    ("operation", "call", "stage"),
    [
        ("embedding", 0, Stage(None, "embedding")),
        ("rms_norm", 0, Stage(0, "input_norm")),
        ("rms_norm", 3, Stage(1, "post_norm")),
        ("rms_norm", 4, Stage(None, "norm")),
        ("linear", 0, Stage(0, "qkv")),
        ("linear", 5, Stage(1, "o")),
        ("linear", 6, Stage(1, "gate_up")),
        ("linear", 3, Stage(0, "down")),
        ("head_norm", 1, Stage(1, "head_norm")),
        ("rotary", 1, Stage(1, "rotary")),
        ("attention", 0, Stage(0, "attention")),
        ("silu_mul", 1, Stage(1, "silu_mul")),
        ("logits", 0, Stage(None, "logits")),
        ("logprobs", 0, Stage(None, "logprobs")),
    ],
)
def test_a_flipped_bit_is_located(operation: str, call: int, stage: Stage) -> None:
    decoder = tiny_decoder(**FAMILIES["qwen3"])
    located = locate(DecoderSide(decoder), other_kernels(decoder, BrokenKernels(operation, call)), rollouts())
    assert located.first == stage
    assert differing(located.isolated) == [stage]
    for differences in (located.cumulative, located.isolated):
        difference = differences[stage]
        assert difference.unequal == 1 and difference.first is not None
        assert (difference.first.line, difference.first.position) == (LINE, ROW + (operation == "logprobs"))
        assert difference.first.unequal == 1 and 0 < difference.first.largest == difference.largest < 1e-6
    assert f"{stage}, position" in sentence(located) and f"of line {LINE}: 1 of" in sentence(located)
    assert sentence(located).endswith(f"1 of 28 stages differ: {stage}.")


def test_a_wrong_rotary_position_is_located() -> None:
    decoder = tiny_decoder()
    located = locate(DecoderSide(decoder), other_kernels(decoder, BrokenKernels("rotary", 1, turn=True)), rollouts())
    stage, shape = Stage(1, "rotary"), decoder.config.shape
    assert located.first == stage and differing(located.isolated) == [stage]
    place = located.cumulative[stage].first
    assert place is not None and (place.line, place.position) == (LINE, ROW)
    assert place.unequal == located.isolated[stage].unequal == shape.q_size + shape.kv_size  # and no value head
    # Rows before it do not see its key, those behind it do.
    attended = located.cumulative[Stage(1, "attention")].first
    assert attended is not None and (attended.line, attended.position) == (LINE, ROW)
    assert located.cumulative[Stage(None, "logprobs")].largest > 1e-4


def test_a_narrowed_norm_weight_is_located() -> None:
    decoder, narrowed = tiny_decoder(), tiny_decoder()
    weight = narrowed.weights["layers.0.post_norm"]
    weight.load(weight.data.bfloat16().float())
    located = locate(DecoderSide(decoder), DecoderSide(narrowed), rollouts())
    assert located.first == Stage(0, "post_norm") and differing(located.isolated) == [Stage(0, "post_norm")]
    place = located.cumulative[Stage(0, "post_norm")].first
    assert place is not None and (place.line, place.position) == (1, 0)
    assert located.cumulative[Stage(0, "residual at post_norm")].unequal == 0
    assert located.cumulative[Stage(1, "residual at input_norm")].unequal > 0


def test_standard_parts_from_aligned() -> None:
    located = locate(DecoderSide(tiny_decoder()), DecoderSide(tiny_decoder("standard")), rollouts())
    assert located.first is not None
    before = [stage for stage in located.cumulative if stage not in differing(located.cumulative)]
    assert Stage(None, "embedding") in before  # a copy
    assert located.isolated[Stage(1, "residual at post_norm")].unequal == 0  # one rounding of the same two numbers
    assert 0 < located.isolated[Stage(1, "attention")].largest < 1e-5
    assert 0 < located.cumulative[Stage(None, "logprobs")].largest < 1e-4
    assert located.outliers == []  # nothing but rounding
    assert "none far more than the others" in sentence(located)


def test_another_dtype_parts_at_the_embedding() -> None:
    located = locate(DecoderSide(tiny_decoder()), DecoderSide(tiny_decoder(dtype=torch.bfloat16)), rollouts())
    assert located.first == Stage(None, "embedding")
    assert 1e-4 < located.isolated[Stage(1, "down")].relative < 1e-2
    assert located.isolated[Stage(1, "down")].relative < located.cumulative[Stage(1, "down")].relative


def theirs(decoder: Decoder, folder: Path, dtype: str = "float32") -> TransformersSide:
    save_decoder(decoder, folder / "model")
    return TransformersSide(folder / "model", dtype, decoder.vocab)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_lines_up(family: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(**FAMILIES[family])
    side = theirs(decoder, tmp_path)
    located = locate(DecoderSide(decoder), side, rollouts())
    rows = sum(LENGTHS) - len(LENGTHS)
    for stage in located.cumulative:
        assert located.cumulative[stage].values == located.isolated[stage].values >= rows, stage
        assert located.cumulative[stage].largest < 1e-4, stage
        assert located.isolated[stage].relative < 1e-6, stage
    assert located.isolated[Stage(0, "attention")].unequal > 0
    assert located.outliers == []
    # Its hooks are gone: it is again what transformers makes of the folder.
    assert not side.module.model.layers[0].mlp._forward_hooks and not side.module.model.norm._forward_pre_hooks


def test_transformers_in_bf16(tmp_path: Path) -> None:
    decoder = tiny_decoder(dtype=torch.bfloat16)
    located = locate(DecoderSide(decoder), theirs(decoder, tmp_path, "bfloat16"), rollouts())
    assert located.cumulative[Stage(None, "embedding")].unequal == 0
    assert all(difference.relative < 1e-2 for difference in located.isolated.values())


def plant(module: Any, fault: str) -> list[Stage]:
    """A fault in the second of two layers, but for rotary, whose frequencies both share."""
    layer = module.model.layers[1]
    if fault == "rotary":
        module.model.rotary_emb.inv_freq[1] *= 1.001
        return [Stage(0, "rotary"), Stage(1, "rotary")]
    parameter, stage = {
        "narrowed norm": (layer.post_attention_layernorm.weight, Stage(1, "post_norm")),
        "narrowed down": (layer.mlp.down_proj.weight, Stage(1, "down")),
        "narrowed key bias": (layer.self_attn.k_proj.bias, Stage(1, "qkv")),
    }[fault]
    parameter.data = parameter.data.bfloat16().float()
    return [stage]


@pytest.mark.parametrize("fault", ["narrowed norm", "narrowed down", "narrowed key bias", "rotary"])
def test_a_fault_in_the_weights_of_transformers_stands_out(fault: str, tmp_path: Path) -> None:
    """Bits differ nearly everywhere, by rounding; the fault is the stage that differs far more on the same inputs."""
    decoder = tiny_decoder(**FAMILIES["qwen2"])
    side = theirs(decoder, tmp_path)
    stages = plant(side.module, fault)
    located = locate(DecoderSide(decoder), side, rollouts())
    assert located.outliers == stages
    assert "far more than the others (relative difference" in sentence(located)
    assert all(f"{stage} (" in sentence(located) for stage in stages)


def test_tokens_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder()
    whole = locate(DecoderSide(decoder), DecoderSide(tiny_decoder("standard")), rollouts()[1:2])
    monkeypatch.setattr(located_module, "TOKENS", 40)
    cut = locate(DecoderSide(decoder), DecoderSide(tiny_decoder("standard")), [rollouts()[2], *rollouts()[:2]])
    assert (cut.rollouts, cut.tokens) == (3, 40)  # 30 of line 3, 8 of line 1, 2 of line 2
    monkeypatch.setattr(located_module, "RECORDING_BYTES", 2 * recorded_bytes(whole))
    small = locate(DecoderSide(decoder), DecoderSide(tiny_decoder("standard")), rollouts())
    assert (small.rollouts, small.tokens) == (3, 6)


def recorded_bytes(located: Located) -> int:
    """Of one row, in fp32."""
    return 4 * sum(difference.values for difference in located.cumulative.values()) // located.tokens


def test_rollouts_with_the_largest_gap_come_first(tmp_path: Path) -> None:
    save_decoder(tiny_decoder(), tmp_path / "model")
    files = rollouts()
    files[2].trajectory.logprobs[5] = -50.0
    files[1].trajectory.logprobs[7] = math.nan
    rescored = rescore(files, Models({None: tmp_path / "model"}), "aligned", "float32", 64, lambda count: None)
    assert [rollout.line for rollout in by_gap(rescored)] == [2, 3, 1]


def test_sizes_of_what_is_no_finite_number() -> None:
    inf, nan = math.inf, math.nan
    difference = Difference()
    difference.add(Stage(0, "o"), 1, torch.tensor([[inf, nan, 0.0]]), torch.tensor([[inf, nan, -0.0]]))
    assert (difference.unequal, difference.largest, difference.relative) == (1, 0.0, 0.0)  # -0 is another bit
    difference.add(Stage(0, "o"), 2, torch.tensor([[1.0, 3.0, nan]]), torch.tensor([[1.0, -inf, 2.0]]))
    assert (difference.unequal, difference.largest, difference.relative) == (3, inf, inf)
    assert difference.first is not None and difference.first.line == 1
