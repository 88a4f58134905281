"""Small runs with one thing really broken, as an auditor finds them: trajectories, and the weights by version.

Engine, learner and updates are the real ones (at least two optimizer steps before an audited token is sampled, weights
swapped in the middle of trajectories). `play(FAULTS[name])` runs one; `play(Fault())` is the run without a fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tests.helpers import tiny_decoder
from zerogap.config import Learner as LearnerConfig
from zerogap.kernels import Weight
from zerogap.kernels.step import EagerStep
from zerogap.learner.learner import Learner
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

Snapshot = dict[str, torch.Tensor]

GROUPS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 3, 4, 8, 12
STEPS_BEFORE_SWAP = 4  # tokens of each trajectory on the weights before an update; the rest comes from those after it
EOS = (1, 2, 3)


@dataclass(frozen=True)
class Fault:
    """What differs from a healthy run.

    break_engine: done once to the engine. deliver: the tensors that it gets as weights `version`, from all snapshots.
    record: what is written down of a sampled batch.
    """

    break_engine: Callable[[EmbeddedEngine], None] = lambda engine: None
    deliver: Callable[[int, dict[int, Snapshot]], Snapshot] = lambda version, snapshots: snapshots[version]
    record: Callable[[list[Trajectory]], list[Trajectory]] = lambda trajectories: trajectories
    temperature: float = 1.0
    learning_rate: float = 1e-2
    engine_dtype: torch.dtype = torch.float32
    engine_kernels: str = "aligned"


@dataclass(frozen=True)
class Scene:
    """A batch that the learner (its decoder) is about to train at `version`, and every version of its weights."""

    decoder: Decoder
    snapshots: dict[int, Snapshot]
    version: int
    trajectories: list[Trajectory]


def play(fault: Fault, lag: int = 2, updates: int = 4) -> Scene:
    """`updates` real updates, each on the oldest of `lag` waiting batches; then the next batch in line.

    Its tokens are `lag` and `lag` - 1 updates old, so lag >= 1; with updates >= 4 two updates went before them.
    """
    decoder = tiny_decoder(trainable=True, eos=EOS)
    config = LearnerConfig.model_validate({"learning_rate": fault.learning_rate})
    learner = Learner(decoder, config, updates, fault.temperature)
    config_of_engine = EngineConfig(max_running=GROUPS * SAMPLES, page_size=8)
    engine_model = tiny_decoder(fault.engine_kernels, fault.engine_dtype, eos=EOS)
    engine = EmbeddedEngine(engine_model, None, config_of_engine)
    fault.break_engine(engine)
    snapshots = {0: decoder.snapshot()}
    waiting: deque[list[Trajectory]] = deque()
    for batch in range(updates + lag):
        for request in _requests(batch, fault.temperature):
            engine.submit(request)
        done = [trajectory for _ in range(STEPS_BEFORE_SWAP) for trajectory in engine.step()]
        if len(waiting) == lag:
            learner.step(waiting.popleft())
            snapshots[learner.version] = decoder.snapshot()
            delivered = fault.deliver(learner.version, snapshots)
            engine.load_weights(learner.version, {n: t.to(fault.engine_dtype) for n, t in delivered.items()})
        while engine.has_work():
            done += engine.step()
        for trajectory in done:
            trajectory.reward = sum(token % 2 for token in trajectory.sampled_token_ids) / trajectory.num_sampled
        waiting.append(fault.record(sorted(done, key=lambda t: (t.group_id, t.sample_index))))
    return Scene(decoder, snapshots, learner.version, waiting.popleft())


def undelivered(updates: int) -> Fault:
    """Field cases 20, R2 and W3: the engine's weights are `updates` older than it says."""
    return Fault(deliver=lambda version, snapshots: snapshots[max(0, version - updates)])


def _requests(batch: int, temperature: float) -> list[GroupRequest]:
    sampling = SamplingParams(NEW_TOKENS, temperature, seed=5)
    prompts = torch.randint(4, 61, (GROUPS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(batch)).tolist()
    first = batch * GROUPS
    return [GroupRequest(first + i, first + i, tuple(prompt), SAMPLES, sampling) for i, prompt in enumerate(prompts)]


def _keep_cache(engine: EmbeddedEngine) -> None:
    """Field case 16: keys and values outlive the weights that made them, and the guard against that is deceived."""
    scheduler = engine._scheduler

    def keep() -> None:
        assert engine._next is not None
        for sequence in (*scheduler.prefixes, *scheduler.running):
            sequence.kv_version = engine._next[0]

    scheduler.drop_all = keep  # type: ignore[method-assign]


def _untie_head(engine: EmbeddedEngine) -> None:
    """Field case 17: the receiver cloned the tied tensor, and only the embedding is updated."""
    engine.decoder.head = Weight(engine.decoder.weights["embed"].data.clone())


def _half(version: int, snapshots: dict[int, Snapshot]) -> Snapshot:
    """Field case 21: the second half of the tensors is still that of the version before."""
    new, old = snapshots[version], snapshots[version - 1]
    arrived = list(new)[: len(new) // 2]
    return {name: new[name] if name in arrived else old[name] for name in new}


def _narrow_all(version: int, snapshots: dict[int, Snapshot]) -> Snapshot:
    return {name: tensor.bfloat16().float() for name, tensor in snapshots[version].items()}


def _narrow(version: int, snapshots: dict[int, Snapshot]) -> Snapshot:
    """Field case 18: one tensor went over the wire as bf16."""
    new = snapshots[version]
    return new | {"layers.1.down": new["layers.1.down"].bfloat16().float()}


Draw = tuple[torch.Tensor, torch.Tensor]  # tokens [B], logprobs [B]


def _sampler(draw: Callable[[Decoder, torch.Tensor, torch.Tensor, float], Draw]) -> Callable[[EmbeddedEngine], None]:
    """An engine that draws with draw(decoder, logits_BV, keys_B4, temperature), one operation at a time."""

    class Model:
        def __init__(self, decoder: Decoder) -> None:
            self.decoder = self.kernels = decoder
            self.hidden, self.logits = decoder.hidden, decoder.logits

        def sample(self, logits_BV: torch.Tensor, keys_B4: torch.Tensor, temperature: float) -> Draw:
            return draw(self.decoder, logits_BV, keys_B4, temperature)

    def break_engine(engine: EmbeddedEngine) -> None:
        runner = engine._runner
        runner._step = lambda version: EagerStep(Model(engine.decoder), runner._cache, runner.page_size)  # type: ignore[method-assign]

    return break_engine


def _draw_tempered_record_untempered(
    decoder: Decoder, logits_BV: torch.Tensor, keys_B4: torch.Tensor, t: float
) -> Draw:
    """Field case 1: the token is drawn at the temperature, its logprob is that of temperature 1."""
    tokens_B, _ = decoder.sample(logits_BV, keys_B4, t)
    return tokens_B, logits_BV.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1)


def _draw_from_nucleus(decoder: Decoder, logits_BV: torch.Tensor, keys_B4: torch.Tensor, t: float) -> Draw:
    """Field case 2: the smallest set that holds 0.9 of the probability, renormalised."""
    sorted_BV, order_BV = (logits_BV / t).softmax(-1).sort(-1, descending=True)
    cut_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(1, order_BV, sorted_BV.cumsum(-1) - sorted_BV > 0.9)
    return decoder.sample(logits_BV.masked_fill(cut_BV, -torch.inf), keys_B4, t)


def _draw_from_rounded_logits(decoder: Decoder, logits_BV: torch.Tensor, keys_B4: torch.Tensor, t: float) -> Draw:
    """The head's output is bf16, as in an engine that keeps activations in it."""
    return decoder.sample(logits_BV.bfloat16().float(), keys_B4, t)


def _pair_with_next_prompt(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Each answer behind the prompt of the next group of its batch."""
    prompts = [t.token_ids[:PROMPT_TOKENS] for t in trajectories]
    shifted = prompts[SAMPLES:] + prompts[:SAMPLES]
    return [
        replace(t, token_ids=prompt + t.token_ids[PROMPT_TOKENS:])
        for t, prompt in zip(trajectories, shifted, strict=True)
    ]


def _zero_eos(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Field case 7: a sampled end mark is recorded with probability 1."""
    return [replace(t, logprobs=[*t.logprobs[:-1], 0.0]) if t.finish_reason == "eos" else t for t in trajectories]


FAULTS = {
    "undelivered weights": undelivered(2),
    "stale prefix cache": Fault(break_engine=_keep_cache),
    "tied head not updated": Fault(break_engine=_untie_head),
    "half of the tensors delivered": Fault(deliver=_half),
    "one tensor narrowed to bf16": Fault(deliver=_narrow),
    "temperature 0.6 on one side": Fault(_sampler(_draw_tempered_record_untempered), temperature=0.6),
    "top-p 0.9 on one side": Fault(_sampler(_draw_from_nucleus)),
    # So small a rate changes no bit of a weight: LAG must be exactly 0.
    "rows paired with another prompt": Fault(record=_pair_with_next_prompt, learning_rate=1e-30),
    "EOS logprob replaced by 0": Fault(record=_zero_eos),
    "weights narrowed to bf16": Fault(deliver=_narrow_all),
    "engine in bf16": Fault(engine_dtype=torch.bfloat16),
    "logits rounded to bf16": Fault(_sampler(_draw_from_rounded_logits)),
}
