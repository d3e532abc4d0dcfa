"""Processes that Open MPI starts, on this machine or on those of a host file."""

from __future__ import annotations

from collections.abc import Callable
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading

from spmd.cli.options import CommandError
from spmd.launch._local import (
    BECOME_PROGRAM,
    Launch,
    Stopped,
    relay,
    say,
    stop,
    stoppable,
    variables,
)

#: What `--tag-output` writes before each line: job, number of the process, and stream.
_TAG = re.compile(rb"\[\d+,(\d+)\]<(?:stdout|stderr|stddiag)>:")


def run(launch: Launch) -> int:
    """Runs a program under ``mpirun``, which stops all processes when one fails.

    Returns:
        The exit code of ``mpirun``, or 128 and the signal that stopped this process.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise CommandError("--on mpirun needs Open MPI, and there is no mpirun on the path.")
    with stoppable():
        running = subprocess.Popen(
            command(launch, mpirun, os.geteuid() == 0),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        pairs = ((running.stdout, sys.stdout), (running.stderr, sys.stderr))
        retag = untagged(launch.prefix)
        relays = [
            threading.Thread(target=relay, args=(source, sink, retag), daemon=True)
            for source, sink in pairs
        ]
        for thread in relays:
            thread.start()
        try:
            code = running.wait()
        except Stopped as stopped:
            say(f"stopped by {stopped.number.name}, and so are the processes")
            stop([running], stopped.number)
            code = 128 + stopped.number
        for thread in relays:
            thread.join()
    return code if code >= 0 else 128 - code


def command(launch: Launch, mpirun: str, is_root: bool) -> list[str]:
    """What to run.

    Args:
        launch: The run.
        mpirun: The path of ``mpirun``.
        is_root: Whether the user is one whom Open MPI refuses by default.
    """
    exported = variables(launch, os.environ)
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
        *(sys.executable, "-c", BECOME_PROGRAM, "", *launch.command),
    ]


def untagged(prefix: bool) -> Callable[[bytes], bytes]:
    """Returns what turns a line of ``mpirun`` into one of ours."""

    def line(text: bytes) -> bytes:
        # A line that several threads of a process wrote has a tag for each piece.
        process = _TAG.match(text)
        text = _TAG.sub(b"", text)
        return b"[%s] %s" % (process[1], text) if process and prefix else text

    return line
