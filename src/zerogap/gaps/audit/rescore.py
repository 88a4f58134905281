"""The sampled tokens of an audit, scored again by the learner's packed forward on the weights that sampled them
(KERNEL) and, where there is a second model, on those that are trained (LAG)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zerogap.gaps.audit.schema import Rollout, RolloutFileError
from zerogap.gaps.split import Split, only_version, split_tokens
from zerogap.model.checkpoint import load_decoder
from zerogap.model.decoder import Decoder
from zerogap.trajectory import NOT_SAMPLED, Trajectory

CHUNK = 32  # rollouts between two reports of progress
BEHAVIOUR, LEARNER = 0, 1  # keys of the weights where a file's own version numbers are not used


@dataclass(frozen=True)
class Models:
    """Folders of weights. behaviour: those that sampled, by version; or under the only key None, for every version.
    learner: those that are trained, None where LAG is not asked for. learner_version: k, None where it is not known."""

    behaviour: Mapping[int | None, Path]
    learner: Path | None = None
    learner_version: int | None = None


class FolderWeights:
    """Weights by version out of model folders, in the learner's form; the latest two stay in memory."""

    def __init__(self, folders: Mapping[int, Path], kernels: str, dtype: str) -> None:
        self._folders, self._kernels, self._dtype = folders, kernels, dtype
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}

    def __getitem__(self, version: int) -> Mapping[str, torch.Tensor]:
        tensors = self._kept.pop(version, None)
        if tensors is None:
            decoder = load_decoder(self._folders[version], self._kernels, self._dtype)
            tensors = {name: weight.data for name, weight in decoder.weights.items()}
        self._kept = {**dict(list(self._kept.items())[-1:]), version: tensors}
        return tensors


@dataclass(frozen=True)
class Rescored:
    """rollouts: as they were read. split: their sampled tokens, versions as in the file; its LAG is 0 where it was not
    measured. lag_measured: there was a second model. ages_known: its version, too. behaviour: the model on the weights
    that sampled the tokens of behaviour_version (None: all tokens)."""

    rollouts: Sequence[Rollout]
    split: Split
    lag_measured: bool
    ages_known: bool
    behaviour: Decoder
    behaviour_version: int | None

    @property
    def finite_N(self) -> torch.Tensor:
        """bool: the recorded log-probability is a finite number."""
        return self.split.recorded_N.isfinite()

    @property
    def of_behaviour_N(self) -> torch.Tensor:
        """bool: finite, and sampled with the weights of `behaviour`."""
        if self.behaviour_version is None:
            return self.finite_N
        return self.finite_N & (self.split.versions_N == self.behaviour_version)


def rescore(
    rollouts: Sequence[Rollout],
    models: Models,
    kernels: str,
    dtype: str,
    token_budget: int,
    progress: Callable[[int], None],
) -> Rescored:
    """Score every sampled token, at the temperature of its rollout.

    token_budget: rows per forward (memory, not bits). progress: told how many rollouts are done since the last call.
    Raises RolloutFileError when a token, a length or a version of the file does not fit the models.
    """
    by_number = None not in models.behaviour
    folders = {number: folder for number, folder in models.behaviour.items() if number is not None}
    if not by_number:
        folders = {BEHAVIOUR: models.behaviour[None]}
    key = None
    if models.learner is not None:
        key = (max(folders) + 1 if models.learner_version is None else models.learner_version) if by_number else LEARNER
        folders.setdefault(key, models.learner)
    known = {*models.behaviour, models.learner_version} if by_number else None
    decoder = load_decoder(next(iter(folders.values())), kernels, dtype)
    _check(rollouts, decoder, known)
    weights = FolderWeights(folders, kernels, dtype)
    trajectories = [r.trajectory if by_number else _relabelled(r.trajectory) for r in rollouts]
    order = sorted(range(len(rollouts)), key=lambda i: max(trajectories[i].versions))  # so that weights load once
    parts: list[tuple[torch.Tensor, Split]] = []
    for start in range(0, len(order), CHUNK):
        chosen = order[start : start + CHUNK]
        members = [trajectories[i] for i in chosen]
        for version in [key] if key is not None else sorted({v for t in members for v in t.versions} - {NOT_SAMPLED}):
            asked = members if key is not None else [only_version(t, version) for t in members]
            parts.append((torch.tensor(chosen), split_tokens(decoder, weights, asked, version, token_budget)))
        progress(len(chosen))
    split = _joined(rollouts, parts, models.learner_version)
    most = int(split.versions_N.mode().values) if by_number else BEHAVIOUR
    return Rescored(
        rollouts,
        split,
        models.learner is not None,
        models.learner is not None and models.learner_version is not None,
        decoder.view(dict(weights[most])),
        most if by_number else None,
    )


def _joined(rollouts: Sequence[Rollout], parts: list[tuple[torch.Tensor, Split]], version: int | None) -> Split:
    """One split over all rollouts in file order, with the versions of the file."""
    owners_N = torch.cat([chosen[split.owners_N] for chosen, split in parts])
    positions_N = torch.cat([split.positions_N for _, split in parts])
    order_N = (owners_N * (int(positions_N.max()) + 1) + positions_N).argsort()
    owners_N, positions_N = owners_N[order_N], positions_N[order_N]
    trajectories = [rollout.trajectory for rollout in rollouts]
    places = zip(owners_N.tolist(), positions_N.tolist(), strict=True)
    versions_N = torch.tensor([trajectories[owner].versions[position] for owner, position in places])
    return Split(
        trajectories,
        int(versions_N.max()) if version is None else version,
        owners_N,
        positions_N,
        versions_N,
        torch.cat([split.recorded_N for _, split in parts])[order_N],
        torch.cat([split.own_N for _, split in parts])[order_N],
        torch.cat([split.current_N for _, split in parts])[order_N],
    )


def _check(rollouts: Sequence[Rollout], decoder: Decoder, versions: set[int | None] | None) -> None:
    for rollout in rollouts:
        ids, limit = rollout.trajectory.token_ids, decoder.config.max_position_embeddings
        wrong = next((position for position, token in enumerate(ids) if token >= decoder.vocab), None)
        if wrong is not None:
            raise RolloutFileError(
                f"line {rollout.line}: token id {ids[wrong]} at position {wrong}, but the model has "
                f"{decoder.vocab} ids; these rollouts are of another model"
            )
        if len(ids) > limit:
            raise RolloutFileError(f"line {rollout.line}: {len(ids)} tokens, but the model's context is {limit}")
        missing = set() if versions is None else set(rollout.trajectory.versions) - versions - {NOT_SAMPLED}
        if missing:
            raise RolloutFileError(
                f"line {rollout.line}: tokens of weight version {min(missing)}, which no folder was given for; "
                f"add --behaviour-model {min(missing)}=DIR"
            )


def _relabelled(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, versions=[BEHAVIOUR if m else NOT_SAMPLED for m in trajectory.loss_mask])
