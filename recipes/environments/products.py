"""Products of numbers that a tiny model cannot multiply in its head, but can with a Python tool."""

import random


def examples(seed, size, digits=4):
    """`size` products of two numbers of 1 to `digits` digits, each length as often as the others, with the trace that a
    warm start learns from."""
    draw = random.Random(seed)

    def number():
        length = draw.randint(1, digits)
        return draw.randint(10 ** (length - 1), 10**length - 1)

    return [_example(number(), number()) for _ in range(size)]


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
