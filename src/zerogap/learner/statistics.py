"""What a step reports about its data. All token statistics come from raw log-ratios, unbounded, in float64.

A name is present only when something was measured. Means are over tokens unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from zerogap.learner.episodes import Episode
from zerogap.learner.objectives.inputs import Mark


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


def sequence_statistics(log_ratios_N: torch.Tensor, owners_N: torch.Tensor) -> dict[str, float]:
    """k1 and k3 as in ratio_statistics, but averaged over each sequence first and then over the sequences, so that a
    short one counts as much as a long one; a segment is a sequence. owners_N: int64, the sequence of each token."""
    if not owners_N.numel():
        return {}
    log_ratios_N = log_ratios_N.double()
    lengths_S = torch.bincount(owners_N)
    present_S = lengths_S > 0

    def mean_of_means(values_N: torch.Tensor) -> float:
        return float((torch.bincount(owners_N, weights=values_N)[present_S] / lengths_S[present_S]).mean())

    return {
        "kl_sequence/k1": mean_of_means(-log_ratios_N),
        "kl_sequence/k3": mean_of_means(log_ratios_N.expm1() - log_ratios_N),
    }


def gradient_weight_statistics(log_ratios_N: torch.Tensor, advantages_N: torch.Tensor) -> dict[str, float]:
    """Of the sum of |ratio * advantage|, the share that the heaviest 1% of the tokens carry (at least one token). Of
    raw ratios, whatever the objective makes of them; absent when all weights are 0."""
    weights_N = log_ratios_N.double().exp() * advantages_N.double().abs()
    total = float(weights_N.sum())
    if not total:
        return {}
    return {"weight/top1_share": float(weights_N.topk(-(-weights_N.numel() // 100)).values.sum()) / total}


def mark_statistics(marks: Mapping[Mark, torch.Tensor], owners_N: torch.Tensor) -> dict[str, float]:
    """For each thing that the objective did to tokens (marks: bool [N]): the share of the tokens that it did it to, and
    the share of the sequences that have such a token."""
    sequences = owners_N.unique().numel()
    statistics = {}
    for mark, marked_N in marks.items():
        statistics[f"{mark}/tokens"] = float(marked_N.double().mean())
        statistics[f"{mark}/sequences"] = owners_N[marked_N].unique().numel() / sequences
    return statistics


def sample_statistics(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Rewards, lengths and turns of the episodes of a step, grouped by prompt. Means over episodes, whatever number of
    segments they have; ungraded ones count only in errors/ungraded. length = sampled tokens, whether or not they are
    trained."""
    graded = [(episode, episode.reward) for group in groups for episode in group if episode.reward is not None]
    ungraded = sum(len(group) for group in groups) - len(graded)
    statistics = {"errors/ungraded": float(ungraded)}
    if not graded:
        return statistics
    rewards = [reward for _, reward in graded]
    lengths = [episode.num_sampled for episode, _ in graded]
    turns = [episode.turns for episode, _ in graded]
    distinct = [{episode.reward for episode in group if episode.reward is not None} for group in groups]
    return statistics | {
        "reward/mean": sum(rewards) / len(rewards),
        "reward/max": max(rewards),
        "reward/zero_variance_groups": float(sum(len(values) == 1 for values in distinct)),
        "length/mean": sum(lengths) / len(lengths),
        "length/max": float(max(lengths)),
        "turns/mean": sum(turns) / len(turns),
        "turns/max": float(max(turns)),
        "truncated/share": sum(episode.truncated for episode, _ in graded) / len(graded),
    }
