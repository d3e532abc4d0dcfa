"""What libtpu asks its surroundings when it starts, and what it logs."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
import contextlib
import functools
import os
from pathlib import Path
import shutil
import tempfile

from spmd import _jax

_USUAL = "/tmp/tpu_logs"
"""Where libtpu logs, if nobody says otherwise."""
_PREFIX = "spmd-libtpu-"
"""Of names of folders, before the number of a process."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Answers what libtpu asks when it starts, where there is no TPU.

    Without the answers it warns that it finds no host; without the last it allows one process on
    the whole machine, which guards chips that are not there. Settings of the user stay.
    """
    if _jax.mesh.tpu_chips():
        yield
        return
    answers = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if "TPU_LOG_DIR" not in os.environ:
        answers |= {"TPU_LOG_DIR": _folder(), "TPU_MIN_LOG_LEVEL": "1"}
    own = {key: value for key, value in answers.items() if key not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for key in own:
            os.environ.pop(key, None)


@functools.cache
def _folder() -> str:
    """Of this process, where libtpu logs warnings if `quiet` started it."""
    _sweep()
    owner = os.getpid()
    try:
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{owner}-")
    except OSError:
        return "disabled"

    def remove() -> None:
        if os.getpid() == owner:  # not in a copy of the process
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _sweep() -> None:
    """Removes the folders of processes that could not, as they were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError):
            pass  # that of another user is not ours to remove, nor one without a number


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What libtpu warns of meanwhile, which it writes to files and not to descriptor 2.

    The list holds it when the context is left: the texts that are new in each file.
    """
    texts: list[str] = []
    before = _sizes()
    try:
        yield texts
    finally:
        for path in _sizes():
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(before.get(path, 0))
                texts.append(file.read().decode("utf-8", "replace"))


def _sizes() -> dict[Path, int]:
    """Bytes of the files of this process, in all folders that libtpu may log to."""
    folders = {os.environ.get("TPU_LOG_DIR") or _USUAL}
    if _folder.cache_info().currsize:
        folders.add(_folder())
    found: dict[Path, int] = {}
    for folder in folders:
        with contextlib.suppress(OSError):  # it may not be read
            for path in Path(folder).glob(f"*.WARNING.*.{os.getpid()}"):
                with contextlib.suppress(OSError):  # it may be gone
                    found[path] = path.stat().st_size
    return found
