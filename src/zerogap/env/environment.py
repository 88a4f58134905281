"""What an environment is: one episode, Gymnasium-like and asynchronous. And what may go over from it to the run.

The checks of what an environment returns live here too, so that every host reports the same faults alike.
"""

from __future__ import annotations

import json
import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zerogap.env.task import Example, GradeError
from zerogap.trajectory import Message

ROLES = ("system", "user", "tool")  # what an environment may say; the assistant's words are the policy's


class Step(NamedTuple):
    """What a step returns, in Gymnasium's order.

    observation: messages to show the policy before its next turn (role "user" or "tool"); [] at the end.
    reward: finite; the rewards of an episode's steps are added up.
    terminated: the episode reached its own end. truncated: a limit of the environment ended it.
    info: facts for the records; plain values (what JSON can hold).
    """

    observation: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Environment(Protocol):
    """One episode. What a call raises is an error of the episode, never a reward.

    Calls of one episode follow one another; those of different episodes interleave wherever they await. Code that
    computes without awaiting keeps all others of its process waiting.
    """

    async def reset(self, example: Example) -> list[Message]:
        """Begin. Returns the opening messages, which must be those of the example: the policy has seen them."""
        ...

    async def step(self, action: str) -> Step:
        """The policy said `action` (the text of one turn)."""
        ...

    async def close(self) -> None:
        """Let go of everything. Called once, also after an error."""
        ...


class ProtocolError(ValueError):
    """An environment returned what the protocol does not allow; the message names the value and the fix."""


@dataclass(frozen=True)
class EpisodeError:
    """Why an episode has no reward.

    kind: "timeout" (its call was over the limit), "crashed" (its call ended the environments' process), "lost" (the
    process ended for another's fault; nothing is known against this episode), or the class name of the exception
    (for a GradeError that of its cause). Errors are counted by it.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> EpisodeError:
        """The exception's class, its text and the line that raised it."""
        cause = (error.__cause__ or error) if isinstance(error, GradeError) else error
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
        return cls(type(cause).__name__, f"{str(error) or type(error).__name__}{where}")

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


async def checked_reset(environment: Environment, example: Example) -> list[Message]:
    """The opening messages. Raises what `reset` raises, and ProtocolError where they are not the example's."""
    messages = await environment.reset(example)
    if messages != example.messages:
        raise ProtocolError(
            f"reset returned {_short(messages)}, but the policy has been shown the example's messages "
            f"{_short(example.messages)}; make them there, and return example.messages"
        )
    return messages


async def checked_step(environment: Environment, action: str) -> Step:
    """The step with plain types: a float, two bools, info as JSON gives it back. Raises what `step` raises, and
    ProtocolError where the values do not fit."""
    result: Any = await environment.step(action)
    if not isinstance(result, tuple) or len(result) != len(Step._fields):
        raise ProtocolError(
            f"step returned {_short(result)}; return Step(observation, reward, terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = result
    terminated, truncated = bool(terminated), bool(truncated)
    return Step(
        _checked_observation(observation, ended=terminated or truncated),
        _checked_reward(reward),
        terminated,
        truncated,
        _checked_info(info),
    )


def _checked_observation(observation: Any, ended: bool) -> list[Message]:
    messages = list(observation) if isinstance(observation, list | tuple) else None
    if messages is None or not all(is_message(message) and message["role"] in ROLES for message in messages):
        raise ProtocolError(
            f"step returned the observation {_short(observation)}; it must be a list of messages "
            f'{{"role": ..., "content": ...}} of texts (valid Unicode), with a role of {", ".join(ROLES)}'
        )
    if not messages and not ended:
        raise ProtocolError("step returned no message though the episode goes on; the policy needs one to answer")
    return messages


def _checked_reward(reward: Any) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise ProtocolError(f"step returned the reward {_short(reward)}; it must be a number") from None
    if not math.isfinite(value):
        raise ProtocolError(f"step returned the reward {value}; it must be finite")
    return value


def _checked_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise ProtocolError(f"step returned the info {_short(info)}; it must be a dict")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(info, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"info {_short(info)} does not go into the records as JSON: {error}") from None
    return plain


def is_message(value: Any) -> bool:
    """{"role": text, "content": text}, and no more than texts beside them."""
    return (
        isinstance(value, dict)
        and {"role", "content"} <= value.keys()
        and all(isinstance(text, str) and _is_unicode(text) for text in value.values())
    )


def _is_unicode(text: str) -> bool:
    """No lone surrogates, which bytes read with surrogateescape leave and no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
