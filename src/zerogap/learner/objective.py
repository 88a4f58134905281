"""The REINFORCE Zero objective as a pure function: an unclipped token ratio, used as a constant weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossOutput:
    """loss: scalar, carries the gradient. terms_N: what each token adds to it. log_ratios_N: raw, learner minus
    behaviour. The last two are fp32 and detached."""

    loss: torch.Tensor
    terms_N: torch.Tensor
    log_ratios_N: torch.Tensor


def reinforce_zero(
    logprobs_N: torch.Tensor, behaviour_logprobs_N: torch.Tensor, advantages_N: torch.Tensor, denominator: int
) -> LossOutput:
    """loss = - sum_t stopgrad(exp(logprob_t - behaviour_t)) * advantage_t * logprob_t / denominator.

    All three inputs are fp32 [N], one entry per trained token; gradients flow through logprobs_N only, and not through
    the ratio. Nothing is clipped. denominator: trained tokens of the WHOLE step, so that the sum over micro-batches
    does not depend on how the step was cut.
    """
    log_ratios_N = logprobs_N.detach() - behaviour_logprobs_N
    weights_N = log_ratios_N.exp() * advantages_N
    terms_N = -(weights_N * logprobs_N) / denominator
    return LossOutput(loss=terms_N.sum(), terms_N=terms_N.detach(), log_ratios_N=log_ratios_N)
