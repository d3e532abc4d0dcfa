"""Processes on this machine: their start, their output, and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
from dataclasses import dataclass
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

from spmd.cli.options import CommandError, cpu_variables
from spmd.launch import ADDRESS, PROCESS, PROCESSES

_POLL = 0.02  # seconds
#: Seconds between what a process is asked with and what it is made to do.
_KILL_AFTER = 5.0
#: Seconds after a failure in which a process that was killed is taken for its cause.
_SOON = 2.0
_COLORS = (36, 33, 35, 32, 34, 31)

# A process of its own session outlives who started it; the kernel ends it instead.
_BECOME_PROGRAM = """
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if sys.argv[1] and os.getppid() != int(sys.argv[1]):
        os._exit(137)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run.

    Attributes:
        command: Arguments of the interpreter: a script or ``-m module``, and its own arguments.
        processes: How many processes.
        devices: Virtual CPU devices of each; None: the devices that JAX finds.
        port: Where the processes meet; 0: a free port.
        grace: Seconds that the others have when one has failed.
        prefix: Whether each line of output is preceded by the number of its process.
        engine_options: More words for the command line of the engine.
    """

    command: tuple[str, ...]
    processes: int
    devices: int | None
    port: int
    grace: float
    prefix: bool
    engine_options: str = ""


def run(launch: Launch) -> int:
    """Runs a program in several processes, and stops all of them when one fails.

    It returns 0, the exit code of the first process that failed, or 128 and the signal that ended
    it.
    """
    port = launch.port or free_port()
    words = program(launch.command, os.getpid())
    running: list[subprocess.Popen[bytes]] = []
    relays: list[threading.Thread] = []

    def ended() -> int:
        for i in range(launch.processes):
            running.append(started(words, environment(launch, i, port, os.environ)))
            relays.extend(relays_of(running[i], _prefixed(i, launch)))
        return wait(
            lambda: [p.poll() for p in running],
            lambda: stop(running, signal.SIGTERM),
            launch.grace,
        )

    with stoppable(), contextlib.ExitStack() as stack:
        stack.callback(_kill, running)
        code = unless_stopped(ended, lambda number: stop(running, number))
        _kill(running)
        for relay in relays:
            relay.join(_KILL_AFTER)  # something else may hold the other end of the pipe
    return code


class Stopped(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: signal.Signals):
        self.number = number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Has signals end this process by an exception, so that nothing is left running."""

    def stop(number: int, _: object) -> None:
        raise Stopped(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def unless_stopped(code: Callable[[], int], stop: Callable[[signal.Signals], None]) -> int:
    """The exit code of a run; when this process is stopped, it stops the run with that signal.

    A signal may come while the processes start, so `code` starts them.
    """
    try:
        return code()
    except Stopped as stopped:
        say(f"stopped by {stopped.number.name}, and so are the processes")
        stop(stopped.number)
        return 128 + stopped.number


#: Linux gives connections their own end from 32768 on, and Ray has its workers below 20000.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """A port of this machine at which nobody listens.

    The program that is to listen there takes seconds to start. A port that the system gives away
    by itself might be taken until then, by any connection that another program makes.
    """
    for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise CommandError("no free port was found: name one with --port.")


def started(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, own_session: bool = True
) -> subprocess.Popen[bytes]:
    """A process that reads nothing, and whose output is read here."""
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=own_session,
    )


def program(command: Sequence[str], parent: int | str = "") -> list[str]:
    """What becomes the program, which the kernel ends with its parent, if the number is given."""
    return [sys.executable, "-c", _BECOME_PROGRAM, str(parent), *command]


def environment(
    launch: Launch, process: int, port: int, outer: Mapping[str, str]
) -> dict[str, str]:
    """The variables of one process of this machine, beside and over the outer ones."""
    return {**outer, **variables(launch, outer), **numbers(launch, process, f"127.0.0.1:{port}")}


def numbers(launch: Launch, process: int, address: str) -> dict[str, str]:
    """The variables that tell a process who it is, and where all of them meet."""
    return {ADDRESS: address, PROCESSES: str(launch.processes), PROCESS: str(process)}


def variables(launch: Launch, outer: Mapping[str, str]) -> dict[str, str]:
    """The variables that all processes have in common, beside those that they had otherwise."""
    devices = {} if launch.devices is None else cpu_variables(launch.devices, outer)
    return {"PYTHONUNBUFFERED": "1", **devices}


# Output


def relays_of(
    running: subprocess.Popen[bytes], shown: Callable[[bytes], bytes]
) -> list[threading.Thread]:
    """Threads that write what a process says, line by line: lines of two never mix."""
    pairs = ((running.stdout, sys.stdout), (running.stderr, sys.stderr))
    threads = [
        threading.Thread(target=_relay, args=(source, sink, shown), daemon=True)
        for source, sink in pairs
    ]
    for thread in threads:
        thread.start()
    return threads


def _relay(source: IO[bytes], sink: IO[str], shown: Callable[[bytes], bytes]) -> None:
    for line in source:
        write(sink, shown(line))


def _prefixed(process: int, launch: Launch) -> Callable[[bytes], bytes]:
    """What writes the number of a process before a line, if that is wanted."""
    text = f"[{process:>{len(str(launch.processes - 1))}}] " if launch.prefix else ""
    if text and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{_COLORS[process % len(_COLORS)]}m{text}\x1b[0m"
    return lambda line: text.encode() + line


_writing = threading.Lock()


def write(sink: IO[str], line: bytes) -> None:
    """Writes a line to one of the streams of this process, whole."""
    line = line if line.endswith(b"\n") else line + b"\n"
    raw = getattr(sink, "buffer", None)
    with _writing, contextlib.suppress(BrokenPipeError, ValueError):
        if raw is None:
            sink.write(line.decode(errors="replace"))
        else:
            raw.write(line)
        sink.flush()


def say(text: str) -> None:
    """Says something of the launcher itself."""
    with _writing:
        sys.stderr.write(f"spmd: {text}\n")
        sys.stderr.flush()


# The end


def wait(
    codes: Callable[[], Sequence[int | None]], stop_others: Callable[[], None], grace: float
) -> int:
    """Waits until all processes have ended; after a failure, no longer than `grace` seconds.

    `codes` gives the exit code of each that has ended, None for the others, which `stop_others`
    stops. It returns 0, or the exit code of the first that failed. One that was killed is taken for
    it, if others failed just before: they have lost it.
    """
    failed, deadline = None, float("inf")
    while time.monotonic() < deadline:
        now, is_soon = codes(), time.monotonic() < deadline - grace + _SOON
        if failed is None and any(now):
            # Who was killed is why the others have failed, so soon after it.
            failed = min((i for i, c in enumerate(now) if c), key=lambda i: (now[i] or 0) > 0)
            deadline = time.monotonic() + grace
            left = sum(c is None for c in now)
            others = f"; {left} other{'s have' if left > 1 else ' has'} {grace:g} s to end"
            say(f"process {failed} {_ended(now[failed])}{others * bool(left)}")
        elif failed is not None and is_soon and -signal.SIGKILL in {*now} - {now[failed]}:
            # What is killed takes some time to end, and its peers may have failed before.
            failed = now.index(-signal.SIGKILL)
            say(f"process {failed} {_ended(now[failed])}")
        if None not in now:
            break
        time.sleep(_POLL)
    else:
        say("the others are stopped")
        stop_others()
    return 0 if failed is None else exit_code(codes()[failed] or 1)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"has failed with exit code {code}"


def exit_code(code: int) -> int:
    """That of a process as a shell says it: 128 and the signal, if one has ended it."""
    return code if code >= 0 else 128 - code


def stop(running: list[subprocess.Popen[bytes]], first: signal.Signals) -> None:
    """Asks all to end, and a little later makes them."""
    _signal(running, first)
    deadline = time.monotonic() + _KILL_AFTER
    with contextlib.suppress(Stopped):  # who cannot wait gets what follows at once
        while time.monotonic() < deadline and any(p.poll() is None for p in running):
            time.sleep(_POLL)
    _kill(running)


def _kill(running: list[subprocess.Popen[bytes]]) -> None:
    _signal(running, signal.SIGKILL)
    for process in running:
        process.wait()


def _signal(running: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in running:
        # What a process has started itself is in its group, and may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
