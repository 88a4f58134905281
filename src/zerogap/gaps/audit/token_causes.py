"""Causes of a KERNEL gap that lie in what was done with the tokens: no other weights are needed to try them.

Each is one function: how much of the gap goes away when the cause is assumed. None where it cannot be tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zerogap.gaps.audit.finding import Finding
from zerogap.gaps.audit.probe import Probe, gaps_behind_other_prompts, take_probe
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.split import Split

TRIED_TOP_P = tuple(percent / 100 for percent in range(50, 100))
TRIED_TOP_K = (*range(1, 51), 64, 80, 100, 128, 200, 256, 500)
LIMITS = ("length", "context", "max_tokens")  # reasons that say: the last token is no end mark


def causes_in_tokens(rescored: Rescored) -> Iterator[Finding | None]:
    """All of them, the cheapest first."""
    yield missing_eos(rescored)
    yield shifted(rescored)
    yield narrowed(rescored)
    if bool((rescored.of_behaviour_N & rescored.split.unequal_N).any()):
        probe = take_probe(rescored)
        yield other_temperature(probe)
        yield truncated(probe)
        yield other_prompts(rescored)


def other_temperature(probe: Probe) -> Finding | None:
    """The recorded log-probabilities are those of another temperature than the file says."""
    said_S = probe.temperatures_S
    before = _gap(probe, said_S)
    tried = torch.logspace(-1, 1, 41)
    for _ in range(4):  # each round looks between the neighbours of the best so far
        gaps = [_gap(probe, torch.full_like(said_S, float(value))) for value in tried]
        best = gaps.index(min(gaps))
        ends = tried[max(0, best - 1)], tried[min(len(tried) - 1, best + 1)]
        fitted, after = float(tried[best]), gaps[best]
        tried = torch.linspace(float(ends[0]), float(ends[1]), 21)
    said = float(said_S.median())
    if not before or abs(fitted / said - 1) < 0.005:
        return None
    return Finding(
        f"temperature {fitted:.3g} instead of {said:.3g}",
        1 - after / before,
        f"mean gap {before:.2e} at the rollouts' temperature {said:.3g}, {after:.2e} at {fitted:.4g}: "
        "the recorded log-probabilities are not of the temperature that the file says",
    )


def truncated(probe: Probe) -> Finding | None:
    """The recorded log-probabilities are of a distribution cut to its top k or top p and renormalised: each is larger
    by minus the log of the mass that was kept."""
    logprobs_SV = (probe.logits_SV / probe.temperatures_S[:, None]).log_softmax(-1)
    own_S = logprobs_SV.gather(1, probe.targets_S[:, None])[:, 0]
    sorted_SV = logprobs_SV.sort(-1, descending=True).values
    mass_SV = sorted_SV.exp().cumsum(-1)
    before_S = (own_S - probe.recorded_S).abs()
    if not float(before_S.mean()):
        return None
    last = mass_SV.shape[1] - 1
    cuts = {f"top-p {p:.2g}": (mass_SV < p).sum(-1).clamp(max=last) for p in TRIED_TOP_P}
    cuts |= {f"top-k {k}": torch.full_like(probe.targets_S, k - 1) for k in TRIED_TOP_K if k <= last}
    gaps = {}
    for name, last_kept_S in cuts.items():
        least_S = sorted_SV.gather(1, last_kept_S[:, None])[:, 0]
        renormalised_S = own_S - mass_SV.gather(1, last_kept_S[:, None])[:, 0].log()
        gap_S = (renormalised_S - probe.recorded_S).abs()
        gaps[name] = float(torch.where(own_S >= least_S, gap_S, before_S).mean())
    best = min(gaps, key=lambda name: gaps[name])
    before = float(before_S.mean())
    return Finding(
        f"truncated sampling ({best})",
        1 - gaps[best] / before,
        f"mean gap {before:.2e} over the whole vocabulary, {gaps[best]:.2e} renormalised over {best}: "
        "the engine records the distribution after the cut, the learner before it",
    )


def shifted(rescored: Rescored) -> Finding | None:
    """Log-probabilities stand one token too early or too late in their rollout."""
    split, best = rescored.split, None
    neighbours_M = split.owners_N[1:] == split.owners_N[:-1]
    neighbours_M &= rescored.finite_N[1:] & rescored.finite_N[:-1]
    if not bool(neighbours_M.any()):
        return None
    own_N, recorded_N = split.own_N.double(), split.recorded_N.double()
    for where, own_M, moved_M, still_M in (
        ("early", own_N[1:], recorded_N[:-1], own_N[:-1]),
        ("late", own_N[:-1], recorded_N[1:], own_N[1:]),
    ):
        before = float((still_M - moved_M)[neighbours_M].abs().mean())
        after = float((own_M - moved_M)[neighbours_M].abs().mean())
        if before and (best is None or 1 - after / before > best.explained):
            best = Finding(
                f"log-probabilities one token too {where}",
                1 - after / before,
                f"mean gap {before:.2e} to the token itself, {after:.2e} to its neighbour in the rollout",
            )
    return best


def missing_eos(rescored: Rescored) -> Finding | None:
    """The last sampled token of rollouts that ended by themselves has a filler instead of a log-probability."""
    split = rescored.split
    last_N = _last_of_rollout(split) & rescored.finite_N
    ended = [trajectory.finish_reason not in LIMITS for trajectory in split.trajectories]
    last_N &= torch.tensor(ended)[split.owners_N]
    kernel_N = split.kernel_N.abs()
    total = float(kernel_N[rescored.finite_N].sum())
    if not bool(last_N.any()) or not total:
        return None
    filler = float(split.recorded_N[last_N].mode().values)
    filled_N = last_N & (split.recorded_N == filler)
    count = int(filled_N.sum())
    # A value that only chance repeats is no filler: 0 is one at once, another has to come three times.
    if filler != 0.0 and (count < 3 or count < int(last_N.sum()) // 2):
        return None
    return Finding(
        "end mark without its log-probability",
        float(kernel_N[filled_N].sum()) / total,
        f"{count} rollouts that ended by themselves record {filler:g} for their last token, "
        f"the model says {float(split.own_N[filled_N].mean()):.3g} on average",
    )


def narrowed(rescored: Rescored) -> Finding | None:
    """The log-probabilities were rounded to 16 bits. Found by bits: the rescored ones, rounded, are the recorded."""
    split = rescored.split
    unequal_N = split.unequal_N & rescored.finite_N
    own, recorded = split.own_N[unequal_N], split.recorded_N[unequal_N]
    if not own.numel():
        return None
    shares = {
        name: float((own.to(dtype).float() == recorded).double().mean())
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    name = max(shares, key=lambda key: shares[key])
    return Finding(
        f"log-probabilities rounded to {name}",
        shares[name],
        f"{shares[name]:.1%} of the {own.numel()} unequal ones are exactly the rescored ones rounded to {name}",
    )


def other_prompts(rescored: Rescored) -> Finding | None:
    """Answers stand behind the prompts of other rows: a few are scored behind the prompts nearest in the file."""
    gaps = gaps_behind_other_prompts(rescored)
    before, after = sum(own for own, _ in gaps), sum(other for _, other in gaps)
    if not before:
        return None
    return Finding(
        "rows paired with another prompt",
        1 - after / before,
        f"mean gap of {len(gaps)} answers {before / len(gaps):.2e} behind their own prompt, {after / len(gaps):.2e} "
        "behind that of another row",
    )


def _gap(probe: Probe, temperatures_S: torch.Tensor) -> float:
    logits_SV = probe.logits_SV / temperatures_S[:, None]
    own_S = logits_SV.gather(1, probe.targets_S[:, None])[:, 0] - logits_SV.logsumexp(-1)
    return float((own_S - probe.recorded_S).abs().mean())


def _last_of_rollout(split: Split) -> torch.Tensor:
    last_N = torch.ones(split.checked, dtype=torch.bool)
    last_N[:-1] = split.owners_N[1:] != split.owners_N[:-1]
    return last_N
