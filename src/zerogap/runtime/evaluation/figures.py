"""What an evaluation measured: answers by prompt, and the figures over them. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerogap.learner.episodes import Episode, grouped_episodes
from zerogap.runtime.backend import FinishedGroup, RunFailed
from zerogap.trajectory import error_class


@dataclass(frozen=True)
class Answer:
    """One episode. token_ids: what was sampled, over all turns and segments. reward is None where `error` says why."""

    reward: float | None
    error: str | None
    truncated: bool
    turns: int
    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class PromptResult:
    """All answers to one prompt, in order of their sample index, sampled by the weights of one version."""

    prompt_id: int
    version: int
    answers: list[Answer]

    @staticmethod
    def of(group: FinishedGroup, version: int) -> PromptResult:
        """RunFailed when a token names another version: then no single policy was measured (field case 44)."""
        for trajectory in group.trajectories:
            named = {v for v, mask in zip(trajectory.versions, trajectory.loss_mask, strict=True) if mask}
            if named != {version}:
                raise RunFailed(
                    f"an evaluation of version {version} measures one policy, but tokens of prompt "
                    f"{trajectory.prompt_id} sample {trajectory.sample_index} name versions {sorted(named)}"
                )
        (episodes,) = grouped_episodes(group.trajectories)
        return PromptResult(group.trajectories[0].prompt_id, version, [_answer(episode) for episode in episodes])


@dataclass(frozen=True)
class Estimate:
    """A mean over `prompts` prompts, each counting alike; error: its standard error, None with one prompt."""

    value: float
    error: float | None
    prompts: int


@dataclass(frozen=True)
class Figures:
    """answers: SHA-256 of all sampled token ids; equal in a re-run that gave the same answers.

    pass_at: k -> estimate, for each k for which any prompt has k graded answers; k = 1 is the mean reward.
    truncated: share of answers that a limit ended. tokens: sampled in all. tokens_mean, turns: means over answers.
    errors: answers without a reward, by the class of the error; these are in no mean of rewards (never 0).
    """

    version: int
    answers: str
    prompts: int
    samples: int
    pass_at: dict[int, Estimate]
    truncated: float
    tokens: int
    tokens_mean: float
    turns: float
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """reward is pass@1; None where every answer has an error."""
        estimates = {str(k): vars(estimate) for k, estimate in self.pass_at.items()}
        first = self.pass_at.get(1)
        return {
            "version": self.version,
            "prompts": self.prompts,
            "samples": self.samples,
            "reward": None if first is None else first.value,
            "reward_error": None if first is None else first.error,
            "pass@k": estimates,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "tokens_mean": self.tokens_mean,
            "turns_mean": self.turns,
            "errors": self.errors,
            "answers": self.answers,
        }


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected best reward among k of these n, drawn without replacement: an unbiased estimate of the best of k
    answers. For rewards of 0 and 1, c of them 1, it is 1 - C(n - c, k) / C(n, k): pass@k as in Chen et al. 2021,
    "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1. For k = 1 it is the mean.

    ValueError unless 1 <= k <= n.
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers, k >= 1; there are {n}")
    # The i-th smallest is the best of those C(i - 1, k - 1) choices that hold it and k - 1 smaller ones.
    ranked = enumerate(sorted(rewards))
    return math.fsum(reward * (math.comb(below, k - 1) / math.comb(n, k)) for below, reward in ranked if reward)


def default_ks(samples: int) -> list[int]:
    """1, 2, 4, ... up to `samples`."""
    return [1 << power for power in range(samples.bit_length())]


def summarise(results: Sequence[PromptResult], ks: Sequence[int]) -> Figures:
    """The figures over at least one result; all must be of one version."""
    results = sorted(results, key=lambda result: result.prompt_id)
    (version,) = {result.version for result in results}
    answers = [answer for result in results for answer in result.answers]
    errors = Counter(error_class(answer.error) for answer in answers if answer.error is not None)
    graded = [[a.reward for a in result.answers if a.reward is not None] for result in results]
    pass_at = {}
    for k in ks:
        values = [pass_at_k(rewards, k) for rewards in graded if len(rewards) >= k]
        if values:
            pass_at[k] = Estimate(statistics.fmean(values), _standard_error(values), len(values))
    return Figures(
        version=version,
        answers=_digest(results),
        prompts=len(results),
        samples=len(results[0].answers),
        pass_at=pass_at,
        truncated=statistics.fmean(answer.truncated for answer in answers),
        tokens=sum(len(answer.token_ids) for answer in answers),
        tokens_mean=statistics.fmean(len(answer.token_ids) for answer in answers),
        turns=statistics.fmean(answer.turns for answer in answers),
        errors=dict(sorted(errors.items())),
    )


def _answer(episode: Episode) -> Answer:
    return Answer(
        reward=episode.reward,
        error=episode.error,
        truncated=episode.truncated,
        turns=episode.turns,
        token_ids=[token for segment in episode.segments for token in segment.sampled_token_ids],
        text="".join(segment.info["text"] for segment in episode.segments),
    )


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _digest(results: Sequence[PromptResult]) -> str:
    ids = [[result.prompt_id, [answer.token_ids for answer in result.answers]] for result in results]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()
