"""Task names, parameters, wording and answers: what the recipe's task section means, and how it fails."""

import pytest

from zerogap import config
from zerogap.env.task import TaskError, Wording, make_task


@pytest.mark.parametrize(
    ("section", "parts"),
    [
        ({"name": "chain_sums"}, ["task.name 'chain_sums'", "nearest: chain_sum"]),
        ({"name": "chain_sum", "params": {"min_term": 2}}, ["task.params.min_term", "'min_terms'", "max_digits"]),
        ({"name": "chain_sum", "params": {"seed": 2}}, ["task.params.seed", "task.seed"]),
        ({"name": "chain_sum", "params": {"min_terms": 9}}, ["chain_sum", "max_terms must be >= min_terms", "9"]),
        ({"name": "chain_sum", "params": {"min_terms": "x"}}, ["chain_sum", "'x'"]),
        ({"name": "chain_sum", "answer_pattern": "("}, ["task.answer_pattern '('"]),
        ({"name": "chain_sum", "answer_pattern": "= 1"}, ["task.answer_pattern '= 1'", "no group"]),
        ({"jsonl": "absent.jsonl"}, ["task.jsonl absent.jsonl does not exist"]),
    ],
)
def test_an_unfit_section_names_key_value_and_fix(section, parts):
    with pytest.raises(TaskError) as caught:
        make_task(config.Task(**section))
    for part in parts:
        assert part in str(caught.value)


def test_a_wholly_unknown_name_lists_what_is_known():
    with pytest.raises(TaskError, match=r"known: .*chain_sum.*word_sorting"):
        make_task(config.Task(name="qqqq"))


def test_messages_carry_system_prompt_and_instruction():
    task = make_task(config.Task(name="chain_sum", system_prompt="Be brief.", instruction="Only the number."))
    system, user = task.example(0).messages
    assert system == {"role": "system", "content": "Be brief."}
    assert user["role"] == "user" and user["content"].endswith("=\nOnly the number.")
    assert make_task(config.Task(name="chain_sum")).example(0).messages[0]["role"] == "user"


def test_the_last_match_of_the_pattern_is_graded_and_no_match_is_no_answer():
    task = make_task(config.Task(name="chain_sum", answer_pattern=r"= (\S+)"))
    example = task.example(0)
    gold = example.payload["answer"]
    assert task.grade(example, f"1 + 1 = 2, so = {gold} ") == 1.0
    assert task.grade(example, f"= {gold} no, = {gold}9") < 1.0
    assert task.grade(example, gold) == 0.0


def test_without_a_pattern_the_whole_text_is_graded_stripped():
    task = make_task(config.Task(name="word_sorting"))
    example = task.example(0)
    assert task.grade(example, f"\n  {example.payload['answer']} \n") == 1.0


@pytest.mark.parametrize(
    ("pattern", "solution"),
    [
        (None, "5"),
        (r"= (\S+)$", "2 + 3 = 5"),
        (r"#### (.*)", "2 + 3 = 5\n#### 5"),
        (r"<answer>(.*?)</answer>", "2 + 3 = 5\n<answer>5</answer>"),
        (r"\\boxed\{(.*?)\}", "2 + 3 = 5\n\\boxed{5}"),
        (r"^(\d+)$", "5"),
    ],
)
def test_solutions_are_stated_the_way_the_pattern_reads_them(pattern, solution):
    wording = Wording(config.Task(name="chain_sum", answer_pattern=pattern))
    assert wording.with_steps("2 + 3 = 5", "5") == solution
    assert wording.answer(solution) == "5"


def test_a_pattern_that_no_solution_fits_says_so():
    wording = Wording(config.Task(name="chain_sum", answer_pattern="zzz(.*)"))
    with pytest.raises(TaskError, match=r"zzz.*warm_start"):
        wording.with_steps("2 + 3 = 5", "5")
