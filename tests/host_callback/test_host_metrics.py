"""Metrics: their names, the three kinds of sinks, order, and what is refused."""

from collections import namedtuple
import dataclasses
import io
import json
import math
import subprocess
import sys
import textwrap
import threading

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P, host_callback as hcb

Pair = namedtuple("Pair", "z a")


class Collected(list):
    """A sink that is a function, and keeps what it gets."""

    def __call__(self, metrics, step):
        self.append((metrics, step))

    __hash__ = object.__hash__


class Writer:
    """A sink like TensorBoard's."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step=None):
        self.scalars.append((tag, scalar_value, global_step))


def written(function, *args):
    """What a function that takes a sink writes into one."""
    sink = Collected()
    jax.block_until_ready(function(sink, *args))
    hcb.barrier_wait()
    return [*sink]


def loop(sink, steps=3, x=1.0):
    """A compiled loop that doubles a number and writes it each time."""

    def body(x, i):
        hcb.metrics_tap("train", {"loss": x.sum(), "step": i}, sink=sink, step=i)
        return 2 * x, None

    return jax.jit(lambda x: lax.scan(body, x, jnp.arange(steps))[0])(x)


# Names


def test_names():
    """A metric is called by its path, in the order of the tree, containers of every kind."""
    tree = {"c": Pair(1.0, (2.0,)), "b": [None, {"deep": 3.0}]}
    sink = Collected()
    assert jax.jit(lambda: hcb.metrics_tap("train", tree, sink=sink))() == tree
    hcb.metrics_tap("alone", 4.0, sink=sink)
    hcb.barrier_wait()
    named = {"train/b/1/deep": 3.0, "train/c/z": 1.0, "train/c/a/0": 2.0}
    assert [*sink] == [(named, None), ({"alone": 4.0}, None)]
    assert [*sink[0][0]] == [*named]


def test_returns_its_tree():
    """What comes back is the tree, with its gradient."""
    sink = Collected()

    def f(x):
        return hcb.metrics_tap("f", {"y": x * x}, sink=sink)["y"]

    assert jax.jit(jax.grad(f))(3.0) == 6.0
    hcb.barrier_wait()
    assert [*sink] == [({"f/y": 9.0}, None)]


def test_nothing():
    """A tree without leaves writes nothing."""
    assert written(lambda sink: hcb.metrics_tap("train", {"a": None}, sink=sink)) == []


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (jnp.bfloat16(1.5), 1.5),
        (jnp.float8_e4m3fn(0.25), 0.25),
        (np.float16(2.5), 2.5),
        (jnp.int4(-3), -3),
        (np.uint32(2**32 - 1), 2**32 - 1),
        (jnp.bool_(True), True),
        (7, 7),
        (False, False),
    ],
    ids=["bf16", "fp8", "f16", "int4", "uint32", "bool", "int", "false"],
)
def test_numbers(value, number):
    """A sink gets Python numbers, of each kind its own."""
    ((metrics, step),) = written(lambda sink: hcb.metrics_tap("x", value, sink=sink, step=3))
    assert metrics == {"x": number}
    assert type(metrics["x"]) is type(number)
    assert type(step) is int


# Sinks


def test_function():
    """A function is called once per step, in order."""
    expected = [({"train/loss": 2.0**i, "train/step": i}, i) for i in range(50)]
    assert written(loop, 50) == expected


def test_writer():
    """A writer like TensorBoard's is called per scalar, in order."""
    writer = Writer()
    loop(writer)
    hcb.barrier_wait()
    assert writer.scalars == [
        ("train/loss", 1.0, 0),
        ("train/step", 0, 0),
        ("train/loss", 2.0, 1),
        ("train/step", 1, 1),
        ("train/loss", 4.0, 2),
        ("train/step", 2, 2),
    ]


LINES = """\
{"step": 0, "train/loss": 1.0, "train/step": 0}
{"step": 1, "train/loss": 2.0, "train/step": 1}
{"step": 2, "train/loss": 4.0, "train/step": 2}
"""


@pytest.mark.parametrize("kind", ["text", "path"])
def test_path(tmp_path, monkeypatch, kind):
    """A path gets a line of JSON per call, behind what is there, wherever the process goes."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": -1}\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    sink = "metrics.jsonl" if kind == "text" else path.relative_to(tmp_path)
    traced = jax.jit(lambda: loop(sink)).lower().compile()
    monkeypatch.chdir(elsewhere)
    traced()
    hcb.barrier_wait()
    assert path.read_text() == '{"step": -1}\n' + LINES


def flat(name, tree):
    """The names of the leaves of a tree, by hand."""
    if not isinstance(tree, (dict, list, tuple)):
        return {name: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {n: leaf for key, part in pairs for n, leaf in flat(f"{name}/{key}", part).items()}


LEAVES = st.floats(width=32) | st.integers(-(2**31), 2**31 - 1) | st.booleans()
TREES = st.recursive(
    LEAVES,
    lambda part: (
        st.lists(part, max_size=3)
        | st.tuples(part, part)
        | st.dictionaries(st.text("ab \u00e9\n", min_size=1, max_size=3), part, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(tree=TREES, step=st.none() | st.integers(0, 2**31 - 1))
def test_lines_say_what_was_written(tree, step):
    """Any tree of scalars comes back from its line of JSON: every name, value and type."""
    file = io.StringIO()
    hcb.configure(inline=True)  # without a compile for each tree
    try:
        hcb.metrics_tap("t", tree, sink=file, step=step)
    finally:
        hcb.configure()
    expected = flat("t", tree)
    lines = file.getvalue().splitlines()
    assert len(lines) == bool(expected)
    if expected:
        read = json.loads(lines[0])
        assert read.pop("step", None) == step
        assert [*read] == [*flat("t", jax.tree.map(lambda leaf: leaf, tree))]
        assert {k: type(v) for k, v in read.items() if type(v) is not str} == {
            k: type(v) for k, v in expected.items() if math.isfinite(v)
        }
        for name, value in expected.items():
            np.testing.assert_equal(float(read.pop(name)), float(value))
        assert not read


def test_open_file(tmp_path):
    """An open file has each line as soon as the call is over, and stays open."""
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        loop(file)
        hcb.barrier_wait()
        assert path.read_text() == LINES
        file.write("end\n")
    assert path.read_text() == LINES + "end\n"


def test_no_flush():
    """An object that can only write will do; each line is one write."""

    class Stream:
        def __init__(self):
            self.written = []

        def write(self, text):
            self.written.append(text)

    stream = Stream()
    loop(stream)
    hcb.barrier_wait()
    assert stream.written == LINES.splitlines(keepends=True)


def test_not_finite():
    """JSON has no such numbers: they are strings that `float` takes; a function gets floats."""
    values = {"a": jnp.inf, "b": -jnp.inf, "c": jnp.nan}
    file = io.StringIO()
    hcb.metrics_tap("x", values, sink=file)
    ((metrics, _),) = written(lambda sink: hcb.metrics_tap("x", values, sink=sink))
    assert file.getvalue() == '{"x/a": "Infinity", "x/b": "-Infinity", "x/c": "NaN"}\n'
    assert metrics["x/a"] == math.inf
    assert metrics["x/b"] == -math.inf
    assert math.isnan(metrics["x/c"])
    strings = json.loads(file.getvalue())
    assert [float(s) for s in strings.values()][:2] == [math.inf, -math.inf]


def test_whole_lines(tmp_path):
    """Lines of several devices and threads that append to one file stay whole, none is lost."""
    path = tmp_path / "metrics.jsonl"
    name = "n" * 20_000

    def run(device):
        with jax.default_device(device):
            for i in range(10):
                hcb.metrics_tap(name, {"i": i}, sink=path, step=device.id)

    threads = [threading.Thread(target=run, args=(d,)) for d in jax.devices()[:4]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hcb.barrier_wait()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for device in jax.devices()[:4]:
        mine = [line[f"{name}/i"] for line in lines if line["step"] == device.id]
        assert mine == [*range(10)]


@pytest.mark.slow
def test_exit(tmp_path):
    """What is pending at exit is written."""
    path = tmp_path / "metrics.jsonl"
    code = f"""
        import jax
        from jax import lax
        import jax.numpy as jnp
        from spmd import host_callback as hcb
        def body(x, i):
            hcb.metrics_tap("train", {{"loss": x, "step": i}}, sink={str(path)!r}, step=i)
            return 2 * x, None
        jax.jit(lambda x: lax.scan(body, x, jnp.arange(3))[0])(1.)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=120,
        check=True,
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert path.read_text() == LINES


# Transformations and devices


def test_vmap():
    """Under `vmap` there is one call, with a metric per element of what is batched."""

    def tap(sink, x, y):
        hcb.metrics_tap("v", {"x": x, "y": y, "n": 1}, sink=sink, step=5)
        return x

    one = jax.vmap(tap, in_axes=(None, 0, None))
    assert written(one, jnp.arange(3.0), jnp.float32(7)) == [
        ({"v/n": 1, "v/x/0": 0.0, "v/x/1": 1.0, "v/x/2": 2.0, "v/y": 7.0}, 5)
    ]
    two = jax.vmap(one, in_axes=(None, 0, None))
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    ((metrics, _),) = written(two, x, jnp.float32(7))
    got = {tag: value for tag, value in metrics.items() if "/x/" in tag}
    # Each level of vmap puts its dimension first.
    assert got == {f"v/x/{i}/{j}": x[i, j] for i in range(2) for j in range(2)}


def test_batched_steps():
    """Steps that differ between the elements are an error of the barrier, equal ones are one."""

    def tap(sink, step):
        return hcb.metrics_tap("v", 1.0, sink=sink, step=step)

    each = jax.vmap(tap, in_axes=(None, 0))
    assert written(each, jnp.array([4, 4])) == [({"v": 1.0}, 4)]
    with pytest.raises(hcb.CallbackException) as caught:
        written(each, jnp.array([4, 5]))
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == ("the elements of a batch are at different steps: [4, 5]")


@pytest.mark.parametrize("by", ["pjit", "shard_map", "pmap", "spmd.pmap"])
def test_devices(mesh, by):
    """A program on eight devices writes once: global values, or those of the first device."""
    x = jnp.arange(8.0)

    def run(sink):
        if by == "pjit":
            function = spmd.pjit(lambda x: loop(sink, x=x), P("data"), P("data"), mesh=mesh)
        elif by == "shard_map":
            spec = P(("data", "model"))
            local = jax.shard_map(
                lambda x: loop(sink, x=x), mesh=mesh, in_specs=spec, out_specs=spec
            )
            function = jax.jit(local)
        else:
            pmap = jax.pmap if by == "pmap" else spmd.pmap
            function = pmap(lambda x: loop(sink, x=x))
        return function(x + 1)

    first = 36.0 if by == "pjit" else 1.0
    got = [(metrics["train/loss"], step) for metrics, step in written(run)]
    assert got == [(first * 2**i, i) for i in range(3)]


def test_device_index(mesh):
    """`device_index` says which device calls; the record knows it."""
    sink = Collected()
    step = spmd.pjit(
        lambda x: hcb.metrics_tap("m", {"x": x.sum()}, sink=sink, device_index=5),
        P("data"),
        None,
        mesh=mesh,
    )
    with hcb.record() as taps:
        step(jnp.arange(8.0))
    assert [(t.name, t.kind, t.device) for t in taps] == [("m", "metrics_tap", jax.devices()[5])]
    assert [*sink] == [({"m/x": 28.0}, None)]


def test_equal_taps(tmp_path):
    """Equal metrics have one compiled program; another sink, name or path has another."""

    def text(name, sink, tree):
        lowered = jax.jit(lambda x: hcb.metrics_tap(name, tree(x), sink=sink)).lower(1.0)
        kept.append(lowered)
        return lowered.as_text()

    kept = []
    a = text("m", tmp_path / "a", lambda x: {"x": x})
    assert text("m", str(tmp_path / "a"), lambda x: {"x": x}) == a
    assert text("m", tmp_path / "b", lambda x: {"x": x}) != a
    assert text("n", tmp_path / "a", lambda x: {"x": x}) != a
    assert text("m", tmp_path / "a", lambda x: {"y": x}) != a


def test_equal_sinks():
    """Each metric goes to its own writer, even where writers are equal."""

    @dataclasses.dataclass(frozen=True)
    class Writer:
        folder: str
        written: list = dataclasses.field(default_factory=list, compare=False)

        def add_scalar(self, *scalar):
            self.written.append(scalar)

    first, second = Writer("run"), Writer("run")
    assert first == second
    for value, sink in enumerate((first, second)):
        hcb.metrics_tap("m", jnp.float32(value), sink=sink)
    hcb.barrier_wait()
    assert (first.written, second.written) == ([("m", 0.0, None)], [("m", 1.0, None)])


def test_failing_sink(caplog):
    """A sink that raises is logged by the name of the metric, and later ones are written."""
    sink = Collected()

    def fail(metrics, step):
        raise OSError("no space left")

    def f(x):
        hcb.metrics_tap("first", x, sink=fail)
        return hcb.metrics_tap("second", x, sink=sink)

    jax.jit(f)(1.0)
    with pytest.raises(hcb.CallbackException, match="no space left"):
        hcb.barrier_wait()
    assert [*sink] == [({"second": 1.0}, None)]
    (record,) = caplog.records
    assert record.getMessage().startswith("metrics_tap of `first` raised an exception:\n")


# Errors


class Unhashable:
    __hash__ = None

    def __call__(self, metrics, step):
        pass

    def __repr__(self):
        return "Unhashable()"


ERRORS = {
    "no scalars": (
        {
            "tree": {"a": np.ones(3, np.float32), "b": "text", "c": 1j, "d": 1.0},
            "sink": print,
        },
        """\
        metrics_tap of `train` cannot write train/a.
          expected  a real scalar
          got       f32[3]
          fix       reduce it, as with jnp.mean, or send it with id_tap
        metrics_tap of `train` cannot write train/b.
          expected  a real scalar
          got       str: 'text'
          fix       reduce it, as with jnp.mean, or send it with id_tap
        metrics_tap of `train` cannot write train/c.
          expected  a real scalar
          got       c64[]
          fix       reduce it, as with jnp.mean, or send it with id_tap""",
    ),
    "no sink": (
        {"tree": 1.0, "sink": 3},
        """\
        metrics_tap of `train` cannot write to sink.
          expected  a path, an open file, an object with add_scalar, or a function
          got       int: 3""",
    ),
    "no hash": (
        {"tree": 1.0, "sink": Unhashable()},
        """\
        metrics_tap of `train` cannot tell this sink from others: it has no hash.
          got       Unhashable: Unhashable()
          fix       pass a function, or an object with __hash__""",
    ),
    "no folder": (
        {"tree": 1.0, "sink": "/no/such/folder/metrics.jsonl"},
        """\
        metrics_tap of `train` cannot write to sink: there is no such folder.
          given     sink='/no/such/folder/metrics.jsonl'""",
    ),
    "one name": (
        {"tree": {"a": {"b": 1.0}, "a/b": 2.0}, "sink": print},
        """\
        metrics_tap of `train` would write 2 scalars as train/a/b.
          fix       rename one""",
    ),
    "step": (
        {"tree": 1.0, "sink": print, "step": 1.5},
        """\
        metrics_tap of `train` cannot tell the step.
          expected  an integer scalar, or None
          got       f32[]""",
    ),
    "device": (
        {"tree": 1.0, "sink": print, "device_index": -1},
        """\
        metrics_tap has no such device.
          given     device_index=-1
          expected  the number of a device of the mesh, from 0""",
    ),
}
OUT_OF_RANGE = ("no folder", "one name", "device")


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    """What cannot be written is an error where the function is traced, with every leaf named."""
    options, message = ERRORS[case]
    with pytest.raises(ValueError if case in OUT_OF_RANGE else TypeError) as caught:
        hcb.metrics_tap("train", **options)
    assert str(caught.value) == textwrap.dedent(message)


def test_a_metric_called_step():
    """A line of JSON has one step; a function may get a metric of that name."""
    with pytest.raises(ValueError, match="would write 2 scalars as step"):
        hcb.metrics_tap("step", 1.0, sink=io.StringIO())
    assert written(lambda sink: hcb.metrics_tap("step", 1.0, sink=sink)) == [({"step": 1.0}, None)]
