"""Tokenizer and chat template: messages to prompt ids."""

from __future__ import annotations

from collections.abc import Sequence
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


def render_text(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
    """The chat with the generation prompt; without a chat template, the contents one after another.

    tools: JSON schemas of functions, for templates that show them.
    """
    if not tokenizer.chat_template:
        return "".join(message["content"] for message in messages)
    text: str = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
    )
    return text


def render_prompt(tokenizer: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
    """Ids of `render_text`."""
    # verbose=False: a prompt longer than the context is the caller's to skip and count, not transformers' to warn of.
    ids: list[int] = tokenizer.encode(render_text(tokenizer, messages, tools), add_special_tokens=False, verbose=False)
    return ids
