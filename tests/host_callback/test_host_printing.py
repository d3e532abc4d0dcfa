"""The printed form of `id_print`, literally."""

import io
import sys
import textwrap

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from oracle import mesh_of
import pytest
from tapped import WAYS, inline

import spmd
from spmd import P, host_callback as hcb, pjit

F = np.float32
X = np.array([1, 2, 3], F)
M = np.arange(6, dtype=F).reshape(2, 3)


def printed(fun, *args):
    """What a function prints to the stream that it is passed."""
    stream = io.StringIO()
    fun(stream)(*args)
    hcb.barrier_wait()
    return stream.getvalue()


def text(golden):
    """A golden as it stands here, without its margin."""
    return textwrap.dedent(golden).lstrip("\n")


# The value

VALUES = {
    "scalar": (F(3), "3.\n"),
    "integer": (np.int32(-3), "-3\n"),
    "boolean": (np.bool_(True), "True\n"),
    "complex": (np.complex64(1 + 2j), "1.+2.j\n"),
    "bfloat16": (jnp.bfloat16(1.5), "1.5\n"),
    "int4": (jnp.arange(-2, 2).astype(jnp.int4), "[-2 -1 0 1]\n"),
    "vector": (X, "[1. 2. 3.]\n"),
    "matrix": (M, "[[0. 1. 2.]\n [3. 4. 5.]]\n"),
    "empty": (np.zeros((0, 2), F), "[]\n"),
    "none": (None, "None\n"),
    "tuple": ((F(3), np.int32(9)), "( 3. 9 )\n"),
    "list": ([F(3), X], "[ 3. [1. 2. 3.] ]\n"),
    "dict": ({"b": F(1), "a": X}, "{ a=[1. 2. 3.] b=1. }\n"),
    "nested": (
        {"x": (F(1), [F(2), None]), "a": {"q": ()}},
        "{ a={ q=( ) } x=( 1. [ 2. None ] ) }\n",
    ),
    "integer keys": ({10: F(1), 9: F(2)}, "{ 10=1. 9=2. }\n"),
    "many rows": (
        (M, M[:1]),
        "( [[0. 1. 2.]\n [3. 4. 5.]] [[0. 1. 2.]] )\n",
    ),
    "wide": (
        (np.arange(16, dtype=F) / 4, np.arange(14, dtype=np.int32) + 100),
        # wider than a line in all: one element below the other
        """
        ( [0.   0.25 0.5  0.75 1.   1.25 1.5  1.75 2.   2.25 2.5  2.75 3.   3.25
         3.5  3.75]
          [100 101 102 103 104 105 106 107 108 109 110 111 112 113] )
        """,
    ),
    "wide in dict": (
        {"first": (np.arange(12, dtype=np.int32) + 10,) * 2, "last": F(1)},
        """
        { first=( [10 11 12 13 14 15 16 17 18 19 20 21]
                  [10 11 12 13 14 15 16 17 18 19 20 21] )
          last=1. }
        """,
    ),
}


@pytest.mark.few(20)
@pytest.mark.parametrize("way", [*WAYS, "inline"])
@pytest.mark.parametrize("name", VALUES)
def test_values(name, way):
    """The value is printed nested as it is, each array as NumPy prints it."""
    value, golden = VALUES[name]
    wrap = WAYS.get(way, lambda fun: fun)

    def made(stream):
        return wrap(lambda v: hcb.id_print(v, output_stream=stream))

    if way == "inline":
        with inline():
            assert printed(made, value) == text(golden)
    else:
        assert printed(made, value) == text(golden)


def test_threshold():
    """Arrays of more elements than the threshold are summarized; NumPy's own is the default."""

    def made(stream, **options):
        return lambda v: hcb.id_print(v, output_stream=stream, **options)

    x = np.arange(12, dtype=np.int32)
    assert printed(lambda s: made(s, threshold=11), x) == "[ 0  1  2 ...  9 10 11]\n"
    assert printed(lambda s: made(s, threshold=12), x) == "[ 0  1  2  3  4  5  6  7  8  9 10 11]\n"
    assert printed(made, np.arange(1001, dtype=np.int32)) == "[   0    1    2 ...  998  999 1000]\n"
    assert "..." not in printed(made, np.arange(1000, dtype=np.int32))


# The line before it


def test_labels_are_sorted():
    """Labels are printed before the value, sorted by name, as `name: value`."""

    def made(stream):
        return lambda x: hcb.id_print(
            x, what="x", at=(1, "two"), Zed=None, number=1.5, things=["a", {"b": 1}],
            output_stream=stream,
        )  # fmt: skip

    assert printed(made, F(3)) == text(
        """
        Zed: None at: (1, 'two') number: 1.5 things: ['a', {'b': 1}] what: x
        3.
        """
    )


@pytest.mark.parametrize("way", ["eager", "jit"])
def test_equal_labels_of_other_kinds(way):
    """Labels that are equal and look different are printed as each of them looks."""

    def made(stream):
        def fun(x):
            for step in (1, True, 1.0, np.float32(1), 0.0, -0.0):
                WAYS[way](lambda x, s=step: hcb.id_print(x, step=s, output_stream=stream))(x)

        return fun

    seen = printed(made, F(3)).replace("\n3.\n", "\n").splitlines()
    assert seen == [f"step: {s}" for s in ("1", "True", "1.0", "1.0", "0.0", "-0.0")]


def test_mutable_labels_are_printed_as_they_were():
    """A label that changes after the call is printed as it was at the call."""
    steps = [1]

    def made(stream):
        def fun(x):
            hcb.id_print(x, steps=steps, output_stream=stream)
            steps.append(2)
            hcb.id_print(x, steps=steps, output_stream=stream)

        return fun

    assert printed(made, F(3)) == "steps: [1]\n3.\nsteps: [1, 2]\n3.\n"


def test_transforms():
    """The transformations are printed among the labels, those without parameters by name."""

    def fun(stream):
        @jax.custom_jvp
        def tangents(x):
            return x

        def show(x, **labels):
            return hcb.id_print(x, output_stream=stream, **labels)

        tangents.defjvp(lambda p, t: (p[0], show(t[0], what="dx")))
        return jax.vmap(jax.grad(lambda x: show(tangents(x * x), a=1, z=2) ** 2))

    # The cotangent of the square of x * x is twice that.
    assert printed(fun, X) == text(
        """
        a: 1 transforms: [('batch', {'batch_dims': (0,)})] z: 2
        [1. 4. 9.]
        transforms: ['transpose', ('batch', {'batch_dims': (0,)})] what: dx
        [ 2.  8. 18.]
        """
    )


def test_nested_batches():
    """Nested vmaps are printed from the innermost; operands that are not batched have None."""

    def fun(stream):
        def one(x, y):
            return hcb.id_print({"x": x, "y": y}, output_stream=stream)["x"]

        return jax.vmap(jax.vmap(one, (0, None)), (0, None))

    assert printed(fun, M, F(5)) == text(
        """
        transforms: [('batch', {'batch_dims': (0, None)}), ('batch', {'batch_dims': (0, None)})]
        { x=[[0. 1. 2.]
         [3. 4. 5.]] y=5. }
        """
    )


def test_device():
    """With `tap_with_device` the device is printed among the labels."""
    last = jax.devices()[7]

    def made(stream):
        return jax.jit(
            lambda x: hcb.id_print(x, tap_with_device=True, a=1, z=2, output_stream=stream)
        )

    golden = f"a: 1 device: {last} z: 2\n[1. 2. 3.]\n"
    assert printed(made, jax.device_put(X, last)) == golden


def test_device_index():
    """A program on several devices prints once, by the device that is asked for."""
    mesh = mesh_of({"a": 4})

    def made(stream):
        return pjit(
            lambda x: hcb.id_print(x, tap_with_device=True, device_index=2, output_stream=stream),
            P("a"),
            mesh=mesh,
        )

    assert printed(made, np.arange(4, dtype=F)) == f"device: {jax.devices()[2]}\n[0. 1. 2. 3.]\n"


def test_shards():
    """With `per_shard` each device prints what it holds, where it stands and where that lies."""
    mesh = mesh_of({"a": 2, "b": 2})

    def made(stream):
        return pjit(
            lambda x: hcb.id_print(x, per_shard=True, what="x", output_stream=stream),
            P("a", "b"),
            mesh=mesh,
        )

    parts = printed(made, np.arange(8, dtype=F).reshape(2, 4)).split("coordinates: ")
    assert sorted(parts) == [
        "",
        "{'a': 0, 'b': 0} index: [0:1,0:2] what: x\n[[0. 1.]]\n",
        "{'a': 0, 'b': 1} index: [0:1,2:4] what: x\n[[2. 3.]]\n",
        "{'a': 1, 'b': 0} index: [1:2,0:2] what: x\n[[4. 5.]]\n",
        "{'a': 1, 'b': 1} index: [1:2,2:4] what: x\n[[6. 7.]]\n",
    ]


def test_control_flow():
    """A print in a loop prints each step."""

    def made(stream):
        def fun(x):
            return lax.while_loop(
                lambda x: hcb.id_print(x < 3, what="go on", output_stream=stream),
                lambda x: hcb.id_print(x + 1, what="next", output_stream=stream),
                x,
            )

        return jax.jit(fun)

    assert printed(made, F(1)) == text(
        """
        what: go on
        True
        what: next
        2.
        what: go on
        True
        what: next
        3.
        what: go on
        False
        """
    )


# Streams


def test_standard_output(capsys):
    """Without a stream the standard output of the time of printing is used, and nothing else."""
    hcb.id_print(X, what="x")
    jax.jit(lambda x: hcb.id_print(x, result=x + 1))(X)
    hcb.barrier_wait()
    assert capsys.readouterr() == ("what: x\n[1. 2. 3.]\n[1. 2. 3.]\n", "")
    fun = jax.jit(lambda x: hcb.id_print(x))
    for _ in range(2):
        fun(X)
        hcb.barrier_wait()
        assert capsys.readouterr() == ("[1. 2. 3.]\n", "")
        sys.stdout, before = io.StringIO(), sys.stdout
        try:
            fun(X)
            hcb.barrier_wait()
            assert sys.stdout.getvalue() == "[1. 2. 3.]\n"
        finally:
            sys.stdout = before


def test_a_stream_needs_only_write():
    """Anything with a method `write` is a stream, be it without a hash."""

    class Lines(list):
        def write(self, text):
            self.append(text)

    lines = Lines()
    jax.jit(lambda x: hcb.id_print(x, what="x", output_stream=lines))(X)
    hcb.barrier_wait()
    assert "".join(lines) == "what: x\n[1. 2. 3.]\n"


def test_equal_streams():
    """Each print goes to its own stream, even where streams are equal."""

    class Equal(io.StringIO):
        def __eq__(self, other):
            return isinstance(other, Equal)

        def __hash__(self):
            return 0

    first, second = Equal(), Equal()
    for stream in (first, second):
        hcb.id_print(F(1), output_stream=stream)
        jax.jit(lambda x, s=stream: hcb.id_print(x, output_stream=s))(F(2))
    hcb.barrier_wait()
    assert first.getvalue() == second.getvalue() == "1.\n2.\n"


class Slow:
    """A stream that any thread may interrupt after each character."""

    def __init__(self):
        self.text = []

    def write(self, text):
        """Adds one character after the other."""
        for character in text:
            self.text.append(character)


@pytest.mark.parametrize("way", ["pmap", "spmd.pmap", "shard_map"])
def test_lines_of_different_threads(way):
    """What eight devices and an inline call print at the same time stays together."""
    stream = Slow()

    def fun(x):
        def body(i, c):
            return hcb.id_print(c, what="x", output_stream=stream) + 8

        return lax.fori_loop(0, 25, body, x)

    if way != "shard_map":
        made = (jax.pmap if way == "pmap" else spmd.pmap)(fun)
    else:
        made = jax.jit(
            jax.shard_map(fun, mesh=mesh_of({"i": 8}), in_specs=P("i"), out_specs=P("i"))
        )
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        result = made(np.arange(8, dtype=np.int32))
        with inline():
            for i in range(-25, 0):
                hcb.id_print(np.int32(i), what="y", output_stream=stream)
        jax.block_until_ready(result)
        hcb.barrier_wait()
    finally:
        sys.setswitchinterval(before)
    lines = "".join(stream.text).splitlines()
    assert len(lines) == 2 * 225
    pairs = [*zip(lines[::2], lines[1::2], strict=True)]
    by_shards = "[{}]" if way == "shard_map" else "{}"
    want = [("what: x", by_shards.format(i)) for i in range(200)]
    want += [("what: y", str(i)) for i in range(-25, 0)]
    assert sorted(pairs) == sorted(want)


def test_a_stream_that_fails():
    """What a stream raises is an error of a tap: the barrier tells, later prints go on."""

    class Closed(io.StringIO):
        def write(self, text):
            raise OSError("disk full")

    fun = jax.jit(lambda x: hcb.id_print(x, output_stream=closed) + 1)
    closed = Closed()
    assert np.asarray(fun(F(1))) == 2
    with pytest.raises(hcb.CallbackException, match="disk full") as caught:
        hcb.barrier_wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert printed(lambda s: lambda x: hcb.id_print(x, output_stream=s), F(1)) == "1.\n"
