"""Two runs of the learner give the same bits, on any number of threads: whole steps, all state, all metrics."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import same_bits, tiny_decoder
from tests.learner.builders import make_trajectory, on_policy
from zerogap.config import Learner as LearnerConfig
from zerogap.learner.learner import Learner

STEPS = 2
# Large enough that every kernel, and torch's own loops in the optimizer, really split their work.
MODEL = {"hidden_size": 128, "intermediate_size": 392, "head_dim": 32, "vocab_size": 1031}


def train(threads: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Optimizer state and metrics after a few updates, each on samples that these weights made more or less likely."""
    torch.set_num_threads(threads)
    settings = {"learning_rate": 3e-3, "weight_decay": 0.1, "micro_batch_tokens": 200}
    decoder = tiny_decoder("aligned", dtype, trainable=True, **MODEL)
    learner = Learner(decoder, LearnerConfig.model_validate(settings), STEPS, temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    metrics = []
    for step in range(STEPS):
        batch = []
        for group in range(2):
            for sample in range(4):
                length = int(torch.randint(20, 130, (), generator=generator))
                tokens = torch.randint(2, 1031, (length,), generator=generator).tolist()
                versions = [step] * (length - 7)
                batch.append(make_trajectory(tokens[:7], tokens[7:], float(sample % 2), group, sample, versions))
        metrics.append(learner.step(on_policy(decoder, batch)))
        del metrics[-1]["throughput/learner_tokens_per_s"]
    state, record = learner.state()
    assert record["version"] == STEPS
    return state | {f"{name}.compute": weight.data for name, weight in decoder.weights.items()}, metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_on_one_two_and_three_threads_are_one_run(dtype: torch.dtype) -> None:
    try:
        first_state, first_metrics = train(1, dtype)
        others = [train(threads, dtype) for threads in (2, 2, 3)]
    finally:
        torch.set_num_threads(1)
    start = tiny_decoder("aligned", dtype, trainable=True, **MODEL)
    assert not same_bits(first_state["layers.1.down.master"], start.weights["layers.1.down"].data.float())
    for state, metrics in others:
        assert metrics == first_metrics
        assert state.keys() == first_state.keys()
        assert [name for name in state if not same_bits(state[name], first_state[name])] == []
