"""Before the first token is sampled, engines and learner show each other what they are: arithmetic and weights.

The recipe says whether a run is aligned (Recipe.aligned). Here that is made true: contracts are equal, or it ends.
"""

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
    """version and digest (SHA-256) of the weights as the learner has them, before an engine converts them to its dtype;
    the numerical contract and its digest (Decoder.contract)."""

    version: int
    weights: str
    contract_digest: str
    contract: dict[str, Any]

    @staticmethod
    def of(decoder: Decoder, version: int, weights: str) -> Identity:
        return Identity(version, weights, decoder.contract_digest(), decoder.contract())


def check_identities(recipe: Recipe, learner: Identity, engines: Sequence[Identity]) -> None:
    """RunFailed when an engine starts with other weights than the learner (field case R4), or computes under another
    contract: in an aligned run than the learner, else than the first engine. Then with both descriptions."""
    peer, expected = ("the learner", learner) if recipe.aligned else ("rollout worker 0", engines[0])
    for index, engine in enumerate(engines):
        if (engine.version, engine.weights) != (learner.version, learner.weights):
            raise RunFailed(
                f"rollout worker {index} starts with weights {engine.weights[:16]} of version {engine.version}, the "
                f"learner with {learner.weights[:16]} of version {learner.version}; both must load the same folder"
            )
        if engine.contract_digest != expected.contract_digest:
            raise RunFailed(
                f"rollout worker {index} and {peer} differ in their numerical contract, so their bits cannot be equal; "
                f"both must run the same build on the same model.\n"
                f"  rollout worker {index}: {json.dumps(engine.contract, sort_keys=True)}\n"
                f"  {peer}: {json.dumps(expected.contract, sort_keys=True)}"
            )
