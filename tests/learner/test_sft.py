"""Warm start: the loss is a mean per trained token, it falls, and it does not depend on micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import tiny_decoder
from tests.learner.builders import make_trajectory
from zerogap.learner.packing import score
from zerogap.learner.sft import Solution, backward_sft, train_sft
from zerogap.model.decoder import Decoder

EXAMPLES = [([3, 4, 5 + i, 6, 1], [0, 0, 0, 1, 1]) for i in range(6)] + [([9, 8], [0, 1])]


def train(decoder: Decoder, steps: int, micro_batch_tokens: int = 64) -> list[float]:
    losses: list[float] = []
    train_sft(
        decoder,
        batches=(EXAMPLES for _ in range(steps)),
        learning_rate=1e-2,
        warmup_steps=2,
        total_steps=steps,
        micro_batch_tokens=micro_batch_tokens,
        on_step=lambda step, loss: losses.append(loss),
    )
    return losses


@pytest.mark.parametrize("kernels", ["standard", "aligned"])
def test_loss_falls(kernels: str) -> None:
    losses = train(tiny_decoder(kernels, trainable=True), 25)
    assert len(losses) == 25
    assert losses[-1] < 0.1 * losses[0]


def test_loss_is_the_mean_over_trained_tokens() -> None:
    decoder = tiny_decoder("standard", trainable=True)
    trajectories = [
        make_trajectory([t for t, m in zip(*e, strict=True) if not m], [t for t, m in zip(*e, strict=True) if m])
        for e in EXAMPLES
    ]
    expected = -torch.cat(score(decoder, trajectories, 64)).mean()
    loss = backward_sft(decoder, [Solution(*example) for example in EXAMPLES], 64)
    assert loss == pytest.approx(float(expected), rel=1e-6)


def test_micro_batches_do_not_change_the_gradient() -> None:
    """Field case 30."""
    gradients = []
    for budget in (64, 5, 1):
        decoder = tiny_decoder("standard", trainable=True)
        backward_sft(decoder, [Solution(*example) for example in EXAMPLES], budget)
        gradients.append(torch.cat([w.master.grad.flatten() for w in decoder.weights.values()]))  # type: ignore[union-attr]
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) <= 1e-6


def test_masked_targets_do_not_matter() -> None:
    """Field case 7: what follows the last trained token changes neither loss nor gradient."""
    losses = [
        backward_sft(tiny_decoder("standard", trainable=True), [Solution([3, 4, 5, tail], [0, 1, 1, 0])], 64)
        for tail in (6, 7)
    ]
    assert losses[0] == losses[1]


def test_unusable_batches_are_refused() -> None:
    decoder = tiny_decoder("standard", trainable=True)
    before = decoder.digest()

    def run(batches: list[list[tuple[list[int], list[int]]]]) -> None:
        train_sft(decoder, batches, 1e-2, 0, 1, 64, lambda step, loss: None)

    with pytest.raises(ValueError, match="ended after 0 of 1 steps"):
        run([])
    with pytest.raises(ValueError, match="none of the 1 examples"):
        run([[([3, 4], [0, 0])]])
    assert decoder.digest() == before
    with pytest.raises(ValueError, match="trainable=True"):
        train_sft(tiny_decoder("standard"), [], 1e-2, 0, 1, 64, lambda step, loss: None)


def test_a_non_finite_loss_stops_before_the_update() -> None:
    decoder = tiny_decoder("standard", trainable=True)
    decoder.weights["norm"].data[0] = float("nan")
    before = decoder.digest()
    with pytest.raises(RuntimeError, match="warm start step 0: loss nan"):
        train(decoder, 1)
    assert decoder.digest() == before
