"""``spmd launch``: what it says to bad arguments, what it gives a process, and how it ends."""

import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

import pytest

from spmd import __main__ as cli
from spmd.cli.options import CommandError
from spmd.launch import _local
from spmd.launch._local import Launch, environment

COMMAND = [sys.executable, "-m", "spmd", "launch"]


def launch(*args, limit=60):
    """Runs the command; what is left after `limit` seconds is killed."""
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=limit, check=False
    )


@pytest.fixture
def script(tmp_path):
    """Writes a program; returns its path."""

    def write(text, name="program.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


BAD = [
    (("-n", "0", "x.py"), "-n 0 is too few: it has to be at least 1."),
    (("-n", "2", "--devices", "0", "x.py"), "--devices 0 is too few: it has to be at least 1."),
    (
        ("-n", "2", "--port", "70000", "x.py"),
        "--port 70000 is too many: it has to be at most 65535.",
    ),
    (("-n", "2", "--grace", "-1", "x.py"), "--grace -1 is negative."),
    (("-n", "2"), "launch needs a program: spmd launch -n 2 script.py [arguments ...]."),
    (("-n", "2", "no.py"), "launch cannot find the script no.py."),
    (("-n", "2", "--", "no.py"), "launch cannot find the script no.py."),
    (
        ("-n", "2", "--", "-x", "no.py"),
        "launch does not know the option -x: see spmd launch --help.",
    ),
    (
        ("-n", "2", "python", "train.py"),
        f"launch cannot find the script python: {os.path.basename(sys.executable)} is started by "
        "itself, write 'train.py'.",
    ),
    (
        ("-n", "2", "package.train"),
        "launch cannot find the script package.train: for a module, write -m package.train.",
    ),
]


@pytest.mark.parametrize(("args", "sentence"), BAD, ids=lambda part: " ".join(part)[:30])
def test_a_bad_argument_gets_one_sentence(args, sentence, capsys):
    """Stderr has one sentence that names the option, and the exit code is 2."""
    assert cli.main(["launch", *args]) == 2
    assert capsys.readouterr() == ("", f"spmd: {sentence}\n")


def test_help_names_every_option(capsys):
    """The help lists the options, with examples."""
    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    text = capsys.readouterr().out
    for word in (
        *("-n", "--devices", "--port", "--grace", "--no-prefix", "-m", "--on", "--engine-options"),
        "examples:",
    ):
        assert word in text


def test_environment():
    """A process learns its number, the others' and where to meet; with devices, how many."""
    options = {"command": ("x.py",), "processes": 3, "port": 0, "grace": 1.0, "prefix": True}
    outer = {"XLA_FLAGS": "--a --xla_force_host_platform_device_count=9", "HOME": "h"}
    assert environment(Launch(devices=None, **options), 1, 4242, outer) == {
        **outer,
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:4242",
        "SPMD_NUM_PROCESSES": "3",
        "SPMD_PROCESS_ID": "1",
        "PYTHONUNBUFFERED": "1",
    }
    found = environment(Launch(devices=4, **options), 1, 4242, outer)
    assert (found["XLA_FLAGS"], found["JAX_NUM_CPU_DEVICES"]) == ("--a", "4")
    assert found["JAX_PLATFORMS"] == "cpu"


ECHO = """
import os, sys
print("out", os.environ["SPMD_PROCESS_ID"], *sys.argv[1:])
print("err", file=sys.stderr)
"""


@pytest.mark.slow
def test_output_and_arguments(script):
    """Lines carry the number of their process, streams stay apart, arguments are passed on."""
    done = launch("-n", 2, script(ECHO), "--lr", "3", "-n", "7")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "[0] out 0 --lr 3 -n 7",
        "[1] out 1 --lr 3 -n 7",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0] err", "[1] err"]
    plain = launch("-n", 1, "--no-prefix", script(ECHO))
    assert (plain.stdout, plain.stderr) == ("out 0\n", "err\n")


@pytest.mark.slow
def test_a_module(script, monkeypatch):
    """``-m`` runs a module, as the interpreter does."""
    monkeypatch.chdir(script(ECHO, "echo.py").parent)
    done = launch("-n", 1, "-m", "echo", "a")
    assert done.stdout == "[0] out 0 a\n"


@pytest.mark.slow
def test_lines_do_not_mix(script):
    """Long lines of several processes come out whole, the last one without its end too."""
    done = launch(
        "-n",
        3,
        script(
            """
import os, sys
me = os.environ["SPMD_PROCESS_ID"]
for i in range(50):
    sys.stdout.write(me * 5000 + "\\n")
sys.stdout.write("end")
"""
        ),
    )
    lines = done.stdout.splitlines()
    for i in range(3):
        assert lines.count(f"[{i}] {str(i) * 5000}") == 50
        assert lines.count(f"[{i}] end") == 1
    assert len(lines) == 153


@pytest.mark.slow
def test_a_failure_stops_the_others(script):
    """The exit code is that of the first failure; who goes on is asked to end, then made to."""
    program = script(
        """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked"))
if os.environ["SPMD_PROCESS_ID"] == "1":
    sys.exit(7)
while True:
    time.sleep(0.1)
"""
    )
    done = launch("-n", 2, "--grace", "0.5", program)
    assert (done.returncode, done.stdout) == (7, "[0] asked\n")
    assert done.stderr == (
        "spmd: process 1 has failed with exit code 7; 1 other has 0.5 s to end\n"
        "spmd: the others are stopped\n"
    )


@pytest.mark.slow
def test_a_failure_of_all(script):
    """Where all end by themselves nobody is stopped, and a signal is an exit code from 128 on."""
    done = launch("-n", 1, script("import os\nos.kill(os.getpid(), 11)"))
    assert (done.returncode, done.stderr) == (139, "spmd: process 0 was ended by SIGSEGV\n")


WAITS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), child.pid)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, -9),
    ],
)
def test_nothing_is_left_running(script, number, code):
    """However the launcher ends, its processes do, and what they have started with Ctrl-C."""
    running = subprocess.Popen(
        [*COMMAND, "-n", "2", str(script(WAITS))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = [running.stdout.readline().split() for _ in range(2)]
        pids = {int(pid) for line in lines for pid in line[2:]}
        assert len(pids) == 4, lines
        running.send_signal(number)
        _, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == code
    if number != signal.SIGKILL:
        assert err == f"spmd: stopped by {number.name}, and so are the processes\n"
    else:
        pids = {int(line[2]) for line in lines}  # what they have started is nobody's
    try:
        gone(pids)
    finally:
        for line in lines:
            for pid in map(int, line[2:]):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


EARLY = """
import signal, sys
from spmd.launch import _local

relays_of = _local.relays_of

def stopped(*args):
    found = relays_of(*args)
    signal.raise_signal(signal.SIGTERM)
    return found

_local.relays_of = stopped
command = "-c", "import time; time.sleep(600)"
launch = dict(command=command, processes=2, devices=None, port=0, grace=1.0, prefix=True)
sys.exit(_local.run(_local.Launch(**launch)))
"""


def test_a_signal_while_processes_start():
    """The first process is there, and the second one not yet."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60, check=False
    )
    said = "spmd: stopped by SIGTERM, and so are the processes\n"
    assert (done.returncode, done.stderr) == (143, said)


def test_a_port_that_nobody_takes_meanwhile(monkeypatch):
    """It is none that the system gives away by itself, and none at which somebody listens."""
    if sys.platform == "linux":
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        assert not {*_local._PORTS} & {*range(int(low), int(high) + 1)}
    port = _local.free_port()
    monkeypatch.setattr(_local, "_PORTS", range(port, port + 1))
    taken, refused = socket.create_server(("127.0.0.1", port)), pytest.raises(CommandError)
    with taken, refused as caught:
        _local.free_port()
    assert "name one with --port" in str(caught.value)
    assert _local.free_port() == port


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids):
    """Waits until none of the processes is there; the limit of the test ends it otherwise."""
    while any(map(alive, pids)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("ended", "soon", "code"),
    [
        ([[1, None], [1, -9]], 60.0, 137),
        ([[1, None], [1, -9]], 0.0, 1),
        ([[None, None], [1, -9]], 60.0, 137),
        ([[None, -9], [1, -9]], 60.0, 137),
        ([[1, None], [1, -6]], 60.0, 1),
        ([[1, None], [1, 0]], 60.0, 1),
    ],
    ids=["killed before", "killed later", "at once", "killed first", "aborts", "ends well"],
)
def test_a_killed_process_is_why_others_failed(ended, soon, code, monkeypatch, capsys):
    """Who loses it may end before it has; who is killed later, or ends otherwise, is no cause."""
    monkeypatch.setattr(_local, "_SOON", soon)
    states = [*ended, ended[-1]]
    assert _local.wait(lambda: states.pop(0) if len(states) > 1 else states[0], list, 60.0) == code
    said = capsys.readouterr().err
    assert said.count("process 1 was ended by SIGKILL") == (code == 137)
