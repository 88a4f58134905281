"""Tasks of the `verifiers` package (0.4): a taskset's prompts, scored by its own rewards in one turn.

What a taskset does with a running agent (tools, containers, set-up) belongs to that package's harnesses and is refused.
Imported only when a recipe asks for it: the package is an optional extra.
"""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import ValidationError

from zerogap import config
from zerogap.env.environment import Step, is_message
from zerogap.env.host import MakeEnvironment
from zerogap.env.task import Example, GradeError, TaskError, Wording
from zerogap.trajectory import Message


class VerifiersTask:
    """See zerogap.env.task.Task. A taskset without end is cut to task.size. Raises TaskError where it does not fit."""

    def __init__(self, settings: config.Task) -> None:
        assert settings.verifiers is not None
        self._name = settings.verifiers
        self._wording = Wording(settings)
        taskset = _taskset(settings.verifiers, settings.params)
        if type(taskset).toolsets(taskset.config):
            raise TaskError(
                f"task.verifiers {self._name!r}: the taskset serves tools, which its episodes cannot call here"
            )
        self._tasks = list(taskset if taskset.bounded else taskset.take(settings.size))
        if not self._tasks:
            raise TaskError(f"task.verifiers {self._name!r} yields no task")
        for task in self._tasks:  # a taskset may mix kinds
            self._check(task)
        if settings.system_prompt is not None or settings.instruction is not None:
            whole = next((i for i, task in enumerate(self._tasks) if not isinstance(task.data.prompt, str)), None)
            if whole is not None:
                raise TaskError(
                    f"task.system_prompt and task.instruction are put around questions, but task {whole} of verifiers "
                    f"{self._name!r} brings whole messages; remove the keys"
                )

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> Example:
        data = self._tasks[index].data
        prompt = data.prompt
        messages = self._wording.messages(prompt) if isinstance(prompt, str) else _messages(prompt)
        if data.system_prompt is not None:
            messages = [{"role": "system", "content": data.system_prompt}, *messages]
        if not messages or not all(map(is_message, messages)):
            raise TaskError(f"task.verifiers {self._name!r}: task {index} has no prompt of texts: {prompt!r:.200}")
        return Example(index, messages, None)  # the episode looks its task up by the index

    def grade(self, example: Example, text: str) -> float:
        raise GradeError(f"a task of verifiers {self._name!r} is scored by its own coroutines, in an environment")

    def solution(self, example: Example) -> str:
        raise TaskError(f"task.verifiers {self._name!r} has no worked solutions; leave out warm_start")

    def environments(self) -> MakeEnvironment:
        """What makes the environment of one episode."""
        return lambda: _Scored(self._tasks)

    def _check(self, task: Any) -> None:
        from verifiers.v1.task import Task

        why = []
        if task.NEEDS_CONTAINER or task.data.image is not None:
            why.append("it needs a container")
        if type(task).toolsets(task.config):
            why.append("it serves tools")
        why += [f"its {name} needs a runtime" for name in ("setup", "finalize") if _overridden(task, Task, name)]
        signals = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
        for signal in signals:
            runtime = inspect.signature(signal).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                why.append(f"its {getattr(signal, '__name__', signal)} needs a runtime")  # verifiers would leave it out
        if not task.hooks("reward") and not task.plugged_judges():
            why.append("it has no reward")
        if why:
            raise TaskError(f"task.verifiers {self._name!r} cannot run here: {'; '.join(why)}")


class _Scored:
    """One task: the policy's turn becomes the trace that the task's rewards look at."""

    def __init__(self, tasks: list[Any]) -> None:
        self._tasks = tasks

    async def reset(self, example: Example) -> list[Message]:
        self._example = example
        return example.messages

    async def step(self, action: str) -> Step:
        task = self._tasks[self._example.prompt_id]
        trace = _trace(task, [*self._example.messages, {"role": "assistant", "content": action}])
        try:
            await task.score(trace)
        except Exception as error:  # verifiers wraps what a reward raised
            raise GradeError(f"verifiers failed to score task {self._example.prompt_id}: {error}") from (
                error.__cause__ or error
            )
        info = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return Step([], trace.reward, True, False, {**trace.metrics, **info})

    async def close(self) -> None:
        """Nothing is held."""


def _taskset(name: str, params: dict[str, Any]) -> Any:
    try:
        from verifiers.v1.configs.taskset import TasksetConfig
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import load_taskset, taskset_class
    except ImportError as error:
        raise TaskError(
            f"task.verifiers {name!r} needs version 0.4 of the verifiers package ({error}): "
            "pip install zerogap[verifiers]"
        ) from error
    try:
        made = taskset_class(name)
        return load_taskset((concrete_type(made, TasksetConfig) or TasksetConfig)(id=name, **params))
    except ValidationError as error:
        raise TaskError(f"task.params do not fit the taskset {name!r}: {error}") from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise TaskError(f"task.verifiers {name!r} cannot be loaded: {error}") from error


def _overridden(task: Any, base: type, name: str) -> bool:
    return getattr(type(task), name) is not getattr(base, name)


def _messages(prompt: Any) -> list[Message]:
    return [{"role": message.role, "content": message.content} for message in prompt or []]


def _trace(task: Any, messages: list[Message]) -> Any:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    kinds = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()))
    for index, message in enumerate(messages):
        said = kinds[message["role"]](content=message["content"])
        trace.nodes.append(
            MessageNode(message=said, parent=index - 1 if index else None, sampled=index == len(messages) - 1)
        )
    return trace
