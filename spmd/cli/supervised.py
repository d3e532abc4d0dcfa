"""A command that compiles runs in a child process: XLA ends its process where a check of it fails.

Nothing here imports JAX. What the compiler says last is on the standard error, which both share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

from spmd.cli.options import USAGE

_SOCKET, _ASKED = "SPMD_PARENT_SOCKET", "SPMD_COMPILER_ENDED"

#: Seconds that another process has to write out the last words of a child.
_LAST_WORDS = 5
#: Seconds after an interrupt from which on it is said that the child has not ended yet.
_AT_ONCE = 1
_POLL = 0.2
#: Seconds from an interrupt that Python dropped until it comes once more.
_AGAIN = 0.05

_asked = False
_terminated = False


def is_child() -> bool:
    """Whether this process is such a child already."""
    return _SOCKET in os.environ


def asked_for_lines() -> bool:
    """Whether a compiler has ended the process of this command, and its lines are asked for."""
    return _asked


def run(argv: Sequence[str]) -> int:
    """The exit code of a command in a child; 2, and the reason on stderr, if its compiler ended it.

    Who interrupts or terminates the command gets the code that a shell gives such an end.
    """
    code = _wait(argv)
    if code >= 0:
        return code
    if -code == signal.SIGINT or _terminated:
        print("spmd: interrupted", file=sys.stderr, flush=True)
        return 128 + (signal.SIGTERM if _terminated else signal.SIGINT)
    name = signal.Signals(-code).name
    text = f"spmd: the compiler ended its process with {name}; its last words are above."
    print(text, file=sys.stderr, flush=True)
    if -code == signal.SIGABRT:
        _wait(argv, **{_ASKED: "1"})
    return USAGE


def _wait(argv: Sequence[str], **more: str) -> int:
    # Each side is told of the other's end by the end of its socket.
    ours, theirs = socket.socketpair()
    with ours:
        with _interrupts() as times:
            with theirs:
                child = subprocess.Popen(
                    [sys.executable, "-m", "spmd", *argv],
                    env={**os.environ, _SOCKET: str(theirs.fileno()), **more},
                    pass_fds=[theirs.fileno()],
                )
            before = signal.signal(signal.SIGTERM, lambda *_: _terminate(child))
            try:
                code = _ended(child, ours, times)
            finally:
                signal.signal(signal.SIGTERM, before)
        if code < 0:
            # The process that writes out what the compiler said last has the child's socket too.
            with contextlib.suppress(KeyboardInterrupt):
                select.select([ours], [], [], _LAST_WORDS)
        return code


def _terminate(child: subprocess.Popen) -> None:
    global _terminated
    _terminated = True
    child.kill()  # of SIGTERM the compiler for TPUs writes its own stack before it ends


@contextlib.contextmanager
def _interrupts() -> Iterator[list[float]]:
    """The times of interrupts, which end this process no longer."""
    times: list[float] = []
    before = signal.signal(signal.SIGINT, lambda *_: times.append(time.monotonic()))
    try:
        yield times
    finally:
        signal.signal(signal.SIGINT, before)


def _ended(child: subprocess.Popen, ours: socket.socket, times: list[float]) -> int:
    """Waits for a child, which the terminal interrupts too.

    Its Python hears of that when the compiler is done; one more interrupt until then ends it.
    """
    heard, said = 0, 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_POLL)
        heard += _heard(ours)
        if heard >= len(times):
            continue
        if said and len(times) > said > heard:
            child.kill()
            child.wait()
            return -signal.SIGINT
        if said <= heard and time.monotonic() - times[-1] > _AT_ONCE:
            said = len(times)  # before it is read: one more may come within the print
            text = "ends when the compiler is done; interrupt again to end at once"
            print(f"\nspmd: {text}", file=sys.stderr, flush=True)


def _heard(ours: socket.socket) -> int:
    """Of how many interrupts the child says that it heard, since it was asked before."""
    return len(ours.recv(64)) if select.select([ours], [], [], 0)[0] else 0


def follow_parent() -> None:
    """Ends this process when its parent is no more, and tells it of interrupts.

    Where Python drops the exception of one, as it does within a finalizer, it comes once more.
    """
    global _asked
    # A command that the user's code starts here has neither this socket nor what was asked.
    parent, _asked = int(os.environ.pop(_SOCKET)), os.environ.pop(_ASKED, None) is not None

    def wait() -> None:
        os.read(parent, 1)  # nothing is ever written: it returns when the other end is closed
        os._exit(USAGE)

    dropped: list[Any] = []
    told = sys.unraisablehook

    def heard(number: int, frame: FrameType | None) -> None:
        if dropped:
            dropped.clear()
        else:
            os.write(parent, b".")
        signal.default_int_handler(number, frame)

    def drop(one: sys.UnraisableHookArgs) -> None:
        if not issubclass(one.exc_type, KeyboardInterrupt):
            told(one)
            return
        dropped.append(one.exc_type)
        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()

    threading.Thread(target=wait, name="spmd-parent", daemon=True).start()
    signal.signal(signal.SIGINT, heard)
    sys.unraisablehook = drop
