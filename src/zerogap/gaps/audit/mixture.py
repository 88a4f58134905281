"""Which tensors of a model are really those of another set of weights? A search that costs a few dozen forwards.

Tried are whole parts (the embedding, the head, a layer), a kind of tensor in all layers, runs of tensors in the order
in which they are delivered, and single tensors. A gradient says, to first order, what each of them would do to the
log-probabilities, so that the likely ones are tried first: in a large model, no others. Gradients are of the model, so
they are taken once for all sets of other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from zerogap.gaps.audit.finding import Finding
from zerogap.gaps.audit.sample import Case, Sample, Tensors
from zerogap.kernels import Weight
from zerogap.model.decoder import Decoder

SEARCH_ROWS, LEAST_TRIALS = 1536, 16  # about the rows of all forwards of a search; forwards however long prompts are
DIRECTIONS = 8  # gradients
HEAD, EMBED, NORM, LAYERS = "head", "embed", "norm", "layers"

Chosen = frozenset[str]


def mixed(model: Decoder, other: Tensors, chosen: Iterable[str]) -> Decoder:
    """The model with the chosen tensors of `other`. "head" of a tied model is its embedding, used as the head only."""
    names = set(chosen)
    own = {name: weight.data for name, weight in model.weights.items()}
    mixture = model.view({name: other[name] if name in names else tensor for name, tensor in own.items()})
    if HEAD not in own:
        mixture.head = Weight((other if HEAD in names else own)[EMBED])
    return mixture


def changed_tensors(model: Decoder, other: Tensors) -> list[str]:
    """Names of the tensors that are not the same in both, in the model's order; the tied head beside the embedding."""
    tied = HEAD not in model.weights
    names = []
    for name, weight in model.weights.items():
        if not torch.equal(weight.data, other[name]):
            names += [name, HEAD] if tied and name == EMBED else [name]
    return names


def causes_in_mixtures(case: Case, others: Mapping[str, Tensors]) -> Iterator[Finding | None]:
    """Some tensors are not those of the case's model: for each of the others the set of its tensors that explains most,
    None where none explains enough. others: what to say of such tensors ("narrowed to bf16"), and all of them."""
    effects = first_order_effects(case.model, list(others.values()), case.quick)
    for (said, other), effect in zip(others.items(), effects, strict=True):
        found = fitting_set(case.model, other, effect, case.quick)
        if found is None:
            yield None
        else:
            name, chosen = found
            yield case.tried_model(f"{name} {said}", mixed(case.model, other, chosen))


def fitting_set(
    model: Decoder, other: Tensors, effects: Mapping[str, torch.Tensor], sample: Sample
) -> tuple[str, Chosen] | None:
    """The set whose tensors, taken from `other`, come nearest to what was recorded, and what to call it. Not the set of
    all. None where nothing can be tried. effects: of each tensor that differs."""
    proposals = _proposals(list(effects), tied=HEAD not in model.weights)
    if not proposals:
        return None
    effects_CK = torch.stack(list(effects.values()))
    members_PC = torch.tensor([[float(name in chosen) for name in effects] for _, chosen in proposals])
    target_K = _directions(sample) @ (sample.recorded_S - sample.own_S)
    order_P = (members_PC @ effects_CK - target_K).norm(dim=1).argsort()
    trials = max(LEAST_TRIALS, SEARCH_ROWS // sample.rows)
    best, least = None, float("inf")
    for name, chosen in (proposals[place] for place in order_P[:trials].tolist()):
        fit = sample.fit(sample.score(mixed(model, other, chosen)))
        if fit.after < least:
            best, least = (name, chosen), fit.after
        if fit.exact:
            break
    return best


def _proposals(changed: Sequence[str], tied: bool) -> list[tuple[str, Chosen]]:
    """Each set once, under the first of its names."""
    in_layers = [name for name in changed if name.startswith(LAYERS)]
    found = _grouped(changed, _part) + _grouped(in_layers, _kind, " of every layer")
    last = [name for name in (NORM, HEAD) if name in changed]
    # Our own order of delivery, and that of a Hugging Face folder.
    for order in (changed, [name for name in changed if name not in last] + last):
        names = [name for name in order if not (tied and name == HEAD)]  # it is delivered as the embedding
        for cut in range(1, len(names)):
            for run in (names[cut:], names[:cut]):
                whole = [*run, HEAD] if tied and EMBED in run else run
                found.append((f"tensors from {run[0]} to {run[-1]}", frozenset(whole)))
    found += [(name, frozenset([name])) for name in changed]
    named: dict[Chosen, str] = {}
    for label, chosen in found:
        named.setdefault(chosen, next(iter(chosen)) if len(chosen) == 1 else label)
    return [(label, chosen) for chosen, label in named.items() if chosen != frozenset(changed)]


def _directions(sample: Sample) -> torch.Tensor:
    """fp32 [K, S] of 1 and -1: sums of log-probabilities, so that a gradient speaks of all tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (DIRECTIONS, len(sample.own_S)), generator=generator).float() * 2 - 1


def first_order_effects(model: Decoder, others: Sequence[Tensors], sample: Sample) -> list[dict[str, torch.Tensor]]:
    """For each of the others, of each tensor that differs: fp32 [K], gradient times change, how that change alone would
    move the K sums."""
    effects = [{name: torch.empty(DIRECTIONS) for name in changed_tensors(model, other)} for other in others]
    if not any(effects):
        return effects
    own = {name: weight.data for name, weight in model.weights.items()}
    weights = {name: Weight(data, trainable=True) for name, data in own.items()}
    learner = Decoder(model.config, model.kernels, weights, model.vocab, rotary=(model.cos_PR, model.sin_PR))
    if HEAD not in own:
        learner.head = weights[HEAD] = Weight(own[EMBED], trainable=True)
    for k, direction_S in enumerate(_directions(sample)):
        sample.backward(learner, direction_S)
        for other, effect in zip(others, effects, strict=True):
            for name, effect_K in effect.items():
                change = other[name if name in other else EMBED].float() - weights[name].data.float()
                effect_K[k] = _gradient(weights[name]).flatten() @ change.flatten()
        for weight in weights.values():
            _gradient(weight).zero_()
    return effects


def _gradient(weight: Weight) -> torch.Tensor:
    assert weight.master is not None and weight.master.grad is not None
    return weight.master.grad


def _part(name: str) -> str:
    """`layers.3.qkv` -> `layers.3`; what is in no layer is a part by itself."""
    return name.rpartition(".")[0] if name.startswith(LAYERS) else name


def _kind(name: str) -> str:
    """`layers.3.qkv` -> `qkv`."""
    return name.rpartition(".")[2]


def _grouped(names: Sequence[str], key: Callable[[str], str], suffix: str = "") -> list[tuple[str, Chosen]]:
    """What to call each group (its key and the suffix), and its names."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return [(label + suffix, frozenset(group)) for label, group in groups.items()]
