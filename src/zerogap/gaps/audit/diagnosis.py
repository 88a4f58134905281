"""Known causes of a KERNEL gap, each assumed in turn: a finding is a hypothesis that was computed, not a guess.

What lies in the tokens is tried first, it is cheap; then other weights and precisions, until one explains it.
A cause that explains little is not listed; none may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from zerogap.gaps.audit.candidates import Candidates
from zerogap.gaps.audit.finding import ENOUGH, LISTED, Finding
from zerogap.gaps.audit.mixture import causes_in_mixtures
from zerogap.gaps.audit.precision_causes import engine_in_bf16, head_in_bf16, narrowed, weights_in_bf16
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.sample import Case, take_case
from zerogap.gaps.audit.token_causes import causes_in_tokens
from zerogap.gaps.audit.weight_causes import other_head, other_version, stale_cache

OF_A_VERSION = (other_version, other_head, stale_cache)
OF_A_PRECISION = (engine_in_bf16, head_in_bf16, weights_in_bf16)


def diagnose(rescored: Rescored, candidates: Candidates, progress: Callable[[int], None]) -> list[Finding]:
    """Findings, the best first; empty where no bit of KERNEL differs or no known cause explains half of the gap.

    progress: told how many hundredths of what there is to try are done since the last call.
    """
    kernel_N = rescored.split.kernel_N[rescored.finite_N]
    if not bool((kernel_N != 0).any()):
        return []
    rescored = _on_what_differs(rescored, candidates)
    findings = [finding for finding in causes_in_tokens(rescored) if finding is not None]
    case = None if _best(findings) >= ENOUGH else take_case(rescored)
    if case is not None:
        findings += _other_weights(case, candidates, progress)
    listed = [finding for finding in findings if finding.explained >= LISTED]
    return sorted(listed, key=lambda finding: -finding.explained)


def _other_weights(case: Case, candidates: Candidates, progress: Callable[[int], None]) -> list[Finding]:
    """Until one fits as bits; the searches only where nothing else explains the gap."""
    near = candidates.near(case.version)
    # Tensors that missed one update are of the version before; those that are never sent are of the first.
    likely = list(dict.fromkeys([*near[:1], *sorted(near)[:1]]))
    cheap = len(near) * len(OF_A_VERSION) + len(OF_A_PRECISION)
    steps = cheap + len(likely) + 1
    findings: list[Finding] = []
    tried = chain(_cheap_causes(case, candidates, near), _searches(case, candidates, likely))
    for number, finding in enumerate(tried, 1):
        findings += [] if finding is None else [finding]
        progress(100 * number // steps - 100 * (number - 1) // steps)
        if _best(findings) == 1 or (_best(findings) >= ENOUGH and number >= cheap):
            break
    return findings


def _on_what_differs(rescored: Rescored, candidates: Candidates) -> Rescored:
    """The model to look into is that of the version whose tokens differ most often."""
    if rescored.behaviour_version is None:
        return rescored
    unequal_N = rescored.split.unequal_N & rescored.finite_N
    version = int(rescored.split.versions_N[unequal_N].mode().values)
    if version == rescored.behaviour_version:
        return rescored
    model = rescored.behaviour.view(dict(candidates.weights[version]))
    return replace(rescored, behaviour=model, behaviour_version=version)


def _cheap_causes(case: Case, candidates: Candidates, versions: Sequence[int]) -> Iterator[Finding | None]:
    """A forward or two each."""
    for version in versions:
        for cause in OF_A_VERSION:
            yield cause(case, version, candidates.weights[version])
    for cause_in_precision in OF_A_PRECISION:
        yield cause_in_precision(case)


def _searches(case: Case, candidates: Candidates, versions: Sequence[int]) -> Iterator[Finding | None]:
    """Some dozens of forwards each."""
    others = {f"of {case.named(version)}": candidates.weights[version] for version in versions}
    yield from causes_in_mixtures(case, {**others, "narrowed to bf16": narrowed(case.model)})


def _best(findings: Sequence[Finding]) -> float:
    return max((finding.explained for finding in findings), default=0.0)
