"""Adapter folders (LoRA and other PEFT) are recognised only to be refused."""

from __future__ import annotations

from pathlib import Path

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def adapter_refusal(folder: Path) -> str | None:
    """Why a folder with an adapter cannot be loaded; None where there is none.

    A base model with an adapter beside it is refused too: transformers would apply the adapter without a word.
    """
    found = [name for name in ADAPTER_FILES if (folder / name).is_file()]
    if not found:
        return None
    return (
        f"{folder} holds an adapter ({found[0]}): adapters (LoRA) are not supported, all weights are trained and "
        "delivered to the engines; merge it into its base model (peft: merge_and_unload) and give that folder"
    )
