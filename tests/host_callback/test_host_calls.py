"""Calls that return something: what they may return, from where, and what they may do there."""

import collections
import functools
import types

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from oracle import assert_sharded, mesh_of, put
from own_process import run_alone
import pytest
from tapped import by_shard_map

from spmd import P, host_callback as hcb, pjit
from spmd.errors import ArgumentError, OptionError

X = np.arange(8, dtype=np.float32)


def ways(fun, mesh):
    """Each way to run a function of `X`, with what it is run on."""
    split = put(X, mesh, P("x"))
    return {
        "eager": (fun, X),
        "one device": (jax.jit(fun), X),
        "the last device": (jax.jit(fun), jax.device_put(X, mesh.devices[7])),
        "eight devices": (jax.jit(fun), split),
        "pjit": (pjit(fun, P("x"), P("x"), mesh=mesh), X),
        "shard_map": (by_shard_map(fun, mesh), split),
    }


MORE = ("one device", "the last device", "eight devices")
WAYS = ("eager", "pjit", "shard_map", *(pytest.param(w, marks=pytest.mark.slow) for w in MORE))

# What is returned

EXAMPLES = {
    "a float": 1.5,
    "an int": 3,
    "a bool": True,
    "a complex": 2j,
    "a NumPy scalar": np.float32(0),
    "a NumPy array": np.zeros((2, 3), np.int16),
    "an array": jnp.zeros((2, 3), jnp.bfloat16),
    "a struct": jax.ShapeDtypeStruct((4,), np.uint8),
    "anything with shape and dtype": types.SimpleNamespace(shape=(2,), dtype=np.dtype(np.int8)),
    "no elements": jax.ShapeDtypeStruct((0, 3), np.float32),
    "keys of a tree": {"a": np.float32(0), "b": (np.int32(0), [True])},
}


@pytest.mark.parametrize("case", EXAMPLES)
@pytest.mark.parametrize("x64", [False, True])
def test_result_shape_by_example_or_struct(case, x64):
    """The result has the shape and canonical dtype of the example, and the host's values."""
    example = EXAMPLES[case]
    with jax.enable_x64(x64):
        wanted = jax.tree.map(
            lambda e: (
                np.arange(max(1, np.prod(e.shape)), dtype=np.int64)[: int(np.prod(e.shape))]
                .reshape(e.shape)
                .astype(jax.dtypes.canonicalize_dtype(e.dtype))
                if hasattr(e, "shape")
                else np.asarray(e, jax.dtypes.canonicalize_dtype(np.asarray(e).dtype))
            ),
            example,
        )
        got = jax.jit(lambda: hcb.call(lambda _: wanted, (), result_shape=example))()
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_array_equal(np.asarray(g), w)


@pytest.mark.parametrize(
    ("given", "returned", "dtype"),
    [
        (np.float32, np.float64, np.float32),
        (np.float64, np.float64, np.float32),
        (np.int32, np.int64, np.int32),
        (np.int64, np.int64, np.int32),
        (np.uint32, np.uint64, np.uint32),
        (np.complex64, np.complex128, np.complex64),
    ],
)
@pytest.mark.parametrize("way", ["eager", "eight devices"])
def test_results_of_64_bits_are_made_canonical(given, returned, dtype, way, row):
    """What NumPy makes of Python numbers by default is a good result where JAX has 32 bits."""
    result = np.array([1, 2, 3], returned)
    run, x = ways(
        lambda x: hcb.call(
            lambda _: result, x, result_shape=types.SimpleNamespace(shape=(3,), dtype=given)
        ),
        row,
    )[way]
    out = run(x)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out), result.astype(dtype))


def test_results_keep_64_bits_where_they_are_enabled():
    """With 64 bits enabled a double is neither rounded nor refused."""
    precise = np.float64(1) + 2.0**-40
    with jax.enable_x64(True):
        out = jax.jit(lambda: hcb.call(lambda _: precise, (), result_shape=np.float64(0)))()
    assert out.dtype == np.float64
    assert float(out) == precise


def test_python_numbers_are_results():
    """A host function may return numbers where the example is a number."""
    example = {"i": 0, "f": 0.0, "b": False, "c": 0j}
    value = {"i": -3, "f": 0.25, "b": True, "c": 1 - 2j}
    assert jax.jit(lambda: hcb.call(lambda _: value, (), result_shape=example))() == value


def test_results_in_any_memory_order():
    """Transposed, strided, reversed and read-only results arrive as they are."""
    a = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    frozen = a.copy()
    frozen.flags.writeable = False
    views = [
        a.T,
        a[:, ::2, 1:],
        a[::-1],
        np.asfortranarray(a),
        frozen,
        np.broadcast_to(a[0], (5, 3, 4)),
    ]
    got = jax.jit(lambda: hcb.call(lambda _: views, (), result_shape=views))()
    for g, w in zip(got, views, strict=True):
        np.testing.assert_array_equal(np.asarray(g), w)


def test_results_may_be_jax_arrays_or_the_argument_itself():
    """A result may be an array of JAX, or what the host function was given."""
    out = jax.jit(lambda x: hcb.call(lambda v: (v, jnp.cos(v["a"])), x, result_shape=(x, x["a"])))(
        {"a": X}
    )
    np.testing.assert_array_equal(np.asarray(out[0]["a"]), X)
    np.testing.assert_allclose(np.asarray(out[1]), np.cos(X), rtol=1e-6)


def test_the_host_may_change_its_result_later():
    """What a host function does to its result in a later call reaches no earlier program."""
    scratch = np.zeros(4, np.float32)

    def fill(v):
        scratch[:] = v
        return scratch

    run = jax.jit(lambda x: hcb.call(fill, x, result_shape=scratch))
    outs = [run(np.float32(i)) for i in range(5)]
    scratch[:] = -1
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(np.asarray(out), np.full(4, i, np.float32))


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node of a tree that JAX does not know by itself."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), "pair"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "pair"
        return cls(*children)


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("way", WAYS)
def test_trees_of_arguments_and_results(way, row):
    """Custom nodes, named tuples, None and empty containers arrive and return as they were."""
    seen = []

    def host(arg):
        seen.append(arg)
        p = arg["p"]
        return Pair(p.a + 1, Point(p.b * 2, None)), [], {"n": None}

    def fun(x):
        shape = Pair(x, Point(x, None)), [], {"n": None}
        pair, empty, none = hcb.call(
            host, {"p": Pair(x, x + 1), "none": None, "empty": ()}, result_shape=shape
        )
        assert isinstance(pair, Pair)
        assert isinstance(pair.b, Point)
        assert (pair.b.y, empty, none) == (None, [], {"n": None})
        return pair.a + pair.b.x

    run, x = ways(fun, row)[way]
    np.testing.assert_array_equal(np.asarray(run(x)), (X + 1) + 2 * (X + 1))
    for arg in seen:
        assert isinstance(arg["p"], Pair)
        assert isinstance(arg["p"].a, np.ndarray)
        assert (arg["none"], arg["empty"]) == (None, ())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nothing", [None, (), [], {}])
@pytest.mark.parametrize("arg", ["operand", "no operand"])
def test_call_without_result_runs_and_is_waited_for(way, nothing, arg, row):
    """A call of `None` or `()` is not dropped, and the program ends after it, in order."""
    seen = []

    def fun(x):
        out = hcb.call(
            lambda v: seen.append(v), x if arg == "operand" else (), result_shape=nothing
        )
        assert out == nothing
        return x * 2

    run, x = ways(fun, row)[way]
    jax.block_until_ready(run(x))
    jax.effects_barrier()
    assert len(seen) == (8 if way == "shard_map" else 1)


@pytest.mark.parametrize("way", WAYS)
def test_values_of_calls_against_numpy(way, row):
    """Two calls that depend on one another give what NumPy gives, on every device."""

    def fun(x):
        y = hcb.call(np.sin, x + 1, result_shape=x)
        return x + hcb.call(lambda v: v[::-1].copy(), y * 2, result_shape=y)

    run, x = ways(fun, row)[way]
    sines = 2 * np.sin(X + 1)
    wanted = X + (sines if way == "shard_map" else sines[::-1])  # a shard has one element
    out = run(x)
    np.testing.assert_allclose(np.asarray(out), wanted, rtol=1e-6)
    if way == "pjit":
        assert_sharded(out, wanted, P("x"), row, rtol=1e-6)


@pytest.mark.parametrize("index", [0, 3, 7])
def test_the_device_of_a_call_and_who_gets_the_result(index, row):
    """One device of the mesh calls, named by its place; all of them get the result."""
    seen = []

    def host(v, *, device):
        seen.append(device)
        return v * 2

    order = (3, 1, 7, 5, 0, 2, 6, 4)
    permuted = mesh_of({"x": 8}, order)
    fun = pjit(
        lambda x: hcb.call(host, x, result_shape=x, call_with_device=True, device_index=index),
        P("x"),
        P(),
        mesh=permuted,
    )
    assert_sharded(fun(X), 2 * X, P(), permuted)
    assert seen == [jax.devices()[order[index]]]


def test_stacked_results_of_shards(row):
    """Under `per_shard` the results of all devices are stacked, each where its device is."""
    fun = pjit(
        lambda x: hcb.call(
            lambda v, *, shard: np.float32([v.sum(), shard.coordinates["x"]]),
            x,
            result_shape=jax.ShapeDtypeStruct((2,), np.float32),
            per_shard=True,
        ),
        P("x"),
        P("x"),
        mesh=row,
    )
    x = np.arange(16, dtype=np.float32)
    wanted = np.stack([x.reshape(8, 2).sum(1), np.arange(8, dtype=np.float32)], 1)
    assert_sharded(fun(x), wanted, P("x"), row)


# Control flow


@pytest.mark.parametrize("way", ["one device", "eight devices", "pjit", "shard_map"])
def test_calls_in_control_flow(way, row):
    """In scan, while, its predicate, cond and switch the calls of what runs are made, in order."""
    seen = []

    def host(name, v):
        seen.append(name)
        return v + 1

    def named(name):
        return lambda v: hcb.call(functools.partial(host, name), v, result_shape=v)

    def fun(x):
        x, steps = lax.scan(lambda c, i: (named("scan")(c), i), x, jnp.arange(3))
        x, _ = lax.while_loop(
            lambda c: named("predicate")(c[1]) < 3,
            lambda c: (named("while")(c[0]), c[1] + 1),
            (x, 0),
        )
        x = lax.cond(steps[0] == 0, named("true"), named("false"), x)
        return lax.switch(steps[2], [named("first"), named("second"), named("third")], x)

    run, x = ways(fun, row)[way]
    np.testing.assert_array_equal(np.asarray(run(x)), X + 7)
    once = ["scan"] * 3 + ["predicate", "while"] * 2 + ["predicate", "true", "third"]
    if way == "shard_map":
        assert sorted(seen) == sorted(once * 8)
    else:
        assert seen == once


# Derivatives


@jax.custom_vjp
def host_sin(x):
    """A sine of NumPy with a derivative of NumPy."""
    return hcb.call(np.sin, x, result_shape=x)


host_sin.defvjp(
    lambda x: (host_sin(x), x),
    lambda x, ct: (hcb.call(np.cos, x, result_shape=x) * ct,),
)


@jax.custom_jvp
def host_exp(x):
    """An exponential of NumPy whose derivative is itself."""
    return hcb.call(np.exp, x, result_shape=x)


@host_exp.defjvp
def _host_exp_jvp(primals, tangents):
    y = host_exp(primals[0])
    return y, y * tangents[0]


@pytest.mark.parametrize("way", WAYS)
def test_custom_derivatives_around_calls(way, row):
    """Rules that call the host themselves give the derivatives of the functions in JAX."""

    def step(sin, exp):
        def loss(x):
            return (sin(x) * exp(x / 8)).sum()

        return lambda x: jax.grad(loss)(x) + jax.jvp(lambda x: exp(x / 8), (x,), (x,))[1]

    run, x = ways(step(host_sin, host_exp), row)[way]
    np.testing.assert_allclose(np.asarray(run(x)), np.asarray(step(jnp.sin, jnp.exp)(X)), rtol=1e-4)


def test_second_derivative_of_a_call():
    """A rule made of calls with rules can be differentiated again."""
    nth = X[3]

    @jax.custom_jvp
    def power(x, n):
        return hcb.call(lambda a: np.power(*a), (x, n), result_shape=x)

    @power.defjvp
    def _power_jvp(primals, tangents):
        x, n = primals
        return power(x, n), n * power(x, n - 1) * tangents[0]

    second = jax.grad(jax.grad(lambda x: power(x, jnp.float32(4))))
    np.testing.assert_allclose(np.asarray(second(nth)), 12 * nth**2, rtol=1e-6)


def with_derivative(x):
    """A call that nothing tells how to differentiate."""
    return hcb.call(np.sin, x, result_shape=x).sum()


PLAIN = {
    "jvp": (lambda x: jax.jvp(with_derivative, (x,), (x,)), "jvp or grad"),
    "grad": (jax.grad(with_derivative), "jvp or grad"),
    "linearize": (lambda x: jax.linearize(with_derivative, x), "jvp or grad"),
    "vmap": (jax.vmap(with_derivative), "vmap"),
}
FIXES = {
    "jvp or grad": "wrap it in jax.custom_jvp or jax.custom_vjp, whose rules may use call"
    " themselves",
    "vmap": "pass vmap_method='sequential', 'expand_dims' or 'broadcast_all' to call, or wrap it"
    " in jax.custom_batching.custom_vmap",
}


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("jitted", [False, True])
def test_plain_transformations_of_a_call_are_refused(case, jitted):
    """`vmap`, `jvp` and `grad` of a plain call raise, and say how to do it."""
    run, name = PLAIN[case]
    with pytest.raises(ArgumentError) as raised:
        (jax.jit(run) if jitted else run)(X)
    assert isinstance(raised.value, hcb.TransformationError)
    assert isinstance(raised.value, NotImplementedError)  # as the classic API
    assert str(raised.value) == (
        f"call cannot apply {name} to `sin`: it is a function of the host.\n"
        "  expected  a function that JAX can see into, or a rule\n"
        f"  fix       {FIXES[name]}"
    )


def test_a_call_of_constants_may_stand_in_a_gradient():
    """Where no tangent reaches a call it needs no rule."""

    def loss(x):
        scale = hcb.call(lambda v: v + 1, lax.stop_gradient(x), result_shape=x)
        return (x * scale + hcb.call(lambda _: X, (), result_shape=X)).sum()

    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(X)), X + 1)


# vmap

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def batched(method, seen):
    """A call with two operands under `vmap`, of which the second is not batched."""

    def host(args):
        x, y = args
        seen.append((x.shape, y.shape))
        return x * y

    return lambda x, y: hcb.call(host, (x, y), result_shape=x, vmap_method=method)


@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("sequential", [((4,), (4,))] * 3),
        ("expand_dims", [((3, 4), (1, 4))]),
        ("broadcast_all", [((3, 4), (3, 4))]),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("jitted", [False, True])
def test_each_way_to_batch_a_call(method, shapes, dim, jitted):
    """Each `vmap_method` calls with its shapes, and gives what a loop over the elements gives."""
    seen = []
    run = jax.vmap(batched(method, seen), in_axes=(dim, None))
    x = ROWS if dim == 0 else ROWS.T
    out = (jax.jit(run) if jitted else run)(x, ROWS[1])
    np.testing.assert_array_equal(np.asarray(out), np.stack([r * ROWS[1] for r in ROWS]))
    assert seen == shapes


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_nested_batches_of_a_call(method):
    """Two `vmap` around a call give what two loops give."""
    seen = []
    outer = np.stack([ROWS, -ROWS])
    run = jax.vmap(jax.vmap(batched(method, seen), in_axes=(0, None)), in_axes=(0, 0))
    out = jax.jit(run)(outer, ROWS[:2])
    wanted = np.stack([[r * y for r in rows] for rows, y in zip(outer, ROWS[:2], strict=True)])
    np.testing.assert_array_equal(np.asarray(out), wanted)
    assert len(seen) == (6 if method == "sequential" else 1)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_batched_call_over_a_mesh(method, row):
    """Under `pjit` a batched call gives the same, and several results are batched each."""

    def one(x):
        a, b = hcb.call(lambda v: (v + 1, v.sum(-1)), x, result_shape=(x, x[0]), vmap_method=method)
        return a, b

    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    a, b = pjit(jax.vmap(one), P("x"), P("x"), mesh=row)(x)
    assert_sharded(a, x + 1, P("x"), row)
    assert_sharded(b, x.sum(1), P("x"), row)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_batched_call_without_result(method):
    """A batched call that returns nothing is made all the same."""
    seen = []
    run = jax.vmap(lambda x: hcb.call(lambda v: seen.append(v), x, vmap_method=method))
    jax.jit(run)(ROWS)
    hcb.barrier_wait()
    np.testing.assert_array_equal(np.concatenate([np.atleast_2d(v) for v in seen]), ROWS)


def test_custom_vmap_around_a_call():
    """The way that the message of a plain `vmap` names works."""

    @jax.custom_batching.custom_vmap
    def host_sum(x):
        return hcb.call(lambda v: v.sum(), x, result_shape=x[0])

    @host_sum.def_vmap
    def _(size, in_batched, x):
        del size
        return hcb.call(lambda v: v.sum(-1), x, result_shape=x[:, 0]), in_batched[0]

    np.testing.assert_array_equal(np.asarray(jax.vmap(host_sum)(ROWS)), ROWS.sum(1))


# Arguments

REFUSED = {
    "not callable": (
        lambda: hcb.call(3, X),
        ArgumentError,
        "call has nothing to call.\n  expected  a function of the host\n  got       int: 3",
    ),
    "no array": (
        lambda: hcb.call(np.sin, {"a": "text"}),
        ArgumentError,
        "call cannot send arg['a']: it is no array.\n  expected  arrays and numbers\n"
        "  got       str: 'text'\n  fix       give text as a label, id_print(x, what='loss'), or "
        "bind it by functools.partial",
    ),
    "no shape": (
        lambda: hcb.call(np.sin, X, result_shape={"r": "f32"}),
        hcb.ResultShapeError,
        "call cannot read a shape from result_shape['r'].\n  expected  numbers, arrays,"
        " jax.ShapeDtypeStruct, or anything with shape and dtype\n  got       str: 'f32'",
    ),
    "no device": (
        lambda: hcb.call(np.sin, X, device_index=-1),
        OptionError,
        "call has no such device.\n  given     device_index=-1\n"
        "  expected  the number of a device of the mesh, from 0",
    ),
    "unknown method": (
        lambda: hcb.call(np.sin, X, vmap_method="sequentially"),
        OptionError,
        "call does not know this way to batch (did you mean 'sequential'?).\n"
        "  given     vmap_method='sequentially'\n"
        "  expected  'sequential', 'expand_dims', 'broadcast_all' or None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_of_a_call(case):
    """Each wrong argument is one clear error, before anything runs."""
    run, kind, text = REFUSED[case]
    with pytest.raises(kind) as raised:
        run()
    assert str(raised.value) == text


def test_a_bad_result_shape_is_a_value_error():
    """As in the classic API; those who catch our class catch it, too."""
    for kind in (ValueError, ArgumentError):
        with pytest.raises(kind, match="cannot read a shape"):
            hcb.call(np.sin, X, result_shape="f32")


def test_all_wrong_arguments_at_once():
    """Several wrong arguments are told in one error."""
    with pytest.raises(ArgumentError) as raised:
        hcb.call(None, ["a", "b"], result_shape="c")
    for part in ("nothing to call", "arg[0]", "arg[1]", "result_shape"):
        assert part in str(raised.value)


# JAX inside of the host function

NESTED = {
    "the same device": "device",
    "another device": "jax.devices()[(device.id + 1) % 8]",
}


@pytest.mark.few(0)
@pytest.mark.parametrize("where", NESTED)
@pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow), 256])
def test_host_functions_that_run_jax(where, size):
    """A host function may run any program of one device, with taps and calls of its own.

    The size decides whether XLA runs it in the thread of the host function or in one of its own.
    """
    script = f"""
    taps = []

    def inner(a):
        b = a @ a.T
        hcb.id_tap(lambda v, t: taps.append(v.shape), b)
        return hcb.call(lambda v: v + 1, b, result_shape=b) @ b

    inner = jax.jit(inner)
    ones = np.ones(({size}, {size}), np.float32)

    def host(v, *, device):
        place = {NESTED[where]}
        w = jax.device_put(ones, place)
        w = jnp.sin(w) * 0 + 1  # eager
        out = inner(w)
        assert out.devices() == {{place}}
        np.testing.assert_array_equal(np.asarray(out), ({size} + 1) * {size} ** 2 * ones)
        return v + np.float32(1)

    def fun(x):
        y = hcb.call(host, x * 2, result_shape=x, call_with_device=True)
        return y.sum() + y

    split = jax.jit(fun, out_shardings=NamedSharding(plain, P("x")))
    for name, run, x, calls in (
        ("eager", fun, X, 1), ("one device", jax.jit(fun), X, 1), ("eight devices", split, XS, 1),
        ("pjit", pjit(fun, P("x"), P("x"), mesh=mesh), X, 1), ("shard_map", sharded(fun), XS, 8)
    ):
        say(name)
        taps.clear()
        outs = [run(x) for _ in range(3)]
        hcb.barrier_wait()
        for out in outs:
            each = 2 * X + 1
            wanted = each + (each if calls == 8 else each.sum())
            np.testing.assert_allclose(np.asarray(out), wanted, rtol=1e-6)
        assert taps == [({size}, {size})] * (3 * calls), len(taps)
    say("end")
    """
    ways = ["eager", "one device", "eight devices", "pjit", "shard_map"]
    assert run_alone(script, limit=40) == [*ways, "end"]


def test_a_result_whose_memory_is_used_again():
    """A host function may return a buffer that it overwrites in the next call; devices lag."""
    out = np.empty(4096, np.float32)

    def host(x):
        return np.add(x, 1, out=out)

    def step(_, carry):
        x, wrong = carry
        y = hcb.call(host, x, result_shape=x)
        return y, wrong + jnp.sum(y != x + 1)

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    x = jax.device_put(np.zeros(4096, np.float32), NamedSharding(mesh, P()))
    _, wrong = jax.jit(lambda x: jax.lax.fori_loop(0, 50, step, (x, jnp.int32(0))))(x)
    assert [int(s.data) for s in wrong.addressable_shards] == [0] * 8
