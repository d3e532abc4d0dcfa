"""Warnings of the partitioner: caught, while all else is passed on."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import Mesh, P, _jax, pjit, topology, with_sharding_constraint as constrain
from spmd.inspection.compile import libtpu, warned

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
from spmd.inspection.compile import warned

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
            pass  # to begin and to end is what is tried
    rows = capfdbinary.readouterr().err.splitlines()
    assert sorted(rows) == sorted(b"%d %d" % (k, i) for k in range(3) for i in range(count))


def test_a_write_under_way_is_waited_for(tmp_path, monkeypatch):
    """However slow: what it writes would be lost. What a child process may write is not."""
    path = tmp_path / "written"
    writing, ended = os.open(path, os.O_WRONLY | os.O_CREAT), threading.Event()
    file = os.open(path, os.O_RDONLY)

    def end():
        ended.set()
        os.close(writing)

    try:
        warned._wait_for_writes(file)  # it gives up
        monkeypatch.setattr(warned, "_GRACE", 60)
        assert not ended.is_set()
        threading.Timer(0.2, end).start()
        warned._wait_for_writes(file)
        assert ended.is_set()
        monkeypatch.delattr(warned.fcntl, "F_SETLEASE")
        warned._wait_for_writes(file)  # of what cannot be known it waits no minute
    finally:
        os.close(file)


def test_closed():
    """Where descriptor 2 is closed, nothing is caught, and it is closed afterwards."""
    saved = os.dup(2)
    os.close(2)
    try:
        with warned.caught() as lines:
            pass  # nothing can be written
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


@pytest.fixture(params=[2, 3])
def silenced(request, monkeypatch):
    """A user who has told XLA to write errors at most, or none of these either."""
    monkeypatch.setattr(_jax.lowering, "_LEVEL", str(request.param))
    _jax.lowering.utils.absl_set_min_log_level(request.param)
    yield request.param
    _jax.lowering.utils.absl_set_min_log_level(1)


# What XLA says, in one write, of a constant that it takes long to fold.
ALARM = (
    b"E1126 08:00:00.000000   1 slow_operation_alarm.cc:74] Constant folding an instruction is "
    b"taking > 1s:\n\n  %sum = f32[3]{0} reduce-window(%iota)\n\nThis isn't necessarily a bug.\n\n"
    b"If you'd like to file a bug, run with envvar XLA_FLAGS=... and attach the results.\n"
)
# What others say, whom nobody has silenced.
OTHERS = [b"W1126 08:00:00.000000   1 train.py:7] loss is NaN", b"W 1126", b"x W1126 a.cc:1] y"]


def moved():
    """A program whose value goes from rows to columns over other axes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))

    def step(a):
        return constrain(jnp.sin(constrain(a, P("z"))), P(None, ("z", "y")))

    return pjit(step, mesh=mesh).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_where_warnings_are_silenced(silenced, capfdbinary):
    """XLA warns for a report, and for nobody else; what its user does not want is not passed on."""
    with warned.caught() as lines:
        moved().compile()
        for letter in b"IWE":
            os.write(2, b"%c1126 08:00:00.000000   1 a/b-c.cc:1] text\n" % letter)
        os.write(2, ALARM)
        for text in OTHERS:
            os.write(2, text + b"\n")
    errors = [] if silenced == 3 else [b"E1126 08:00:00.000000   1 a/b-c.cc:1] text"]
    alarm = [] if silenced == 3 else ALARM.splitlines()
    info = b"I1126 08:00:00.000000   1 a/b-c.cc:1] text"
    assert read(capfdbinary) == [info, *errors, *alarm, *OTHERS]
    assert len(lines) == 1
    moved().compile()
    assert read(capfdbinary) == []


def read(captured):
    """Lines of the standard error since the last time."""
    return captured.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("config", "variable", "unwanted"),
    [
        ("NOTSET", "", ""),
        ("NOTSET", "1", ""),
        ("NOTSET", "2", "W"),
        ("NOTSET", "many", ""),
        ("ERROR", "0", "W"),
        ("CRITICAL", "", "WE"),
        ("WARNING", "3", ""),
        (None, "3", "WE"),
    ],
)
def test_who_silences(config, variable, unwanted, monkeypatch):
    """JAX's setting comes before the variable; what is written as ever is left alone."""
    set_to = []
    monkeypatch.setattr(_jax.lowering, "_LEVEL", variable)
    monkeypatch.setattr(_jax.lowering.utils, "absl_set_min_log_level", set_to.append)
    monkeypatch.setattr(
        _jax.lowering.jax, "config", SimpleNamespace(values={"jax_logging_level": config})
    )
    assert _jax.lowering.silenced() == unwanted
    with _jax.lowering.warning_aloud():
        assert set_to == [1] * bool(unwanted)
    assert set_to == ([1, 1 + len(unwanted)] if unwanted else [])


@pytest.mark.slow
@needs_libtpu
def test_described_tpus(capfd):
    """Their compiler logs its warnings to a file, and they become findings all the same."""
    mesh = topology("v5e:2x4", {"x": 2, "y": 2, "z": 2})

    def step(a):
        a = constrain(a, P("z"))
        return constrain(jnp.sin(a), P(None, ("z", "y")))

    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    kinds = [one.kind for one in spmd.report(pjit(step, mesh=mesh), x).findings]
    assert kinds.count("full-rematerialization") == 1
    kinds = [one.kind for one in spmd.report(pjit(jnp.sin, mesh=mesh), x).findings]
    assert "full-rematerialization" not in kinds
    assert capfd.readouterr().err == ""


def test_folders_of_processes_that_were_killed(monkeypatch, tmp_path):
    """They are removed by the next process that needs one; those of others stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for owner in (dead.pid, os.getpid(), "x"):
        (tmp_path / f"spmd-libtpu-{owner}-abc" / "log").mkdir(parents=True)
    libtpu._sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"spmd-libtpu-{owner}-abc" for owner in (os.getpid(), "x")
    )


def test_logs_of_libtpu(monkeypatch, tmp_path):
    """What is new in a file of this process is read, and what came on both ways is once there."""
    monkeypatch.setenv("TPU_LOG_DIR", str(tmp_path))
    own = tmp_path / f"tpu_driver.host.user.log.WARNING.20261126-080000.{os.getpid()}"
    (tmp_path / own.name.replace("host", "gone")).symlink_to("nowhere")
    others = [own.with_suffix(".1"), tmp_path / own.name.replace("WARNING", "INFO")]
    for path in (own, *others):
        path.write_bytes(ONE)

    def grow():
        for path in (own, *others):
            with path.open("ab") as file:
                file.write(b"W1126 other\n" + ONE + ONE.replace(b"f32[4,8]", b"f32[4,9]"))

    with warned.caught() as lines:
        grow()
        os.write(2, ONE)
    assert [line.count("f32[4,8]") for line in lines] == [1, 0]
    monkeypatch.setenv("TPU_LOG_DIR", "disabled")
    with warned.caught() as lines:
        grow()
    assert lines == []
