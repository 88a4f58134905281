"""One update per call: advantages, packed forward and backward, AdamW, metrics.

Gradients of all micro-batches are summed in the fp32 masters, in a fixed order, before the one optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerogap.config import Learner as LearnerConfig
from zerogap.learner.advantage import group_advantages
from zerogap.learner.episodes import Episode, grouped_episodes
from zerogap.learner.objectives import policy_loss
from zerogap.learner.objectives.inputs import LEAVES_DENOMINATOR, Mark, TrainedTokens
from zerogap.learner.optimizer import MasterOptimizer
from zerogap.learner.packing import pack
from zerogap.learner.statistics import (
    gradient_weight_statistics,
    mark_statistics,
    ratio_statistics,
    sample_statistics,
    sequence_statistics,
)
from zerogap.model.decoder import Decoder
from zerogap.trajectory import Trajectory


class NonFiniteUpdate(RuntimeError):
    """NaN or infinity in loss or gradient. Weights, moments and version are those before the step."""


@dataclass(frozen=True)
class Batch:
    """The trajectories that are trained in a step, and their N trained tokens as flat tensors, in that order.

    advantages_N, behaviour_N: fp32. lags_N: int64, learner version minus token version. owners_N: int64, index of
    the trajectory. groups: all episodes of the step, trained or not, by group_id.
    """

    groups: list[list[Episode]]
    trajectories: list[Trajectory]
    advantages_N: torch.Tensor
    behaviour_N: torch.Tensor
    lags_N: torch.Tensor
    owners_N: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.owners_N.numel()


@dataclass(frozen=True)
class BackwardOutput:
    """loss of the step; log_ratios_N fp32 and marks bool [N] (see LossOutput) in the order of the batch; denominator:
    tokens that loss and gradient are divided by; rows that went through the model, and how many more would have without
    shared prefixes."""

    loss: float
    log_ratios_N: torch.Tensor
    marks: dict[Mark, torch.Tensor]
    denominator: int
    rows: int
    shared_rows: int


class Learner:
    """version: number of updates made; 0 at start. temperature: the one at which the engine samples."""

    def __init__(self, decoder: Decoder, config: LearnerConfig, total_updates: int, temperature: float) -> None:
        self.decoder = decoder
        self.config = config
        self.temperature = temperature
        self.version = 0
        self.optimizer = MasterOptimizer(decoder, config, total_updates)
        decoder.activation_checkpointing = config.activation_checkpointing

    def step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Train on graded trajectories and return the metrics of the step; version grows by 1.

        A step without a trained token, or whose tokens the objective leaves out one and all, counts, leaves weights and
        moments alone and has loss 0 (update/skipped 1).
        Raises NonFiniteUpdate, or ValueError on a trajectory that this learner cannot train (wrong temperature,
        reward not finite, token of a later version, no prompt).
        """
        started = time.perf_counter()
        batch = self.batch(trajectories)
        self.optimizer.clear_gradients()
        output = self.backward(batch)
        gradient_norm = self.optimizer.gradient_norm()
        if not math.isfinite(gradient_norm):
            raise self._gradient_error(batch)
        metrics = {
            "loss/policy": output.loss,
            "grad_norm": gradient_norm,
            "tokens/trained": float(batch.tokens),
            "update/skipped": float(not output.denominator),
        }
        if output.denominator:
            metrics["learning_rate"] = self.optimizer.apply(self.version)
        if batch.tokens:
            metrics["tokens/learner_rows"] = float(output.rows)
            metrics["tokens/shared_rows"] = float(output.shared_rows)
            metrics["throughput/learner_tokens_per_s"] = output.rows / (time.perf_counter() - started)
        self.version += 1
        return (
            metrics
            | sample_statistics(batch.groups)
            | ratio_statistics(output.log_ratios_N, batch.lags_N)
            | sequence_statistics(output.log_ratios_N, batch.owners_N)
            | gradient_weight_statistics(output.log_ratios_N, batch.advantages_N)
            | mark_statistics(output.marks, batch.owners_N)
        )

    def batch(self, trajectories: Sequence[Trajectory]) -> Batch:
        """Choose what is trained. Advantages come from every graded episode of a group, before anything is left out;
        ungraded episodes, (config.mask_truncated) truncated ones and segments without a sampled token are then not
        trained. Raises ValueError where the segments of an episode do not fit together."""
        for trajectory in trajectories:
            self._check(trajectory)
        groups = grouped_episodes(trajectories)
        trained: list[tuple[Trajectory, float]] = []
        for group in groups:
            advantages = group_advantages([e.reward for e in group], self.config.objective.normalize_std)
            for episode, advantage in zip(group, advantages, strict=True):
                masked = self.config.mask_truncated and episode.truncated
                if advantage is not None and not masked:
                    trained += [(segment, advantage) for segment in episode.segments if segment.num_sampled]
        chosen = [trajectory for trajectory, _ in trained]
        counts = torch.tensor([trajectory.num_sampled for trajectory in chosen], dtype=torch.int64)
        owners_N = torch.repeat_interleave(torch.arange(len(chosen)), counts)
        versions_N = torch.tensor([v for t in chosen for v, m in zip(t.versions, t.loss_mask, strict=True) if m])
        return Batch(
            groups=groups,
            trajectories=chosen,
            advantages_N=torch.tensor([advantage for _, advantage in trained])[owners_N],
            behaviour_N=torch.tensor([lp for t in chosen for lp, m in zip(t.logprobs, t.loss_mask, strict=True) if m]),
            lags_N=self.version - versions_N.to(torch.int64),
            owners_N=owners_N,
        )

    def backward(self, batch: Batch) -> BackwardOutput:
        """Add the gradient of the step's loss to the masters, which must hold none. Raises NonFiniteUpdate naming the
        first bad token."""
        log_ratios_N, terms_N = torch.empty(batch.tokens), torch.empty(batch.tokens)
        marks: dict[Mark, torch.Tensor] = {}
        rows = shared_rows = 0
        for micro_batch in pack(batch.trajectories, self.config.micro_batch_tokens):
            trained_N = micro_batch.trained_N
            tokens = TrainedTokens(
                micro_batch.logprobs(self.decoder, self.temperature),
                batch.behaviour_N[trained_N],
                batch.advantages_N[trained_N],
                batch.owners_N[trained_N],  # a micro-batch holds whole sequences (see pack)
                denominator=batch.tokens,
            )
            output = policy_loss(tokens, self.config.objective)
            finite_N = torch.isfinite(output.terms_N) & torch.isfinite(output.log_ratios_N)
            if not finite_N.all():
                first = int(trained_N[~finite_N].min())
                raise self._loss_error(batch, first, float(output.log_ratios_N[trained_N == first]))
            log_ratios_N[trained_N] = output.log_ratios_N
            terms_N[trained_N] = output.terms_N
            for mark, marked_N in output.marks.items():
                marks.setdefault(mark, torch.zeros(batch.tokens, dtype=torch.bool))[trained_N] = marked_N
            rows += micro_batch.rows.num_rows
            shared_rows += micro_batch.shared_rows
            output.loss.backward()
        loss = float(terms_N.double().sum())
        left_out = sum(int(marked_N.sum()) for mark, marked_N in marks.items() if mark in LEAVES_DENOMINATOR)
        denominator = batch.tokens - left_out
        if left_out and denominator:
            self.optimizer.scale_gradients(batch.tokens / denominator)
            loss *= batch.tokens / denominator
        return BackwardOutput(loss, log_ratios_N, marks, denominator, rows, shared_rows)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """What a resumed run needs: tensors (see MasterOptimizer.state; live, not copies) and a JSON record."""
        return self.optimizer.state(), {"version": self.version}

    def load_state(self, tensors: dict[str, torch.Tensor], record: dict[str, int]) -> None:
        """Continue where `state` was taken: masters, moments, version and thereby the learning rate."""
        self.optimizer.load_state(tensors)
        self.version = record["version"]

    def _check(self, trajectory: Trajectory) -> None:
        if trajectory.sampling.temperature != self.temperature:
            raise ValueError(
                f"{_name(trajectory)} was sampled at temperature {trajectory.sampling.temperature}, the learner scores "
                f"at {self.temperature}; both must be rollout.temperature"
            )
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise ValueError(
                f"{_name(trajectory)} has reward {trajectory.reward}; a sample that could not be graded has reward None"
            )
        newest = max(trajectory.versions, default=0)
        if newest > self.version:
            raise ValueError(
                f"{_name(trajectory)} has a token of version {newest}, but the learner is at version {self.version}; "
                "the engine and the learner count updates differently (was only one of them resumed?)"
            )

    def _loss_error(self, batch: Batch, token: int, log_ratio: float) -> NonFiniteUpdate:
        owner = int(batch.owners_N[token])
        behaviour = float(batch.behaviour_N[token])
        return NonFiniteUpdate(
            f"step {self.version}: the loss is not finite. First bad trajectory: {_name(batch.trajectories[owner])}, "
            f"sampled token {token - int((batch.owners_N < owner).sum())}, lag {int(batch.lags_N[token])}: "
            f"behaviour logprob {behaviour}, log-ratio {log_ratio}, advantage {float(batch.advantages_N[token])}. "
            "The weights were not changed"
        )

    def _gradient_error(self, batch: Batch) -> NonFiniteUpdate:
        """Find the culprit by running each trajectory alone (rare, so its cost does not matter)."""
        culprit = "no single trajectory (only their sum overflows)"
        for owner, trajectory in enumerate(batch.trajectories):
            mine_N = batch.owners_N == owner
            alone = Batch(
                groups=[],
                trajectories=[trajectory],
                advantages_N=batch.advantages_N[mine_N],
                behaviour_N=batch.behaviour_N[mine_N],
                lags_N=batch.lags_N[mine_N],
                owners_N=torch.zeros_like(batch.owners_N[mine_N]),
            )
            self.optimizer.clear_gradients()
            self.backward(alone)
            if not math.isfinite(self.optimizer.gradient_norm()):
                culprit = _name(trajectory)
                break
        self.optimizer.clear_gradients()
        return NonFiniteUpdate(
            f"step {self.version}: the gradient is not finite. First bad trajectory: {culprit}. "
            "The weights were not changed"
        )


def _name(trajectory: Trajectory) -> str:
    t = trajectory
    return f"prompt {t.prompt_id} group {t.group_id} sample {t.sample_index} segment {t.segment}"
