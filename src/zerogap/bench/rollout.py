"""Sampling speed: the embedded engine and a peer on the same model and prompts.

Timed: prompts in, `new_tokens` out for each sample, at temperature 1 from the whole distribution, end of sequence
ignored on all sides. Every round has prompts of its own, so that no prefix cache carries over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerogap.bench.machine import describe
from zerogap.bench.models import ModelSetting, is_smollm2, model_folder, read_config
from zerogap.bench.report import CPU_SHARE, Report, bar_text
from zerogap.bench.serve import Channel
from zerogap.bench.sides import Progress, Side, SideFailed, by_turns, cores, cpu_share, median, python_command, running

PROMPT_TOKENS = (32, 56)  # shortest and longest prompt
WARM_UP_TOKENS = 4
VLLM_BARS = {("eager", "float32"): 1.5, ("eager", "bfloat16"): 1.5, ("compile", "bfloat16"): 1.2}
TRANSFORMERS_BAR = 5.0
TRANSFORMERS_BAR_BATCH = 32
BAR_NEW_TOKENS = 128
VLLM_SPARE_TOKENS = 256  # of KV per sequence, for the unfilled part of its last block
VLLM_SIDE = Path(__file__).with_name("vllm_side.py")


@dataclass(frozen=True)
class RolloutSetting(ModelSetting):
    """batches: samples asked for at once, multiples of `samples`, those that share a prompt. peer: transformers, vllm,
    or torch (our engine on stock kernels). vllm_python: of an environment with vLLM. vllm_modes: eager, compile."""

    peer: str
    batches: tuple[int, ...]
    samples: int
    new_tokens: int
    vllm_python: str | None
    vllm_modes: tuple[str, ...]

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return PROMPT_TOKENS[1] + self.new_tokens


def compare(setting: RolloutSetting, progress: Progress) -> Report:
    """Tokens/s of ours and of the peer for every dtype, mode and batch, by turns."""
    machine = describe(setting.threads, progress)
    rows = []
    with model_folder(setting) as folder:
        peers = [f"vllm {mode}" for mode in setting.vllm_modes] if setting.peer == "vllm" else [setting.peer]
        for dtype in setting.dtypes:
            for peer in peers:
                progress(f"rollout, {dtype}, {peer}")
                commands = {"zerogap": _zerogap("aligned", folder, dtype, setting)}
                commands[peer] = _peer(peer, folder, dtype, setting)
                environments = {peer: _vllm_environment(peer, setting)} if setting.peer == "vllm" else {}
                with running(commands, setting.threads, progress, environments) as sides:
                    machine |= sides[peer].facts
                    for batch in setting.batches:
                        row = {"dtype": dtype, "peer": peer, "batch": batch}
                        bar = _bar(peer, dtype, batch, setting) if is_smollm2(folder) else {}
                        rows.append(row | _measure(sides, batch, folder, setting, progress) | bar)
    return Report(_title(setting), machine, COLUMNS, rows)


COLUMNS = (
    ("dtype", "dtype", ""),
    ("peer", "peer", ""),
    ("batch", "batch", ""),
    ("ours", "zerogap tokens/s", ",.0f"),
    ("theirs", "peer tokens/s", ",.0f"),
    ("ratio", "ratio of tokens/s", ".2f"),
    ("bar", "bar", ""),
    CPU_SHARE,
)


def serve_zerogap(channel: Channel, folder: str, dtype: str, kernels: str, max_running: int, max_context: int) -> None:
    """The engine as a run has it; end of sequence is ignored so that every sample has its full length."""
    from zerogap.model.checkpoint import load_decoder
    from zerogap.rollout.embedded.engine import EmbeddedEngine, EngineConfig
    from zerogap.trajectory import GroupRequest, SamplingParams

    decoder = load_decoder(folder, kernels, dtype)
    decoder.eos_token_ids = ()
    engine = EmbeddedEngine(decoder, None, EngineConfig(max_running=max_running, max_context=max_context))

    def run(prompts: list[list[int]], samples: int, new_tokens: int) -> dict[str, Any]:
        for index, ids in enumerate(prompts):
            engine.submit(GroupRequest(index, index, tuple(ids), samples, SamplingParams(max_new_tokens=new_tokens)))
        sampled = 0
        while engine.has_work():
            sampled += sum(trajectory.num_sampled for trajectory in engine.step())
        return {"sampled": sampled}

    channel.serve(run)


def make_prompts(vocabulary: int, count: int, seed: int) -> list[list[int]]:
    """Random token ids of slightly different lengths; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shortest, longest = PROMPT_TOKENS
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _measure(
    sides: Mapping[str, Side], batch: int, folder: Path, setting: RolloutSetting, progress: Progress
) -> dict[str, float]:
    """Median tokens/s of both sides and their ratio. SideFailed when one samples another number of tokens."""
    vocabulary = read_config(folder)["vocab_size"]

    def request(number: int, new_tokens: int = setting.new_tokens) -> dict[str, Any]:
        prompts = make_prompts(vocabulary, batch // setting.samples, seed=1000 * batch + number)
        return {"prompts": prompts, "samples": setting.samples, "new_tokens": new_tokens}

    for side in sides.values():
        side.ask(request(setting.rounds, WARM_UP_TOKENS))
    progress(f"batch {batch}")
    answers = by_turns(sides, setting.rounds, request, progress)
    tokens = batch * setting.new_tokens
    for name, several in answers.items():
        if any(answer["sampled"] != tokens for answer in several):
            raise SideFailed(f"{name} sampled {several[0]['sampled']} tokens where {tokens} were asked for")
    ours, theirs = (tokens / median(several, "seconds") for several in answers.values())
    return {"ours": ours, "theirs": theirs, "ratio": ours / theirs, "cpu_share": cpu_share(answers)}


def _zerogap(kernels: str, folder: Path, dtype: str, setting: RolloutSetting) -> list[str]:
    return python_command(
        "rollout:serve_zerogap",
        folder=str(folder),
        dtype=dtype,
        kernels=kernels,
        max_running=max(setting.batches),
        max_context=setting.context,
    )


def _peer(peer: str, folder: Path, dtype: str, setting: RolloutSetting) -> list[str]:
    if peer == "torch":
        return _zerogap("standard", folder, dtype, setting)
    if peer == "transformers":
        return python_command("peers:serve_generation", folder=str(folder), dtype=dtype)
    assert setting.vllm_python is not None
    # -I: the script's folder must not hide packages of that environment behind modules of ours.
    script = [setting.vllm_python, "-I", str(VLLM_SIDE), str(folder), dtype, peer.split()[1]]
    running, config = max(setting.batches), read_config(folder)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    bytes_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    kv_bytes = running * (setting.context + VLLM_SPARE_TOKENS) * bytes_per_token
    return [*script, str(running), str(setting.context), str(kv_bytes)]


def _vllm_environment(peer: str, setting: RolloutSetting) -> dict[str, str]:
    """One process, pinned like ours; without TORCHDYNAMO_DISABLE logprobs start the compiler in eager mode too."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(setting.threads))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return environment | ({"TORCHDYNAMO_DISABLE": "1"} if peer == "vllm eager" else {})


def _bar(peer: str, dtype: str, batch: int, setting: RolloutSetting) -> dict[str, str]:
    """The bar that is set for this row, if any."""
    if setting.threads != 1 or setting.new_tokens != BAR_NEW_TOKENS:
        return {}
    if peer == "transformers":
        bar = TRANSFORMERS_BAR if batch == TRANSFORMERS_BAR_BATCH else None
    else:
        bar = VLLM_BARS.get((peer.removeprefix("vllm "), dtype))
    return {} if bar is None else {"bar": bar_text(bar, at_least=True)}


def _title(setting: RolloutSetting) -> str:
    groups = f", {setting.samples} of each prompt" if setting.samples > 1 else ""
    return f"rollout: {setting.new_tokens} new tokens per sample{groups}, median of {setting.rounds}"
