"""Tracing: once per signature, with the mesh of the call in sight, and nothing left behind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from oracle import counted, mesh_of, put
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)
NOTHING = spmd.Counts()


def recorder(mesh, **options):
    """A function that notes each of its traces."""
    seen = []

    def fun(*args, **kwargs):
        seen.append((args, kwargs))
        return jax.tree.map(lambda x: x + 1, args)

    return pjit(fun, mesh=mesh, **options), seen


def test_one_trace_per_signature(mesh):
    """Values and placement cause no trace; shape, dtype, weak type and structure do."""
    f, seen = recorder(mesh)
    for same in (X, X + 1, jnp.asarray(X), put(X, mesh, P("data")), put(X, mesh, P("model"))):
        f(same)
    assert len(seen) == 1
    f(X[:4])
    f(X.astype(np.int32))
    f([X])
    f(X, X)
    assert len(seen) == 5
    f(1.0)
    f(np.float32(1.0))
    assert len(seen) == 7
    for again in ((X,), (X[:4],), ([X],), (X, X), (1.0,)):
        f(*again)
    assert len(seen) == 7


def test_trace_counter_counts_traces(mesh):
    """`counts().traces` counts what the function itself sees."""
    f, seen = recorder(mesh)
    for x in (X, X, X[:2], X[:4], X[:2]):
        f(x)
    before = spmd.counts()
    f(X[:6])
    assert (spmd.counts() - before).traces == 1
    assert len(seen) == 4


def test_transformations_trace_once(mesh):
    """Under grad, vmap and jit the function is traced once per signature, not per transform."""
    seen = []

    def fun(x):
        seen.append(x.shape)
        return jnp.sin(x).sum()

    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
    jax.grad(f)(X), jax.grad(f)(X), jax.jit(f)(X), f(X), jax.vmap(f)(np.stack([X, X]))
    jax.vmap(jax.grad(f))(np.stack([X, X]))
    assert seen == [(8, 8)]


def test_function_sees_tracers_with_its_own_structure(mesh):
    """Arguments reach the function as they were passed: trees, static values, keywords."""
    seen = {}

    def fun(x, *rest, n, **named):
        seen.update(x=x, rest=rest, n=n, named=named)
        return x["a"]

    f = pjit(fun, static_argnames="n", mesh=mesh)
    f({"a": X, "b": None}, (X, [X]), n="static", other=X)
    assert seen["n"] == "static"
    assert set(seen["x"]) == {"a", "b"}
    assert seen["x"]["b"] is None
    assert isinstance(seen["rest"][0], tuple)
    assert isinstance(seen["rest"][0][1], list)
    assert isinstance(seen["named"]["other"], jax.core.Tracer)
    assert seen["x"]["a"].shape == (8, 8)


def test_mesh_is_in_sight_while_tracing(mesh):
    """Inside of the function the mesh of the call is current, however it was given."""
    seen = []

    def fun(x):
        seen.append(spmd.current_mesh())
        return with_sharding_constraint(x, P("data"))

    pjit(fun, mesh=mesh)(X)
    other = mesh_of({"data": 2, "more": 4})
    with mesh:
        pjit(fun, mesh=other)(X)
        assert spmd.current_mesh() == mesh
    assert spmd.current_mesh() is None
    assert seen == [mesh, other]


def test_bare_specs_of_jax_work_inside(mesh):
    """JAX's own constraint with a bare spec finds the mesh of the call."""
    f = pjit(lambda x: jax.lax.with_sharding_constraint(x * 2, P("data")), mesh=mesh)
    np.testing.assert_array_equal(f(X), 2 * X)
    assert '<@mesh, [{"data"}, {}]>' in f.lower(X).as_text()


def test_results_that_are_no_arrays_are_named(mesh):
    """A function that returns something else than arrays is told so."""
    f = pjit(lambda x: {"a": x, "b": "text", "c": [object]}, mesh=mesh)
    for call in (f, f.lower, f.eval_shape, jax.jit(f)):
        with pytest.raises(TypeError) as e:
            call(X)
        assert str(e.value).startswith(
            "pjit of `<lambda>` cannot return result['b']: it is no array.\n"
            "  expected  arrays, numbers, None, and containers of them\n"
            "  got       str: 'text'\n"
            "pjit of `<lambda>` cannot return result['c'][0]: it is no array.\n"
        )


def test_constants_and_inputs_pass_through(mesh):
    """Results that are constants, inputs, or Python numbers come out as arrays."""
    c = jnp.arange(3.0)
    out = pjit(lambda x: (x, c, 2, np.float32(3), None), mesh=mesh)(X)
    np.testing.assert_array_equal(out[0], X)
    np.testing.assert_array_equal(out[1], [0, 1, 2])
    assert (int(out[2]), float(out[3]), out[4]) == (2, 3.0, None)


def test_registered_classes(mesh):
    """Registered classes are trees like any other, with their own paths in messages."""

    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=["kind"]
    )
    @dataclasses.dataclass
    class Pair:
        left: object
        right: object
        kind: str = "sum"

    f = pjit(lambda p: p.left + p.right, mesh=mesh)
    np.testing.assert_array_equal(f(Pair(X, X + 1)), 2 * X + 1)
    with pytest.raises(TypeError, match=r"p\.right"):
        f(Pair(X, "text"))


def test_eval_shape_and_call_share_a_trace(mesh):
    """`eval_shape`, `trace`, `lower` and the call trace once between them."""
    f, seen = recorder(mesh)
    f.eval_shape(X), f.trace(X), f.lower(X), f(X)
    assert len(seen) == 1
    assert counted(f, X)[1] == NOTHING
