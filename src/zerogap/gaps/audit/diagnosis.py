"""Known causes of a KERNEL gap, each assumed in turn: a finding is a hypothesis that was computed, not a guess.

What lies in the tokens is tried first, it is cheap; then other weights and precisions, until one explains it.
A cause that explains little is not listed; none may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from zerogap.gaps.audit.candidates import Candidates
from zerogap.gaps.audit.finding import ENOUGH, LISTED, Finding
from zerogap.gaps.audit.precision_causes import engine_in_bf16, head_in_bf16, tensor_in_bf16, weights_in_bf16
from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.sample import Case, take_case
from zerogap.gaps.audit.token_causes import causes_in_tokens
from zerogap.gaps.audit.weight_causes import other_head, other_version, part_of_version, stale_cache

Step = Callable[[], Finding | None]


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
    cheap, searches = _steps(case, candidates)
    findings: list[Finding] = []
    done = 0
    for number, step in enumerate([*cheap, *searches], 1):
        if _best(findings) == 1 or (_best(findings) >= ENOUGH and number > len(cheap)):
            break
        finding = step()
        findings += [] if finding is None else [finding]
        share = 100 * number // (len(cheap) + len(searches))
        progress(share - done)
        done = share
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


def _steps(case: Case, candidates: Candidates) -> tuple[list[Step], list[Step]]:
    """Those of a forward or two each, and searches of some dozens."""
    near = candidates.near(case.version)
    cheap: list[Step] = []
    for version in near:
        cheap += [partial(_try, cause, case, candidates, version) for cause in (other_version, other_head, stale_cache)]
    cheap += [partial(cause, case) for cause in (engine_in_bf16, head_in_bf16, weights_in_bf16)]
    # Tensors that missed one update are of the version before; those that are never sent are of the first.
    likely = dict.fromkeys([*near[:1], *sorted(near)[:1]])
    searches: list[Step] = [partial(_try, part_of_version, case, candidates, version) for version in likely]
    return cheap, [*searches, partial(tensor_in_bf16, case)]


def _try(cause: Callable[..., Finding | None], case: Case, candidates: Candidates, version: int) -> Finding | None:
    return cause(case, version, candidates.weights[version])


def _best(findings: Sequence[Finding]) -> float:
    return max((finding.explained for finding in findings), default=0.0)
