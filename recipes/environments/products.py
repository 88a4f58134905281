"""Products of numbers that a tiny model cannot multiply in its head, but can with a Python tool."""

import random


def examples(seed, size, digits=4):
    """`size` products of two numbers of `digits` digits, with the trace that a warm start learns from.

    Both are above 10 ** (digits - 0.5), so all products have 2 * digits digits: one kind of prompt, on which
    a policy is neither always right nor always wrong.
    """
    draw = random.Random(seed)
    lowest = int(10 ** (digits - 0.5)) + 1
    return [_example(*(draw.randint(lowest, 10**digits - 1) for _ in range(2))) for _ in range(size)]


def grade(payload, text):
    """1 for the exact product."""
    return float(text.strip() == payload)


def _example(first, second):
    question, answer = f"{first}*{second}", str(first * second)
    return {
        "question": question,
        "payload": answer,
        "solution": [
            {"role": "assistant", "content": f"```python\n{question}\n```"},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ],
    }
