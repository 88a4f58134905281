"""Before the first token is sampled, engines and learner show each other what they are: arithmetic and weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerogap.config import Recipe
from zerogap.model.decoder import Decoder
from zerogap.runtime.backend import RunFailed


@dataclass(frozen=True)
class Identity:
    """version and digest (SHA-256) of the weights; the numerical contract and its digest (Decoder.contract)."""

    version: int
    weights: str
    contract_digest: str
    contract: dict[str, Any]

    @staticmethod
    def of(decoder: Decoder, version: int) -> Identity:
        return Identity(version, decoder.digest(), decoder.contract_digest(), decoder.contract())


def check_identities(recipe: Recipe, learner: Identity, engines: Sequence[Identity]) -> None:
    """RunFailed when an engine starts with other weights (field case R4), or, in an aligned run, computes under
    another contract; then with both descriptions."""
    for index, engine in enumerate(engines):
        if (engine.version, engine.weights) != (learner.version, learner.weights):
            raise RunFailed(
                f"rollout worker {index} starts with weights {engine.weights[:16]} of version {engine.version}, the "
                f"learner with {learner.weights[:16]} of version {learner.version}; both must load the same folder"
            )
        if recipe.model.kernels == "aligned" and engine.contract_digest != learner.contract_digest:
            raise RunFailed(
                f"rollout worker {index} and the learner differ in their numerical contract, so their bits cannot be "
                f"equal.\n  engine:  {json.dumps(engine.contract, sort_keys=True)}\n"
                f"  learner: {json.dumps(learner.contract, sort_keys=True)}"
            )
