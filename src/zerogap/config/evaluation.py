"""`evaluation` of the recipe: measuring versions of the policy while the training goes on."""

from __future__ import annotations

from pydantic import Field, model_validator

from zerogap.config.section import Section
from zerogap.config.task import Task


class Evaluation(Section):
    """Each measures one version of the weights, on an engine of its own; its answers are no rollouts. On Ray a process
    of low priority does it beside the training; one that is due while another runs is skipped, but for the last."""

    every: int = Field(0, ge=0)
    """Updates between evaluations; the last update is evaluated too. 0 = none."""
    task: Task | None = None
    """What is asked; default: the run's task with task.seed + 1 (the lines of a jsonl stay those that are trained)."""
    samples: int = Field(1, ge=1)
    """Answers per prompt; pass@k is estimated for k = 1, 2, 4, ... up to it."""
    limit: int = Field(64, ge=1)
    """First examples of the task that are asked."""
    temperature: float | None = Field(None, ge=0)
    """0 takes the most likely token; default: rollout.temperature."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer, of each turn; default: rollout.max_new_tokens."""

    @model_validator(mode="after")
    def _not_one_answer_again(self) -> Evaluation:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"samples {self.samples} with temperature 0 would repeat one answer; set samples to 1, or raise "
                "temperature"
            )
        return self
