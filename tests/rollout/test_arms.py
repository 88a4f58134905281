"""An engine that computes in another dtype than weights are delivered in: one conversion, the same at every version."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from zerogap.config import Learner as LearnerConfig
from zerogap.learner.learner import Learner
from zerogap.model.decoder import Decoder, WeightMismatch
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

BF16, FP32 = torch.bfloat16, torch.float32


def in_engine(decoder: Decoder, dtype: torch.dtype | None, version: int = 0) -> EmbeddedEngine:
    return EmbeddedEngine(decoder, None, EngineConfig(max_running=4, page_size=8, dtype=dtype), version)


def sample(engine: EmbeddedEngine) -> list[Trajectory]:
    engine.submit(GroupRequest(engine.version, 0, (5, 6, 7), 4, SamplingParams(max_new_tokens=8, seed=3)))
    done: list[Trajectory] = []
    while engine.has_work():
        done += engine.step()
    for trajectory in done:
        trajectory.reward = float(trajectory.sample_index % 2)
    return sorted(done, key=lambda t: t.sample_index)


@pytest.mark.parametrize(("learned", "computed"), [(FP32, BF16), (BF16, FP32)])
def test_the_engine_is_one_of_its_own_dtype_on_the_converted_weights(
    learned: torch.dtype, computed: torch.dtype
) -> None:
    """At the start and after each of three real updates (W2): weights, tokens and log-probabilities, as bits."""
    decoder = tiny_decoder(dtype=learned, trainable=True)
    learner = Learner(decoder, LearnerConfig.model_validate({"learning_rate": 1e-2}), 3, 1.0)
    engine = in_engine(tiny_decoder(dtype=learned), computed)
    seen = []
    for version in range(4):
        weights = {name: tensor.to(computed) for name, tensor in decoder.snapshot().items()}
        plain = tiny_decoder(dtype=computed)
        plain.load_snapshot(weights)
        mine, theirs = sample(engine), sample(in_engine(plain, None, version))
        assert all(same_bits(engine.decoder.weights[name].data, weights[name]) for name in weights)
        assert [t.token_ids for t in mine] == [t.token_ids for t in theirs]
        assert [t.logprobs for t in mine] == [t.logprobs for t in theirs]
        assert {t.contract for t in mine} == {plain.contract_digest()} != {decoder.contract_digest()}
        seen.append(mine[0].logprobs)
        if version < 3:
            learner.step(mine)
            engine.load_weights(version + 1, decoder.snapshot())
    assert len({tuple(logprobs) for logprobs in seen}) == 4, "the weights did not move"


def test_a_tensor_narrowed_on_the_way_is_refused() -> None:
    """Field case 18: fp32 was sent, one tensor arrives in bf16. That the engine computes in bf16 is no excuse."""
    decoder = tiny_decoder()
    engine = in_engine(tiny_decoder(), BF16)
    before = engine.decoder.digest()
    snapshot = {name: 2 * tensor for name, tensor in decoder.snapshot().items()}
    snapshot["layers.1.o"] = snapshot["layers.1.o"].to(BF16)
    message = r"'layers.1.o' was delivered as torch.bfloat16 \(32, 32\), expected is torch.float32 \(32, 32\)"
    with pytest.raises(WeightMismatch, match=message):
        engine.load_weights(1, snapshot)
    assert (engine.version, engine.decoder.digest()) == (0, before)


def test_the_same_dtype_is_not_copied() -> None:
    decoder = tiny_decoder()
    assert in_engine(decoder, FP32).decoder is decoder
