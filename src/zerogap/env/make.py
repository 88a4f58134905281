"""From the recipe's task section to its environments."""

from __future__ import annotations

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


def make_environments(settings: config.Task) -> MakeEnvironment:
    """A function that makes the environment of one episode. Loads what the episodes share; raises TaskError where
    that fails. As a host's `load` (it can be pickled): `functools.partial(make_environments, recipe.task)`."""
    task = make_task(settings)
    if settings.tools is not None:
        return with_python_tool(task.grade, settings)
    if isinstance(task, FileTask | VerifiersTask):
        return task.environments()
    return lambda: SingleTurn(task.grade)


def open_host(settings: config.Task, in_process: bool) -> Host:
    """Where environments live: in a process of their own, or in this one so that one debugger sees all. Raises
    TaskError or HostError where they do not load."""
    load = partial(make_environments, settings)
    return (LocalHost if in_process else ProcessHost)(load, settings.call_timeout_s)
