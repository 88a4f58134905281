"""Code that attacks ends within its limit and a second with a reason; the next call works; nothing is left behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.env.tools.conftest import LIMITS, SECRET, Sandbox, descendants, eventually

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"

# Code and the classes of error that may come of it.
HOSTILE = {
    "endless loop": ("while True:\n    pass", {"timeout"}),
    "loop that catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        {"timeout"},
    ),
    "one operation that takes forever": ("x = 10 ** 10 ** 8", {"timeout", "memory"}),
    "sleep": ("import time\ntime.sleep(1000)", {"timeout"}),
    "1e9 characters in one string": ("print('x' * 10**9)", {"memory"}),
    "1e9 characters in a loop": ("for _ in range(10**6): print('x' * 1000)", {"output", "timeout"}),
    "1e9 characters, errors caught": (
        "for _ in range(10**6):\n    try: print('x' * 1000)\n    except BaseException: pass",
        {"output", "timeout"},
    ),
    "a value of 1e9 characters": ("'x' * 10**9", {"memory"}),
    "100 GB at once": ("x = 'x' * (100 * 2**30)", {"memory"}),
    "memory bit by bit": ("x = []\nwhile True: x.append('x' * 10**6 + str(len(x)))", {"memory", "timeout"}),
    "recursion": ("def f(n): return f(n + 1)\nf(0)", {"exception"}),
    "nested source": ("(" * 10**5, {"exception", "memory"}),
    "fork": ("import os\nos.fork()", {"exception"}),
    "fork loop": ("import os\nwhile True:\n    try: os.fork()\n    except Exception: pass", {"timeout"}),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", {"exception"}),
    "subprocess": ("import subprocess\nsubprocess.run(['ls'])", {"exception"}),
    "thread": ("import threading\nthreading.Thread(target=print).start()", {"exception"}),
    "killing the parent": ("import os\nos.kill(os.getppid(), 9)", {"exception"}),
    "killing everybody": (
        "import os\nfor process in range(-1, 200):\n    try: os.kill(process, 9)\n    except Exception: pass",
        {None},
    ),
    "ending itself": ("import os\nos._exit(0)", {"crashed", "exception"}),
    "leaving": ("raise SystemExit", {"exception"}),
    "asking a person": ("input()", {"exception"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_ends_with_a_reason_and_the_next_call_works(sandbox: Sandbox, name: str) -> None:
    code, errors = HOSTILE[name]
    before = descendants()
    attack, after = sandbox.run(code, "6 * 7")
    assert attack.error in errors
    assert attack.seconds < LIMITS.seconds + 1
    assert bool(attack.text) == (attack.error is not None)
    assert len(attack.text) <= LIMITS.output_chars
    assert (after.text, after.error) == ("42\n", None)
    # Monty keeps a warm worker where the attacked one was; a session of CPython leaves nothing.
    allowed = len(before) + (1 if sandbox.name == "monty" else 0)
    assert eventually(lambda: len(descendants()) <= allowed)
    assert eventually(lambda: "R" not in descendants().values())


def test_variables_survive_an_exception_and_are_lost_with_the_interpreter_which_the_text_says(sandbox: Sandbox) -> None:
    _, failed, kept, stopped, gone = sandbox.run("x = 41", "1 / 0", "x + 1", "while True: pass", "x")
    assert failed.error == "exception" and failed.text.endswith("ZeroDivisionError: division by zero\n")
    assert kept.text == "42\n"
    assert stopped.text == "[stopped after 1 s, the limit; all variables are lost]\n"
    assert "NameError" in gone.text


def test_text_printed_before_a_kill_is_kept(sandbox: Sandbox) -> None:
    (result,) = sandbox.run("print('so far')\nwhile True: pass")
    assert result.text.startswith("so far\n[stopped")


def test_no_file_of_this_machine_is_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "answers.jsonl"
    secret.write_text(SECRET)
    assert RECIPE.exists()
    paths = ["/etc/passwd", str(secret), str(RECIPE), str(RECIPE.parent), "/proc/self/environ", "/proc/1/environ"]
    read = "print('got', open(path).read())"
    result, listing = sandbox.run(
        f"for path in {paths!r}:\n    try: {read}\n    except OSError as error: print('refused')",
        f"import os\nfor path in {[str(tmp_path), str(RECIPE.parent)]!r}:\n"
        "    try: print('got', os.listdir(path))\n    except OSError: print('refused')",
    )
    assert result.text == "refused\n" * len(paths)
    assert listing.text == "refused\n" * 2


def test_no_file_is_written(sandbox: Sandbox, tmp_path: Path) -> None:
    paths = [str(tmp_path / "left"), "/tmp/zerogap-left", "/zerogap-left", "zerogap-left", "/sandbox/left", "/dev/null"]
    write = "open(path, 'w').write('left')\n        print('written')"
    (result,) = sandbox.run(
        f"for path in {paths!r}:\n    try:\n        {write}\n    except OSError: print('refused')",
    )
    assert result.text == "refused\n" * len(paths)
    assert not any(Path(path).is_file() for path in paths)


def test_the_environment_is_not_inherited(sandbox: Sandbox) -> None:
    results = sandbox.run("import os\nprint(dict(os.environ))", "import os\nprint(os.getenv('ZEROGAP_TEST_SECRET'))")
    assert not any(SECRET in result.text for result in results)


def test_a_server_on_this_machine_gets_no_connection(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        code = f"import socket\nsocket.create_connection({server.getsockname()!r})"
        (result,) = sandbox.run(code)
        assert result.error == "exception"
        with pytest.raises(BlockingIOError):
            server.accept()
