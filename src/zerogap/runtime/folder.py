"""The run folder as a whole: fit to start in, and left as it was found when a run fails before its first update."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zerogap.runtime.backend import RunFailed
from zerogap.runtime.records import METRICS


class RunFolderError(RunFailed):
    """A folder in which the run cannot start or go on; the message names it and the fix."""


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """RunFolderError when a new run would land in a used folder, or a resumed one has nothing to go on from."""
    if run_dir.exists() and not run_dir.is_dir():
        raise RunFolderError(f"output directory {run_dir} is a file; give another --output-dir")
    used = run_dir.is_dir() and any(run_dir.iterdir())
    if used and not resume:
        raise RunFolderError(
            f"output directory {run_dir} already holds a run; add --resume to go on with it, "
            "or give another --output-dir"
        )
    if resume and not used:
        raise RunFolderError(f"--resume: {run_dir} holds no run; leave --resume out, or give the run's --output-dir")


@contextmanager
def new_run_folder(run_dir: Path) -> Iterator[None]:
    """A new or empty folder for the block. When the block fails before a line of metrics is written, everything in
    the folder goes, and so do the folders made here: nothing half-written blocks the next try.

    RunFolderError when the folder is in use; then nothing is touched.
    """
    check_run_dir(run_dir, resume=False)
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # KeyboardInterrupt too
        metrics = run_dir / METRICS
        if not (metrics.is_file() and metrics.stat().st_size):
            _remove(run_dir, made)
        raise


def _remove(run_dir: Path, made: list[Path]) -> None:
    """What is in run_dir, then the empty folders of `made`, innermost first."""
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # somebody else uses it by now
            folder.rmdir()
