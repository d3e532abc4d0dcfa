"""The progress bar: what it draws, which steps move it, and that it survives what loops do."""

import io
import re
import subprocess
import sys
import textwrap

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import spmd
from spmd import P, host_callback as hcb
from spmd.host_callback import _progress

TERMINAL = {"force_terminal": True, "_environ": {"TERM": "xterm", "COLUMNS": "70"}}


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch):
    """No thread redraws, and every test closes what it opens."""
    monkeypatch.setattr(_progress, "_REFRESHES_PER_SECOND", 0.001)
    yield
    hcb.barrier_wait()
    assert not _progress._screens


def console(**options):
    """A console of 70 columns without colors, on which no time passes."""
    defaults = {"file": io.StringIO(), "width": 70, "color_system": None, "get_time": Clock()}
    return Console(**(defaults | options))


def scanned(bar, steps, body=lambda x: x + 1.0):
    """A compiled loop that tells its steps to a bar, and takes and returns its state."""

    def step(x, i):
        return bar(i, body(x)), None

    return jax.jit(lambda x: lax.scan(step, x, jnp.arange(steps))[0])


def recorded(function, *args):
    """The steps that a function sends, with the devices, without drawing anything."""
    with hcb.record(run=False) as taps:
        jax.block_until_ready(function(*args))
    return [(int(t.value), t.device.id) for t in taps]


# What is drawn


def test_lines():
    """Where the console is no terminal, a line stands for each tenth, and the last has the time."""
    screen = console()
    bar = hcb.progress(100, description="training", console=screen)
    assert scanned(bar, 100)(0.0) == 100.0
    hcb.barrier_wait()
    assert screen.file.getvalue() == textwrap.dedent("""\
        training ━━━━                                      10/100 -:--:--
        training ━━━━━━━━                                  20/100 -:--:--
        training ━━━━━━━━━━━━                              30/100 -:--:--
        training ━━━━━━━━━━━━━━━━                          40/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━                      50/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━━━━━                  60/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━              70/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━          80/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━      90/100 -:--:--
        training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 100/100 0:00:00
        """)


def test_terminal():
    """In a terminal one line is drawn over and over, below a hidden cursor that comes back."""
    screen = console(**TERMINAL)
    with hcb.progress(20, description="training", console=screen) as bar:
        scanned(bar, 20)(0.0)
    hide, again, show = "\x1b[?25l", "\r\x1b[2K", "\x1b[?25h"
    assert screen.file.getvalue() == (
        f"{hide}{again}training                                           0/20 -:--:--"
        f"{again}training ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 20/20 0:00:00\n{show}"
    )


def test_remaining_time():
    """The time that is left is what the steps so far took, times the steps to go."""
    clock = Clock()
    screen = console(get_time=clock)
    with hcb.progress(100, console=screen, every=1) as bar:
        for step in range(50):
            clock.now = 2.0 * step
            bar(step)
            hcb.barrier_wait()
    lines = screen.file.getvalue().splitlines()
    assert [line.split()[-2:] for line in lines] == [
        ["10/100", "0:03:00"],
        ["20/100", "0:02:40"],
        ["30/100", "0:02:20"],
        ["40/100", "0:02:00"],
        ["50/100", "0:01:40"],
    ]


def test_without_description(capsys):
    """A bar needs no description, and no console: it is on the standard output."""
    scanned(hcb.progress(1), 1)(0.0)
    hcb.barrier_wait()
    assert capsys.readouterr().out.split() == ["━" * 40, "1/1", "0:00:00"]


def test_description_is_text():
    """A description is printed as it is, brackets and colons included."""
    screen = console()
    scanned(hcb.progress(1, description="[bold] :x: [0]", console=screen), 1)(0.0)
    hcb.barrier_wait()
    assert screen.file.getvalue().startswith("[bold] :x: [0] ━")


@pytest.mark.slow
def test_per_device(mesh):
    """Each device has its line, from 10 % to 100 %, named by the device."""
    screen = console()
    bar = hcb.progress(100, description="training", per_device=True, console=screen)
    loop = jax.shard_map(scanned(bar, 100), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with mesh:
        jax.jit(loop)(jnp.ones(8))
    hcb.barrier_wait()
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    for device in jax.devices():
        counts = [words[-2] for words in lines if words[1] == f"cpu:{device.id}"]
        assert counts == [f"{10 * n}/100" for n in range(1, 11)]


def test_per_device_in_a_terminal(mesh):
    """The rows of the devices stand in their order, whichever came first."""
    screen = console(**TERMINAL)
    bar = hcb.progress(8, per_device=True, console=screen)
    loop = jax.shard_map(scanned(bar, 8), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with mesh:
        jax.jit(loop)(jnp.ones(8))
    hcb.barrier_wait()
    rows = re.findall(r"(cpu:\d) \S* *(\d/8)", screen.file.getvalue())
    assert rows[-8:] == [(f"cpu:{i}", "8/8") for i in range(8)]


def test_nested():
    """The bar of an inner loop starts again with every step of the outer one."""
    screen = console()
    outer = hcb.progress(2, description="epoch", console=screen)
    inner = hcb.progress(2, description="step", console=screen)

    def epoch(x, i):
        x, _ = lax.scan(lambda x, j: (inner(j, x + 1.0), None), x, jnp.arange(2))
        return outer(i, x), None

    assert jax.jit(lambda x: lax.scan(epoch, x, jnp.arange(2))[0])(0.0) == 4.0
    hcb.barrier_wait()
    shown = [(line.split()[0], line.split()[-2]) for line in screen.file.getvalue().splitlines()]
    steps = [("step", "1/2"), ("step", "2/2")]
    assert shown == [*steps, ("epoch", "1/2"), *steps, ("epoch", "2/2")]


# Which steps move it


@pytest.mark.parametrize(
    ("length", "updates"),
    [(1, 1), (7, 7), (200, 200), (201, 102), (1000, 201), (4321, 198), (100_000, 201)],
)
def test_default_of_every(length, updates):
    """The host is told at most 201 times: of the first step, each n-th, and the last."""
    bar = hcb.progress(length)
    steps = [step for step, _ in recorded(scanned(bar, length), 0.0)]
    every = bar.every
    expected = {0, length - 1, *range(every - 1, length, every)}
    assert steps == sorted(expected)
    assert len(steps) == updates


@pytest.mark.parametrize(("every", "steps"), [(1, range(5)), (2, (0, 1, 3, 4)), (10, (0, 4))])
def test_every(every, steps):
    """`every` says how far apart the steps are that are sent."""
    bar = hcb.progress(5, every=every)
    assert [step for step, _ in recorded(scanned(bar, 5), 0.0)] == [*steps]


def test_loops():
    """Every kind of loop can move it, Python's included, and steps beyond the length do not."""
    bar = hcb.progress(4)

    def by_while(x):
        return lax.while_loop(lambda c: c[0] < 6, lambda c: (bar(c[0]) + 1, c[1]), (0, x))

    def by_python(x):
        for i in range(6):
            x = bar(i, x)
        return x

    for loop in (
        jax.jit(by_while),
        jax.jit(by_python),
        by_python,
        jax.jit(lambda x: lax.fori_loop(0, 6, bar, x)),
        jax.jit(lambda x: lax.map(bar, jnp.arange(6))),
    ):
        assert [step for step, _ in recorded(loop, 1.0)] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_step_types(dtype):
    """Any integer type can count, also towards a length that it does not hold."""
    bar = hcb.progress(70_000, every=50)
    steps = jnp.arange(100, dtype=dtype)
    loop = jax.jit(lambda: lax.scan(lambda x, i: (bar(i, x), bar(i)), 0, steps)[1])
    assert [step for step, _ in recorded(loop)] == [0, 0, 49, 49, 99, 99]
    with hcb.record(run=False):
        assert loop().dtype == dtype


def test_returns_its_value():
    """It returns the value, of any tree, or else the step."""
    bar = hcb.progress(3)
    with hcb.record(run=False):
        assert jax.jit(bar)(2) == 2
        assert bar(np.int8(1)).dtype == np.int8
        assert jax.jit(lambda i: bar(i, {"a": (i, None)}))(1) == {"a": (1, None)}


@pytest.mark.slow
def test_transformed():
    """A bar in a differentiated, checkpointed or batched loop counts each step once."""
    bar = hcb.progress(4)
    loop = scanned(bar, 4, jnp.sin)
    checkpointed = scanned(bar, 4, jax.checkpoint(jnp.sin))
    x = jnp.float32(0.5)
    want = np.cos(0.5) * np.cos(np.sin(0.5))
    want *= np.cos(np.sin(np.sin(0.5))) * np.cos(np.sin(np.sin(np.sin(0.5))))
    for function in (jax.grad(loop), jax.jit(jax.grad(loop)), jax.grad(checkpointed)):
        assert [step for step, _ in recorded(function, x)] == [0, 1, 2, 3]
        with hcb.record(run=False):
            np.testing.assert_allclose(function(x), want, rtol=1e-5)
    assert [s for s, _ in recorded(jax.vmap(loop), jnp.ones(3))] == [0, 1, 2, 3]


def test_without_jit():
    """Where `jit` is off, the loop is one of Python, and moves it all the same."""
    bar = hcb.progress(4)
    with jax.disable_jit():
        assert [step for step, _ in recorded(scanned(bar, 4), 0.0)] == [0, 1, 2, 3]


def test_loop_that_nothing_depends_on(mesh):
    """In a `shard_map` without any value in it that is used, each step counts once."""
    bar = hcb.progress(4)
    spec = P("data")
    loop = jax.shard_map(scanned(bar, 4), mesh=mesh, in_specs=spec, out_specs=spec)
    with mesh:
        gradient = jax.jit(jax.grad(lambda x: loop(x).sum()))
        assert [step for step, _ in recorded(gradient, jnp.ones(8))] == [0, 1, 2, 3]


def test_batched_steps():
    """Under `vmap` over the steps themselves the slowest element is shown."""
    bar = hcb.progress(10)

    def loop(start):
        return lax.scan(lambda x, i: (x, bar(i + start)), 0.0, jnp.arange(4))[1]

    starts = jnp.array([3, 1, 2])
    assert [s for s, _ in recorded(jax.jit(jax.vmap(loop)), starts)] == [1, 2, 3, 4]
    with hcb.record(run=False):
        got = jax.vmap(loop)(starts)
    np.testing.assert_array_equal(got, np.arange(4) + np.asarray(starts)[:, None])


@pytest.mark.few(4)
@pytest.mark.parametrize("per_device", [False, True])
@pytest.mark.parametrize("by", ["jit", "pjit", "shard_map", "unrolled", "pmap", "spmd.pmap"])
def test_devices(mesh, by, per_device):
    """One device moves the bar of a program, and each device its own bar."""
    bar = hcb.progress(3, per_device=per_device)
    loop = scanned(bar, 3)
    if by == "unrolled":

        def loop(x):
            return bar(2, bar(1, bar(0, x + 3)))

    x, count = jnp.ones(8), 8
    if by == "jit":
        function, count = loop, 1
    elif by == "pjit":
        function = spmd.pjit(loop, P("data"), P("data"), mesh=mesh)
    elif by in ("shard_map", "unrolled"):
        spec = P(("data", "model"))
        function = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec))
    else:
        function = (jax.pmap if by == "pmap" else spmd.pmap)(loop)
    expected = {d.id: [0, 1, 2] for d in jax.devices()[: count if per_device else 1]}
    with mesh if by == "pjit" else jax.default_device(None):
        sent = recorded(function, x)
    assert {d: [s for s, e in sent if e == d] for _, d in sent} == expected


def test_no_collectives(mesh):
    """Bars of the devices add no collective to a partitioned program."""
    bar = hcb.progress(3, per_device=True)
    with mesh:
        step = spmd.pjit(scanned(bar, 3), P("data"), P("data"))
        assert not spmd.report(step, jnp.ones(8)).collectives


# Identity


def test_equal_bars():
    """Equal bars have one hash, one trace and one compiled program; others differ."""
    screen = console()

    def bar(**options):
        return hcb.progress(10, description="a", console=screen, **options)

    assert bar() == bar()
    assert hash(bar()) == hash(bar())
    assert bar() != bar(every=2)
    traces = []

    @jax.jit
    def take(x):
        traces.append(x)
        return bar()(x)

    static = jax.jit(lambda b, i: (traces.append(i), b(i))[1], static_argnums=0)
    static(bar(), 3)
    static(bar(), 3)
    assert len(traces) == 1
    one, other, third = (scanned(b, 10).lower(0.0) for b in (bar(), bar(), bar(every=2)))
    assert one.as_text() == other.as_text()
    assert one.as_text() != third.as_text()
    bar().close()


# Ends


def test_early_end():
    """A bar whose loop ends early stays where it is once it is closed, and starts afresh."""
    screen = console()
    bar = hcb.progress(100, description="search", every=1, console=screen)

    @jax.jit
    def search(last):
        return lax.while_loop(lambda i: i < last, lambda i: bar(i) + 1, 0)

    with bar:
        assert search(25) == 25
    search(11)
    bar.close()
    bar.close()
    counts = [line.split()[-2] for line in screen.file.getvalue().splitlines()]
    assert counts == ["10/100", "20/100", "25/100", "10/100", "11/100"]


def test_early_end_without_close():
    """A bar that was not closed starts afresh with the next run."""
    screen = console()
    bar = hcb.progress(10, console=screen)
    scanned(bar, 3)(0.0)
    scanned(bar, 2)(0.0)
    scanned(bar, 10)(0.0)
    hcb.barrier_wait()
    counts = [line.split()[-2] for line in screen.file.getvalue().splitlines()]
    assert counts == [f"{n}/10" for n in (1, 2, 3, 1, 2, *range(1, 11))]


def test_closed_while_another_is_open():
    """A bar that is closed and used again beside an open one is one row, with its own time."""
    screen = console(**TERMINAL)
    outer = hcb.progress(2, description="outer", console=screen)
    inner = hcb.progress(9, description="inner", console=screen)
    outer(0)
    for _ in range(2):
        inner(3)
        inner.close()
    assert len(_progress._screens[screen].display.tasks) == 2
    outer(1)
    hcb.barrier_wait()


def test_exceptions():
    """An exception in the loop, or in the body of `with`, passes, and leaves no bar behind."""
    screen = console()

    def fail(x):
        raise OSError("the disk is full")

    def body(x):
        return hcb.call(fail, x, result_shape=x)

    bar = hcb.progress(10, console=screen)
    with pytest.raises(Exception, match="the disk is full"), bar:
        scanned(bar, 10, body)(jnp.float32(0)).block_until_ready()
    with pytest.raises(hcb.CallbackException, match="the disk is full"):
        hcb.barrier_wait()
    with pytest.raises(ZeroDivisionError), bar:
        bar(0, 1 / 0)
    with bar:
        bar(0)
    assert screen.file.getvalue().split()[-2:] == ["1/10", "-:--:--"]
    scanned(bar, 10)(0.0)
    hcb.barrier_wait()
    assert screen.file.getvalue().split()[-2:] == ["10/10", "0:00:00"]


def test_broken_console():
    """A console that cannot print is an error of the barrier; the loop ends as ever."""

    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("the pipe is broken")

    with hcb.progress(1, console=console(file=Broken())) as bar:
        assert scanned(bar, 1)(0.0) == 1.0
    with pytest.raises(hcb.CallbackException, match="the pipe is broken"):
        hcb.barrier_wait()


@pytest.mark.slow
def test_exit():
    """At exit the pending steps are drawn, and the cursor of the terminal comes back."""
    code = """
        import jax, jax.numpy as jnp
        from jax import lax
        from rich.console import Console
        from spmd import host_callback as hcb
        console = Console(force_terminal=True, width=60, color_system=None)
        bar = hcb.progress(10, console=console)
        jax.jit(lambda: lax.scan(lambda x, i: (bar(i, x), None), 0., jnp.arange(7)))()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"TERM": "xterm", "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
    )
    assert "7/10" in done.stdout.splitlines()[-2]
    assert done.stdout.endswith("\x1b[?25h")
    assert done.stderr == ""


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"iterable_length": -1, "every": 0, "console": 3},
            """\
            progress cannot count with this iterable_length.
              given     iterable_length=-1
              expected  a number of steps, 0 or more
            progress cannot count with this every.
              given     every=0
              expected  a number of steps, 1 or more
            progress cannot draw on console.
              expected  a rich.console.Console
              got       int: 3""",
        ),
        (
            {"iterable_length": 2.5},
            """\
            progress cannot count with this iterable_length.
              given     iterable_length=2.5
              expected  a number of steps, 0 or more""",
        ),
    ],
    ids=["out of range", "no integer"],
)
def test_options(options, message):
    """Every option that makes no sense is named."""
    kind = TypeError if "every" not in options else ValueError
    with pytest.raises(kind) as caught:
        hcb.progress(**options)
    assert str(caught.value) == textwrap.dedent(message)


@pytest.mark.parametrize(
    ("step", "got"),
    [
        (1.5, "f32[]"),
        (np.ones(2, np.int32), "i32[2]"),
        ("a", "str: 'a'"),
        (None, "NoneType: None"),
        (True, "bool[]"),
    ],
    ids=["float", "array", "text", "none", "bool"],
)
def test_no_step(step, got):
    """A step is an integer scalar, or the error says what it is."""
    with pytest.raises(TypeError) as caught:
        hcb.progress(3)(step)
    assert str(caught.value) == (
        "progress cannot tell which step is done.\n"
        "  expected  an integer scalar, counted from 0\n"
        f"  got       {got}"
    )
