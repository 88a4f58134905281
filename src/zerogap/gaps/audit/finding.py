"""What a diagnosis says: a cause that was tried, not guessed, and how much of the KERNEL gap it explains."""

from __future__ import annotations

from dataclasses import dataclass

LISTED = 0.5  # least share explained of a finding that is listed
NAMED = 0.9  # of a cause that the verdict names as the cause
ENOUGH = 0.99  # of a cause after which dearer ones are not tried


@dataclass(frozen=True)
class Finding:
    """explained: 1 - (gap with it) / (gap without it), as mean absolute log-ratios of the tokens that were tried.
    evidence: the numbers behind it, in a sentence."""

    cause: str
    explained: float
    evidence: str
