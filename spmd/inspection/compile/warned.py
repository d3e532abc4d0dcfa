"""What XLA's partitioner warns of while it compiles.

Its C++ writes that to file descriptor 2, and that of libtpu to a file. So a report catches what is
written there meanwhile, takes these warnings out, and passes all else on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import os
import re
import select
import tempfile
import threading
import time
from typing import Any
import weakref

from spmd import _jax
from spmd.inspection.compile import libtpu
from spmd.inspection.findings.rematerialization import PARTS

_HEAD = r"[%s]\d{4} [\d:.]+ +\d+ [\w./\-]+\.(?:cc|h):\d+\] "
_WARNING = rf"(?:{_HEAD % 'IWEF'})?{PARTS}\n?"
# A message, with all lines of the only one that has several; those of Python have another head.
_MESSAGE = rf"^{_HEAD}(?:[^\n]* is taking > [\s\S]*?attach the results\.|[^\n]*)\n?"

#: Seconds between two times that what was written is passed on.
_INTERVAL = 0.05

#: Seconds for which processes are waited for that were given the descriptor, and may write yet.
_GRACE = 0.1

#: Seconds that a write has to end in where nothing says when it does.
_BLIND = 0.01

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    """Takes the partitioner's warnings out of what is written to file descriptor 2.

    The list holds them when the context is left. Everything else is passed on to where the
    descriptor leads: byte for byte, in order, and while it is written up to the last whole line.
    Only what another thread writes at the moment when the context is left may change places with
    what it writes next. Where another thread catches already, nothing is caught, and where there is
    no such descriptor, only what libtpu logs.

    If the user wants no warnings to be written, XLA warns all the same, and none is passed on.
    """
    lines: list[str] = []
    if not _one_at_a_time.acquire(blocking=False):
        yield lines
        return
    try:
        with contextlib.ExitStack() as stack:
            # A closed descriptor 2 would be the number of the next file that is opened, so the
            # copy comes first.
            with contextlib.suppress(OSError):
                real = os.dup(2)
                stack.callback(os.close, real)
                # A file and no pipe: who writes never waits for us, whatever locks they hold.
                file, rest = _opened_twice(stack)
                dismiss = stack.enter_context(_last_words(rest))
                passing = _Passing(file, rest, real, lines, _jax.lowering.silenced())
                stack.enter_context(_redirected(passing, file, real, dismiss))
                stack.enter_context(_jax.lowering.warning_aloud())
            with libtpu.logged() as texts:
                yield lines
        logged = [found[0] for text in texts for found in re.finditer(_WARNING, text)]
        lines += [line for line in logged if line not in lines]
    finally:
        _one_at_a_time.release()


def _opened_twice(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Two descriptors of a new file without a name; each has a place in it of its own."""
    file, path = tempfile.mkstemp()
    stack.callback(os.close, file)
    try:
        rest = os.open(path, os.O_RDONLY)
    finally:
        os.unlink(path)
    stack.callback(os.close, rest)
    return file, rest


#: Waits for a line, which comes where all went well. If the end comes first, this process is no
#: more: it writes out what is left of the file. What a process is given by its parent, such as the
#: socket of `spmd.cli.supervised`, has lower numbers than 9, and a shell knows no higher ones.
_GUARD = "read -r _ || cat <&9 >&2"


@contextlib.contextmanager
def _last_words(rest: int) -> Iterator[Callable[[], object]]:
    """If this process is aborted, another one writes what was not passed on yet.

    No handler of a signal could: the compiler aborts while other threads hold Python's locks. The
    other process shares the place of `rest` in its file, and so knows what is left. What is yielded
    tells it that all is well; its end takes a while, so it is told early.
    """
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, rest, 9)]
    guard = None
    try:
        with contextlib.suppress(OSError):  # no shell, or no processes allowed
            guard = os.posix_spawn(
                "/bin/sh", ["sh", "-c", _GUARD], os.environ, file_actions=actions
            )
        # Both ends stay open here, so there is always one who could read this.
        yield lambda: os.write(write, b"\n")
    finally:
        if guard is not None:
            os.write(write, b"\n")  # once more: it may not have been told
            with contextlib.suppress(OSError):  # others may have waited for it
                os.waitpid(guard, 0)
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def _redirected(
    passing: _Passing, file: int, real: int, dismiss: Callable[[], object]
) -> Iterator[None]:
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(_INTERVAL):
            passing.on()

    thread = threading.Thread(target=repeat, name="spmd-stderr", daemon=True)
    thread.start()
    try:
        os.dup2(file, 2)
        os.dup2(passing.at, file)  # so that nothing else is open for writing
        yield
    finally:
        try:
            done.set()
            thread.join()
            # What is there goes first, so that next to nothing is left when others write past us.
            passing.on()
        finally:
            os.dup2(real, 2)
            dismiss()
        # A write that began before may still be under way.
        passing.on()
        _wait_for_writes(file)
        passing.on(to_the_end=True)


def _wait_for_writes(descriptor: int) -> None:
    """Waits until nothing can write to a file any more, or for a while.

    Linux leases a file for reading only where it is not open for writing, nor a write under way.
    """
    end = time.monotonic() + _GRACE
    while time.monotonic() < end:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return
        except BlockingIOError:
            time.sleep(0.001)
        except (OSError, AttributeError):  # no leases: another system, or a file system without
            time.sleep(_BLIND)
            return


class _Passing:
    """What was written to a file and is not yet passed on to the descriptor `real`.

    The place of `rest` in the file is kept where that begins, and `lines` gets the warnings.
    Messages of XLA's that begin with one of the letters `unwanted` are not passed on.
    """

    def __init__(self, file: int, rest: int, real: int, lines: list[str], unwanted: str):
        self._file, self.at, self._real, self._lines = file, rest, real, lines
        self._place, self._rest = 0, b""
        pattern = f"{_WARNING}|{_MESSAGE % unwanted}" if unwanted else _WARNING
        self._taken = re.compile(pattern.encode(), re.MULTILINE)

    def on(self, to_the_end: bool = False) -> None:
        """Passes on what is whole lines, or all there is; keeps the warnings."""
        while more := os.pread(self._file, 1 << 20, self._place):
            self._place += len(more)
            text = self._rest + more
            # A warning has no line end inside; the lines of a progress bar end without a feed.
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._sort(text[:end])
            self._rest = text[end:]
            # From here on another process writes it, should this one end.
            os.lseek(self.at, self._place - len(self._rest), os.SEEK_SET)
        if to_the_end:
            self._sort(self._rest)

    def _sort(self, text: bytes) -> None:
        place = 0
        for found in self._taken.finditer(text):
            _write(self._real, text[place : found.start()])
            if found["operation"]:
                self._lines.append(found[0].decode("utf-8", "replace"))
            place = found.end()
        _write(self._real, text[place:])


def _write(descriptor: int, data: bytes) -> None:
    """Writes all of it; a program is compiled whether or not anyone reads what it says."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return


# A program is compiled once, and reported on as often as one likes.
_lines_of: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def compile_and_catch(lowered: Any, *, by_lines: bool = True) -> Any:
    """Compiles, and remembers what the partitioner warns of for `warnings_of`.

    Args:
        lowered: the program.
        by_lines: whether JAX's persistent cache tells programs apart by their source lines. If so,
            the lines of a report are those of its program; else what is compiled is there for all
            who compile it.
    """
    key = _jax.lowering.lines_in_cache_key() if by_lines else contextlib.nullcontext()
    with caught() as lines, key, _jax.lowering.stored_if_it_runs(lowered):
        compiled = lowered.compile()
    if lines:
        _lines_of.setdefault(_jax.lowering.executable_of(compiled), tuple(lines))
    return compiled


def warnings_of(compiled: Any) -> tuple[str, ...]:
    """The partitioner's warnings, if it was a report that compiled the program."""
    return _lines_of.get(_jax.lowering.executable_of(compiled), ())
