"""One engine and the environments of its episodes: groups go in, finished groups come out. Inline and on Ray alike.

The engine never waits for an environment while it has anything else to do: a sample whose turn ended is parked, its
environment answers from another process, and then the sample goes on, begins a new segment, or ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from zerogap.env.environment import EpisodeError, Step
from zerogap.env.host import Answer, Host
from zerogap.env.make import open_host
from zerogap.env.python_tool import tool_schemas
from zerogap.model.chat import load_tokenizer
from zerogap.model.checkpoint import load_decoder
from zerogap.model.decoder import snapshot_digest
from zerogap.model.turns import CannotRender, ChatTurns
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import ContextFull, Engine
from zerogap.runtime.backend import EngineStats, FinishedGroup, Item, RunSetup, Weights
from zerogap.runtime.episode import EpisodeState
from zerogap.runtime.identity import Identity
from zerogap.runtime.transfer import WeightDeliveryError, from_arrays
from zerogap.trajectory import FinishReason, Trajectory

IDLE_WAIT_S = 0.05  # how long a step waits for an environment when the engine has nothing to do


class RolloutWorker:
    """Drives an engine and a host. Not thread-safe: one thread calls everything.

    retries: how often an episode whose environment failed begins again, before it is given up as an error.
    """

    def __init__(self, engine: Engine, host: Host, turns: ChatTurns, retries: int) -> None:
        self.engine = engine
        self._host = host
        self._turns = turns
        self._retries = retries
        self._episodes: dict[tuple[int, int], EpisodeState] = {}
        self._done: dict[int, list[list[Trajectory]]] = {}
        self._asked: set[tuple[int, int]] = set()  # episodes that wait for an environment
        self._busy_s = self._idle_s = self._environment_s = 0.0
        self._retried: Counter[str] = Counter()

    def submit(self, items: Sequence[Item]) -> None:
        for request, example in items:
            self.engine.submit(replace(request, interactive=True))
            self._done[request.group_id] = []
            for index in range(request.n):
                self._episodes[request.group_id, index] = EpisodeState(request, example, index)

    def publish(self, weights: Weights) -> None:
        """Take over a complete set of weights between two steps.

        Raises WeightDeliveryError or WeightMismatch with engine and version unchanged.
        """
        tensors = from_arrays(weights.tensors)
        received = snapshot_digest(tensors)
        if received != weights.digest:
            raise WeightDeliveryError(
                f"weights of version {weights.version} arrived with digest {received[:16]}, the learner sent "
                f"{weights.digest[:16]}; the engine stays at version {self.engine.version}"
            )
        self.engine.load_weights(weights.version, tensors)

    def has_work(self) -> bool:
        return bool(self._asked) or self.engine.has_work()

    def step(self) -> list[FinishedGroup]:
        """What environments answered, then one engine step; the groups whose last episode ended with it."""
        finished = self._take_answers()
        if self.engine.has_work():
            started = time.perf_counter()
            trajectories = self.engine.step()
            self._busy_s += time.perf_counter() - started
            for trajectory in trajectories:
                self._end_turn(trajectory)
        return finished

    def stats(self) -> EngineStats:
        counters = self.engine.stats()
        return EngineStats(
            sampled_tokens=counters["sampled_tokens"],
            preemptions=counters["preemptions"],
            busy_s=self._busy_s,
            idle_s=self._idle_s,
            environment_s=self._environment_s,
            retried=Counter(self._retried),
            kv_pages=counters["pages_total"],
            kv_bytes=counters["cache_bytes"],
            workers=1,
        )

    def close(self) -> None:
        """End the environments and their processes."""
        self._host.close()

    def _end_turn(self, trajectory: Trajectory) -> None:
        """Ask the environment; an episode is reset with its first turn, so that a queued one holds nothing."""
        state = self._episodes[trajectory.group_id, trajectory.sample_index]
        state.end_turn(trajectory)
        if state.turns == 1:
            self._host.reset(state.key, state.example)
            self._asked.add(state.key[:2])
        else:
            self._ask(state)

    def _ask(self, state: EpisodeState) -> None:
        self._host.step(state.key, self._turns.text(state.said))
        self._asked.add(state.key[:2])

    def _take_answers(self) -> list[FinishedGroup]:
        if not self._asked:
            return []
        started = time.perf_counter()
        idle = not self.engine.has_work()
        answers = self._host.results(IDLE_WAIT_S if idle else 0.0)
        if idle:
            self._idle_s += time.perf_counter() - started
        return [group for answer in answers if (group := self._take(answer)) is not None]

    def _take(self, answer: Answer) -> FinishedGroup | None:
        """The group that the answer completes, if it does."""
        self._environment_s += answer.seconds
        state = self._episodes[answer.episode[:2]]
        self._asked.discard(answer.episode[:2])
        if answer.error is not None:
            return self._failed(state, answer.error)
        if answer.step is None:
            self._ask(state)
            return None
        state.take(answer.step)
        try:
            reason = self._end(state, answer.step) or self._go_on(state, answer.step)
        except CannotRender as error:
            return self._failed(state, EpisodeError.of(error))
        return None if reason is None else self._finish(state, reason)

    def _end(self, state: EpisodeState, step: Step) -> FinishReason | None:
        """Why the episode ends with this step; None: it goes on."""
        assert state.turn is not None
        if step.truncated:
            return "turns"
        if step.terminated or state.turn.truncated:  # a turn that a limit cut is the last one
            return state.turn.finish_reason
        return None

    def _go_on(self, state: EpisodeState, step: Step) -> FinishReason | None:
        """Into the next turn; "context" where it does not fit (field case 14: nothing is cut from the left)."""
        assert state.turn is not None
        group_id, index = state.request.group_id, state.sample_index
        following = self._turns.next_turn(state.chat, state.said, step.observation)
        try:
            if following.appended:
                self.engine.extend(group_id, index, following.ids)
            else:
                self.engine.restart(group_id, index, following.ids, state.turn.segment + 1)
                state.ended.append(state.turn)
        except ContextFull:
            return "context"
        state.chat = following.chat
        return None

    def _failed(self, state: EpisodeState, error: EpisodeError) -> FinishedGroup | None:
        """Try again from the first turn, or give the episode up: no reward, in no mean and in no loss. An episode that
        was lost for another's fault is always tried again; the host ends a run whose process dies again and again."""
        state.failures += error.kind != "lost"
        if state.failures <= self._retries:
            self._retried[error.kind] += 1
            self._host.close_episode(state.key)
            state.begin_again()
            self.engine.restart(state.request.group_id, state.sample_index, state.request.prompt_token_ids, 0)
            return None
        assert state.turn is not None
        return self._finish(state, state.turn.finish_reason, error)

    def _finish(
        self, state: EpisodeState, reason: FinishReason, error: EpisodeError | None = None
    ) -> FinishedGroup | None:
        group_id, index = state.request.group_id, state.sample_index
        self._host.close_episode(state.key)
        self.engine.end(group_id, index)
        del self._episodes[group_id, index]
        self._done[group_id].append(state.finished(reason, error, self._turns))
        if len(self._done[group_id]) < state.request.n:
            return None
        episodes = sorted(self._done.pop(group_id), key=lambda segments: segments[0].sample_index)
        return FinishedGroup(group_id, [segment for segments in episodes for segment in segments])


def build_rollout_worker(setup: RunSetup) -> tuple[RolloutWorker, Identity]:
    """Load model, tokenizer and environments of a run; the engine starts with the weights of setup.start_version.

    They are loaded in the learner's dtype, in which later versions are delivered, too; the engine converts both.
    """
    recipe = setup.recipe
    torch.set_num_threads(recipe.rollout.threads)
    arithmetic = recipe.engine_arithmetic
    decoder = load_decoder(setup.model_folder, arithmetic.kernels, recipe.model.dtype)
    tokenizer = load_tokenizer(setup.model_folder)
    config = EngineConfig(
        max_running=recipe.rollout.max_running,
        max_batched_tokens=recipe.rollout.max_batched_tokens,
        page_size=recipe.rollout.page_size,
        kv_tokens=setup.kv_tokens,
        max_context=decoder.config.max_position_embeddings,
        on_update=recipe.rollout.on_update,
        dtype=getattr(torch, arithmetic.dtype),
    )
    engine = EmbeddedEngine(decoder, tokenizer, config, setup.start_version)
    identity = Identity.of(engine.decoder, setup.start_version, decoder.digest())
    host = open_host(recipe.task, in_process=recipe.runtime.driver == "inline")
    return RolloutWorker(engine, host, ChatTurns(tokenizer, tool_schemas(recipe.task)), recipe.task.retries), identity
