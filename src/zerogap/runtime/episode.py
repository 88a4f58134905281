"""A sample of a group on its way through turns: what was said and shown, its reward so far, how often it was tried."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from zerogap.env.environment import EpisodeError, Step
from zerogap.env.host import Episode
from zerogap.env.task import Example
from zerogap.model.turns import ChatTurns
from zerogap.trajectory import FinishReason, GroupRequest, Message, Trajectory


@dataclass
class EpisodeState:
    """attempt: 0 at first; grows when the environment failed and the episode begins again. failures: how often
    that was its own environment's fault, not another's that took the process with it.

    turn: the trajectory so far, as the engine handed it out at the end of the newest turn; None before the first.
    said: the ids sampled in that turn. chat: messages before it. ended: segments that a forgetful template closed.
    """

    request: GroupRequest
    example: Example
    sample_index: int
    attempt: int = 0
    failures: int = 0
    chat: list[Message] = field(init=False)
    ended: list[Trajectory] = field(default_factory=list)
    turn: Trajectory | None = None
    said: list[int] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chat = self.example.messages

    @property
    def key(self) -> Episode:
        return self.request.group_id, self.sample_index, self.attempt

    def end_turn(self, trajectory: Trajectory) -> None:
        """The engine handed it out. The turn's ids are the sampled ones at its end."""
        start = len(trajectory.token_ids)
        while trajectory.loss_mask[start - 1]:
            start -= 1
        self.turn, self.said = trajectory, trajectory.token_ids[start:]
        self.turns += 1

    def take(self, step: Step) -> None:
        self.reward += step.reward
        self.info |= step.info

    def begin_again(self) -> None:
        """From the first turn, as the next attempt; nothing of this one is kept."""
        self.attempt += 1
        self.chat, self.ended, self.turn, self.said = self.example.messages, [], None, []
        self.reward, self.turns, self.info = 0.0, 0, {}

    def finished(self, reason: FinishReason, error: EpisodeError | None, turns: ChatTurns) -> list[Trajectory]:
        """All segments, each with the episode's reward, or with the error and no reward."""
        assert self.turn is not None
        segments = [*self.ended, replace(self.turn, finish_reason=reason)]
        for segment in segments:
            segment.info = {**self.info, "text": turns.text(segment.sampled_token_ids), "turns": self.turns}
            if self.attempt:
                segment.info["attempts"] = self.attempt + 1
            segment.reward = None if error is not None else self.reward
            segment.error = None if error is None else str(error)
        return segments
