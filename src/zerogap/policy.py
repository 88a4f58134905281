"""A policy for a notebook or a test: the engine's sampling and the learner's scoring behind four methods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from zerogap.learner.packing import score
from zerogap.model.chat import load_tokenizer
from zerogap.model.checkpoint import load_decoder, save_decoder
from zerogap.model.decoder import Decoder
from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
from zerogap.trajectory import GroupRequest, SamplingParams, Trajectory

SCORE_TOKENS = 4096  # packed rows per forward in `score`; changes memory, not bits


class Policy:
    """Weights and a tokenizer, seen from both programs.

    >>> policy = Policy.load("runs/tiny-001/final_model", dtype="float32")
    >>> trajectories = policy.generate(policy.tokenizer.encode("1 + 1 ="), n=4)
    >>> learner_logprobs = policy.score(trajectories)
    """

    def __init__(self, decoder: Decoder, folder: Path) -> None:
        self.decoder = decoder
        self.folder = folder

    @staticmethod
    def load(
        folder: str | Path,
        kernels: Literal["aligned", "standard"] = "aligned",
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
    ) -> Policy:
        """Load a Hugging Face folder. Raises CheckpointError or UnsupportedModel with the reason."""
        return Policy(load_decoder(folder, kernels, dtype), Path(folder))

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer (transformers)."""
        return load_tokenizer(self.folder)

    def generate(
        self,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor,
        n: int = 4,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        engine: EngineConfig | None = None,
    ) -> list[Trajectory]:
        """Sample n trajectories of one prompt, or of each of several, with the embedded engine.

        A token depends only on (weights, prefix, seed, prompt_id, sample_index, position): not on the batch.
        prompt_id is the index of the prompt. temperature 0 takes the most likely token. `engine` sets batching
        and paging (EngineConfig). Returns trajectories ordered by prompt, then sample; versions are all 0.
        ValueError names a prompt that can never be served.
        """
        ids: Any = prompt_token_ids.tolist() if isinstance(prompt_token_ids, torch.Tensor) else prompt_token_ids
        prompts: list[Sequence[int]] = list(ids) if len(ids) and isinstance(ids[0], Sequence) else [ids]
        if temperature < 0:
            raise ValueError(f"temperature {temperature} must be >= 0 (0 = greedy)")
        sampling = SamplingParams(max_new_tokens, temperature, tuple(stop), seed)
        if engine is None:  # a KV cache for these prompts, not for the model's whole context
            longest = max(len(prompt) for prompt in prompts) + max_new_tokens
            limit = self.decoder.config.max_position_embeddings
            engine = EngineConfig(max_running=min(64, n * len(prompts)), max_context=min(limit, longest))
        runner = EmbeddedEngine(self.decoder, self.tokenizer if stop else None, engine)
        for i, prompt in enumerate(prompts):
            runner.submit(GroupRequest(i, i, tuple(int(t) for t in prompt), n, sampling))
        done: list[Trajectory] = []
        while runner.has_work():
            done.extend(runner.step())
        return sorted(done, key=lambda t: (t.prompt_id, t.sample_index))

    def score(self, trajectories: Sequence[Trajectory]) -> list[torch.Tensor]:
        """The learner's packed forward: fp32 log-probability of each sampled token, one tensor per trajectory.

        At the trajectory's own temperature. With aligned kernels the bits equal `trajectory.logprobs`.
        """
        learner_side = self.decoder.view({name: weight.data for name, weight in self.decoder.weights.items()})
        return score(learner_side, list(trajectories), SCORE_TOKENS)

    def save(self, folder: str | Path) -> Path:
        """Write a Hugging Face folder that transformers loads."""
        return save_decoder(self.decoder, folder, self.folder)
