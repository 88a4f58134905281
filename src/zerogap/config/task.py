"""`task` and `warm_start` of the recipe: what is asked and graded, and the worked solutions before it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from zerogap.config.section import Section


class Task(Section):
    """Exactly one of name (a reasoning-gym dataset) and jsonl (a file with `question` and `answer`)."""

    name: str | None = None
    """A reasoning-gym dataset with its own scorer (chain_sum, gcd, ...)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset (min_terms, max_digits, ...), not `size` or `seed`.
    Write 1.0e-3 here: YAML reads 1e-3 as text."""
    jsonl: str | None = None
    """A file with one {"question", "answer"} per line, graded by math-verify."""
    size: int = Field(10_000, ge=1)
    """reasoning-gym only: number of distinct examples; then they repeat in a new order."""
    seed: int = 0
    """Seed of the generated examples, and of nothing else."""
    system_prompt: str | None = None
    """A system message before each question."""
    instruction: str | None = None
    """Text added after each question (how to answer)."""
    answer_pattern: str | None = None
    """Regular expression whose first group (last match) is graded; default: the whole sampled text."""

    call_timeout_s: float = Field(30.0, gt=0)
    """Longest call of an environment or grader in seconds; then it is stopped, also when it computes without end."""
    retries: int = Field(1, ge=0)
    """How often an episode whose environment failed begins again before it is given up as an error."""
    max_error_share: float = Field(0.1, ge=0, le=1)
    """The run ends when more than this share of an update's episodes has an error instead of a reward."""

    @model_validator(mode="after")
    def _one_source(self) -> Task:
        if (self.name is None) == (self.jsonl is None):
            raise ValueError("give exactly one of name (a reasoning-gym dataset) and jsonl (a file)")
        if self.jsonl is not None and self.params:
            raise ValueError("params belong to name (reasoning-gym), not to jsonl")
        return self


class WarmStart(Section):
    """Supervised steps on worked solutions before the first rollout."""

    steps: int = Field(200, ge=1)
    """Supervised updates."""
    examples_per_step: int = Field(64, ge=1)
    """Worked solutions per update."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak rate of the warm start; the optimizer starts anew for the run itself."""
    warmup_steps: int = Field(20, ge=0)
    """Updates over which the rate rises linearly to its peak."""
