"""The line of a finding is the user's, wherever a library does the work; else there is none."""

import concurrent.futures
import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

import spmd
from spmd import P, pjit

MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
N = 1024

LIBRARY = """
import jax, jax.numpy as jnp
import spmd
from spmd import P, with_sharding_constraint as constrain

def large(x):
    return jnp.sin(jnp.outer(x, x))  # here: large

jitted = jax.jit(lambda x: jnp.cos(jnp.sin(jnp.outer(x, x))))

def deep(x, n=40):
    return large(x) if n == 0 else deep(x, n - 1)

def layer(h, w):
    return jnp.tanh(h @ w), None

def scanned(x, ws):
    return jax.lax.scan(layer, x, ws)[0]

def checkpointed(x, ws):
    return jax.lax.scan(jax.checkpoint(layer), x, ws)[0]

def moved(a):
    return constrain(jnp.sin(constrain(a, P("z"))), P(None, ("z", "y")))

@jax.checkpoint
def gathered(h, w):
    return jnp.tanh(h @ constrain(w, P()))

def looped(x, w):
    return jax.lax.scan(lambda h, _: (gathered(h, w), None), x, None, length=5)[0]

def norm(x):
    return jnp.linalg.norm(large(x) @ x)

def reported(fun, mesh, *args):
    return spmd.report(spmd.pjit(fun, mesh=mesh), *args)
"""


@functools.cache
def line_of(marker, text=None):
    """The line of this file, or of a text, that ends in ``# here: marker``."""
    if text is None:
        with open(__file__, encoding="utf-8") as file:
            text = file.read()
    return next(
        n for n, line in enumerate(text.splitlines(), 1) if line.endswith(f"# here: {marker}")
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A module of functions in a folder of installed packages."""
    path = tmp_path_factory.mktemp("env") / "site-packages" / "library.py"
    path.parent.mkdir()
    path.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("library", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def f32(*shape):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def lines(kind, fun, specs, *args):
    """The lines of the findings of a kind, all of them in this file."""
    report = spmd.report(pjit(fun, in_axis_resources=specs, mesh=MESH), *args)
    found = [one for one in report.findings if one.kind == kind]
    assert {one.source.file for one in found} == {__file__}
    return sorted(one.source.line for one in found)


@pytest.mark.parametrize("name", ["large", "deep", "jitted"])
def test_large_values(library, name):
    """The line is the call of the library, however deep it calls, also across `jax.jit`."""
    large = getattr(library, name)

    def fun(x):
        a = large(x)  # here: first call
        b = large(x + 1)  # here: second call
        return jnp.linalg.norm(a @ x), jnp.linalg.norm(b @ x)

    calls = [line_of("first call"), line_of("second call")]
    assert lines("replicated-value", fun, None, f32(N)) == calls


@pytest.mark.few(0)
@pytest.mark.parametrize("name", ["scanned", "checkpointed"])
def test_gradients_of_loops(library, name):
    """What the backward pass of a library's loop needs has the line that calls the library.

    Also in a second program with the same loop: JAX traces some of its functions only once.
    """
    layers = getattr(library, name)

    def loss(ws, x):
        x = layers(x, ws)  # here: layers
        return (x**2).mean()

    def again(ws, x):
        x = jax.checkpoint(layers)(x, ws)  # here: layers again
        return (x**2).mean()

    args = f32(4, N, N), f32(2047, N)  # rows that no axis divides
    assert line_of("layers") in lines("replicated-residual", jax.grad(loss), None, *args)
    for kind in ("replicated-residual", "replicated-value"):
        found = lines(kind, jax.grad(again), None, *args)
        assert {*found} <= {line_of("layers again"), line_of("layers again") + 1}
    assert line_of("layers again") in found


def test_rematerializations(library):
    """Also where the line comes from the partitioner's warning."""

    def fun(a):
        return library.moved(a)  # here: moved

    assert lines("full-rematerialization", fun, None, f32(8, 8)) == [line_of("moved")]


def test_collectives_in_loops(library):
    """Also where the line is the collective's."""

    def fun(w, x):
        return (library.looped(x, w) ** 2).sum()  # here: looped

    specs = (P(None, "x"), P("y"))
    assert lines("collective-in-loop", jax.grad(fun), specs, f32(N, N), f32(512, N)) == [
        line_of("looped")
    ]


def in_a_thread_of_its_own(fun, *args):
    """What a function returns where no caller of it is the user's."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fun, *args).result()


def test_no_line_of_the_user(library):
    """Where all is in libraries there is no line, and the library's is a fact."""
    report = in_a_thread_of_its_own(library.reported, library.norm, MESH, f32(N))
    (one,) = [one for one in report.findings if one.kind == "replicated-value"]
    assert one.source is None
    assert one.facts == (
        "no mesh axis reaches it",
        f"it is made in a library, at library.py:{line_of('large', LIBRARY)}",
    )
    assert one.fix == (
        "with_sharding_constraint(value, P('x')) on what goes into that library or comes out of it"
    )


def test_no_line_of_the_user_in_the_compiled_program(library):
    """The same holds for what the partitioner warns of."""
    report = in_a_thread_of_its_own(library.reported, library.moved, MESH, f32(8, 8))
    (one,) = [one for one in report.findings if one.kind == "full-rematerialization"]
    assert one.source is None
    assert one.subject.startswith("f32[8,8] of sharding_constraint is gathered whole")


def test_own_code_in_a_library():
    """A function of the user's that a library calls has its own line."""

    def layer(h, _):
        return jnp.sin(jnp.outer(h, h)) @ h, None  # here: own layer

    def fun(x):
        return jax.lax.scan(layer, x, None, length=3)[0]

    assert lines("replicated-value", fun, None, f32(N)) == [line_of("own layer")]
