"""`zerogap doctor`: what this machine has, and in words what follows from it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zerogap.cli.arguments import command_parser

GPU_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")

EXAMPLES = """  zerogap doctor
  zerogap doctor --json"""


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("doctor", "What this machine has and what follows from it.", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout")
    return parser


def run(args: argparse.Namespace) -> int:
    """0 when a run can work here, 1 when something that every run needs is missing."""
    facts = examine()
    notes, usable = conclude(facts)
    if args.json:
        print(json.dumps({**facts, "usable": usable, "notes": notes}))
        return 0 if usable else 1
    for key, value in facts.items():
        if key == "kernels_error":
            continue  # it is the first note
        print(f"{key.replace('_', ' '):<18}{_words(value)}")
    print()
    for note in notes:
        print(f"- {note}")
    return 0 if usable else 1


def examine() -> dict[str, Any]:
    """Facts only. None means: not there."""
    from zerogap.cli.estimate import gigabytes, machine_memory_bytes

    memory = machine_memory_bytes()
    return {
        "zerogap": _installed("zerogap"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_available": None if memory is None else gigabytes(memory),
        **_kernels(),
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
        "ray": _installed("ray"),
        "vllm": _installed("vllm"),
        "gpus": _gpus(),
    }


def conclude(facts: dict[str, Any]) -> tuple[list[str], bool]:
    """(what follows, whether a run can work here)."""
    notes: list[str] = []
    usable = True
    if facts["kernels_error"] is not None:
        usable = False
        notes.append(
            f"the aligned kernels did not load ({facts['kernels_error']}); reinstall with a C++ compiler "
            "(`pip install .`), or run only the control arm with model.kernels=standard"
        )
    else:
        notes.append(
            f"the aligned kernels run as {facts['kernels']}; every variant computes the same bits, "
            "so workers and learner may sit on different machines"
        )
    for package in ("torch", "transformers"):
        if facts[package] is None:
            usable = False
            notes.append(f"{package} is missing; pip install {package}")
    if facts["ray"] is None:
        notes.append("Ray is missing: only runtime.driver=inline works; pip install ray for asynchronous runs")
    if facts["cores"] == 1:
        notes.append("one core: engine and learner take turns on it, an asynchronous run gains nothing in time")
    else:
        notes.append(
            f"{facts['cores']} cores: rollout.workers x rollout.threads + learner.threads should not exceed that"
        )
    if facts["gpus"]:
        notes.append("a GPU is present, but this version computes on the CPU only")
    if facts["vllm"] is not None:
        notes.append("vLLM is installed, but this version samples with the embedded engine only")
    return notes, usable


def _kernels() -> dict[str, Any]:
    """Which builds of the kernel library exist, which of them this CPU runs, which one is used; or why none loads."""
    try:
        from zerogap.kernels import native

        chosen = os.environ.get("ZEROGAP_ISA") or native.runnable()[-1]
        native.load_variant(chosen)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"
        return {"kernels_built": [], "kernels_runnable": [], "kernels": None, "kernels_error": message}
    return {
        "kernels_built": native.variants(),
        "kernels_runnable": native.runnable(),
        "kernels": chosen,
        "kernels_error": None,
    }


def _gpus() -> list[str]:
    """Names that the driver reports, or none."""
    if shutil.which(GPU_QUERY[0]) is None:
        return []
    try:
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _installed(package: str) -> str | None:
    """The version from the package's metadata; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
