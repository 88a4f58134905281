"""zerogap: asynchronous reinforcement learning in which the rollout engine and the learner compute the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

if TYPE_CHECKING:
    from zerogap.policy import Policy

__version__ = "0.1.0"
__all__ = ["GroupRequest", "Policy", "SamplingParams", "Trajectory", "__version__"]


def __getattr__(name: str) -> Any:
    """Policy needs torch; it is imported when first asked for, so that recipes load without it."""
    if name == "Policy":
        from zerogap.policy import Policy

        return Policy
    raise AttributeError(f"module 'zerogap' has no attribute {name!r}")
