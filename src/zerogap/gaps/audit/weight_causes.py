"""Causes of a KERNEL gap that lie in the weights of another version: all, the head's, a cache's.

Each is one function of a version and its tensors; None where it explains too little. Of some tensors: mixture.py.
"""

from __future__ import annotations

import torch

from zerogap.gaps.audit.finding import Finding
from zerogap.gaps.audit.mixture import HEAD, mixed
from zerogap.gaps.audit.sample import Case, Sample, Tensors
from zerogap.kernels.rows import PACKED_PAGE_SIZE, RowBatch
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory


def other_version(case: Case, version: int, tensors: Tensors) -> Finding | None:
    """Undelivered weights: the engine still had, or already had, those of another version."""
    return case.tried_model(f"weights of {case.named(version)}", case.model.view(dict(tensors)))


def other_head(case: Case, version: int, tensors: Tensors) -> Finding | None:
    """Only the head is of another version: where it is tied, the engine updates a copy of the embedding."""
    model = mixed(case.model, tensors, [HEAD])
    name = "head" if HEAD in case.model.weights else "tied head (apart from its embedding)"
    return case.tried(f"{name} of {case.named(version)}", lambda sample: sample.score(model))


def stale_cache(case: Case, version: int, tensors: Tensors) -> Finding | None:
    """Keys and values that outlived an update: rows before the first token of its version ran on other weights."""
    earlier = case.model.view(dict(tensors))
    cause = f"stale prefix cache: keys and values of {case.named(version)}"
    return case.tried(cause, lambda sample: _score_behind_cache(case.model, earlier, sample))


@torch.no_grad()
def _score_behind_cache(model: Decoder, earlier: Decoder, sample: Sample) -> torch.Tensor:
    """fp32 [S]: what was sampled before a trajectory's first token of the sample is prefilled by `earlier`, and the
    rest goes through the paged path of the engine."""
    return torch.cat([_score_one(model, earlier, trajectory) for trajectory in sample.trajectories])


def _score_one(model: Decoder, earlier: Decoder, trajectory: Trajectory) -> torch.Tensor:
    positions_N = torch.tensor(trajectory.loss_mask).nonzero()[:, 0]
    first, last = int(positions_N[0]) - 1, int(positions_N[-1])  # rows that predict the sample's tokens lie in between
    tokens_T = torch.tensor(trajectory.token_ids)
    pages = list(range(-(-last // PACKED_PAGE_SIZE)))
    cache = model.new_cache(len(pages), PACKED_PAGE_SIZE)
    if first:
        earlier.hidden(tokens_T[:first], RowBatch.paged([(0, first)], [pages], PACKED_PAGE_SIZE), cache)
    rows = RowBatch.paged([(first, last - first)], [pages], PACKED_PAGE_SIZE)
    hidden_TH = model.hidden(tokens_T[first:last], rows, cache)
    predicting_SH = hidden_TH[positions_N - 1 - first]
    return model.logprobs(predicting_SH, tokens_T[positions_N], trajectory.sampling.logprob_temperature)
