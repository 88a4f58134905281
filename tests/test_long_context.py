"""16,384 tokens: chunked prefill, decode and learner, compared as bits over several optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from tests.rollout.builders import by_sample, request, run
from zerogap.config import Learner as LearnerConfig
from zerogap.learner.learner import Learner
from zerogap.learner.packing import score
from zerogap.model import load_decoder
from zerogap.model.context import change_context
from zerogap.model.decoder import Decoder
from zerogap.model.fetch import FetchError, fetch_model
from zerogap.rollout.embedded import EngineConfig
from zerogap.trajectory import NOT_SAMPLED, Trajectory

CONTEXT = 16_384
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}
TINY: dict[str, Any] = {
    "num_layers": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rope_scaling": YARN,
}


CHUNKED = EngineConfig(max_running=2, max_batched_tokens=1000, page_size=8, kv_tokens=2 * CONTEXT)
WHOLE = EngineConfig(max_running=2, max_batched_tokens=CONTEXT, page_size=64, kv_tokens=2 * CONTEXT)


def sample(decoder: Decoder, config: EngineConfig) -> list[Trajectory]:
    """An answer that ends with the last position of the context, and a short one."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(2, min(decoder.vocab, 40_000), (CONTEXT - 6,), generator=generator).tolist()
    done = run(decoder, [request(0, prompt, new=12), request(1, prompt[:20], new=12)], config)
    long, short = sorted(done, key=lambda t: t.group_id)
    assert (len(long.token_ids), long.num_sampled, long.finish_reason) == (CONTEXT, 6, "context")
    return [long, short]


def train(learner: Learner, trajectories: list[Trajectory]) -> dict[str, float]:
    """An update on both as one group, with rewards that differ, so that the weights move."""
    for index, trajectory in enumerate(trajectories):
        trajectory.group_id, trajectory.sample_index, trajectory.reward = 0, index, float(index)
        trajectory.versions = [learner.version if sampled else NOT_SAMPLED for sampled in trajectory.loss_mask]
    return learner.step(trajectories)


def check_two_updates(learner: Learner, engine_side: Decoder) -> None:
    """Before each update and after both, every recorded logprob is the learner's, bit for bit."""
    before = learner.decoder.digest()
    for config in (WHOLE, CHUNKED):
        metrics = train(learner, sample(engine_side, config))
        assert metrics["ratio/min"] == metrics["ratio/max"] == 1.0 and metrics["grad_norm"] > 0
        assert learner.decoder.digest() != before
        engine_side.load_snapshot(learner.decoder.snapshot())
    done = sample(engine_side, CHUNKED)
    for trajectory, scored_N in zip(done, score(learner.decoder, done, CONTEXT), strict=True):
        recorded = [p for p, sampled in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if sampled]
        assert same_bits(torch.tensor(recorded), scored_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_model(dtype: torch.dtype) -> None:
    """Pages of 8 and 64, chunks that divide nothing and one chunk for all."""
    settings = LearnerConfig.model_validate({"learning_rate": 1e-3, "activation_checkpointing": True})
    learner = Learner(tiny_decoder(dtype=dtype, trainable=True, eos=(), **TINY), settings, 10, temperature=1.0)
    engine_side = tiny_decoder(dtype=dtype, eos=(), **TINY)
    check_two_updates(learner, engine_side)
    assert by_sample(sample(engine_side, WHOLE)) == by_sample(sample(engine_side, CHUNKED))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_smollm2_at_twice_its_context(dtype: str, tmp_path: Path) -> None:
    """A checkpoint for 8,192 tokens, stretched by yarn. Takes half an hour in fp32."""
    try:
        source = fetch_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"SmolLM2 is not to be had here: {error}")
    folder = change_context(source, tmp_path / "long", CONTEXT, YARN)
    settings = LearnerConfig.model_validate({"learning_rate": 1e-5, "activation_checkpointing": True})
    learner = Learner(load_decoder(folder, "aligned", dtype, trainable=True), settings, 10, temperature=1.0)
    engine_side = load_decoder(folder, "aligned", dtype)
    engine_side.eos_token_ids = ()  # the answer has to reach the last position
    check_two_updates(learner, engine_side)
