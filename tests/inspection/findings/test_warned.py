"""Warnings of the partitioner: caught, while all else is passed on."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import threading

import pytest

from spmd.inspection.findings import warned

ONE = (
    b"W1122 22:03:00.674385    8792 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    b"rematerialization. The compiler cannot go from sharding {devices=[2,1]<=[2]} to "
    b"{devices=[1,2]<=[2]} efficiently for HLO operation %copy.2 = f32[4,8]{1,0} copy(%sin). "
    b"As the last resort, SPMD will replicate the tensor and then partition it.\n"
)


def test_the_rest_is_passed_on(capfdbinary):
    """All but the warnings arrives byte for byte, also what stands in the line before one."""
    with warned.caught() as lines:
        for text in (b"a\n", b" 50%\r 60%" + ONE, b"\xff\x00b\r\n\n", ONE[:-1] + b"\n[SPMD] x\n"):
            os.write(2, text)
        os.write(2, ONE[:100])
        os.write(2, ONE[100:] + b"no end")
    assert capfdbinary.readouterr().err == b"a\n 50%\r 60%\xff\x00b\r\n\n[SPMD] x\nno end"
    assert [line.strip() for line in lines] == [ONE.decode().strip()] * 3


def test_it_is_passed_on_at_once(capfdbinary):
    """Whole lines arrive while the context is still open."""
    # What pytest captures it cuts off as it reads, and with it what is written at that moment.
    end, passed_on = os.pipe()
    captured = os.dup(2)
    os.dup2(passed_on, 2)
    try:
        with warned.caught():
            os.write(2, b"very slow compile\nno end")
            assert os.read(end, 100) == b"very slow compile\n"  # waits as long as it takes
        assert os.read(end, 100) == b"no end"
    finally:
        os.dup2(captured, 2)
        for one in (end, passed_on, captured):
            os.close(one)


def test_much(capfdbinary):
    """More than a pipe or one read holds is passed on."""
    text = b"".join(b"%d\n" % i for i in range(400_000))
    with warned.caught() as lines:
        os.write(2, text)
        os.write(2, ONE)
    assert capfdbinary.readouterr().err == text
    assert len(lines) == 1


def test_after_an_error(capfdbinary):
    """If a compile fails, what it wrote arrives, and the descriptor leads where it did."""
    before = os.fstat(2)

    class Lowered:
        def compile(self):
            os.write(2, b"why\n" + ONE)
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        warned.compile_and_catch(Lowered())
    assert os.path.samestat(os.fstat(2), before)
    assert capfdbinary.readouterr().err == b"why\n"


ABORTING = """
import os, time
from spmd.inspection.findings import warned

with warned.caught():
    os.write(2, b"at once\\nnot yet ")
    time.sleep(1)
    os.write(2, b"a line\\nlast words")
    os.abort()
"""


@pytest.mark.slow
def test_last_words():
    """What a process writes before it aborts arrives, once, though nobody in it passes it on."""
    done = subprocess.run([sys.executable, "-c", ABORTING], capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT
    # Python itself may write more: CI turns its fault handler on.
    assert done.stderr.startswith(b"at once\nnot yet a line\nlast words")
    assert done.stderr.count(b"last words") == done.stderr.count(b"at once") == 1


def test_without_a_shell(monkeypatch, capfdbinary):
    """Where no process can be started, warnings are caught all the same."""

    def refuse(*args, **options):
        raise PermissionError

    monkeypatch.setattr(os, "posix_spawn", refuse)
    with warned.caught() as lines:
        os.write(2, b"x\n" + ONE)
    assert (len(lines), capfdbinary.readouterr().err) == (1, b"x\n")


def test_one_at_a_time(capfdbinary):
    """A second one catches nothing while the first does, and does so afterwards."""
    with warned.caught() as outer:
        with warned.caught() as inner:
            os.write(2, ONE)
        os.write(2, b"x\n")
    assert (len(outer), len(inner)) == (1, 0)
    with warned.caught() as again:
        os.write(2, ONE)
    assert len(again) == 1
    assert capfdbinary.readouterr().err == b"x\n"


def test_threads(capfdbinary):
    """What other threads write meanwhile, and as it begins and ends, arrives in full."""
    count, go = 3000, threading.Event()

    def write(k):
        go.wait()
        for i in range(count):
            os.write(2, b"%d %d\n" % (k, i))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    while any(thread.is_alive() for thread in threads):
        with warned.caught():
            pass
    rows = capfdbinary.readouterr().err.splitlines()
    assert sorted(rows) == sorted(b"%d %d" % (k, i) for k in range(3) for i in range(count))


def test_closed():
    """Where descriptor 2 is closed, nothing is caught, and it is closed afterwards."""
    saved = os.dup(2)
    os.close(2)
    try:
        with warned.caught() as lines:
            pass
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(2)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    assert lines == []


def test_nothing_stays_open():
    """Catching leaves no descriptor, thread and process behind."""

    def what_is_there():
        here = Path("/proc/thread-self")
        children = (here / "children").read_text()
        return sorted(os.listdir(here / "fd")), threading.active_count(), children

    before = what_is_there()
    with warned.caught():
        os.write(2, b"")
        assert what_is_there()[2] != before[2]
    assert what_is_there() == before
