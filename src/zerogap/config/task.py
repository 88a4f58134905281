"""`task` and `warm_start` of the recipe: what is asked and graded, and the worked solutions before it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from zerogap.config.section import Section
from zerogap.config.tools import MOST_CALLS, Tools

DEFAULT_TURNS = 16


class Task(Section):
    """Exactly one of name (a reasoning-gym dataset), jsonl (a file with `question` and `answer`), file (any Python
    file that makes an environment) and verifiers (a taskset of that package)."""

    name: str | None = None
    """A reasoning-gym dataset with its own scorer (chain_sum, gcd, ...)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset (min_terms, max_digits, ...), of the file's `examples` and
    `Environment`, or of the taskset; not `size` or `seed`. Write 1.0e-3 here: YAML reads 1e-3 as text."""
    jsonl: str | None = None
    """A file with one {"question", "answer"} per line, graded by math-verify."""
    file: str | None = None
    """A Python file with a function `examples`, and `grade` or a class `Environment` (docs/environments.md)."""
    verifiers: str | None = None
    """A taskset of the verifiers package by its id, a module that can be imported, scored in one turn. Needs `pip
    install zerogap[verifiers]`."""
    size: int = Field(10_000, ge=1)
    """reasoning-gym: number of distinct examples; then they repeat in a new order. A file's `examples` gets it where it
    has a parameter of that name. A taskset without end is cut there."""
    seed: int = 0
    """Seed of the generated examples, and of nothing else. A file's `examples` gets it where it has a parameter of that
    name."""
    system_prompt: str | None = None
    """A system message before each question."""
    instruction: str | None = None
    """Text added after each question (how to answer)."""
    answer_pattern: str | None = None
    """Regular expression whose first group (last match) is graded; default: the whole sampled text. Not with file,
    which reads the answer itself."""
    max_turns: int | None = Field(None, ge=1)
    """Most turns of an episode with tools or of a file's `Environment`; one that would go on is truncated there.
    Default: 16."""
    tools: Tools | None = None
    call_timeout_s: float = Field(30.0, gt=0)
    """Longest call of an environment or grader in seconds; then it is stopped, also when it computes without end."""
    retries: int = Field(1, ge=0)
    """How often an episode whose environment failed begins again before it is given up as an error."""
    max_error_share: float = Field(0.1, ge=0, le=1)
    """The run ends when more than this share of an update's episodes has an error instead of a reward."""

    @model_validator(mode="after")
    def _one_source(self) -> Task:
        sources = ("name", "jsonl", "file", "verifiers")
        given = [key for key in sources if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of name (a reasoning-gym dataset), jsonl (a file of questions and answers), file "
                f"(a Python file) and verifiers (a taskset); given: {', '.join(given) or 'none'}"
            )
        if self.jsonl is not None and self.params:
            raise ValueError("params belong to name (reasoning-gym), file or verifiers, not to jsonl")
        if self.file is None and self.tools is None and self.max_turns is not None:
            raise ValueError(f"max_turns {self.max_turns}: an episode of {given[0]} has one turn; remove the key")
        if self.tools is not None and self.call_timeout_s <= MOST_CALLS * self.tools.seconds:
            raise ValueError(
                f"call_timeout_s {self.call_timeout_s:g} must be above {MOST_CALLS} calls of tools.seconds "
                f"{self.tools.seconds:g}, the most of one turn; raise the one or lower the other"
            )
        if given[0] in ("file", "verifiers") and self.answer_pattern is not None:
            raise ValueError(f"answer_pattern belongs to name or jsonl; {given[0]} reads the answer itself")
        if self.verifiers is not None and self.tools is not None:
            raise ValueError("tools belong to name, jsonl or file; a verifiers taskset is scored in one turn")
        return self

    @property
    def turn_limit(self) -> int:
        """Most turns of an episode."""
        if self.file is None and self.tools is None:
            return 1
        return DEFAULT_TURNS if self.max_turns is None else self.max_turns


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
