"""The command that starts the CPython sandbox. Of this machine bubblewrap shows Python, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import site
import sys
from pathlib import Path

from zerogap.env.tools import guest, interface, seccomp
from zerogap.env.tools.interface import SandboxUnavailable

_OTHER = 'or use the other back-end, "monty"'
_INSIDE = Path("/sandbox")  # of the packages that the code may import
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_ENVIRONMENT = {
    "PYTHONPATH": str(_INSIDE),
    "PYTHONHASHSEED": "0",  # the order of a set of strings is the same in every run
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a session has one thread
    "OPENBLAS_NUM_THREADS": "1",
}


def command(descriptor: int) -> list[str]:
    """Arguments that start the nursery (guest.py) on an inherited socket.

    Raises SandboxUnavailable where this machine lacks bubblewrap, a package, or a table of its system calls.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(
            f"the cpython tool needs bubblewrap: apt-get install bubblewrap (Linux only), {_OTHER}"
        )
    if platform.machine() not in seccomp.TABLES:
        raise SandboxUnavailable(
            f"the cpython tool knows the system calls of {', '.join(seccomp.TABLES)}, not {platform.machine()}; "
            f"run it there, {_OTHER}"
        )
    return [
        bwrap,
        *_isolation(),
        *_files(),
        "--",
        os.path.realpath(sys.executable),
        "-S",
        "-s",
        "-P",
        "-m",
        guest.__name__,
        str(descriptor),
    ]


def refused(stderr: str) -> SandboxUnavailable:
    """The error for a sandbox that did not start."""
    return SandboxUnavailable(
        f"the cpython tool's sandbox did not start: {stderr.strip() or 'no message'}. It needs user namespaces and "
        f"seccomp (in a container they may be switched off: allow them, or run outside of it), {_OTHER}"
    )


def _isolation() -> list[str]:
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for key, value in _ENVIRONMENT.items():
        arguments += ["--setenv", key, value]
    return [*arguments, "--chdir", "/"]


def _files() -> list[str]:
    """No /proc, /dev, /tmp, home or project: shared libraries, Python's library, three packages, files of ours."""
    arguments: list[str] = []
    for library in _LIBRARIES:
        if os.path.islink(library):
            arguments += ["--symlink", os.readlink(library), library]
        else:
            arguments += ["--ro-bind-try", library, library]
    for path in ("/etc/ld.so.cache", os.path.realpath(sys.executable), f"{sys.base_prefix}/lib"):
        arguments += ["--ro-bind-try", path, path]
    for path in site.getsitepackages([sys.base_prefix]):
        if os.path.isdir(path):  # other people's packages, which may hold answers
            arguments += ["--tmpfs", path, "--remount-ro", path]
    for module in (guest, interface, seccomp):
        inside = _INSIDE.joinpath(*module.__name__.split(".")).with_suffix(".py")
        arguments += ["--ro-bind", str(module.__file__), str(inside)]
    for name in guest.PACKAGES:
        specification = importlib.util.find_spec(name)
        if specification is None or not specification.submodule_search_locations:
            raise SandboxUnavailable(f"the cpython tool needs {name}: pip install {name}, {_OTHER}")
        folder = Path(specification.submodule_search_locations[0])
        for source in (
            folder,
            folder.with_name(f"{name}.libs"),
        ):  # wheels keep their shared libraries beside the package
            arguments += ["--ro-bind-try", str(source), str(_INSIDE / source.name)]
    return [*arguments, "--remount-ro", "/"]
