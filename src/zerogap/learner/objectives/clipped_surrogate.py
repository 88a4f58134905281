"""PPO's clipped surrogate, per token: the one objective here whose ratio is differentiated, by its definition."""

from __future__ import annotations

from zerogap.config.objective import PpoClip
from zerogap.learner.objectives.inputs import LossOutput, TrainedTokens


def ppo_clip(tokens: TrainedTokens, config: PpoClip) -> LossOutput:
    """loss = - sum_t min(r_t * advantage_t, clip(r_t, 1 - eps_low, 1 + eps_high) * advantage_t) / denominator, with
    r_t = exp(logprob_t - behaviour_t): no second, "old" policy stands between learner and behaviour.

    Marks `clipped` where the bound takes the gradient away (r > 1 + eps_high and advantage > 0, or r < 1 - eps_low and
    advantage < 0). Elsewhere the gradient is that of REINFORCE Zero, r * advantage. Every token stays in the
    denominator.

    Sources: Schulman et al., Proximal Policy Optimization Algorithms (2017), arXiv:1707.06347, equation 7. On groups:
    Shao et al., DeepSeekMath (2024), arXiv:2402.03300. Unequal bounds, and one denominator for all tokens: Yu et al.,
    DAPO (2025), arXiv:2503.14476. Advantage without the group's standard deviation: Liu et al., Understanding
    R1-Zero-Like Training (2025), arXiv:2503.20783.
    """
    low, high = 1.0 - config.eps_low, 1.0 + config.eps_high
    log_ratios_N = tokens.log_ratios_N
    raw_N, advantages_N = log_ratios_N.exp(), tokens.advantages_N
    clipped_N = ((raw_N > high) & (advantages_N > 0)) | ((raw_N < low) & (advantages_N < 0))
    # Clipped before exp: an infinite ratio that is clipped away would give 0 * infinity in the backward pass.
    ratios_N = (tokens.logprobs_N - tokens.behaviour_logprobs_N).masked_fill(clipped_N, 0.0).exp()
    bounded_N = ratios_N.where(~clipped_N, raw_N.clamp(low, high))
    terms_N = -(bounded_N * advantages_N) / tokens.denominator
    return LossOutput(terms_N.sum(), terms_N.detach(), log_ratios_N, {"clipped": clipped_N})
