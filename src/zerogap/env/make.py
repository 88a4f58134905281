"""From the recipe's task section to its environments."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial

from zerogap import config
from zerogap.env.file_task import FileTask
from zerogap.env.host import Host, MakeEnvironment
from zerogap.env.local_host import LocalHost
from zerogap.env.process_host import ProcessHost
from zerogap.env.python_tool import with_python_tool
from zerogap.env.single_turn import SingleTurn
from zerogap.env.task import make_task
from zerogap.env.verifiers_task import VerifiersTask


def make_environments(settings: config.Task, shared: AsyncExitStack) -> MakeEnvironment:
    """A function that makes the environment of one episode. Loads what the episodes share, which `shared` closes.
    Raises TaskError where that fails. A host's `load`, which can be pickled: `partial(make_environments, recipe.task)`.
    """
    task = make_task(settings)
    if settings.tools is not None:
        return with_python_tool(task.grade, settings, shared)
    if isinstance(task, FileTask | VerifiersTask):
        return task.environments()
    return lambda: SingleTurn(task.grade)


def open_host(settings: config.Task, in_process: bool) -> Host:
    """Where environments live: in a process of their own, or in this one so that one debugger sees all. Raises
    TaskError or HostError where they do not load."""
    load = partial(make_environments, settings)
    return (LocalHost if in_process else ProcessHost)(load, settings.call_timeout_s)
