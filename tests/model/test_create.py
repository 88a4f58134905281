"""Created models: a folder that transformers and zerogap both load, whose tokenizer spells the task exactly."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from zerogap.config import CreateModel
from zerogap.kernels.rows import RowBatch
from zerogap.model import load_decoder
from zerogap.model.chat import load_tokenizer
from zerogap.model.create import EOS, _character_tokenizer, create_model
from zerogap.model.turns import ChatTurns

TEXTS = ["Calculate 12 + 34.", "46", "two\nlines\tand  spaces", "naïve → ∀ 🙂", "12 + 34 = 46"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
_CHARACTERS = _character_tokenizer(["abcé →\n\t .'"])


@pytest.fixture(scope="module", params=["characters", "bpe"])
def folder(request, tmp_path_factory):
    spec = CreateModel(**SMALL, tokenizer=request.param, vocab_size=320, max_position_embeddings=128)
    return create_model(spec, iter(TEXTS), tmp_path_factory.mktemp("models") / request.param, seed=1)


def test_transformers_and_zerogap_load_it_and_agree(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_decoder(folder, "standard", "float32")
    ids = tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        hidden = ours.hidden(torch.tensor(ids), RowBatch.pack([len(ids)]))
        torch.testing.assert_close(ours.logits(hidden), theirs(torch.tensor([ids])).logits[0], atol=1e-4, rtol=1e-4)
    assert ours.vocab == len(tokenizer) == theirs.config.vocab_size
    assert ours.eos_token_ids == (tokenizer.eos_token_id,) == (theirs.generation_config.eos_token_id,)
    assert ours.config.max_position_embeddings == 128 and ours.config.tie_word_embeddings


def test_it_spells_its_texts_exactly(folder):
    tokenizer = load_tokenizer(folder)
    for text in [*TEXTS, "".join(TEXTS), "  43 21 \n", ""]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_turn_costs_two_tokens_beside_its_text(folder):
    tokenizer = load_tokenizer(folder)
    question = [{"role": "user", "content": "12 + 34"}]
    spelled = tokenizer.encode("12 + 34", add_special_tokens=False)
    prompt = ChatTurns(tokenizer).prompt(question)
    assert prompt[0] == tokenizer.bos_token_id and prompt[1:-1] == spelled and tokenizer.decode(prompt[-1:]) == "\n"
    ids, mask = ChatTurns(tokenizer).solution(question, "46")[0]
    assert ids[: len(prompt)] == prompt and ids[-1] == tokenizer.convert_tokens_to_ids(EOS)
    assert mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    turns = [*question, {"role": "assistant", "content": "46"}, *question]
    assert ChatTurns(tokenizer).prompt(turns) == ids + prompt[1:]


def test_characters_have_one_token_each_and_others_are_unknown(tmp_path):
    folder = create_model(CreateModel(**SMALL), ["abc", "cab"], tmp_path / "m", seed=0)
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer) == 4 + len("abc\n")
    assert len(tokenizer.encode("cab\n", add_special_tokens=False)) == 4
    assert tokenizer.encode("axb", add_special_tokens=False)[1] == tokenizer.unk_token_id


@given(text=st.text(alphabet="abcé →\n\t .'", max_size=40))
def test_any_text_of_known_characters_comes_back(text):
    assert _CHARACTERS.decode(_CHARACTERS.encode(text).ids) == text


def test_weights_depend_on_the_seed_only(tmp_path):
    def weights(name, seed):
        create_model(CreateModel(**SMALL), TEXTS, tmp_path / name, seed)
        return load_file(tmp_path / name / "model.safetensors")

    one, same, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(one[k].view(torch.int32), same[k].view(torch.int32)) for k in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(one["model.norm.weight"], torch.ones(32))
    assert one["model.layers.0.mlp.gate_proj.weight"].std().item() == pytest.approx(32**-0.5, rel=0.1)


def test_a_failure_leaves_no_folder(tmp_path):
    def broken():
        yield "abc"
        raise OSError("the task ended")

    with pytest.raises(OSError, match="the task ended"):
        create_model(CreateModel(**SMALL), broken(), tmp_path / "m", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_creating_again_replaces_the_folder(tmp_path):
    for texts in (["abc"], ["abcdef"]):
        create_model(CreateModel(**SMALL), texts, tmp_path / "m", seed=0)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"] == 4 + len("abcdef\n")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
