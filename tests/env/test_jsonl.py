"""JSON Lines tasks graded by math-verify: which files fit, what is equal, what is an error."""

import json
import threading
from pathlib import Path

import pytest

from zerogap import config
from zerogap.env import jsonl
from zerogap.env.task import GradeError, TaskError, make_task

SHARED = Path(__file__).parents[3] / "shared" / "data"


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n", encoding="utf-8")
    return path


def task_of(path, **section):
    return make_task(config.Task(jsonl=str(path), **section))


GSM8K = {"question": "Half of 48, and 48?", "answer": "48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72"}


def test_gsm8k_gold_is_what_follows_the_mark_and_the_answer_is_the_solution(tmp_path):
    task = task_of(write(tmp_path / "a.jsonl", GSM8K))
    example = task.example(0)
    assert example.payload == "72"
    assert task.solution(example) == GSM8K["answer"]
    assert task.grade(example, task.solution(example)) == 1.0
    assert task.grade(example, "It is 24.") == 0.0
    assert task.grade(example, "nothing to see") == 0.0


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("72", "so $72$", 1.0),
        ("1,000", "1000", 1.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (3, "3.0", 1.0),
        ("72", "27", 0.0),
        ("72", "", 0.0),
    ],
)
def test_values_are_compared_not_texts(tmp_path, gold, text, reward):
    task = task_of(write(tmp_path / "a.jsonl", {"question": "q", "answer": gold}))
    assert task.grade(task.example(0), text) == reward


def test_a_solution_field_is_used_and_the_pattern_is_obeyed(tmp_path):
    path = write(tmp_path / "a.jsonl", {"question": "q", "answer": "72", "solution": "48 + 24 = 72."})
    assert task_of(path).solution(task_of(path).example(0)) == "48 + 24 = 72.\n#### 72"
    task = task_of(path, answer_pattern=r"<answer>(.*?)</answer>")
    solution = task.solution(task.example(0))
    assert solution == "48 + 24 = 72.\n<answer>72</answer>"
    assert task.grade(task.example(0), solution) == 1.0
    assert task.grade(task.example(0), "72") == 0.0


def test_grading_works_off_the_main_thread(tmp_path):
    """math-verify's own limits are signal alarms, which raise outside the main thread: all rewards would be 0."""
    task = task_of(write(tmp_path / "a.jsonl", GSM8K))
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(task.grade(task.example(0), "#### 72")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_a_failing_grader_is_an_error_and_never_a_reward(tmp_path, monkeypatch):
    """Field case 37."""
    task = task_of(write(tmp_path / "a.jsonl", GSM8K))

    def fail(*args, **kwargs):
        raise RecursionError("deep")

    monkeypatch.setattr(jsonl, "verify", fail)
    with pytest.raises(GradeError, match=r"prompt 0.*RecursionError: deep"):
        task.grade(task.example(0), "72")


def test_a_gold_that_math_verify_cannot_read_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", GSM8K, {"question": "q", "answer": "hello"})
    task = task_of(path)
    with pytest.raises(GradeError, match=r"a\.jsonl:2: answer 'hello'"):
        task.grade(task.example(1), "3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q"}', "field `answer` is missing"),
        ('{"answer": "1"}', "field `question` is missing"),
        ('{"question": "q", "answer": null}', "field `answer` must be a text or a number, got None"),
        ('{"question": ["q"], "answer": "1"}', "field `question` must be a text"),
        ('{"question": " ", "answer": "1"}', "field `question` is empty"),
        ('{"question": "q", "answer": "steps ####"}', "nothing after ####"),
        ('{"question": "q", "answer": "1", "solution": 1.5e', "not a JSON object"),
        ('["q", "1"]', "got list"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", GSM8K, "", line)
    with pytest.raises(TaskError) as caught:
        task_of(path)
    assert f"{path}:3: " in str(caught.value) and message in str(caught.value)


def test_files_without_lines_or_text_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskError, match="has no lines"):
        task_of(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="not UTF-8"):
        task_of(tmp_path / "binary.jsonl")


@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test", "aime24"])
def test_shared_math_files(name):
    path = SHARED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not beside this checkout")
    task = task_of(path)
    for index in range(0, len(task), max(1, len(task) // 100)):
        example = task.example(index)
        assert task.grade(example, task.solution(example)) == 1.0
