"""A process that is killed, raises or ends: the others stop with an error, and nothing is left."""

import os
import re

import pytest
from runs import START, launch

QUICK = START.replace("initialize()", "initialize(lost_timeout=3)")

TRAIN = """
import signal
x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("data"))
step = pjit(lambda x: x.sum(), in_axis_resources=P("data"), mesh=mesh)
with open(os.path.join(os.environ["SAID"], f"pid{me}"), "w") as f:
    f.write(str(os.getpid()))
for i in range(200):
    if (i, me) == (5, VICTIM):
        END
    assert float(step(x)) == 28
say("went on")
"""

KILLED = "its connection has closed without a word: it was killed, or its machine is gone"


def train(tmp_path, victim, end, processes=2, devices=4, **options):
    """Trains in several processes, of which one ends after a few steps."""
    program = TRAIN.replace("VICTIM", str(victim)).replace("END", end)
    run = launch(tmp_path, program, processes, devices, head=QUICK, **options)
    for process in range(processes):
        pid = int((tmp_path / "said" / f"pid{process}").read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # nothing is left running
    assert run.said == [""] * processes
    return run


def said_by(run, process):
    """What `spmd` said on the standard error of a process."""
    lines = [
        line.removeprefix(f"[{process}] ")
        for line in run.err.splitlines()
        if line.startswith(f"[{process}] ")
    ]
    # A traceback of the main thread may stand before it on the line.
    found = [re.search(r"spmd: .*|^  (got|fix) .*", line) for line in lines]
    return [match[0] for match in found if match]


@pytest.mark.few(0)
@pytest.mark.parametrize("processes", [2, 4])
def test_a_killed_worker(tmp_path, processes):
    """Who waits in a collective for it ends, and says where it was; so do all others."""
    run = train(tmp_path, 1, "os.kill(os.getpid(), signal.SIGKILL)", processes, 8 // processes)
    assert run.code == 128 + 9
    for process in {*range(processes)} - {1}:
        said = said_by(run, process)
        assert len(said) == 4, run.err
        lost, got, fix, end = said
        assert lost == f"spmd: This run has lost process 1 of {processes}."
        assert got == f"  got       {KILLED}"
        assert fix == (
            "  fix       start all of them again, from the last checkpoint; this process ends "
            "within 1 s"
        )
        assert re.fullmatch(
            r"spmd: this process ends, too; it was at (.*program\.py:\d+ in <module>|its end)"
            r"|spmd: this process ends because of that",
            end,
        )
    assert "Check failure stack trace" not in run.err
    assert "\nspmd: process 1 was ended by SIGKILL" in f"\n{run.err}"


@pytest.mark.slow
def test_the_killed_coordinator(tmp_path):
    """Without process 0 the others end at once, before JAX aborts them."""
    run = train(tmp_path, 0, "os.kill(os.getpid(), signal.SIGKILL)")
    assert run.code == 128 + 9
    lost, got, fix = said_by(run, 1)[:3]
    assert lost == "spmd: This run has lost process 0 of 2."
    assert got == f"  got       {KILLED}"
    assert fix.endswith("this process ends now")
    assert "Check failure stack trace" not in run.err


@pytest.mark.slow
def test_a_worker_that_raises(tmp_path):
    """The others say what it raised; it does not wait for them at its end."""
    run = train(tmp_path, 1, 'raise ValueError("batch 5 is broken")')
    assert run.code == 1
    lost, got = said_by(run, 0)[:2]
    assert lost == "spmd: This run has lost process 1 of 2."
    assert got == "  got       it raised ValueError: batch 5 is broken"
    assert "[1] ValueError: batch 5 is broken" in run.err


@pytest.mark.slow
def test_a_fork_does_not_hide_a_death(tmp_path):
    """A child that outlives a killed process does not keep its connection open."""
    end = """
        child = os.fork()
        if not child:
            os.close(1), os.close(2)  # or the launcher waits for them
            signal.pause()
            os._exit(0)
        os.setpgid(child, child)
        with open(os.path.join(os.environ["SAID"], "child"), "w") as f:
            f.write(str(child))
        os.kill(os.getpid(), signal.SIGKILL)"""
    try:
        run = train(tmp_path, 1, end.strip())
        assert said_by(run, 0)[0] == "spmd: This run has lost process 1 of 2."
    finally:
        os.kill(int((tmp_path / "said" / "child").read_text()), 9)


@pytest.mark.slow
def test_a_worker_that_is_late_to_end(tmp_path):
    """Processes that end as they should, at different times, all end well."""
    run = launch(tmp_path, "import time; time.sleep(me / 2); say('passed')", 4, 2, head=QUICK)
    assert (run.code, run.said, run.err) == (0, ["passed"] * 4, "")
