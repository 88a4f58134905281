"""The sampled tokens of an audit, scored again by the learner's packed forward on the weights that sampled them
(KERNEL) and, where there is a second model, on those that are trained (LAG)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from zerogap.gaps.audit.schema import Rollout, RolloutFileError
from zerogap.gaps.split import Split, only_version, split_tokens
from zerogap.model.checkpoint import load_decoder
from zerogap.model.decoder import Decoder
from zerogap.trajectory import NOT_SAMPLED, Trajectory

CHUNK = 32  # rollouts between two reports of progress
BEHAVIOUR, LEARNER = 0, 1  # keys of the weights where a file's own version numbers are not used
UNKNOWN = -1  # the version that trains a token, where nothing says it


@dataclass(frozen=True)
class Models:
    """Folders of weights. behaviour: those that sampled, by version; or under the only key None, for every version.
    learner: those that are trained, None where LAG is not asked for. learner_version: k, None where it is not known.
    each_its_own: k is what each rollout says (Rollout.trained), and LAG is measured where `behaviour` has it."""

    behaviour: Mapping[int | None, Path]
    learner: Path | None = None
    learner_version: int | None = None
    each_its_own: bool = False


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
    """rollouts: as they were read. split: their sampled tokens, versions as in the file, UNKNOWN where nothing says k.
    lag_asked: there was more than the weights that sampled. lagged_N: bool, LAG was measured (else it is 0 in the
    split). behaviour: the model on the weights that sampled the tokens of behaviour_version (None: all tokens)."""

    rollouts: Sequence[Rollout]
    split: Split
    lag_asked: bool
    lagged_N: torch.Tensor
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
    plan = _plan(rollouts, models)
    decoder = load_decoder(next(iter(plan.folders.values())), kernels, dtype)
    _check(rollouts, decoder, {*models.behaviour, models.learner_version} if plan.by_number else None)
    weights = FolderWeights(plan.folders, kernels, dtype)
    trajectories = [r.trajectory if plan.by_number else _relabelled(r.trajectory) for r in rollouts]
    # Neighbours use the same weights, so that each version is loaded about once.
    order = sorted(range(len(rollouts)), key=lambda i: (plan.keys[i], max(trajectories[i].versions)))
    parts: list[tuple[torch.Tensor, Split]] = []
    for start in range(0, len(order), CHUNK):
        chunk = order[start : start + CHUNK]
        for key, group in groupby(chunk, lambda i: plan.keys[i]):
            chosen = list(group)
            members = [trajectories[index] for index in chosen]
            asked = {key: members}
            if key == UNKNOWN:  # each version is its own k, so that no row is run twice
                versions = sorted({version for t in members for version in t.versions} - {NOT_SAMPLED})
                asked = {version: [only_version(t, version) for t in members] for version in versions}
            for version, part in asked.items():
                parts.append((torch.tensor(chosen), split_tokens(decoder, weights, part, version, token_budget)))
        progress(len(chunk))
    split = _joined(rollouts, parts, plan.trained)
    most = int(split.versions_N.mode().values) if plan.by_number else BEHAVIOUR
    return Rescored(
        rollouts,
        split,
        models.each_its_own or models.learner is not None,
        (torch.tensor(plan.keys) != UNKNOWN)[split.owners_N],
        decoder.view(dict(weights[most])),
        most if plan.by_number else None,
    )


@dataclass(frozen=True)
class _Plan:
    """folders: by version, or by BEHAVIOUR and LEARNER where the file's numbers are not used (by_number is False).
    keys: of each rollout, whose weights give log pi_k; UNKNOWN: LAG is not measured. trained: k, where it is known."""

    folders: dict[int, Path]
    by_number: bool
    keys: list[int]
    trained: list[int]


def _plan(rollouts: Sequence[Rollout], models: Models) -> _Plan:
    by_number = None not in models.behaviour
    folders = {BEHAVIOUR if number is None else number: folder for number, folder in models.behaviour.items()}
    keys = trained = [UNKNOWN] * len(rollouts)
    if models.each_its_own:
        said = (UNKNOWN if rollout.trained is None else rollout.trained for rollout in rollouts)
        keys = trained = [version if version in folders else UNKNOWN for version in said]
    elif models.learner is not None:
        version = models.learner_version
        key = LEARNER if not by_number else max(folders) + 1 if version is None else version
        folders.setdefault(key, models.learner)
        keys = [key] * len(rollouts)
        trained = [UNKNOWN if version is None else version] * len(rollouts)
    return _Plan(folders, by_number, keys, trained)


def _joined(rollouts: Sequence[Rollout], parts: list[tuple[torch.Tensor, Split]], trained: list[int]) -> Split:
    """One split over all rollouts in file order, with the versions of the file. trained: k of each rollout."""
    owners_N = torch.cat([chosen[split.owners_N] for chosen, split in parts])
    positions_N = torch.cat([split.positions_N for _, split in parts])
    order_N = (owners_N * (int(positions_N.max()) + 1) + positions_N).argsort()
    owners_N, positions_N = owners_N[order_N], positions_N[order_N]
    trajectories = [rollout.trajectory for rollout in rollouts]
    places = zip(owners_N.tolist(), positions_N.tolist(), strict=True)
    return Split(
        trajectories,
        torch.tensor(trained)[owners_N],
        owners_N,
        positions_N,
        torch.tensor([trajectories[owner].versions[position] for owner, position in places]),
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
