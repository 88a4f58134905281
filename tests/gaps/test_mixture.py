"""The search for tensors that are of other weights: what it finds in a model of many layers, and what that costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.helpers import tiny_decoder
from zerogap.gaps.audit.mixture import (
    DIRECTIONS,
    EMBED,
    HEAD,
    LEAST_TRIALS,
    changed_tensors,
    first_order_effects,
    fitting_set,
    mixed,
)
from zerogap.gaps.audit.sample import Sample
from zerogap.model.decoder import Decoder
from zerogap.trajectory import SamplingParams, Trajectory

LAYERS = 12
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny_decoder(num_layers=LAYERS, tie_word_embeddings=request.param)


def updated(model: Decoder) -> Tensors:
    """The same after an update: every element moves."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight.data * (1 + 1e-2 * torch.randn(weight.data.shape, generator=generator))
        for name, weight in model.weights.items()
    }


def sample_of(truth: Decoder, model: Decoder) -> Sample:
    """Forty tokens as `truth` scores them."""
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(61, (24,), generator=generator).tolist() for _ in range(2)]
    mask, nothing = [0] * 4 + [1] * 20, [0.0] * 24
    sampling = SamplingParams(temperature=0.8)
    trajectories = [Trajectory(t, mask, nothing, mask, "eos", 0, 0, 0, sampling) for t in ids]
    sample = Sample(trajectories, torch.empty(0), torch.empty(0), 48)
    return Sample(trajectories, sample.score(truth), sample.score(model), 48)


def found(model: Decoder, other: Tensors, sample: Sample) -> tuple[str, frozenset[str]] | None:
    (effects,) = first_order_effects(model, [other], sample)
    return fitting_set(model, other, effects, sample)


def first_to(last: str) -> Callable[[list[str]], list[str]]:
    return lambda names: names[: names.index(last) + 1]


def last_from(first: str) -> Callable[[list[str]], list[str]]:
    """In the order of our own delivery, which ends with the layers."""
    return lambda names: names[names.index(first) :]


def last_from_in_hf(first: str) -> Callable[[list[str]], list[str]]:
    """In the order of a Hugging Face folder, which ends with the norm and, where it is no copy, the head."""
    return lambda names: [*last_from(first)(names), *names[names.index("norm") : names.index("layers.0.input_norm")]]


@pytest.mark.parametrize(
    ("label", "of"),
    [
        ("layers.7.o", lambda names: ["layers.7.o"]),
        ("layers.7.post_norm", lambda names: ["layers.7.post_norm"]),
        ("norm", lambda names: ["norm"]),
        ("embed", lambda names: [EMBED]),
        ("head", lambda names: [HEAD]),
        ("layers.3", lambda names: [n for n in names if n.startswith("layers.3.")]),
        ("input_norm of every layer", lambda names: [n for n in names if n.endswith("input_norm")]),
        ("tensors from layers.8.o to layers.11.down", last_from("layers.8.o")),
        ("tensors from embed to layers.2.qkv", first_to("layers.2.qkv")),
        ("tensors from layers.8.o to LAST", last_from_in_hf("layers.8.o")),
    ],
)
def test_the_set_is_found(
    model: Decoder, label: str, of: Callable[[list[str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bits, under its name, in a few forwards: the gradient knows where to look."""
    other = updated(model)
    names = changed_tensors(model, other)
    chosen = frozenset(of(names))
    sample = sample_of(mixed(model, other, chosen), model)
    forwards: list[Decoder] = []
    score = Sample.score
    monkeypatch.setattr(Sample, "score", lambda self, m: (forwards.append(m), score(self, m))[1])
    label = label.replace("LAST", "norm" if model.config.tie_word_embeddings else "head")
    assert found(model, other, sample) == (label, chosen)
    assert len(forwards) < 12


def test_what_does_not_differ_is_not_in_the_set(model: Decoder) -> None:
    """Two sets of weights that differ in two tensors: each of them is tried, and nothing else."""
    other = {name: weight.data for name, weight in model.weights.items()}
    other |= {name: updated(model)[name] for name in ("layers.5.qkv", "layers.5.down")}
    assert changed_tensors(model, other) == ["layers.5.qkv", "layers.5.down"]
    sample = sample_of(mixed(model, other, ["layers.5.down"]), model)
    assert found(model, other, sample) == ("layers.5.down", {"layers.5.down"})


def test_equal_weights_have_no_mixture(model: Decoder) -> None:
    other = {name: weight.data.clone() for name, weight in model.weights.items()}
    assert found(model, other, sample_of(model, model)) is None


def test_the_search_ends(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits (the truth is another model): no more forwards than are allowed, and the nearest set."""
    monkeypatch.setattr("zerogap.gaps.audit.mixture.SEARCH_ROWS", 48)
    sample = sample_of(tiny_decoder(num_layers=LAYERS, seed=3), model)
    forwards: list[Decoder] = []
    score = Sample.score
    monkeypatch.setattr(Sample, "score", lambda self, m: (forwards.append(m), score(self, m))[1])
    assert found(model, updated(model), sample) is not None
    assert len(forwards) == LEAST_TRIALS


def test_gradients_are_taken_once_for_all_sets(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say of each what they say of it alone."""
    others = [updated(model), {name: weight.data.bfloat16().float() for name, weight in model.weights.items()}]
    sample = sample_of(tiny_decoder(num_layers=LAYERS, seed=3), model)
    alone = [first_order_effects(model, [other], sample)[0] for other in others]
    calls: list[torch.Tensor] = []
    backward = Sample.backward
    monkeypatch.setattr(Sample, "backward", lambda self, m, w: (calls.append(w), backward(self, m, w))[1])
    together = first_order_effects(model, others, sample)
    assert len(calls) == DIRECTIONS
    for effects, expected in zip(together, alone, strict=True):
        assert list(effects) == list(expected)
        assert all(effects[name].any() and torch.equal(effects[name], expected[name]) for name in effects)
