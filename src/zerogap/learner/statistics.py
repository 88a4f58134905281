"""What a step reports about its data. All token statistics come from raw log-ratios, unbounded, in float64.

A name is present only when something was measured. Means are over tokens unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerogap.trajectory import Trajectory


def effective_sample_size(ratios_N: torch.Tensor) -> float:
    """(sum r)^2 / (n sum r^2): 1 when all ratios are equal, 1/n when one token carries all the weight."""
    return float(ratios_N.sum() ** 2 / (ratios_N.numel() * (ratios_N**2).sum()))


def ratio_statistics(log_ratios_N: torch.Tensor, lags_N: torch.Tensor) -> dict[str, float]:
    """log_ratios_N: learner minus behaviour logprob of each trained token. lags_N: its age in updates, >= 0.

    kl/k1 and kl/k3 estimate KL(behaviour || learner): k1 = mean(-log r) may be negative, k3 = mean(r - 1 - log r)
    may not. ratio/dev = mean |r - 1|, ratio/chi2 = mean (r - 1)^2.
    """
    if not log_ratios_N.numel():
        return {}
    log_ratios_N = log_ratios_N.double()
    ratios_N, excess_N = log_ratios_N.exp(), log_ratios_N.expm1()
    statistics = {
        "ratio/mean": float(ratios_N.mean()),
        "ratio/max": float(ratios_N.max()),
        "ratio/min": float(ratios_N.min()),
        "ratio/dev": float(excess_N.abs().mean()),
        "ratio/chi2": float((excess_N**2).mean()),
        "kl/k1": float(-log_ratios_N.mean()),
        "kl/k3": float((excess_N - log_ratios_N).mean()),
        "lag/mean": float(lags_N.double().mean()),
        "lag/max": float(lags_N.max()),
        "ess/all": effective_sample_size(ratios_N),
    }
    for age in sorted(set(lags_N.tolist())):
        statistics[f"ess/age_{age}"] = effective_sample_size(ratios_N[lags_N == age])
    return statistics


def sample_statistics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Rewards and lengths of the samples of a step, grouped by prompt. Means over samples; ungraded ones count only
    in errors/ungraded. length = sampled tokens, whether or not they are trained."""
    graded = [trajectory for group in groups for trajectory in group if trajectory.reward is not None]
    ungraded = sum(len(group) for group in groups) - len(graded)
    statistics = {"errors/ungraded": float(ungraded)}
    if not graded:
        return statistics
    rewards = [trajectory.reward for trajectory in graded if trajectory.reward is not None]
    lengths = [trajectory.num_sampled for trajectory in graded]
    distinct = [{t.reward for t in group if t.reward is not None} for group in groups]
    return statistics | {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/zero_variance_groups": float(sum(len(values) == 1 for values in distinct)),
        "length/mean": sum(lengths) / len(lengths),
        "length/max": float(max(lengths)),
        "truncated/share": sum(trajectory.truncated for trajectory in graded) / len(graded),
    }
