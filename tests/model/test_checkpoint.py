"""Loading and saving model folders: what is refused, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny_decoder
from zerogap.model import CheckpointError, UnsupportedModel, WeightMismatch, load_decoder, save_decoder
from zerogap.model.checkpoint import check_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tiny_decoder("standard"), tmp_path / "model")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, ["dynamic", "default", "yarn"]),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5}},
            ["llama3", "high_freq_factor, original_max_position_embeddings"],
        ),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["gptq", "unquantised"]),
    ],
)
def test_unsupported_models_are_named(folder: Path, changes: dict[str, Any], words: list[str]) -> None:
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModel) as error:
        load_decoder(folder, "standard", "float32")
    assert all(word in str(error.value) for word in words)


def test_missing_folder_and_pickle_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_decoder(tmp_path / "nowhere", "standard", "float32")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never loaded"):
        load_decoder(folder, "standard", "float32")


def test_missing_and_unknown_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    removed = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        load_decoder(folder, "standard", "float32")
    tensors["model.layers.1.mlp.down_proj.weight"] = removed
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lora_A"):
        load_decoder(folder, "standard", "float32")


def test_an_adapter_beside_or_instead_of_a_model_is_refused(folder: Path) -> None:
    """Field case 20: with the base model beside it, loading would silently leave the adapter out."""
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json.*merge it into its base model"):
        load_decoder(folder, "standard", "float32")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapters \(LoRA\) are not supported"):
        load_decoder(folder, "standard", "float32")


def test_shards_are_checked_by_their_headers(folder: Path) -> None:
    """An index may name a shard that is absent or cut short, and promise a tensor that its shard lacks."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config, files = check_folder(folder)
    assert files == index["weight_map"]
    assert load_decoder(folder, "standard", "float32").config == config

    save_file({name: tensors[name] for name in names[5:-1]}, folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=names[-1]):
        check_folder(folder)
    (folder / "b.safetensors").write_bytes(b"\0" * 7)
    with pytest.raises(CheckpointError, match=r"b\.safetensors is not a readable safetensors file"):
        check_folder(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard b\.safetensors"):
        check_folder(folder)


def test_a_broken_tokenizer_names_its_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_decoder(folder, "standard", "float32")


def test_saving_replaces_the_folder_whole(folder: Path) -> None:
    (folder / "stale.txt").write_text("left over")
    other = tiny_decoder("standard", seed=5)
    save_decoder(other, folder)
    assert not (folder / "stale.txt").exists()
    assert load_decoder(folder, "standard", "float32").digest() == other.digest()
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("zerogap.model.checkpoint.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_decoder(tiny_decoder("standard"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_delivery_is_checked_before_anything_is_written() -> None:
    """Field cases 18 and 21 at the model's door: narrowed, missing or unknown tensors change nothing."""
    decoder, new = tiny_decoder("standard"), tiny_decoder("standard", seed=9).snapshot()
    before = decoder.digest()
    narrowed = new | {"layers.1.down": new["layers.1.down"].bfloat16()}
    missing = {k: v for k, v in new.items() if k != "layers.1.down"}
    unknown = new | {"layers.7.down": new["layers.1.down"]}
    for bad, word in ((narrowed, "layers.1.down"), (missing, "layers.1.down"), (unknown, "layers.7.down")):
        with pytest.raises(WeightMismatch, match=word):
            decoder.load_snapshot(bad)
        assert decoder.digest() == before
    decoder.load_snapshot(new)
    assert decoder.digest() == tiny_decoder("standard", seed=9).digest()


def test_tied_head_follows_its_embedding() -> None:
    """Field case 17: one Weight serves both; an untied head is delivered under its own name."""
    tied, untied = tiny_decoder("standard"), tiny_decoder("standard", tie_word_embeddings=False)
    assert tied.head is tied.weights["embed"]
    assert untied.head is untied.weights["head"]
    changed = tied.snapshot()
    changed["embed"] = changed["embed"] + 1
    tied.load_snapshot(changed)
    assert torch.equal(tied.head.data, changed["embed"])


def test_a_padded_head_is_never_sampled_beyond_the_tokenizer() -> None:
    """Field case 9: ids >= tokenizer size carry no mass on either side."""
    decoder = tiny_decoder("standard", vocab_size=61)
    decoder.vocab = 50
    logits = torch.zeros(64, 61)
    logits[:, 55] = 50.0
    keys = torch.stack([torch.tensor([0, 0, i, 0]) for i in range(64)])
    tokens, logprobs = decoder.sample(logits, keys, 1.0)
    assert int(tokens.max()) < 50
    assert torch.allclose(logprobs, torch.full((64,), -3.912023), atol=1e-5)
