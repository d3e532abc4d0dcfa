"""Processes that Open MPI starts, on this machine or on those of a host file."""

from __future__ import annotations

from collections.abc import Callable
import os
import re
import shlex
import shutil
import subprocess
import threading

from spmd.cli.options import CommandError
from spmd.launch import _local
from spmd.launch._local import Launch

#: What `--tag-output` writes before each line: job, number of the process, and stream.
_TAG = re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>:")


def run(launch: Launch) -> int:
    """Runs a program under ``mpirun``, which stops all processes when one fails.

    It returns the exit code of ``mpirun``, or 128 and the signal that stopped this process.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise CommandError("--on mpirun needs Open MPI, and there is no mpirun on the path.")
    words = command(launch, mpirun, os.geteuid() == 0)
    running: list[subprocess.Popen[bytes]] = []
    relays: list[threading.Thread] = []

    def ended() -> int:
        running.append(_local.started(words))
        relays.extend(_local.relays_of(running[0], untagged(launch.prefix)))
        return running[0].wait()

    with _local.stoppable():
        code = _local.unless_stopped(ended, lambda number: _local.stop(running, number))
        for thread in relays:
            thread.join()
    return _local.exit_code(code)


def command(launch: Launch, mpirun: str, is_root: bool) -> list[str]:
    """What to run; by default Open MPI refuses the user who is root."""
    exported = _local.variables(launch, os.environ)
    return [
        mpirun,
        "-n",
        str(launch.processes),
        "--tag-output",
        # Processes of JAX have threads of their own for every core.
        *("--bind-to", "none", "--oversubscribe"),
        *(("--allow-run-as-root",) if is_root else ()),
        *(word for name, value in exported.items() for word in ("-x", f"{name}={value}")),
        *shlex.split(launch.engine_options),
        *_local.program(launch.command),
    ]


def untagged(prefix: bool) -> Callable[[bytes], bytes]:
    """Returns what turns a line of ``mpirun`` into one of ours."""

    def line(text: bytes) -> bytes:
        # A line that several threads of a process wrote has a tag for each piece.
        process = _TAG.match(text)
        text = _TAG.sub(b"", text)
        return b"[%s] %s" % (process[1], text) if process and prefix else text

    return line
