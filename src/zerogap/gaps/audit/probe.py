"""A small sample of an audit's tokens with everything that the model says of them, for hypotheses about the cause."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from zerogap.gaps.audit.rescore import Rescored
from zerogap.gaps.audit.selection import ROWS, reduced, spread
from zerogap.learner.packing import pack_by_temperature, score

TOKENS, ROLLOUTS = 256, 8  # most of a probe: its logits take 4 bytes * 256 * vocabulary
PAIRED, PROMPTS, ANSWER = 3, 8, 32  # how much is tried behind other prompts


@dataclass(frozen=True)
class Probe:
    """S sampled tokens. logits_SV: fp32, before any temperature. targets_S: int64, the tokens.
    recorded_S: fp32, the engine's log-probabilities. temperatures_S: fp32, as the file has them (greedy: 1)."""

    logits_SV: torch.Tensor
    targets_S: torch.Tensor
    recorded_S: torch.Tensor
    temperatures_S: torch.Tensor


@torch.no_grad()
def take_probe(rescored: Rescored) -> Probe:
    """Tokens of a few rollouts that differ, spread over the file."""
    split, wanted_N = rescored.split, rescored.of_behaviour_N
    owners = spread(split.owners_N[wanted_N & split.unequal_N].unique(), ROLLOUTS)
    indices = spread((wanted_N & torch.isin(split.owners_N, owners)).nonzero()[:, 0], TOKENS)
    trajectories = reduced(split, torch.zeros_like(wanted_N).index_fill(0, indices, True))
    model = rescored.behaviour
    logits_SV = torch.empty(indices.numel(), model.vocab)
    targets_S = torch.empty(indices.numel(), dtype=torch.int64)
    temperatures_S = torch.empty(indices.numel())
    for batch, temperature in pack_by_temperature(trajectories, ROWS):
        hidden_TH = model.hidden(batch.tokens_T, batch.rows)
        logits_SV[batch.trained_N] = model.logits(hidden_TH.index_select(0, batch.rows_N))[:, : model.vocab]
        targets_S[batch.trained_N] = batch.targets_N
        temperatures_S[batch.trained_N] = temperature
    return Probe(logits_SV, targets_S, split.recorded_N[indices], temperatures_S)


def gaps_behind_other_prompts(rescored: Rescored) -> list[tuple[float, float]]:
    """For a few rollouts: mean |recorded - rescored| of the first sampled tokens behind their own prompt, and the least
    of it behind any of the prompts that stand nearest in the file. Empty where all prompts are the same."""
    split = rescored.split
    owners = spread(split.owners_N[rescored.of_behaviour_N & split.unequal_N].unique(), PAIRED)
    prompts = [tuple(t.token_ids[: t.loss_mask.index(1)]) for t in split.trajectories]
    gaps = []
    for owner in owners.tolist():
        trajectory, own = split.trajectories[owner], prompts[owner]
        nearest = sorted(range(len(prompts)), key=lambda other: abs(other - owner))
        room = rescored.behaviour.config.max_position_embeddings - ANSWER
        fitting = (prompts[other] for other in nearest if prompts[other] != own and len(prompts[other]) <= room)
        others = list(dict.fromkeys(fitting))[:PROMPTS]
        end = len(own) + ANSWER
        finite = set(split.positions_N[rescored.of_behaviour_N & (split.owners_N == owner)].tolist())
        asked = [position for position in range(len(own), min(end, len(trajectory.token_ids))) if position in finite]
        if not others or not asked:
            continue
        recorded = torch.tensor([trajectory.logprobs[position] for position in asked])
        mask = [int(position in asked) for position in range(len(own), asked[-1] + 1)]
        tried = [
            replace(
                trajectory,
                token_ids=[*prompt, *trajectory.token_ids[len(own) : asked[-1] + 1]],
                loss_mask=[0] * len(prompt) + mask,
                logprobs=[0.0] * (len(prompt) + len(mask)),
                versions=[0] * (len(prompt) + len(mask)),
            )
            for prompt in (own, *others)
        ]
        found = [float((scores - recorded).abs().mean()) for scores in score(rescored.behaviour, tried, ROWS)]
        gaps.append((found[0], min(found[1:])))
    return gaps
