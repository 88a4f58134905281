"""What a run will need, from its recipe alone: cores, memory, disk, tokens. Estimates, for --dry-run."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerogap.cli.model_size import ASSUMED_PROMPT_TOKENS, ModelSize
from zerogap.config import Recipe

BYTES = {"float32": 4, "bfloat16": 2}
PROCESS_BYTES = 450 << 20  # one Python process with torch and Ray loaded (measured: 0.4 to 0.5 GB)


@dataclass(frozen=True)
class Needs:
    """Counts, bytes for everything that ends in _bytes, and what engines and learner compute with."""

    engine_arithmetic: str
    learner_arithmetic: str
    aligned: bool
    parameters: int
    cores: int
    cores_here: int
    worker_bytes: int
    kv_pages: int
    kv_page_tokens: int
    kv_cache_bytes: int
    learner_bytes: int
    snapshot_bytes: int
    stored_bytes: int
    memory_bytes: int
    memory_here_bytes: int | None
    disk_bytes: int
    sequences_per_update: int
    tokens_per_update: int
    lag_updates: int
    lag_tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For a person: one fact a line, most of them with the key that changes it."""
        here = "" if self.memory_here_bytes is None else f" (this machine: {gigabytes(self.memory_here_bytes)})"
        lines = [
            f"arithmetic           engine {self.engine_arithmetic}, learner {self.learner_arithmetic} "
            f"(aligned: {'yes' if self.aligned else 'no'})",
            f"parameters           {self.parameters:,}",
            f"cores                {self.cores} busy (this machine: {self.cores_here})",
            f"memory               about {gigabytes(self.memory_bytes)}{here}",
            f"  each worker        {gigabytes(self.worker_bytes)}, of it KV cache {gigabytes(self.kv_cache_bytes)}: "
            f"{self.kv_pages:,} pages of {self.kv_page_tokens} tokens",
            f"  learner            {gigabytes(self.learner_bytes)}: weights, masters, Adam, gradients, activations",
            f"  weight versions    {gigabytes(self.snapshot_bytes)}: those that a token within the lag may name",
            f"disk                 about {gigabytes(self.disk_bytes)}, of it weight versions "
            f"{gigabytes(self.stored_bytes)} (audit.weights_memory_mb keeps them in memory)",
            f"sequences per update {self.sequences_per_update:,}",
            f"tokens per update    at most {self.tokens_per_update:,}",
            f"lag                  at most {self.lag_updates} updates, {self.lag_tokens:,} sampled tokens",
        ]
        if self.cores > self.cores_here:
            lines.append("note: more busy threads than cores; lower rollout.workers, rollout.threads, learner.threads")
        if self.memory_here_bytes is not None and self.memory_bytes > self.memory_here_bytes:
            lines.append(
                "note: may not fit; lower rollout.kv_cache_mb, rollout.max_running, learner.micro_batch_tokens or set "
                "learner.activation_checkpointing=true"
            )
        return lines


def estimate_needs(recipe: Recipe) -> Needs:
    size = ModelSize.from_recipe(recipe)
    width = BYTES[recipe.model.dtype]
    rollout, train = recipe.rollout, recipe.train
    weights = size.parameters * width

    turns = recipe.task.turn_limit
    longest = min(size.context, ASSUMED_PROMPT_TOKENS + turns * rollout.max_new_tokens)
    page, kv_pages = size.kv_budget(recipe)
    kv_cache = kv_pages * page
    engine = recipe.engine_arithmetic
    engine_weights = size.parameters * BYTES[engine.dtype]
    derived = {"aligned": engine_weights, "standard": 0, "int8": size.parameters}[engine.kernels]  # panels; int8 copy
    staged = weights if engine.dtype == recipe.model.dtype else weights + engine_weights  # the next version, converted
    worker = PROCESS_BYTES + engine_weights + derived + staged + kv_cache

    compute_copy = 0 if recipe.model.dtype == "float32" else weights  # an fp32 run computes on its masters
    activation_values = size.layers * size.layer_activations_per_token
    if recipe.learner.activation_checkpointing:  # each layer's two inputs, and one layer that is run again
        activation_values = size.layers * 2 * size.hidden_size + size.layer_activations_per_token
    rows = max(recipe.learner.micro_batch_tokens, longest)  # a longer sequence is a micro-batch of its own
    activations = rows * activation_values * width
    learner = PROCESS_BYTES + 16 * size.parameters + compute_copy + activations  # masters, gradients, two moments
    # The newest version and one on its way to the engines; for the audit the older ones within the lag (weight store).
    older = train.lag if recipe.audit.share > 0 else 0
    older_in_memory = min(older, int(recipe.audit.weights_memory_mb * 1e6 // weights))
    evaluation = int(recipe.evaluation.every > 0)  # one more worker, and the version that it measures
    snapshots = (2 + older_in_memory + evaluation) * weights

    checkpoints = (recipe.checkpoint.keep if recipe.checkpoint.every else 0) + 1
    checkpoint = weights + 12 * size.parameters  # Hugging Face folder; masters and two moments for --resume
    stored = (older - older_in_memory) * weights
    disk = checkpoints * checkpoint + weights + stored + int(recipe.logging.trajectories_mb * 1e6)

    sequences = train.groups_per_update * rollout.group_size
    tokens = sequences * min(turns * rollout.max_new_tokens, size.context)
    return Needs(
        engine_arithmetic=str(engine),
        learner_arithmetic=str(recipe.model.arithmetic),
        aligned=recipe.aligned,
        parameters=size.parameters,
        cores=rollout.workers * rollout.threads + recipe.learner.threads,
        cores_here=len(os.sched_getaffinity(0)),
        worker_bytes=worker,
        kv_pages=kv_pages,
        kv_page_tokens=rollout.page_size,
        kv_cache_bytes=kv_cache,
        learner_bytes=learner,
        snapshot_bytes=snapshots,
        stored_bytes=stored,
        memory_bytes=(rollout.workers + evaluation) * worker + learner + snapshots + PROCESS_BYTES,
        memory_here_bytes=machine_memory_bytes(),
        disk_bytes=disk,
        sequences_per_update=sequences,
        tokens_per_update=tokens,
        lag_updates=train.lag,
        lag_tokens=train.lag * tokens,
    )


def machine_memory_bytes() -> int | None:
    """Memory available now (Linux), or None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"
