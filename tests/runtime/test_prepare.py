"""The starting model: created or given, warm-started by supervision."""

import json

import pytest
import torch
from safetensors.torch import load_file

from zerogap.config import parse_recipe
from zerogap.env.task import TaskError, make_task
from zerogap.learner.packing import pack
from zerogap.learner.sft import Solution
from zerogap.model import CheckpointError, load_decoder
from zerogap.model.chat import load_tokenizer
from zerogap.model.turns import ChatTurns
from zerogap.runtime import prepare
from zerogap.runtime.observer import Observer
from zerogap.runtime.prepare import create_for_task, prepare_model


class Recorder(Observer):
    def __init__(self):
        self.calls = []

    def stage(self, name, total=None):
        self.calls.append((name, total))

    def progress(self, done, text=""):
        self.calls.append((done, text.split()[0]))

    def stage_end(self):
        self.calls.append("end")


def recipe(**changes):
    size = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]}
    values = {
        "name": "test",
        "model": {"create": {**size, "max_position_embeddings": 64}, "kernels": "standard"},
        "task": {"name": "basic_arithmetic", "size": 300, "params": params},
        "warm_start": {"steps": 3, "examples_per_step": 16, "learning_rate": 1e-2, "warmup_steps": 0},
    }
    return parse_recipe({**values, **changes})


def mean_logprob(folder, task):
    decoder, tokenizer = load_decoder(folder, "standard", "float32"), load_tokenizer(folder)
    examples = [task.example(i) for i in range(64)]
    turns = ChatTurns(tokenizer)
    solutions = [Solution(*turns.solution(e.messages, task.solution(e))[0]) for e in examples]
    with torch.no_grad():
        return torch.cat([b.logprobs(decoder, 1.0) for b in pack(solutions, 4096)]).mean().item()


def test_create_and_warm_start_teach_the_solutions(tmp_path):
    settings = recipe(warm_start={"steps": 30, "examples_per_step": 32, "learning_rate": 1e-2, "warmup_steps": 0})
    observer = Recorder()
    start = prepare_model(settings, tmp_path, observer)
    assert start == tmp_path / "start_model"
    assert observer.calls[:4] == [("create model", None), "end", ("warm start", 30), (1, "loss")]
    assert observer.calls[-2:] == [(30, "loss"), "end"]
    task = make_task(settings.task)
    assert mean_logprob(start, task) > mean_logprob(tmp_path / "base_model", task) + 1.0


def test_the_same_recipe_gives_the_same_bits_elsewhere(tmp_path):
    one, other = (prepare_model(recipe(), tmp_path / name, Observer()) for name in "ab")
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(first[name].view(torch.int32), second[name].view(torch.int32)) for name in first)


def test_a_warm_start_that_ends_early_leaves_no_start_model(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "train_sft", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_model(recipe(), tmp_path, Observer())
    assert [p.name for p in tmp_path.iterdir()] == ["base_model"]


def test_without_a_warm_start_the_given_folder_is_the_start(tmp_path):
    base = create_for_task(recipe().model.create, make_task(recipe().task), tmp_path / "given", seed=0)
    settings = recipe(model={"path": str(base)}, warm_start=None)
    assert prepare_model(settings, tmp_path / "run", Observer()) == base
    assert not (tmp_path / "run").exists()


def test_a_warm_start_from_a_given_folder_leaves_it_alone(tmp_path):
    base = create_for_task(recipe().model.create, make_task(recipe().task), tmp_path / "given", seed=0)
    before = {p.name: p.read_bytes() for p in base.iterdir()}
    start = prepare_model(recipe(model={"path": str(base), "kernels": "standard"}), tmp_path / "run", Observer())
    assert {p.name: p.read_bytes() for p in base.iterdir()} == before
    assert (start / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert json.loads((start / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_missing_folder_or_task_without_solutions_says_so_and_leaves_no_model(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        prepare_model(recipe(model={"path": str(tmp_path / "absent")}), tmp_path / "run", Observer())
    with pytest.raises(TaskError, match="rush_hour"):
        prepare_model(recipe(task={"name": "rush_hour", "size": 20}), tmp_path / "run", Observer())
    assert not (tmp_path / "run" / "start_model").exists()


def test_examples_longer_than_the_context_are_left_out(tmp_path):
    tight = recipe().model.create.model_copy(update={"max_position_embeddings": 8})
    settings = recipe(model={"create": tight.model_dump(), "kernels": "standard"})
    with pytest.raises(ValueError, match="longer than the model's context of 8 tokens"):
        prepare_model(settings, tmp_path, Observer())
    roomy = recipe().model.create.model_copy(update={"max_position_embeddings": 20})
    prepare_model(recipe(model={"create": roomy.model_dump(), "kernels": "standard"}), tmp_path, Observer())


def test_another_context_goes_through_the_warm_start(tmp_path):
    """The folder that is given stays as it is; the run begins with a longer context, stretched by yarn."""
    source = prepare_model(recipe(warm_start=None), tmp_path / "source", Observer())
    yarn = {"rope_type": "yarn", "factor": 4.0}
    model = {"path": str(source), "kernels": "standard", "max_position_embeddings": 256, "rope_scaling": yarn}
    start = prepare_model(recipe(model=model), tmp_path / "run", Observer())
    assert start == tmp_path / "run" / "start_model"
    config = load_decoder(start, "standard", "float32").config
    assert config.max_position_embeddings == 256
    assert config.rope_scaling == {**yarn, "original_max_position_embeddings": 64}
    assert load_tokenizer(start).model_max_length == 256
    assert load_decoder(source, "standard", "float32").config.rope_scaling is None


def test_a_created_tokenizer_spells_prompts_and_solutions(tmp_path):
    task = make_task(recipe(task={"name": "spell_backward", "size": 100}).task)
    tokenizer = load_tokenizer(create_for_task(recipe().model.create, task, tmp_path / "m", seed=0))
    for index in range(100):
        example = task.example(index)
        for text in (example.messages[0]["content"], task.solution(example)):
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
