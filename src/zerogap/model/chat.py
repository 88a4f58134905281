"""Tokenizer and chat template: messages to prompt ids, and worked solutions to supervised examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from zerogap.model.checkpoint import CheckpointError

Message = dict[str, str]


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer (transformers), from local files only, never with remote code."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").is_file():
        raise CheckpointError(f"{folder} has no tokenizer.json (a fast tokenizer is needed)")
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, use_fast=True)


def render_prompt(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Prompt ids with the generation prompt; without a chat template, the contents one after another."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "".join(message["content"] for message in messages)
    # verbose=False: a prompt longer than the context is the caller's to skip and count, not transformers' to warn of.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def render_solution(tokenizer: Any, messages: list[Message], solution: str) -> tuple[list[int], list[int]]:
    """(token ids, loss mask) of prompt + solution + end of sequence; the mask is 1 on what the policy should say."""
    prompt = render_prompt(tokenizer, messages)
    if tokenizer.eos_token_id is None:
        raise CheckpointError("the tokenizer has no eos_token; a supervised example must teach where to stop")
    answer = [*tokenizer.encode(solution, add_special_tokens=False, verbose=False), tokenizer.eos_token_id]
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)
