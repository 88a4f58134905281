"""reasoning-gym: every dataset gives prompts that can be graded, the same ones again, with solutions worth 1.0."""

import os
import pickle
import random
import subprocess
import sys
import threading

import pytest
from reasoning_gym.factory import DATASETS

from zerogap import config
from zerogap.env.reasoning import _HASH_ORDERED, ReasoningTask
from zerogap.env.task import GradeError, TaskError, make_task

WITHOUT_SOLUTION = ("boxnet", "rush_hour")  # reasoning-gym has no answer for these
LENIENT = ("game_of_life_halting",)  # whatever is not "True" counts as "False"
SINGLE = sorted(set(DATASETS) - {"composite"})


@pytest.mark.filterwarnings("ignore:the examples of task")
@pytest.mark.parametrize("name", SINGLE)
def test_every_dataset(name):
    """Pickled to a worker and back it is graded the same; its own solution gets 1.0; nonsense gets less."""
    task = make_task(config.Task(name=name, size=20, seed=3))
    for index in (4, 1):
        example = task.example(index)
        assert example.prompt_id == index and example.messages[-1]["content"]
        assert task.example(index) == example
        sent = pickle.loads(pickle.dumps(example))
        assert task.grade(sent, "no answer") < 1.0 or name in LENIENT
        if name in WITHOUT_SOLUTION:
            with pytest.raises(TaskError, match=f"{name}.*warm_start"):
                task.solution(example)
        else:
            assert task.grade(sent, task.solution(example)) == 1.0


def test_composite_mixes_datasets():
    parts = [{"name": n, "weight": 1.0, "config": {}} for n in ("chain_sum", "gcd")]
    task = make_task(config.Task(name="composite", size=30, params={"datasets": parts}))
    examples = [task.example(i) for i in range(30)]
    assert len({e.messages[0]["content"].split()[0] for e in examples}) == 2
    assert all(task.grade(e, task.solution(e)) == 1.0 for e in examples)


@pytest.mark.parametrize("name", ["chain_sum", "decimal_chain_sum", "basic_arithmetic", "products", "gcd"])
def test_worked_steps_end_in_the_graded_answer(name):
    task = make_task(config.Task(name=name, size=200, answer_pattern=r"= (\S+)$"))
    with_steps = 0
    for index in range(200):
        example = task.example(index)
        solution = task.solution(example)
        assert task.grade(example, solution) == 1.0
        with_steps += solution != f"= {example.payload['answer']}"
    assert with_steps >= 150


def test_chain_sum_steps_are_the_running_total():
    task = make_task(config.Task(name="chain_sum", answer_pattern=r"= (\S+)$", params={"min_terms": 3, "max_terms": 3}))
    example = task.example(0)
    a, first, b, second, c = example.payload["metadata"]["expression"].split()
    total = int(a) + int(first + b)
    assert task.solution(example) == f"{a} {first} {b} = {total}\n{total} {second} {c} = {example.payload['answer']}"


def test_seeds_give_other_examples_not_the_same_ones_shifted():
    """reasoning-gym seeds item i with seed + i: used as it is, an evaluation with seed 1 would be the training set."""
    questions = []
    for seed in (0, 1, 2):
        task = make_task(config.Task(name="chain_sum", seed=seed, params={"min_digits": 4, "min_terms": 4}))
        questions.append({task.example(i).messages[0]["content"] for i in range(200)})
    assert not questions[0] & questions[1] and not questions[1] & questions[2]


def test_examples_do_not_depend_on_order_nor_on_the_global_generator():
    """list_functions draws from Python's global generator."""
    one, other = (make_task(config.Task(name="list_functions", size=40)) for _ in range(2))
    forward = [one.example(i) for i in range(40)]
    random.seed(5)
    expected = random.Random(5).random()
    assert [other.example(i) for i in reversed(range(40))] == forward[::-1]
    assert random.random() == expected


def test_examples_are_the_same_in_another_process():
    """The names in _HASH_ORDERED are the only ones that need PYTHONHASHSEED, and they say so."""
    names = sorted({"chain_sum", "word_sorting", "spell_backward", "list_functions", *_HASH_ORDERED})
    script = (
        "import sys, warnings, hashlib; warnings.simplefilter('ignore')\n"
        "from zerogap import config; from zerogap.env.task import make_task\n"
        "for n in sys.argv[1:]:\n"
        "    t = make_task(config.Task(name=n, size=50, seed=3))\n"
        "    print(n, hashlib.sha256(repr([t.example(i) for i in range(12)]).encode()).hexdigest())\n"
    )

    def run(hash_seed: str) -> dict[str, str]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", script, *names], env=environment, capture_output=True, check=True)
        return dict(line.split() for line in done.stdout.decode().splitlines() if line.split()[0] in names)

    one, same, other = run("1"), run("1"), run("2")
    assert one == same
    assert {n for n in names if one[n] != other[n]} == set(_HASH_ORDERED)


def test_hash_ordered_datasets_warn(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.warns(UserWarning, match="word_ladder.*PYTHONHASHSEED=0"):
        make_task(config.Task(name="word_ladder"))


def test_a_failing_scorer_is_an_error_and_never_a_reward(monkeypatch):
    """Field case 37: an exception in the grader must not become reward 0, also off the main thread."""
    task = make_task(config.Task(name="chain_sum"))
    example = task.example(0)
    monkeypatch.setattr(type(task._dataset), "score_answer", lambda self, answer, entry: 1 / 0)
    caught = []

    def grade():
        try:
            task.grade(example, "5")
        except GradeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert "chain_sum" in caught[0] and "ZeroDivisionError" in caught[0] and "'5'" in caught[0]


@pytest.mark.parametrize(
    ("name", "text"), [("prime_factorization", "no answer"), ("boxnet", "12"), ("game_of_life", '{"a": 1}')]
)
def test_a_text_that_a_scorer_cannot_read_is_a_wrong_answer(name, text):
    """These scorers raise on malformed text; reward 0 is right there, since the policy is at fault."""
    task = make_task(config.Task(name=name, size=20, seed=3))
    assert task.grade(task.example(1), text) == 0.0


def test_the_dataset_is_built_at_first_use_and_not_pickled(monkeypatch):
    built = []
    dataset_class = DATASETS["chain_sum"][0]
    initialise = dataset_class.__init__
    monkeypatch.setattr(dataset_class, "__init__", lambda self, config: (built.append(1), initialise(self, config))[1])
    task = make_task(config.Task(name="chain_sum"))
    assert isinstance(task, ReasoningTask) and not built
    example = task.example(3)
    assert built == [1]
    assert pickle.loads(pickle.dumps(task)).example(3) == example


def test_an_index_outside_the_task_is_refused():
    with pytest.raises(IndexError, match=r"20 .*0\.\.19"):
        make_task(config.Task(name="chain_sum", size=20)).example(20)
