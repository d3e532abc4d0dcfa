"""Every type of value, tree and function, eagerly and under jit, vmap and grad.

The peer is `jax.jit` of the same function: dtype, weak type and every bit must be the same.
"""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint

RNG = np.random.default_rng(2)
X = RNG.uniform(-1, 1, (8, 4)).astype(np.float32)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def bits(x):
    """The bytes of an array or key, in the order of its elements."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def same(got, want):
    """Asserts that two trees are the same to the bit, weak types included."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape, g.aval.weak_type) == (w.dtype, w.shape, w.aval.weak_type)
        assert bits(g) == bits(w)


def close(got, want, **tolerance):
    """Asserts that two trees have the same structure, dtypes and values."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), **(tolerance or CLOSE))


# Dtypes

FLOATS = ["float32", "bfloat16", "float16"]
SMALL_FLOATS = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
# Not int2 and uint2: XLA's CPU client corrupts memory when `jax.jit` splits them over devices.
INTEGERS = ["int4", "int8", "int16", "int32", "uint4", "uint8", "uint16", "uint32"]
ALL = ["bool", *INTEGERS, *FLOATS, *SMALL_FLOATS, "complex64"]
MOVED = ["bool", "int4", "bfloat16", "float8_e4m3fn", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]


def values(dtype, shape=(8, 4)):
    """Small values of a dtype, zero and negative ones among them."""
    raw = np.arange(np.prod(shape)).reshape(shape) % 7
    if dtype == "bool":
        return raw % 2 == 0
    if dtype.startswith("complex"):
        return (raw - 1j * raw.T.reshape(shape)).astype(dtype)
    if dtype == "float8_e8m0fnu":  # powers of two
        return (2.0 ** (raw - 3)).astype(np.float32).astype(ml_dtypes.float8_e8m0fnu)
    raw = raw % 4 - (0 if dtype.startswith("uint") else 2)
    return raw.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))


def shuffle(x):
    """Moves data between devices in ways that no arithmetic is needed for."""
    y = jnp.concatenate([x[::-1], x[:2]])[:8]
    return x, y.T, jnp.where(y == x, x, y)


def shuffled(tree):
    """The same for values of several dtypes; the rarer ones only cross devices once."""
    return {k: shuffle(x) if k in MOVED else (x, x.T, x) for k, x in tree.items()}


@pytest.mark.slow
def test_every_dtype(mesh):
    """Values of any dtype go in, across devices and out as by `jax.jit`, to the bit."""
    tree = {dtype: values(dtype) for dtype in ALL}
    f = pjit(shuffled, P("data"), {k: (P("data"), P("model", "data"), P()) for k in ALL}, mesh=mesh)
    got, want = f(tree), jax.jit(shuffled)(tree)
    assert {k: str(v[0].dtype) for k, v in got.items()} == {k: k for k in ALL}
    same(got, want)
    assert {s.data.shape for v in got.values() for s in v[1].addressable_shards} == {(2, 2)}


@pytest.mark.slow
def test_dtypes_moved_and_mapped(mesh):
    """Values of few bits and many, placed right, placed otherwise, and mapped inside of jit."""
    tree = {dtype: values(dtype) for dtype in MOVED}
    f = pjit(shuffled, P("data"), P("model", "data"), mesh=mesh)
    want = jax.jit(shuffled)(tree)
    for spec in (P("data"), P(None, "model")):
        same(f({k: put(x, mesh, spec) for k, x in tree.items()}), want)
    stack = {k: np.stack([x, x[::-1]]) for k, x in tree.items()}
    same(jax.jit(jax.vmap(f))(stack), jax.jit(jax.vmap(shuffled))(stack))


@pytest.mark.slow
def test_sums_over_devices(mesh):
    """Reductions over a split dimension are those of `jax.jit`, to the bit: all sums are exact."""

    def sums(tree):
        return {k: (x.sum(), (x * x)[3:].sum(0, dtype=x.dtype)) for k, x in tree.items()}

    names = ["int8", "int16", "int32", "uint8", "uint16", "uint32", *FLOATS, "complex64"]
    tree = {dtype: values(dtype) for dtype in names}
    f = pjit(sums, P(("data", "model")), P(), mesh=mesh)
    same(f(tree), jax.jit(sums)(tree))


@pytest.mark.slow
def test_gradients_have_the_dtype_of_their_input(mesh):
    """Gradients and tangents of any dtype keep it, and lie as the input does."""
    names = [*FLOATS, "complex64", "float8_e4m3fn", "float8_e5m2"]

    def loss(tree):
        # Exact in every dtype: small whole numbers.
        wide = [x if x.dtype == jnp.complex64 else x.astype(jnp.float32) for x in tree.values()]
        return sum((jnp.real(x * jnp.conj(x)) + jnp.real(x)).sum() for x in wide)

    tree = {dtype: values(dtype) for dtype in names}
    f = pjit(loss, P("data", "model"), P(), mesh=mesh)
    want = jax.jit(jax.grad(loss))(tree)
    got = jax.grad(f)(tree)
    same(got, want)
    assert {g.addressable_shards[0].data.shape for g in got.values()} == {(2, 2)}
    same(jax.jit(jax.grad(f))(tree), want)
    same(jax.jvp(f, (tree,), (tree,))[1], jax.jvp(jax.jit(loss), (tree,), (tree,))[1])


@pytest.mark.slow
def test_wide_dtypes(mesh):
    """Under x64 nothing is narrowed, and the same function takes narrow values outside of it."""

    def moved(tree):
        return {k: shuffle(x) for k, x in tree.items()}

    f = pjit(moved, P("data"), P(), mesh=mesh)
    # Not host arrays: JAX 0.10's own dispatcher mixes up their widths, and crashes.
    narrow = {dtype: jnp.asarray(values(dtype)) for dtype in WIDE}
    assert "64" not in narrow["float64"].dtype.name
    for _ in range(2):
        with jax.enable_x64(True):
            wide = {dtype: jnp.asarray(values(dtype)) for dtype in WIDE}
            got = f(wide)
            assert {str(o.dtype) for o in jax.tree.leaves(got)} == set(WIDE)
            same(got, jax.jit(moved)(wide))
        same(f(narrow), jax.jit(moved)(narrow))


@pytest.mark.slow
def test_wide_gradients(mesh):
    """Derivatives under x64 are double, against NumPy's."""

    def fun(x):
        return (jnp.sin(x) * x[::-1]).sum()

    f = pjit(fun, P("data"), P(), mesh=mesh)
    with jax.enable_x64(True):
        x = np.linspace(0, 1, 8) + 1e-9
        want = np.cos(x) * x[::-1] + np.sin(x)[::-1]
        for g in (jax.grad(f), jax.jit(jax.grad(f))):
            got = g(jnp.asarray(x))
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, want, rtol=1e-14)
        pushed = jax.jvp(f, (jnp.asarray(x),), (jnp.asarray(x),))[1]
        np.testing.assert_allclose(pushed, want @ x, rtol=1e-14)


# Numbers and weak types

NUMBERS = {
    "int": 3,
    "float": 2.5,
    "bool": True,
    "complex": 2 - 1j,
    "numpy int": np.int16(3),
    "numpy float": np.float32(1.5),
    "numpy bool": np.bool_(False),
    "numpy zero-d": np.array(4),
    "jax weak": jnp.asarray(2),
    "jax strong": jnp.float32(2),
    "bfloat16": ml_dtypes.bfloat16(1.5),
}


def doubled(x):
    """The argument, what is made of it, and what it does to a type."""
    return x, x * 2, jnp.ones(4, jnp.bfloat16) * 1, jnp.stack([x, x])


@pytest.mark.slow
def test_numbers(mesh):
    """Numbers of Python, NumPy and JAX come out as `jax.jit` returns them, weak or not."""

    def doubled(tree):
        return {k: (x, x if x.dtype == bool else x * 2, jnp.stack([x, x])) for k, x in tree.items()}

    want = jax.jit(doubled)(NUMBERS)
    for spec in (None, P()):
        f = pjit(doubled, spec, None, mesh=mesh)
        for _ in range(2):
            same(f(NUMBERS), want)
    same(jax.jit(f)(NUMBERS), want)
    mapped = [jax.vmap(g, None, 0, axis_size=3)(NUMBERS) for g in (f, jax.jit(doubled))]
    same(*mapped)
    one = pjit(doubled, P(), mesh=mesh_of({"x": 1}))
    same(one(NUMBERS), want)


@pytest.mark.slow
def test_weak_types_in_derivatives(mesh):
    """A gradient by a Python number is as weak as by `jax.jit`, of first and second order."""

    def derivatives(g, x):
        grad = jax.grad(g)
        return grad(x), jax.grad(grad)(x), jax.jvp(g, (x,), (x,)), jax.vjp(g, x)[1](x)

    def cube(x):
        return x * x * x

    f = pjit(cube, P(), P(), mesh=mesh)
    for value in (2.0, np.float32(2)):
        want = derivatives(jax.jit(cube), value)
        same(derivatives(f, value), want)
        same(jax.jit(functools.partial(derivatives, f))(value), want)


def test_weak_and_strong_are_two_signatures(mesh):
    """A weak number and a strong one are traced apart, and each is found again."""
    f = pjit(lambda x: x + 1, mesh=mesh)
    one, two = np.int32(2), 2
    assert counted(f, one)[1].traces == 1
    assert counted(f, two)[1].traces == 1
    for value in (one, two, 5, np.int32(7)):
        assert counted(f, value)[1] == spmd.Counts()


def test_weak_type_in_loop_carry(mesh):
    """A weak result of a call in a loop is promoted as that of `jax.jit` is."""

    def run(g):
        return jax.lax.fori_loop(0, 3, lambda i, c: g(c), 1.0)

    f = pjit(lambda c: c * 2, mesh=mesh)
    same(run(f), run(jax.jit(lambda c: c * 2)))


def test_numbers_too_large_are_refused_as_by_jit(mesh):
    """A Python number that fits no dtype is refused, by name."""
    f = pjit(lambda scale: scale, mesh=mesh)
    with pytest.raises(OverflowError):
        jax.jit(lambda scale: scale)(2**40)
    with pytest.raises((OverflowError, TypeError, ValueError)) as e:
        f(2**40)
    assert "scale" in str(e.value)
    assert "1099511627776" in str(e.value)


# Zero-size arrays

EMPTY = [
    ((0,), P("data")),
    ((0, 4), P("data")),
    ((0, 4), P("data", "model")),
    ((0, 4), P(None, "model")),
    ((8, 0), P("data")),
    ((8, 0), P("data", "model")),
    ((8, 0, 4), P(("data", "model"))),
]


@pytest.mark.slow
def test_empty_arrays(mesh):
    """No rows are split over an axis into no rows each; values, gradients and maps of them."""
    shapes, specs = zip(*EMPTY, strict=True)
    xs = tuple(np.zeros(s, np.float32) for s in shapes)

    def fun(*xs):
        return (
            tuple(map(jnp.sin, xs)),
            sum(x.sum() for x in xs),
            [jnp.concatenate([x, x]) for x in xs],
        )

    def check(arrays):
        for a, x, spec in zip(arrays, xs, specs, strict=True):
            assert_sharded(a, x, spec, mesh)

    f = pjit(fun, specs, (specs, P(), list(specs)), mesh=mesh)
    ys, total, twice = f(*xs)
    check(ys)
    assert float(total) == 0
    assert [t.shape for t in twice] == [(2 * s[0], *s[1:]) for s in shapes]
    for again in (f(*ys), f(*(put(x, mesh, s) for x, s in zip(xs, specs, strict=True)))):
        check(again[0])
    loss = jax.grad(lambda *xs: f(*xs)[1] + f(*xs)[0][1].sum(), argnums=tuple(range(len(xs))))
    check(loss(*xs))
    # The compiler splits nothing that is empty where no boundary asks for it.
    for got in (jax.jit(f)(*xs), jax.jit(loss)(*xs)):
        close(tuple(got[0] if len(got) == 3 else got), xs)
    stacks = tuple(np.stack([x] * 3) for x in xs)
    close(jax.vmap(f)(*stacks)[0], stacks)
    none = tuple(s[:0] for s in stacks)
    close(jax.vmap(f)(*none)[0], none)


def test_empty_beside_full(mesh):
    """An empty argument takes its part: sums over no rows, stacked with some rows."""

    def fun(x, none):
        return jnp.concatenate([x, none]), none.sum(axis=0) + x.sum(axis=0), none @ x.T

    f = pjit(fun, (P("data"), P("data")), P(), mesh=mesh)
    none = np.zeros((0, 4), np.float32)
    want = (X, X.sum(0), np.zeros((0, 8), np.float32))
    close(f(X, none), want)
    close(jax.jit(f)(X, none), want)
    dx, dnone = jax.grad(lambda *a: f(*a)[1].sum(), argnums=(0, 1))(X, none)
    close((dx, dnone), (np.ones_like(X), none))


# Keys


@pytest.mark.few(0)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_arrays_of_keys(impl, mesh):
    """An array of typed keys is split like any other, in, out, moved, and under transformations."""
    keys = jax.random.split(jax.random.key(1, impl=impl), 8)

    def fun(keys, x):
        return keys[::-1], x * jax.vmap(jax.random.uniform)(keys)[:, None]

    f = pjit(fun, (P("data"), P("data")), (P("model"), P("data")), mesh=mesh)
    want = fun(keys, X)
    for given in (keys, put(keys, mesh, P("data")), put(keys, mesh, P("model"))):
        more, y = f(given, X)
        assert more.dtype == keys.dtype
        assert bits(more) == bits(want[0])
        assert {s.data.shape for s in more.addressable_shards} == {(4,)}
        assert_sharded(y, want[1], P("data"), mesh, **CLOSE)
    assert bits(f(f(keys, X)[0], X)[0]) == bits(fun(want[0], X)[0])
    assert bits(jax.jit(f)(keys, X)[0]) == bits(want[0])
    dx = jax.grad(lambda x: f(keys, x)[1].sum())(X)
    assert_sharded(dx, jax.grad(lambda x: fun(keys, x)[1].sum())(X), P("data"), mesh, **CLOSE)


@pytest.mark.slow
def test_keys_are_residuals(mesh):
    """Keys that the backward half draws from again are held, split as the keys are."""
    keys = jax.random.split(jax.random.key(2), 8)

    @jax.checkpoint
    def noisy(x, keys):
        return jnp.sin(x * (jax.random.key_data(keys)[:, :1] % 7).astype(x.dtype))

    def fun(x, keys):
        return noisy(x, keys[::-1])

    f = pjit(fun, (P("data"), P("data")), P("data"), mesh=mesh)
    _, pull = jax.vjp(lambda x: f(x, keys), X)
    want = jax.vjp(lambda x: fun(x, keys), X)[1](X)
    for _ in range(2):
        close(pull(X), want)
    held = [r for r in jax.tree.leaves(pull) if jax.dtypes.issubdtype(r.dtype, jax.dtypes.prng_key)]
    assert held
    for r in held:
        assert bits(r) == bits(keys[::-1])
        assert {s.data.shape for s in r.addressable_shards} == {(2,)}
    grad = jax.jit(jax.grad(lambda x: f(x, keys).sum()))
    close(grad(X), jax.grad(lambda x: fun(x, keys).sum())(X))


def test_keys_are_donated_constrained_and_checked(mesh):
    """Keys may be donated and placed by a constraint; one too many is told by its shape."""
    keys = jax.random.split(jax.random.key(3), 8)
    f = pjit(
        lambda k: jax.random.wrap_key_data(jax.random.key_data(k) + 1),
        P("data"),
        P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    given = put(keys, mesh, P("data"))
    assert bits(f(given)) == bits(jax.random.wrap_key_data(jax.random.key_data(keys) + 1))
    assert given.is_deleted()
    with mesh:
        placed = with_sharding_constraint(keys, P(("data", "model")))
    assert bits(placed) == bits(keys)
    assert {s.data.shape for s in placed.addressable_shards} == {(1,)}
    with pytest.raises(spmd.ShardingError) as e:
        f(keys[:6])
    assert "got       key<fry>[6]: 6 = 1*4 + 2" in str(e.value)


def test_old_style_keys(mesh):
    """A key that is an array of uint32 is an array."""
    key = jax.random.PRNGKey(0)
    f = pjit(lambda k: jax.random.normal(k, (8, 2)), P(), P("data"), mesh=mesh)
    assert_sharded(f(key), jax.random.normal(key, (8, 2)), P("data"), mesh, **CLOSE)


# Trees


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A node with an attribute that is no leaf."""

    def __init__(self, value, unit="m"):
        self.value, self.unit = value, unit

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], self.unit

    @classmethod
    def tree_unflatten(cls, unit, children):
        return cls(*children, unit)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "b"], meta_fields=["activation"]
)
@dataclasses.dataclass
class Layer:
    """A dataclass with a static field."""

    w: Any
    b: Any
    activation: str = "tanh"


class Pair(NamedTuple):
    """A named tuple."""

    left: Any
    right: Any


def forward(layer, x):
    """Reads fields, returns another node of each kind."""
    h = getattr(jnp, layer.activation)(x @ layer.w)
    h = h if layer.b is None else h + layer.b[None]
    return Box(h, unit=layer.activation), Pair(h.sum(), {"none": None, "empty": ()})


LAYER = Layer(X.T.copy(), np.arange(8, dtype=np.float32))


def forward_on(mesh):
    """The same, with specs in nodes of the same classes."""
    return pjit(
        forward,
        in_axis_resources=(Layer(P(None, "model"), P("model")), P("data")),
        out_axis_resources=(Box(P("data", "model"), unit="tanh"), Pair(P(), P())),
        mesh=mesh,
    )


@pytest.mark.slow
def test_nodes_of_every_kind(mesh):
    """Registered classes, dataclasses and named tuples, in arguments, specs and results."""
    f = forward_on(mesh)
    want = jax.jit(forward)(LAYER, X)
    for got in (f(LAYER, X), jax.jit(f)(LAYER, X)):
        close(got, want)
        assert got[0].unit == "tanh"
        assert got[1].right == {"none": None, "empty": ()}
    assert_sharded(f(LAYER, X)[0].value, want[0].value, P("data", "model"), mesh, **CLOSE)
    grads = jax.grad(lambda p: f(p, X)[1].left)(LAYER)
    assert isinstance(grads, Layer)
    assert grads.activation == "tanh"
    close(grads, jax.grad(lambda p: forward(p, X)[1].left)(LAYER))
    assert_sharded(grads.w, grads.w, P(None, "model"), mesh)
    mapped = jax.vmap(f, in_axes=(Layer(None, 0), None), out_axes=(1, Pair(0, None)))
    stack = Layer(LAYER.w, np.stack([LAYER.b, 2 * LAYER.b]))
    plain = jax.vmap(forward, in_axes=(Layer(None, 0), None), out_axes=(1, Pair(0, None)))
    close(mapped(stack, X), plain(stack, X))


def test_static_fields_are_part_of_the_signature(mesh):
    """Another static field is another function; the same is found again."""
    f = pjit(forward, (P(), P("data")), P(), mesh=mesh)
    close(f(LAYER, X), forward(LAYER, X))
    other = dataclasses.replace(LAYER, activation="sin")
    got, counts = counted(f, other, X)
    assert counts.traces == 1
    close(got, jax.jit(forward)(other, X))
    assert counted(f, other, X)[1] == spmd.Counts()


def test_none_leaves(mesh):
    """None where an array may be is no argument; None among specs is a replicated one."""
    f = pjit(forward, ({"layer": None, "x": P("data")}), P(), mesh=mesh)
    bare = Layer(LAYER.w, None)
    close(f(bare, X), jax.jit(forward)(bare, X))
    close(f(LAYER, X), jax.jit(forward)(LAYER, X))
    g = jax.grad(lambda p: f(p, X)[1].left)(bare)
    assert g.b is None
    assert jax.vmap(f, in_axes=(None, 0))(bare, X[None])[1].left.shape == (1,)
    prefix = pjit(lambda t: t, ([P("data"), P("model")],), None, mesh=mesh)
    close(prefix([None, X]), [None, X])
    close(prefix([X, None]), [X, None])


@pytest.mark.slow
def test_empty_trees(mesh):
    """Nothing in, nothing out and nothing in between, under every transformation."""
    f = pjit(lambda tree, x: ({}, (), [None], x * 2, tree), (P(), P("data")), P(), mesh=mesh)
    for tree in ({}, (), None, [[], {"a": ()}], Pair((), None)):
        want = ({}, (), [None], 2 * X, tree)
        close(f(tree, X), want)
        close(jax.jit(f)(tree, X), want)
        close(jax.vmap(f, (None, 0))(tree, X[None]), ({}, (), [None], 2 * X[None], tree))
        assert jax.grad(lambda t: f(t, X)[3].sum())(tree) == tree
    nothing = pjit(lambda: (), mesh=mesh)
    assert nothing() == ()
    assert jax.jit(nothing)() == ()
    assert jax.vmap(nothing, axis_size=3)() == ()


def test_dicts_of_other_kinds(mesh):
    """Ordered and default dicts keep their type and order, as arguments and as specs."""
    f = pjit(lambda t: jax.tree.map(lambda x: x * 2, t), P("data"), P("data"), mesh=mesh)
    ordered = collections.OrderedDict(z=X, a=X + 1)
    assert list(f(ordered)) == ["z", "a"]
    close(f(ordered), collections.OrderedDict(z=2 * X, a=2 * X + 2))
    default = collections.defaultdict(list, {"k": X})
    close(f(default), collections.defaultdict(list, {"k": 2 * X}))
    specs = collections.OrderedDict(z=P("data"), a=P(None, "model"))
    g = pjit(lambda t: t["z"] - t["a"], (specs,), P(), mesh=mesh)
    close(g(ordered), X - (X + 1))
    numbered = {3: X, 1: X + 1}
    close(f(numbered), {3: 2 * X, 1: 2 * X + 2})


WRONG_FIELD = """\
pjit of `forward` cannot split argument layer.b.
  given     in_axis_resources[0].b = P('model', 'data') on mesh data=4, model=2
  expected  a spec of at most 1 entry
  got       f32[8], which has rank 1; the spec has 2 entries
  fix       shorten the spec to 1 entry"""


def test_fields_are_named_in_errors(mesh):
    """A field of a user's class is called as the user does."""
    f = pjit(forward, (Layer(P(), P("model", "data")), P()), P(), mesh=mesh)
    with pytest.raises(spmd.ShardingError) as e:
        f(LAYER, X)
    assert str(e.value) == WRONG_FIELD
    with pytest.raises(spmd.ShardingError) as e:
        pjit(lambda box: box, P("data"), mesh=mesh)(Box(X[:6]))
    assert "cannot split argument box.value." in str(e.value)


# Functions


class Model:
    """Functions of every kind, with the same value."""

    power = 2

    def __init__(self, by):
        self.by = by

    def method(self, x, scale=1.0):
        return self.by * scale * x**self.power

    @classmethod
    def of_class(cls, x, by=3.0):
        return by * x**cls.power

    @staticmethod
    def static(x):
        return 3.0 * x**2

    def __call__(self, x):
        return self.by * x**2

    @property
    def made(self):
        return lambda x: self.by * x**2


class Slotted:
    """A callable that has no dict, no name and no weak reference."""

    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x**2


def with_all(x, /, by=1.0, *more, power=2, **options):
    """Every kind of parameter."""
    return by * x**power + sum(more) * 0.0 + 0.0 * options.get("shift", 0.0)


MODEL = Model(3.0)
FUNCTIONS = {
    "bound method": MODEL.method,
    "classmethod": Model.of_class,
    "classmethod of an object": MODEL.of_class,
    "staticmethod": Model.static,
    "callable object": MODEL,
    "slotted callable": Slotted(3.0),
    "property": MODEL.made,
    "lambda": lambda x: 3.0 * x**2,
    "partial": functools.partial(lambda by, x: by * x**2, 3.0),
    "partial by keyword": functools.partial(with_all, by=3.0, power=2),
    "partial of a method": functools.partial(MODEL.method, scale=1.0),
    "partial of a callable": functools.partial(MODEL),
    "partial of a partial": functools.partial(functools.partial(with_all, power=2), by=3.0),
    "jax Partial": jax.tree_util.Partial(lambda by, x: by * x**2, 3.0),
    "jit": jax.jit(lambda x: 3.0 * x**2),
    "vmap": jax.vmap(lambda x: 3.0 * x**2),
    "grad": jax.grad(lambda x: (x**3).sum()),
    "checkpoint": jax.checkpoint(lambda x: 3.0 * x**2),
    "custom_jvp": jax.custom_jvp(lambda x: 3.0 * x**2),
    "defaults": with_all,
}
FUNCTIONS["custom_jvp"].defjvp(lambda p, t: (3.0 * p[0] ** 2, 6.0 * p[0] * t[0]))


@pytest.mark.few(6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, mesh):
    """Every kind of function, eagerly, under jit, grad and vmap."""
    fun = FUNCTIONS[name]
    by = 1.0 if name == "defaults" else 3.0
    f = pjit(fun, P("data"), P("data"), mesh=mesh)
    assert_sharded(f(X), by * X**2, P("data"), mesh, **CLOSE)
    mapped = jax.jit(jax.vmap(jax.grad(lambda x: f(x).sum())))
    np.testing.assert_allclose(mapped(X[None])[0], 2 * by * X, **CLOSE)
    assert counted(f, X)[1] == spmd.Counts()


@pytest.mark.slow
def test_functions_with_every_kind_of_parameter(mesh):
    """Positional, default, variadic and keyword parameters under transformations."""

    def fun(x, /, y=2.0, *more, scale=1.0, **options):
        return x * y * scale + sum(m.sum() for m in more) + options.get("shift", 0.0)

    specs = {"x": P("data"), "y": P(), "scale": P()}
    f = pjit(fun, specs, P("data"), mesh=mesh)
    calls = [
        ((X,), {}),
        ((X, 3.0), {}),
        ((X, np.float32(3), X, 2 * X), {"scale": 0.5}),
        ((X,), {"y": X, "shift": np.float32(2)}),
        ((X, 1.5), {"shift": 1.0, "scale": X}),
    ]
    for args, kwargs in calls:
        want = jax.jit(fun)(*args, **kwargs)
        close(f(*args, **kwargs), want)
        loss = [jax.grad(lambda *a, k=kwargs, g=g: g(*a, **k).sum()) for g in (f, fun)]
        close(jax.jit(loss[0])(*args), jax.jit(loss[1])(*args))
    mapped = jax.vmap(lambda x, s: f(x, 1.5, scale=s), (0, 0))
    scales = np.float32([1, 2])
    np.testing.assert_allclose(
        mapped(np.stack([X, X]), scales), X * 1.5 * scales[:, None, None], **CLOSE
    )
    # vmap maps keyword arguments over their leading dimension.
    np.testing.assert_allclose(
        jax.vmap(f)(np.stack([X, X]), scale=scales), X * 2 * scales[:, None, None], **CLOSE
    )


def test_methods_decorated_in_a_class(mesh):
    """A method of a module that is a tree: transformed through the instance."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Module:
        w: Any

        @functools.partial(
            pjit, in_axis_resources=({"self": P("model"), "x": P("data")}), mesh=mesh
        )
        def __call__(self, x):
            return jnp.tanh(x @ self.w)

        @classmethod
        @functools.partial(pjit, static_argnums=0, mesh=mesh)
        def twice(cls, x):
            return x * 2

    module, want = Module(X.T.copy()), np.tanh(X @ X.T)
    np.testing.assert_allclose(module(X), want, **CLOSE)
    g = jax.grad(lambda m: m(X).sum())(module)
    np.testing.assert_allclose(g.w, X.T @ (1 - want**2), **CLOSE)
    assert_sharded(g.w, g.w, P("model"), mesh)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(module, X), want, **CLOSE)
    np.testing.assert_allclose(jax.vmap(module)(X[None]), want[None], **CLOSE)
    np.testing.assert_allclose(Module.twice(X), 2 * X)
