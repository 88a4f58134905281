"""One engine with its grader: groups go in, graded groups come out. The same class runs inline and in a Ray actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from zerogap.env.task import Example, GradeError, Task, make_task
from zerogap.model.chat import load_tokenizer
from zerogap.model.checkpoint import load_decoder
from zerogap.model.decoder import snapshot_digest
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.rollout.engine import Engine
from zerogap.runtime.backend import EngineStats, FinishedGroup, Item, RunSetup, Weights
from zerogap.runtime.identity import Identity
from zerogap.runtime.transfer import WeightDeliveryError, from_arrays
from zerogap.trajectory import Trajectory


class RolloutWorker:
    """Drives an engine. Not thread-safe: one thread calls everything.

    decode: sampled token ids -> the text that is graded.
    """

    def __init__(self, engine: Engine, task: Task, decode: Callable[[list[int]], str]) -> None:
        self.engine = engine
        self._task = task
        self._decode = decode
        self._examples: dict[int, Example] = {}
        self._sizes: dict[int, int] = {}
        self._graded: dict[int, list[Trajectory]] = {}
        self._busy_s = 0.0

    def submit(self, items: Sequence[Item]) -> None:
        for request, example in items:
            self.engine.submit(request)
            self._examples[request.group_id] = example
            self._sizes[request.group_id] = request.n
            self._graded[request.group_id] = []

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
        return self.engine.has_work()

    def step(self) -> list[FinishedGroup]:
        """One engine step; the groups whose last sample it finished, graded."""
        started = time.perf_counter()
        trajectories = self.engine.step()
        self._busy_s += time.perf_counter() - started
        finished = []
        for trajectory in trajectories:
            group_id = trajectory.group_id
            self._grade(trajectory, self._examples[group_id])
            samples = self._graded[group_id]
            samples.append(trajectory)
            if len(samples) == self._sizes[group_id]:
                del self._examples[group_id], self._sizes[group_id], self._graded[group_id]
                finished.append(FinishedGroup(group_id, sorted(samples, key=lambda t: t.sample_index)))
        return finished

    def stats(self) -> EngineStats:
        counters = self.engine.stats()
        return EngineStats(
            sampled_tokens=counters["sampled_tokens"],
            preemptions=counters["preemptions"],
            busy_s=self._busy_s,
            kv_pages=counters["pages_total"],
            kv_bytes=counters["cache_bytes"],
            workers=1,
        )

    def _grade(self, trajectory: Trajectory, example: Example) -> None:
        """Reward, or the grader's error: then reward stays None, so the sample is in no mean and no loss."""
        text = self._decode(trajectory.sampled_token_ids)
        trajectory.info["text"] = text
        if trajectory.error is not None:
            return
        try:
            trajectory.reward = self._task.grade(example, text)
        except GradeError as error:
            trajectory.error = f"{type(error.__cause__ or error).__name__}: {error}"


def build_rollout_worker(setup: RunSetup) -> tuple[RolloutWorker, Identity]:
    """Load model, tokenizer and task of a run; the engine starts with the weights of setup.start_version."""
    recipe = setup.recipe
    torch.set_num_threads(recipe.rollout.threads)
    decoder = load_decoder(setup.model_folder, recipe.model.kernels, recipe.model.dtype)
    tokenizer = load_tokenizer(setup.model_folder)
    config = EngineConfig(
        max_running=recipe.rollout.max_running,
        max_batched_tokens=recipe.rollout.max_batched_tokens,
        page_size=recipe.rollout.page_size,
        kv_tokens=setup.kv_tokens,
        max_context=decoder.config.max_position_embeddings,
        on_update=recipe.rollout.on_update,
    )

    def decode(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    identity = Identity.of(decoder, setup.start_version)
    engine = EmbeddedEngine(decoder, tokenizer, config, setup.start_version)
    return RolloutWorker(engine, make_task(recipe.task), decode), identity
