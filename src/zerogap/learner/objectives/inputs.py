"""What goes into an objective and what comes out. No objective of its own lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Mark = Literal["clipped", "truncated_weight", "masked", "rejected"]
LEAVES_DENOMINATOR: tuple[Mark, ...] = ("masked", "rejected")


@dataclass(frozen=True)
class TrainedTokens:
    """N trained tokens of whole sequences, in any order of sequences.

    logprobs_N: fp32, the learner's; the only input that carries a gradient.
    behaviour_logprobs_N: fp32, recorded when the token was sampled. advantages_N: fp32.
    owners_N: int64 >= 0, the sequence of each token. Either all trained tokens of a sequence are here or none.
    denominator: trained tokens of the WHOLE step, so that the sum over micro-batches does not depend on the cut.
    """

    logprobs_N: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    owners_N: torch.Tensor
    denominator: int

    @property
    def log_ratios_N(self) -> torch.Tensor:
        """Raw, learner minus behaviour; no gradient."""
        return self.logprobs_N.detach() - self.behaviour_logprobs_N


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar, carries the gradient. terms_N: what each token adds to it. log_ratios_N: raw, learner minus
    behaviour. The last two are fp32 and detached.

    marks: for each thing that this objective does to tokens, bool [N], which tokens it did it to. Tokens with a mark of
    LEAVES_DENOMINATOR add exactly 0 to loss and gradient, and are to be taken out of the step's denominator: how many
    they are in the whole step is known only when all of it is scored, so the caller scales by
    denominator / (denominator - left out) at the end.
    """

    loss: torch.Tensor
    terms_N: torch.Tensor
    log_ratios_N: torch.Tensor
    marks: Mapping[Mark, torch.Tensor] = field(default_factory=dict)


def weighted_logprobs(
    tokens: TrainedTokens, weights_N: torch.Tensor, marks: Mapping[Mark, torch.Tensor] | None = None
) -> LossOutput:
    """loss = - sum_t weight_t * advantage_t * logprob_t / denominator. The gradient does not flow through weights_N."""
    terms_N = -(weights_N * tokens.advantages_N * tokens.logprobs_N) / tokens.denominator
    return LossOutput(terms_N.sum(), terms_N.detach(), tokens.log_ratios_N, marks or {})
