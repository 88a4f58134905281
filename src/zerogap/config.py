"""The typed recipe: every key of a run, with what follows from its value. Importable without torch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from zerogap.config_objective import ObjectiveConfig, ReinforceZero
from zerogap.config_section import Section

ADAPTER_WORDS = ("lora", "adapter", "peft")
REFUSED_SAMPLING_KEYS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LOWEST_TEMPERATURE = 1e-3


class RecipeError(ValueError):
    """A recipe that cannot run; the message names each key, its value and the fix."""


class CreateModel(Section):
    """A small decoder with random weights and a tokenizer built on the task's text."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream: num_heads times an even head size."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the MLP."""
    num_layers: int = Field(4, ge=1)
    """Decoder blocks."""
    num_heads: int = Field(4, ge=1)
    """Query heads per layer."""
    num_kv_heads: int = Field(2, ge=1)
    """Key-value heads; fewer than num_heads makes the KV cache smaller (GQA). Must divide num_heads."""
    max_position_embeddings: int = Field(512, ge=8)
    """Context: longest prompt plus answer. A longer prompt is skipped and counted."""
    tokenizer: Literal["characters", "bpe"] = "characters"
    """characters: one token per character of the task's text. bpe: byte-level BPE trained on it."""
    vocab_size: int = Field(1024, ge=300)
    """bpe only: size of the vocabulary to train."""

    @model_validator(mode="after")
    def _heads(self) -> CreateModel:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_heads {self.num_heads} times an even head size"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class RopeScaling(Section):
    """Rotary positions stretched for a longer context, under the names of a Hugging Face config.json."""

    rope_type: Literal["linear", "yarn", "llama3"]
    """linear: all frequencies divided by factor. yarn, llama3: only those that turn seldom in the original context."""
    factor: float = Field(ge=1)
    """Longest context over the original one."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """yarn, llama3: the context that the model was trained with; default: the checkpoint's own."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: what cos and sin are multiplied by; default: 0.1 ln(factor) + 1."""
    beta_fast: float | None = Field(None, gt=0)
    """yarn: pairs that turn more often in the original context are kept; default: 32."""
    beta_slow: float | None = Field(None, gt=0)
    """yarn: pairs that turn less often are stretched; default: 1."""
    low_freq_factor: float | None = Field(None, gt=0)
    """llama3, required: pairs that turn less often in the original context are stretched."""
    high_freq_factor: float | None = Field(None, gt=0)
    """llama3, required: pairs that turn more often are kept."""

    @model_validator(mode="after")
    def _keys_of_the_type(self) -> RopeScaling:
        given = self.model_dump(exclude_none=True).keys() - {"rope_type", "factor"}
        known = {
            "linear": set(),
            "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        }[self.rope_type]
        if foreign := sorted(given - known):
            raise ValueError(f"rope_type {self.rope_type} does not know {', '.join(foreign)}; remove it")
        if self.rope_type == "llama3" and (self.low_freq_factor is None or self.high_freq_factor is None):
            raise ValueError("rope_type llama3 needs low_freq_factor and high_freq_factor")
        return self


class Model(Section):
    """Exactly one of path, create, fetch says where the weights come from."""

    path: str | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer)."""
    create: CreateModel | None = None
    fetch: Literal["smollm2-135m"] | None = None
    """A model that `zerogap model fetch` knows; downloaded once into the cache."""
    max_position_embeddings: int | None = Field(None, ge=8)
    """Context of the model, instead of its config.json's: longest prompt plus answer."""
    rope_scaling: RopeScaling | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and activations in engine and learner; masters and logprobs are fp32."""
    kernels: Literal["aligned", "standard"] = "aligned"
    """standard is the control arm: stock torch, not bitwise; the run then says `aligned: no`."""

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        given = [k for k in ("path", "create", "fetch") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of path, create, fetch (given: {', '.join(given) or 'none'})")
        if self.create is not None and self.changes_context:
            raise ValueError(
                "max_position_embeddings and rope_scaling change a given checkpoint; the context of a created model is "
                "model.create.max_position_embeddings"
            )
        return self

    @property
    def changes_context(self) -> bool:
        return self.max_position_embeddings is not None or self.rope_scaling is not None


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


class Learner(Section):
    threads: int = Field(1, ge=1)
    """CPU threads of the learner. Log-probabilities do not depend on it."""
    learning_rate: float = Field(1e-4, gt=0)
    """Peak rate of AdamW. With lag it bounds how far the policy moves away from the tokens it trains on."""
    schedule: Literal["constant", "cosine"] = "constant"
    """cosine: from learning_rate to 0 over train.updates, after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Updates over which the rate rises linearly to its peak."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Packed rows per forward/backward; changes memory and speed, not the gradient."""
    activation_checkpointing: bool = False
    """True: the forward pass keeps only the input of each layer, the backward pass runs the layer again. Much less
    memory, about a third more time, the same bits."""
    mask_truncated: bool = False
    """True: samples ended by a limit keep their place in the group mean but add nothing to loss or denominator."""
    objective: ObjectiveConfig = Field(default_factory=ReinforceZero)
    """What is maximised: the section of its `name`, one of those below; default: reinforce_zero."""


class Train(Section):
    updates: int = Field(300, ge=1)
    """Optimizer updates of the run."""
    groups_per_update: int = Field(16, ge=1)
    """Prompts per update; each brings rollout.group_size samples."""
    lag: int = Field(2, ge=0, le=1024)
    """Most optimizer updates between the weights that sampled a token and those trained on it. 0 = synchronous.
    Kept by admission: nothing generated is ever dropped."""
    min_ess: float = Field(0.3, ge=0, le=1)
    """Warn (never gate) when the effective sample size of any version age falls below this share."""


class Audit(Section):
    share: float = Field(0.125, ge=0, le=1)
    """Share of each batch's groups whose tokens are scored again with the weights of their own version."""
    on_unequal: Literal["stop", "warn"] = "stop"
    """stop: the run ends at the first unequal bit (aligned kernels only). warn: it goes on and counts."""
    weights_memory_mb: float = Field(2000.0, ge=0)
    """Most megabytes (10^6 bytes) of older weight versions that the learner keeps in memory for the audit. The others
    are files in the run folder until the last token that names them is trained. At most train.lag versions in all."""


class Checkpoint(Section):
    every: int = Field(0, ge=0)
    """Updates between checkpoints; 0 = only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""


class Logging(Section):
    tensorboard: bool = True
    """Also write TensorBoard events; metrics.jsonl is always written."""
    trajectories_mb: float = Field(64.0, ge=0)
    """Most megabytes of trajectories.jsonl; 0 keeps none."""


class Runtime(Section):
    driver: Literal["ray", "inline"] = "ray"
    """inline: the same loop in one process, deterministic (tests, replay, debugging)."""
    ray_address: str | None = None
    """Join this Ray cluster; default: an embedded one that listens on loopback only."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait for a rollout or an update before the run ends with an error naming what it waits for."""


class Recipe(Section):
    name: str
    """Names the run folder runs/<name>."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Keys the sampler, the order of prompts and the weights of a created model."""
    output_dir: str | None = None
    """Run folder; default runs/<name>."""
    model: Model
    task: Task
    warm_start: WarmStart | None = None
    rollout: Rollout = Field(default_factory=lambda: Rollout.model_validate({}))
    learner: Learner = Field(default_factory=lambda: Learner.model_validate({}))
    train: Train = Field(default_factory=lambda: Train.model_validate({}))
    audit: Audit = Field(default_factory=lambda: Audit.model_validate({}))
    checkpoint: Checkpoint = Field(default_factory=lambda: Checkpoint.model_validate({}))
    logging: Logging = Field(default_factory=lambda: Logging.model_validate({}))
    runtime: Runtime = Field(default_factory=lambda: Runtime.model_validate({}))

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir or f"runs/{self.name}")


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and apply dotted overrides (`learner.learning_rate=3e-4`).

    Raises RecipeError with one message that lists every violation.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"recipe {path} does not exist; see the recipes/ folder for examples")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not UTF-8 text: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"recipe {path} must be a mapping of sections, got {type(values).__name__}")
    for override in overrides or []:
        _apply_override(values, override)
    return parse_recipe(values, source=str(path))


def parse_recipe(values: dict[str, Any], source: str = "recipe") -> Recipe:
    """Check a mapping against the typed recipe; RecipeError lists all violations."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors()]
        raise RecipeError(f"{source}: {len(lines)} problem(s)\n" + "\n".join(f"  - {line}" for line in lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"override {override!r} must have the form section.key=value")
    node = values
    *parents, leaf = key.split(".")
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise RecipeError(f"override {override!r}: {parent} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: the value is not valid YAML: {error}") from error


def _explain(error: Any) -> str:
    location = [str(part) for part in error["loc"]]
    if location[:2] == ["learner", "objective"]:
        del location[2:3]  # pydantic puts the objective's name between the section and its key
    key = ".".join(location) or "recipe"
    if location[:-1] == ["rollout"] and location[-1] in REFUSED_SAMPLING_KEYS:
        return (
            f"{key}: refused in training: it changes the distribution that tokens are drawn from, so the ratio would "
            "carry the kept probability mass; remove the key (temperature is supported)"
        )
    if error["type"] == "extra_forbidden":
        if any(word in location[-1].lower() for word in ADAPTER_WORDS):
            return (
                f"{key}: adapters (LoRA) are not supported: all weights are trained, and all are delivered to the "
                "engines; merge the adapter into its base model, give that as model.path, and remove the key"
            )
        known = _known_keys([str(part) for part in error["loc"][:-1]])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{key}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{key}: required, but missing"
    if error["type"] == "union_tag_not_found":
        return f"{key}: name is required, one of {', '.join(_sections(Learner, 'objective'))}"
    if error["type"] == "union_tag_invalid":
        return f"{key}.name: {error['ctx']['tag']!r} is none of {', '.join(_sections(Learner, 'objective'))}"
    message = error["msg"].removeprefix("Value error, ")
    own = error["type"] == "value_error"  # written above, with the value in it
    return f"{key}: {message}" + ("" if own else f" (got {error.get('input')!r})")


def _known_keys(location: list[str]) -> list[str]:
    """Keys of the section at a location as pydantic writes it: with the name of a section among several."""
    model: Any = Recipe
    parts = iter(location)
    for part in parts:
        sections = _sections(model, part)
        model = next(iter(sections.values())) if len(sections) == 1 else sections[next(parts)]
    return list(model.model_fields)


def _sections(model: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """The sections that a key may hold, by their `name` where there are several."""
    annotation = model.model_fields[key].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    if len(sections) == 1:
        return {key: sections[0]}
    return {section.model_fields["name"].annotation.__args__[0]: section for section in sections}  # type: ignore[union-attr]
