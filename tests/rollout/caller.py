"""The other side of interactive requests: says after each turn how it goes on, and checks every turn token by token."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.rollout.builders import Bits, bits, drain, request
from tests.rollout.hash_decoder import VOCAB
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import ContextFull, Engine
from zerogap.trajectory import GroupRequest, Trajectory

Place = tuple[int, int]  # group_id, sample_index


@dataclass(frozen=True)
class Answer:
    """What follows a turn. "extend" by so many tokens; "segment": the next one, on a prompt of so many tokens; "retry":
    the same segment again from its prompt. delay: engine steps that pass before."""

    kind: Literal["extend", "segment", "retry"]
    tokens: int = 1
    delay: int = 0


class Caller:
    """Drives an engine. answers: of each interactive group, what follows its first turn, its second, ...; then (and
    where the context is full) the episode ends. Its tokens are random ids, as no tokenizer would cut them.

    turns: every turn that was handed out, by sample. ended: the last of each segment, of episodes that have ended.
    """

    def __init__(self, engine: Engine, answers: Mapping[int, Sequence[Answer]], vocab: int = VOCAB) -> None:
        self.engine = engine
        self.turns: dict[Place, list[Trajectory]] = {}
        self.ended: list[Trajectory] = []
        self._answers = answers
        self._vocab = vocab
        self._prompts: dict[Place, list[int]] = {}
        self._before: dict[Place, list[int]] = {}  # the ids that its turn must begin with
        self._due: list[tuple[int, Place]] = []
        self._clock = 0

    def submit(self, request: GroupRequest) -> None:
        self.engine.submit(request)
        for index in range(request.n):
            self._prompts[request.group_id, index] = self._before[request.group_id, index] = list(
                request.prompt_token_ids
            )

    def step(self) -> None:
        """One engine step; then the answers that are due."""
        self.take(self.engine.step())

    def take(self, turns: Iterable[Trajectory]) -> None:
        """Turns that a step handed out."""
        self._clock += 1
        for turn in turns:
            place = (turn.group_id, turn.sample_index)
            self._check(turn, self._before[place])
            self.turns.setdefault(place, []).append(turn)
            if turn.group_id in self._answers:
                self._due.append((self._clock + self._next(place).delay, place))
            else:
                self.ended.append(turn)
        due = [place for clock, place in self._due if clock <= self._clock]
        self._due = [(clock, place) for clock, place in self._due if clock > self._clock]
        for place in due:
            self._answer(place)

    def drain(self, groups: Container[int] | None = None, limit: int = 20_000) -> None:
        """Until nothing more happens, or these groups have ended; a limit on steps turns a livelock into a failure."""
        for _ in range(limit):
            if groups is not None and not any(group_id in groups for group_id, _ in self.engine.pending()):
                return
            if not self.engine.has_work() and not self._due:
                return
            self.step()
        raise AssertionError(f"still pending after {limit} steps: {self.engine.pending()}")

    def abort(self, group_id: int) -> None:
        """Its trajectories are in `ended` only where they had ended before."""
        self.engine.abort([group_id])
        self._due = [(clock, place) for clock, place in self._due if place[0] != group_id]

    def _next(self, place: Place) -> Answer:
        answers, count = self._answers[place[0]], len(self.turns[place])
        return answers[count - 1] if count <= len(answers) else Answer("extend", 0)

    def _answer(self, place: Place) -> None:
        turn, answer = self.turns[place][-1], self._next(place)
        tokens = random.Random(repr((place, len(self.turns[place])))).choices(range(self._vocab), k=answer.tokens)
        if answer.kind == "retry":
            self._before[place] = self._prompts[place]
            self.engine.restart(*place, self._prompts[place], turn.segment)
            return
        try:
            if answer.kind == "segment":
                self.engine.restart(*place, tokens, turn.segment + 1)
                self.ended.append(turn)
                self._prompts[place] = self._before[place] = tokens
                return
            if tokens:
                self.engine.extend(*place, tokens)
                self._before[place] = turn.token_ids + tokens
                return
        except ContextFull:
            pass
        self.engine.end(*place)
        self.ended.append(turn)

    @staticmethod
    def _check(turn: Trajectory, before: Sequence[int]) -> None:
        """Token exactness (field cases 10, 11, 13): the ids begin with what was there, the rest was sampled."""
        count = len(before)
        assert turn.token_ids[:count] == list(before), "a turn does not begin with the ids of the turns before it"
        assert 0 < len(turn.token_ids) - count <= turn.sampling.max_new_tokens
        assert turn.loss_mask[count:] == [1] * (len(turn.token_ids) - count)
        assert all(x == 0.0 for x, m in zip(turn.logprobs, turn.loss_mask, strict=True) if not m)
        assert all((v >= 0) == bool(m) for v, m in zip(turn.versions, turn.loss_mask, strict=True))


def turn_bits(caller: Caller) -> dict[Place, list[Bits]]:
    return {place: [bits(turn) for turn in turns] for place, turns in caller.turns.items()}


def alone(
    decoder: Decoder, requests: Iterable[GroupRequest], answers: Mapping[int, Sequence[Answer]], max_context: int
) -> dict[Place, list[Bits]]:
    """The reference: each episode by itself on an engine with room for it, so that nothing is evicted or shared."""
    found: dict[Place, list[Bits]] = {}
    for r in requests:
        for index in range(r.n):
            engine = EmbeddedEngine(decoder, None, EngineConfig(1, 4096, 64, max_context=max_context))
            caller = Caller(engine, answers)
            caller.submit(r)
            group = engine._scheduler.groups[r.group_id]
            group.samples, group.waiting = [group.samples[index]], [group.samples[index]]
            caller.drain()
            stats = engine.stats()
            assert (stats["evictions"], stats["prefix_forks"], stats["preemptions"]) == (0, 0, 0)
            found |= turn_bits(caller)
    return found


def parked(engine: EmbeddedEngine, group_id: int, **fields: Any) -> Trajectory:
    """Submit one episode of 5 prompt tokens and run it to the end of its first turn of 4."""
    engine.submit(request(group_id, range(5), **({"new": 4, "interactive": True} | fields)))
    (turn,) = drain(engine)
    return turn
