"""`rollout` of the recipe: engines and sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from zerogap.config.section import Section

LOWEST_TEMPERATURE = 1e-3


class Rollout(Section):
    workers: int = Field(1, ge=1)
    """Engines, each in its own process. A token depends on weights, prefix and seed, not on its engine."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rollout worker. Bits do not depend on it."""
    group_size: int = Field(8, ge=2)
    """Samples per prompt; the advantage is the reward minus the mean of its group."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest answer; a longer one is cut, graded as it stands, and counted as truncated."""
    temperature: float = Field(1.0)
    """At least 0.001. Engine and learner both use softmax(logits / temperature)."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end an answer; the text up to and including them is kept and trained."""
    max_running: int = Field(64, ge=1)
    """Sequences decoded together."""
    max_batched_tokens: int = Field(1024, ge=1)
    """Rows per engine step; longer prompts are prefilled in chunks."""
    page_size: Literal[8, 16, 32, 64] = 32
    """Positions per page of the KV cache. Bits do not depend on it."""
    kv_cache_mb: float | None = Field(None, gt=0)
    """Memory of each worker's KV cache in megabytes (10^6 bytes), cut into whole pages; default: room for max_running
    sequences as long as the task suggests. Too little costs time, not bits: samples wait or are preempted."""
    on_update: Literal["recompute", "finish"] = "recompute"
    """recompute: running requests drop their KV and go on with the new weights. finish: they end on the old."""
    kernels: Literal["aligned", "standard", "int8"] | None = None
    """Kernel family of the engines alone; default: model.kernels. int8: standard with the weights of the layers rounded
    to 8 bits. Anything but aligned in engine and learner, at one dtype, makes the run `aligned: no`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of weights and activations in the engines alone; default: model.dtype. Weights are sent in model.dtype, and
    converted by each engine."""

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float) -> float:
        if value <= 0:
            raise ValueError(f"temperature {value} must be > 0 in training (greedy is for eval)")
        if value < LOWEST_TEMPERATURE:
            raise ValueError(
                f"temperature {value} must be at least {LOWEST_TEMPERATURE:g}: below, sampling is greedy in effect, "
                "and gradients and rounding errors are multiplied by 1 / temperature (greedy is for eval)"
            )
        return value

    @field_validator("stop")
    @classmethod
    def _stop(cls, values: list[str]) -> list[str]:
        if "" in values:
            raise ValueError("an empty stop string would end every answer at once; remove it")
        return values
