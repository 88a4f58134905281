"""The CPython back-end: numpy and sympy, its system calls, its protocol, and refusals where it cannot be isolated."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.env.tools.conftest import LIMITS, Sandbox, opened
from zerogap.env.tools import bubblewrap
from zerogap.env.tools.cpython import CPythonBackend
from zerogap.env.tools.interface import SandboxUnavailable


@pytest.fixture(scope="module")
def cpython() -> Iterator[Sandbox]:
    made = opened("cpython")
    yield made
    made.close()


def test_numpy_and_sympy_are_there(cpython: Sandbox) -> None:
    results = cpython.run("import numpy as np\nint(np.arange(5).sum())", "import sympy\nsympy.factorint(60)")
    assert [result.text for result in results] == ["10\n", "{2: 2, 3: 1, 5: 1}\n"]


def test_a_long_computation_of_sympy_is_stopped(cpython: Sandbox) -> None:
    code = "import sympy\nsympy.factorint(sympy.nextprime(10**40) * sympy.nextprime(10**41))"
    result, after = cpython.run(code, "1")
    assert result.error == "timeout" and result.seconds < LIMITS.seconds + 1
    assert after.text == "1\n"


def test_memory_of_any_kind_counts(cpython: Sandbox) -> None:
    shared, array, after = cpython.run(
        "import mmap\nmmap.mmap(-1, 100 * 2**30)", "import numpy\nnumpy.ones(100 * 2**30)", "1"
    )
    assert shared.error == "exception" and "OSError" in shared.text
    assert array.error == "memory"
    assert after.text == "1\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls are those of x86_64")
def test_system_calls_that_computing_does_not_need_are_refused(cpython: Sandbox) -> None:
    refused = {
        "socket": 41,
        "clone": 56,
        "fork": 57,
        "vfork": 58,
        "execve": 59,
        "kill": 62,
        "fcntl": 72,
        "ptrace": 101,
        "mount": 165,
        "tgkill": 234,
        "unshare": 272,
        "prlimit64": 302,
        "process_vm_readv": 310,
        "memfd_create": 319,
        "bpf": 321,
        "io_uring_setup": 425,
        "pidfd_open": 434,
        "clone3": 435,
        "getpid in the numbers of x32": 0x40000000 + 39,
    }
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"[(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()) for number in {[*refused.values()]}]"
    )
    (result,) = cpython.run(code)
    assert result.text == f"{[(-1, 1)] * len(refused)}\n"


def test_a_session_that_writes_to_the_socket_itself_only_harms_itself(cpython: Sandbox) -> None:
    for junk in ("b'junk' * 1000", "b'P' + b'\\xff' * 4", "b'D' + b'\\x00' * 3"):
        broken, after = cpython.run(f"import os\nos.write(3, {junk})", "1")
        assert broken.error == "crashed"
        assert after.text == "1\n"


def test_a_missing_bubblewrap_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailable, match=r'apt-get install bubblewrap.*"monty"'):
        bubblewrap.command(3)


def test_a_machine_without_namespaces_is_refused_with_bubblewraps_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    async def refused() -> None:
        backend = CPythonBackend()
        with pytest.raises(SandboxUnavailable, match=r'No permissions to create new namespace.*"monty"'):
            await backend.open(LIMITS)

    asyncio.run(refused())
