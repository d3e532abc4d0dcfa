"""Start-up: processes that cannot come together say why, all of them, and soon."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading

import jax
import pytest
from runs import HEAD, launch

import spmd
from spmd import distributed
from spmd.distributed import _start
from spmd.launch._local import free_port

SUBJECT = "spmd.distributed.initialize"


@contextlib.contextmanager
def taken_port():
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1], server


def start(*calls, limit=60, prelude=""):
    """Runs `initialize` with each of these arguments in a process of its own.

    Returns:
        Per process the lines of its error, or "started".
    """
    script = textwrap.dedent(prelude) + textwrap.dedent("""
        import sys
        import spmd
        try:
            spmd.distributed.initialize(*eval(sys.argv[1]), **eval(sys.argv[2]))
        except spmd.SpmdError as error:
            print(type(error).__name__, error)
        else:
            print("started")
    """)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)} | {
        "JAX_PLATFORMS": "cpu"
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, repr(args), repr(options), str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i, (args, options) in enumerate(calls)
    ]
    try:
        ended = [p.communicate(timeout=limit) for p in running]
    finally:
        for p in running:
            p.kill()
    return [out.strip() or err[-2000:] for out, err in ended]


def error(what, **rows):
    """The text of an error of start-up."""
    lines = [f"  {name:<8}  {text}" for name, text in rows.items()]
    return "\n".join([f"DistributedError {SUBJECT} {what}.", *lines])


@pytest.mark.slow
def test_port_in_use():
    """Process 0 cannot listen where somebody else does."""
    with taken_port() as (port, _):
        (told,) = start(((f"127.0.0.1:{port}", 1, 0), {}))
    assert told == error(
        f"cannot listen at 127.0.0.1:{port}",
        expected="a port of this machine that is free: here process 0 meets all others",
        got="Address already in use",
        fix="choose another port in coordinator_address, the same in every process",
    )


@pytest.mark.slow
def test_nobody_listens():
    """A process that cannot reach process 0 says so after the time that it was given."""
    port = free_port()
    (told,) = start(((f"127.0.0.1:{port}", 2, 1), {"timeout": 1}))
    assert told == error(
        f"cannot reach process 0 at 127.0.0.1:{port}",
        expected="it to listen there within 1 s",
        got="Connection refused",
        fix="see whether process 0 runs, and whether its port is open to this machine",
    )


def test_no_such_machine(monkeypatch):
    """A name that nobody has is told at once, however long the time is."""

    def nobody(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", nobody)
    with pytest.raises(spmd.DistributedError) as e:
        _start._connect("head-nod", 1234, 600)
    assert str(e.value) == (
        f"{SUBJECT} cannot find process 0.\n"
        "  expected  a name or number of its machine\n"
        "  got       'head-nod': Name or service not known"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "machine"])
def test_addresses(host):
    """Process 0 listens on the loopback for its names, and else on all addresses of both kinds."""
    with _start._listen(host, 0) as server:
        port = server.getsockname()[1]
        own = host if host != "machine" else "127.0.0.1"
        with socket.create_connection((own, port), timeout=5):
            pass
        assert (server.getsockname()[0] in ("::", "0.0.0.0")) == (host == "machine")
    assert _start._split(_start._shown(host, port)) == (host, port)


@pytest.mark.slow
def test_somebody_else_listens():
    """What answers at the address of process 0 and is none is told."""
    with taken_port() as (port, server):

        def answer():
            connection, _ = server.accept()
            connection.sendall(b"220 mail ready\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        (told,) = start(((f"127.0.0.1:{port}", 2, 1), {"timeout": 5}))
        thread.join()
    assert told == error(
        f"gets no answer from 127.0.0.1:{port}",
        expected="process 0 of this run, in spmd.distributed.initialize",
        fix="see whether process 0 has ended, uses jax.distributed.initialize instead, or "
        "something else listens at this port",
    )


@pytest.mark.slow
def test_a_process_is_missing():
    """Those who have come are told who has not."""
    address = f"127.0.0.1:{free_port()}"
    told = start(((address, 4, 0), {"timeout": 4}), ((address, 4, 2), {"timeout": 4}))
    want = error(
        "waited in vain for processes 1, 3 of 4",
        expected=f"all of them at {address} within 4 s",
        fix="see whether they run, reach this address and call spmd.distributed.initialize, or "
        "give a longer timeout",
    )
    assert told == [want, want]


@pytest.mark.slow
def test_counts_differ():
    """Processes that disagree on their number say who believes what."""
    address = f"127.0.0.1:{free_port()}"
    told = start(((address, 2, 0), {}), ((address, 3, 1), {}))
    want = error(
        "finds that the processes disagree on how many they are",
        got="num_processes=2 in process 0\n            num_processes=3 in process 1",
        fix="give every process the same num_processes",
    )
    assert told == [want, want]


@pytest.mark.slow
def test_one_number_twice():
    """Two processes of one number are both told."""
    address = f"127.0.0.1:{free_port()}"
    told = start(*[((address, 3, i), {"timeout": 10}) for i in (0, 1, 1)])
    want = error(
        "finds two processes with process_id=1", expected="a process_id of its own for each"
    )
    assert told == [want] * 3


@pytest.mark.slow
def test_versions_differ():
    """Processes with different packages are told both lists."""
    address = f"127.0.0.1:{free_port()}"
    prelude = """
        import sys, spmd
        spmd.__version__ = "1." + sys.argv[3]
    """
    told = start(((address, 2, 0), {}), ((address, 2, 1), {}), prelude=prelude)
    assert told[0] == told[1]
    lines = told[0].splitlines()
    assert lines[0] == (
        f"DistributedError {SUBJECT} finds that the processes run different versions."
    )
    assert lines[2].startswith("  got       spmd 1.0, jax ")
    assert lines[2].endswith(" in process 0")
    assert lines[3].startswith("            spmd 1.1, jax ")
    assert lines[3].endswith(" in process 1")


@pytest.mark.slow
def test_who_says_nothing_is_left_alone():
    """A port scanner that connects first does not keep the processes from meeting."""
    port = free_port()
    prelude = f"""
        import socket, sys, threading, time
        def scan():
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", {port})) as c:
                        c.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                    return
                except OSError:
                    time.sleep(0.01)
        if sys.argv[3] == "0":
            scanner = threading.Thread(target=scan)
            scanner.start()
        else:
            time.sleep(1)
    """
    address = f"127.0.0.1:{port}"
    told = start(((address, 2, 0), {}), ((address, 2, 1), {}), prelude=prelude)
    assert told == ["started", "started"]


UNKNOWN = (
    f"{SUBJECT} cannot tell which processes there are.\n"
    "  expected  {missing}\n"
    "  got       no argument, and no environment that says it: spmd launch, SLURM, Open MPI, "
    "Kubernetes, Cloud TPU\n"
    "  fix       spmd launch -n 2 script.py, on one machine; else give the arguments"
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), UNKNOWN.format(missing="coordinator_address and num_processes and process_id")),
        (("host:1",), UNKNOWN.format(missing="num_processes and process_id")),
        (
            ("host", 2, 0),
            f"{SUBJECT} cannot read the address of process 0.\n"
            "  expected  host:port\n"
            "  got       'host'",
        ),
        (
            ("host:1", 2, 2),
            f"{SUBJECT} cannot use these numbers.\n"
            "  expected  a process_id from 0 up to num_processes - 1\n"
            "  got       process_id=2, num_processes=2",
        ),
        (
            ("host:1", 2, 1, None),
            f"{SUBJECT} cannot use this timeout.\n"
            "  expected  seconds, more than 0\n"
            "  got       0\n"
            f"{SUBJECT} cannot use this lost_timeout.\n"
            "  expected  seconds, more than 0\n"
            "  got       -1",
        ),
    ],
)
def test_bad_arguments(args, text):
    """What cannot be meant is said before anything is waited for."""
    options = {"timeout": 0, "lost_timeout": -1} if len(args) == 4 else {}
    (told,) = start((args, options))
    assert told == f"OptionError {text}"


def test_too_late():
    """After JAX has started in this process, it cannot be part of a run."""
    assert jax.devices()
    with pytest.raises(spmd.DistributedError) as e:
        distributed.initialize("localhost:1", 2, 0)
    assert str(e.value) == (
        f"{SUBJECT} comes too late: JAX has started, for this process alone.\n"
        "  expected  a call before anything that asks for devices or makes an array\n"
        "  fix       make it the first line of the program after the imports"
    )


@pytest.mark.slow
def test_twice_and_shutdown(tmp_path):
    """A second call is an error; after `shutdown` a process ends by itself, all are well."""
    run = launch(
        tmp_path,
        """
        d.initialize()
        try:
            d.initialize()
        except spmd.DistributedError as error:
            say(error)
        say(d.process_allgather(jax.process_index()).tolist())
        d.shutdown()
        """,
        head=HEAD,
    )
    assert (run.code, run.err) == (0, "")
    assert run.said == [f"{SUBJECT} was called before.\n  fix       call it once\n[0, 1]"] * 2


@pytest.mark.few(0)
@pytest.mark.parametrize("end", ["d.shutdown()", ""])
@pytest.mark.parametrize(("local", "used"), [(4, 4), (4, 1), (1, 1)])
def test_what_was_started_is_ended_first(tmp_path, local, used, end):
    """Of two processes one is late on the last of the devices in use, and the other has to wait.

    What the first device has may have been read; with one device in use there is nothing to read.
    """
    run = launch(
        tmp_path,
        f"""
        import atexit

        @atexit.register
        def at_exit():  # registered before `initialize`, so run after what that registers
            shards = [s.data for s in y.addressable_shards]
            say([x.is_ready() for x in shards], [x.tolist() for x in shards])

        d.initialize()
        devices = np.array(jax.devices()).reshape(2, {local})[:, :{used}]
        mesh = jax.sharding.Mesh(devices, ("process", "device"))

        def step(x):
            is_late = (lax.axis_index("process") == 0) & (lax.axis_index("device") == {used - 1})
            x = lax.fori_loop(0, jnp.where(is_late, 500, 0), lambda i, x: x @ x / 500, x)
            return lax.psum(x[0, :1], "process")

        split = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P("device"), check_vma=False)
        y = jax.jit(split)(np.ones((500, 500), "float32"))
        if {used} > 1:
            assert y.addressable_data(0).tolist() == [2.0]
        {end}
        """,
        devices=local,
        head=HEAD,
    )
    assert run.code == 0, run.err
    assert run.said == [f"{[True] * used} {[[2.0]] * used}"] * 2


@pytest.mark.slow
def test_a_program_that_the_others_never_start_is_given_up(tmp_path):
    """One process starts a sum over both, the other one ends: so does the first, and says why."""
    run = launch(
        tmp_path,
        """
        d.initialize(lost_timeout=3)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        total = jax.shard_map(lambda x: lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P())
        if jax.process_index() == 0:
            y = jax.jit(total)(np.ones(1, "float32"))
        """,
        devices=2,
        head=HEAD,
    )
    assert "[0] spmd: all other processes have ended, and a program that may wait" in run.err


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_handler_may_shut_down(tmp_path, told):
    """It runs in the thread that waits for the work of the devices, which waits for it here.

    The sum in the process that is told ends when the other one starts its own, after the signal.
    """
    run = launch(
        tmp_path,
        f"""
        import pathlib, signal, threading, time

        d.initialize()
        is_told = jax.process_index() == {told}
        signaled = pathlib.Path(os.environ["SAID"], "signaled")
        signal.signal(signal.SIGUSR1, lambda *_: (say("signal"), signaled.touch(), d.shutdown()))
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))

        def step(x):  # a loop, so that the call does not wait for it
            return lax.psum(lax.fori_loop(0, 2, lambda i, x: x @ x / 500, x)[0, :1], "device")

        split = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        x, split = np.ones((500, 500), "float32"), jax.jit(split)
        jax.block_until_ready(split(x))  # the processes have met
        while not is_told and not signaled.exists():
            time.sleep(0.01)
        y = split(x)
        if is_told:
            threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1]).start()
        d.shutdown()
        say(y.addressable_data(0).tolist())
        """,
        devices=1,
        head=HEAD,
    )
    assert run.code == 0, run.err
    assert sorted(run.said) == ["[2.0]", "signal\n[2.0]"]


@pytest.mark.slow
def test_stock_start_up(tmp_path):
    """Where `jax.distributed` was started without us, everything but the watch works."""
    run = launch(
        tmp_path,
        """
        address = os.environ["JAX_COORDINATOR_ADDRESS"]
        me = int(os.environ["SPMD_PROCESS_ID"])
        jax.distributed.initialize(address, 2, me)
        d.check()
        say(d.process_allgather(me).tolist())
        mesh = spmd.make_mesh({"x": 8})
        x = d.host_local_to_global(part(np.arange(8.0)), mesh, P("x"))
        say(float(pjit(lambda x: x.sum(), mesh=mesh)(x)))
        """,
        head=HEAD,
    )
    assert run.code == 0, run.err
    assert run.said == ["[0, 1]\n28.0"] * 2
