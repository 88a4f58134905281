"""The one record that flows from the engine to the loss: what was sampled, by which weights, how likely.

Tokens in, tokens out: nothing here is decoded and tokenised again. No torch: any process may read these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

# Why the last turn ended; "turns": an environment's limit of turns, which no engine knows of.
FinishReason = Literal["eos", "stop_string", "length", "context", "turns"]
Message = dict[str, str]  # of a chat: {"role", "content"}, both texts
NOT_SAMPLED = -1  # the version of a token that no weights produced (of a prompt, of a tool)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: from softmax(logits / temperature) over the tokenizer's ids, nothing else.

    temperature: > 0 samples; 0 takes the most likely token (evaluation only).
    max_new_tokens: most tokens sampled per turn, >= 1.
    stop: strings that end a turn once its sampled text contains one of them.
    seed: run seed of the counter-based generator (64 bits).
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    @property
    def logprob_temperature(self) -> float:
        """What recorded log-probabilities are at: the temperature, or 1 where the most likely token was taken."""
        return self.temperature or 1.0


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to be sampled `n` times (a group).

    group_id: position in the run's order of admission = order of consumption.
    prompt_id: index of the prompt in its task; with the sample index and the position it keys the sampler.
    min_version: the engine must not sample a token of this group with weights older than this
        (the lag bound as a property of the request; see runtime/admission.py).
    interactive: each sample is handed out at the end of every turn, and then waits for extend, restart or end.
    """

    group_id: int
    prompt_id: int
    prompt_token_ids: tuple[int, ...]
    n: int
    sampling: SamplingParams
    min_version: int = 0
    interactive: bool = False


@dataclass
class Trajectory:
    """One sampled sequence: an episode, or a segment of one. The four token lists have equal length: the prompt, then
    sampled tokens, and between the turns of an episode what was put in (tool output, template).

    loss_mask: 1 where the engine sampled the token, else 0.
    logprobs: natural log, fp32, of the distribution really sampled from; 0.0 where loss_mask is 0.
    versions: weight version that produced the token; NOT_SAMPLED where loss_mask is 0.
    segment: place among the segments of its episode (group_id, sample_index). A chat template that rewrites what came
        before cuts an episode into several, each with a prompt of its own; all of them carry the episode's reward.
    reward is None until graded; `error` holds the grader's or engine's error (then reward stays None).
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt_id: int
    group_id: int
    sample_index: int
    sampling: SamplingParams
    segment: int = 0
    contract: str = ""
    reward: float | None = None
    error: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if not (len(self.loss_mask) == len(self.logprobs) == len(self.versions) == n):
            raise ValueError(
                f"trajectory of prompt {self.prompt_id} sample {self.sample_index}: {n} token ids, "
                f"{len(self.loss_mask)} mask entries, {len(self.logprobs)} logprobs, {len(self.versions)} versions; "
                "the engine must return one of each per token"
            )

    @property
    def num_sampled(self) -> int:
        return sum(self.loss_mask)

    @property
    def sampled_token_ids(self) -> list[int]:
        return [t for t, m in zip(self.token_ids, self.loss_mask, strict=True) if m]

    @property
    def turns(self) -> int:
        """Stretches of sampled tokens."""
        return sum(mask > before for before, mask in pairwise([0, *self.loss_mask]))

    @property
    def truncated(self) -> bool:
        """Ended by a limit, not by the policy."""
        return self.finish_reason in ("length", "context", "turns")

    def to_json(self) -> str:
        # Not asdict: it copies every number of the four lists on its own, at 100 times the cost of writing them.
        return json.dumps({**vars(self), "sampling": vars(self.sampling)}, separators=(",", ":"))

    @staticmethod
    def from_json(line: str) -> Trajectory:
        record = json.loads(line)
        sampling = record.pop("sampling")
        sampling["stop"] = tuple(sampling["stop"])
        return Trajectory(sampling=SamplingParams(**sampling), **record)


def error_class(error: str) -> str:
    """What a Trajectory.error is counted by: an exception's name, or timeout, crashed, lost."""
    return error.partition(":")[0]
