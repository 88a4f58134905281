"""From the recipe's task section to its environments."""

from __future__ import annotations

from zerogap import config
from zerogap.env.host import MakeEnvironment
from zerogap.env.single_turn import SingleTurn
from zerogap.env.task import make_task


def make_environments(settings: config.Task) -> MakeEnvironment:
    """A function that makes the environment of one episode. Loads what the episodes share; raises TaskError where
    that fails. As a host's `load` (it can be pickled): `functools.partial(make_environments, recipe.task)`."""
    task = make_task(settings)
    return lambda: SingleTurn(task)
