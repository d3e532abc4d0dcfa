"""Who calls the host from a program on several devices, and with which part of a value."""

import collections
import dataclasses
import math
import re

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import ml_dtypes
import numpy as np
from oracle import SAMPLES, assert_sharded, block_of, mesh_of, put, sample
import pytest
from strategies import specs
from tapped import Listener

import spmd
from spmd import host_callback as hcb

X = np.arange(64, dtype=np.float32).reshape(8, 8)
W = np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)

#: Axes of the mesh, the devices in its order, and how an 8x8 operand is split on it.
MESHES = {
    "8": ({"x": 8}, range(8), P("x")),
    "4x2": ({"data": 4, "model": 2}, range(8), P("data", "model")),
    "2x2x2": ({"a": 2, "b": 2, "c": 2}, range(8), P(("c", "a"), None)),
    "2x2x2 permuted": ({"a": 2, "b": 2, "c": 2}, (3, 1, 7, 5, 0, 2, 6, 4), P("b", ("a", "c"))),
    "4x2 backwards": ({"data": 4, "model": 2}, range(7, -1, -1), P(None, "data")),
    "2x2 of the middle": ({"a": 2, "b": 2}, (5, 2, 3, 4), P("a", "b")),
    "2 far apart": ({"x": 2}, (6, 1), P("x")),
    "2 replicas": ({"x": 2}, (1, 6), P()),
}


def plain(mesh):
    """The mesh as JAX knows it."""
    return Mesh(mesh.devices, mesh.axis_names)


def _jit_with_shardings(fun, mesh, spec):
    sharding = NamedSharding(plain(mesh), spec)
    return jax.jit(fun, in_shardings=sharding, out_shardings=sharding)


def _in_mesh(fun, mesh, spec):
    def run(x):
        with mesh:
            return spmd.pjit(fun, spec, spec)(x)

    return run


#: How a program comes to run on the devices of a mesh.
WAYS = {
    "pjit": lambda f, mesh, spec: spmd.pjit(f, spec, spec, mesh=mesh),
    "pjit in a mesh": _in_mesh,
    "pjit in jit": lambda f, mesh, spec: jax.jit(spmd.pjit(f, spec, spec, mesh=mesh)),
    "jit with shardings": _jit_with_shardings,
    "jit of sharded": lambda f, mesh, spec: lambda x: jax.jit(f)(put(x, mesh, spec)),
    "eager": lambda f, mesh, spec: lambda x: f(put(x, mesh, spec)),
}

#: JAX does not tell the lowering of such a program what its mesh is called.
NAMELESS = "jit with shardings"


def some(names, first):
    """The first names as cases of the default run, and the rest of them as slow ones."""
    return [n if n in first else pytest.param(n, marks=pytest.mark.slow) for n in names]


every_mesh = pytest.mark.parametrize(
    "name", some(MESHES, ("4x2", "2x2x2 permuted", "2x2 of the middle", "2 replicas"))
)
#: Every mesh with one way, and every way on some meshes.
every_pair = pytest.mark.parametrize(
    ("name", "way"),
    [(name, "pjit") for name in MESHES]
    + [("2x2x2 permuted", way) for way in WAYS if way != "pjit"]
    + [
        pytest.param(name, way, marks=pytest.mark.slow)
        for way in WAYS
        if way != "pjit"
        for name in MESHES
        if name != "2x2x2 permuted"
    ],
)


def ceil_block(value, spec, mesh, coordinate):
    """The block and its slices at a coordinate where dimensions need not divide, without padding.

    A dimension of n in k parts is cut every ceil(n / k) elements; NumPy cuts at the end.
    """
    slices = []
    for dim, entry in enumerate((*spec, *(None,) * (value.ndim - len(spec)))):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        place, parts = 0, 1
        for axis in axes:
            place = place * mesh.shape[axis] + coordinate[axis]
            parts *= mesh.shape[axis]
        step = math.ceil(value.shape[dim] / parts)
        slices.append(slice(place * step, (place + 1) * step))
    return value[tuple(slices)]


def assert_shards(seen, value, spec, mesh, *, calls=1, named=True):
    """Asserts that each device of the mesh called with its block, its coordinate and its index."""
    assert collections.Counter(s.device for s in seen) == dict.fromkeys(mesh.devices.flat, calls)
    of = {s.device: s for s in seen}
    for at, device in np.ndenumerate(mesh.devices):
        got = of[device]
        coordinate = dict(zip(mesh.axis_names, at, strict=True))
        assert got.shard.device == device
        assert got.shard.coordinates == (coordinate if named else {})
        np.testing.assert_array_equal(got.arg, ceil_block(value, spec, mesh, coordinate))
        assert got.arg.dtype == value.dtype
        np.testing.assert_array_equal(value[got.shard.index], got.arg)
        for s, n in zip(got.shard.index, value.shape, strict=True):
            assert 0 <= s.start <= s.stop <= n
            assert s.step is None


# The whole operand


@every_pair
def test_one_device_calls_with_the_whole_operand(name, way):
    """One call gets all of a sharded operand, from the device of that index on the mesh."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()
    index = mesh.size - 1
    out = WAYS[way](lambda x: log.tap(x, device_index=index), mesh, spec)(X)
    (seen,) = log.take()
    np.testing.assert_array_equal(seen.arg, X)
    assert seen.device == mesh.devices.flat[index]
    assert seen.shard is None
    assert_sharded(out, X, spec, mesh)


@every_mesh
def test_every_index_is_that_device(name):
    """`device_index` counts the devices of the mesh from major to minor, whatever their ids."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()

    def fun(x):
        for index in range(mesh.size):
            log.tap({"value": x * (index + 1)}, device_index=index)
        return x

    spmd.pjit(fun, spec, spec, mesh=mesh)(X)
    seen = {s.device: s for s in log.take()}
    assert set(seen) == set(mesh.devices.flat)
    for index, device in enumerate(mesh.devices.flat):
        np.testing.assert_array_equal(seen[device].arg["value"], X * (index + 1))


def test_default_is_the_first_device_of_the_mesh():
    """Without a `device_index` the first device of the mesh calls, not that of id 0."""
    mesh, log = mesh_of({"x": 4}, (6, 0, 3, 1)), Listener()
    spmd.pjit(log.tap, P("x"), P("x"), mesh=mesh)(X)
    (seen,) = log.take()
    assert seen.device == jax.devices()[6]


@pytest.mark.parametrize("index", [0, 3, 7])
def test_call_gets_the_whole_and_gives_the_whole(index):
    """A call on one device gets all of its operand once; every device gets all of its result."""
    mesh, log = mesh_of({"a": 2, "b": 4}, (3, 1, 7, 5, 0, 2, 6, 4)), Listener()

    def host(x, *, device):
        log(x, device=device)
        return x.T * 2

    def fun(x):
        return hcb.call(host, x, result_shape=x, call_with_device=True, device_index=index) + 1

    out = spmd.pjit(fun, P("a", "b"), P("b"), mesh=mesh)(X)
    assert_sharded(out, X.T * 2 + 1, P("b"), mesh)
    (seen,) = log.take()
    np.testing.assert_array_equal(seen.arg, X)
    assert seen.device == mesh.devices.flat[index]


def test_operands_that_are_split_differently():
    """A tree of arrays of which each is split its own way arrives whole, in one call."""
    mesh, log = mesh_of({"a": 2, "b": 4}), Listener()
    tree = {"x": X, "y": [W, np.int32(7)], "z": X.astype(ml_dtypes.bfloat16)}
    splits = {"x": P("a", "b"), "y": [P("b"), P()], "z": P(None, ("b", "a"))}
    spmd.pjit(lambda t: log.tap(t, device_index=5), (splits,), splits, mesh=mesh)(tree)
    (seen,) = log.take()
    assert jax.tree.structure(seen.arg) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, seen.arg, tree)


# One call per shard


@every_pair
def test_every_shard_calls(name, way):
    """Each device calls once, with its own block, its mesh coordinate and its global index."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()
    out = WAYS[way](log.shards, mesh, spec)(X)
    assert_shards(log.take(), X, spec, mesh, named=way != NAMELESS)
    assert_sharded(out, X, spec, mesh)


def test_blocks_are_those_of_the_oracle():
    """Where dimensions divide, the blocks are those that `oracle.block_of` counts."""
    mesh, log, spec = mesh_of({"a": 2, "b": 4}, range(7, -1, -1)), Listener(), P("b", "a")
    spmd.pjit(log.shards, spec, spec, mesh=mesh)(X)
    for seen in log.take():
        np.testing.assert_array_equal(seen.arg, block_of(X, spec, mesh, seen.shard.coordinates))


@pytest.mark.parametrize("operand", ["constant", "nothing", "derived"])
@pytest.mark.parametrize("way", ["pjit", "pjit in a mesh", "pjit in jit"])
def test_coordinates_do_not_depend_on_the_operand(way, operand):
    """A device knows its place in the mesh when it calls with a constant or with nothing."""
    mesh, log = mesh_of({"a": 2, "b": 4}, (3, 1, 7, 5, 0, 2, 6, 4)), Listener()

    def fun(x):
        log.shards({"constant": jnp.arange(3), "nothing": (), "derived": x.sum()}[operand])
        return x

    WAYS[way](fun, mesh, P("a"))(X)
    seen = log.take()
    places = {s.device: s.shard.coordinates for s in seen}
    assert len(seen) == 8
    assert places == {d: dict(zip("ab", at, strict=True)) for at, d in np.ndenumerate(mesh.devices)}


@pytest.mark.parametrize("size", some([1, 2, 5, 7, 8, 9, 12, 17], (2, 9, 17)))
def test_padding_is_cut_off(size):
    """Shards of a dimension that does not divide arrive without padding, empty ones too."""
    mesh, log = mesh_of({"a": 2, "b": 4}, (3, 1, 7, 5, 0, 2, 6, 4)), Listener()
    value = np.arange(1, 3 * size + 1, dtype=np.int32).reshape(size, 3)
    spec = P(("b", "a"))

    def fun(x):
        x = lax.with_sharding_constraint(x, NamedSharding(plain(mesh), spec))
        return log.shards(x) * 1

    out = jax.jit(fun)(put(value, mesh, P()))
    seen = log.take()
    assert_shards(seen, value, spec, mesh)
    pieces = [s.arg for s in sorted(seen, key=lambda s: s.shard.index[0].start)]
    np.testing.assert_array_equal(np.concatenate(pieces), value)
    np.testing.assert_array_equal(out, value)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int4 if hasattr(np, "int4") else ml_dtypes.int4, ml_dtypes.bfloat16]
)
def test_padding_of_small_dtypes(dtype):
    """Elements of a byte and less are cut where the others are."""
    mesh, log, spec = mesh_of({"a": 4, "b": 2}), Listener(), P("a", "b")
    value = np.arange(35).reshape(5, 7) % 2 == 0
    value = (value if dtype is np.bool_ else np.arange(35).reshape(5, 7) % 7).astype(dtype)

    def fun(x):
        return log.shards(lax.with_sharding_constraint(x, NamedSharding(plain(mesh), spec)))

    jax.jit(fun, out_shardings=NamedSharding(plain(mesh), P()))(put(value, mesh, P()))
    assert_shards(log.take(), value, spec, mesh)


def test_what_a_tap_keeps_of_an_uneven_shard_is_its_own():
    """A shard without padding is no view of more memory, and can be written."""
    mesh, log = mesh_of({"x": 8}), Listener()
    sharding = NamedSharding(plain(mesh), P("x"))
    jax.jit(lambda x: log.shards(lax.with_sharding_constraint(x, sharding)) * 1)(
        put(np.arange(13), mesh, P())
    )
    for seen in log.take():
        assert seen.arg.base is None or seen.arg.base.nbytes <= max(seen.arg.nbytes, 1)
        assert seen.arg.flags.writeable
        assert seen.arg.flags.c_contiguous


def test_tree_of_shards_has_a_tree_of_indices():
    """The index has the tree of the argument; each array has its own slices."""
    mesh, log = mesh_of({"a": 2, "b": 4}), Listener()
    tree = {"x": X, "y": (W, np.float32(7), None), "z": []}
    splits = {"x": P("a", "b"), "y": (P(None, "b"), P(), None), "z": []}
    spmd.pjit(lambda t: log.shards(t), (splits,), splits, mesh=mesh)(tree)
    seen = log.take()
    assert len(seen) == 8
    for s in seen:
        a, b = s.shard.coordinates["a"], s.shard.coordinates["b"]
        assert s.shard.index == {
            "x": (slice(4 * a, 4 * a + 4), slice(2 * b, 2 * b + 2)),
            "y": ((slice(0, 8), slice(4 * b, 4 * b + 4)), (), None),
            "z": [],
        }
        np.testing.assert_array_equal(s.arg["x"], X[s.shard.index["x"]])
        np.testing.assert_array_equal(s.arg["y"][0], W[s.shard.index["y"][0]])
        assert s.arg["y"][1] == 7


def test_replicas_call_too():
    """Each of the devices that hold the same block calls with it."""
    mesh, log = mesh_of({"a": 2, "b": 2, "c": 2}), Listener()
    spmd.pjit(log.shards, P("b"), P("b"), mesh=mesh)(X)
    seen = log.take()
    assert_shards(seen, X, P("b"), mesh)
    assert collections.Counter(s.shard.index[0].start for s in seen) == {0: 4, 4: 4}


@st.composite
def _placed(draw):
    axes = draw(
        st.sampled_from(
            [{"a": 8}, {"a": 4, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}, {"a": 5}]
        )
    )
    seed = draw(st.integers(0, 2**16))
    order = np.random.default_rng(seed).permutation(8)[: math.prod(axes.values())]
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 9, 16]), max_size=3)))
    return mesh_of(axes, [int(i) for i in order]), shape, draw(specs(tuple(axes), len(shape)))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(_placed())
def test_any_value_on_any_mesh(placed):
    """On any mesh, for any spec and shape, the shards are the NumPy slices by coordinate."""
    _check_any(*placed)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=400, deadline=None)
@given(_placed())
def test_many_values_on_many_meshes(placed):
    """The same for more of them."""
    _check_any(*placed)


def _check_any(mesh, shape, spec):
    log = Listener()
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    sharding = NamedSharding(plain(mesh), spec)

    def fun(x):
        x = lax.with_sharding_constraint(x, sharding)
        log.shards(x)
        return log.tap(x, device_index=mesh.size - 1) + 1

    out = jax.jit(fun)(put(value, mesh, P()))
    seen = log.take()
    assert_shards([s for s in seen if s.shard], value, spec, mesh)
    (whole,) = [s for s in seen if not s.shard]
    np.testing.assert_array_equal(whole.arg, value)
    assert whole.device == mesh.devices.flat[-1]
    np.testing.assert_array_equal(out, value + 1)


# Loops and branches


def test_shards_of_loops():
    """In scans, branches and loops each device calls as often as they run, in order."""
    mesh, log, spec = mesh_of({"a": 4, "b": 2}, range(7, -1, -1)), Listener(), P("a", "b")

    def fun(x):
        x, _ = lax.scan(lambda c, i: (log.shards(c + i), None), x, jnp.arange(3.0))
        x = lax.cond(x.sum() > 0, lambda x: log.shards(x * 2), lambda x: log.shards(x * 100), x)
        return lax.while_loop(lambda x: x.sum() < 100_000, lambda x: log.shards(x * 3), x)

    spmd.pjit(fun, spec, spec, mesh=mesh)(X)
    steps = [X, X + 1, X + 3, 2 * (X + 3)]
    while steps[-1].sum() < 100_000:
        steps.append(steps[-1] * 3)
    seen = log.take()
    for device in mesh.devices.flat:
        mine = [s for s in seen if s.device == device]
        assert len(mine) == len(steps)
        for s, step in zip(mine, steps, strict=True):
            np.testing.assert_array_equal(s.arg, step[s.shard.index])


def test_shards_of_a_batched_tap():
    """Under vmap the shard and its index are those of the batched value."""
    mesh, log, spec = mesh_of({"a": 4, "b": 2}), Listener(), P("a", "b")
    spmd.pjit(jax.vmap(log.shards, 1, 1), spec, spec, mesh=mesh)(X)
    seen = log.take()
    assert_shards(seen, X, spec, mesh)
    assert {str(s.transforms) for s in seen} == {"(('batch', {'batch_dims': (1,)}),)"}


# No collective


def _layers(tap, x, w):
    return lax.scan(lambda c, _: (tap(jnp.tanh(c @ w @ w.T)), None), x, None, length=3)[0]


def _branches(tap, x, w):
    return lax.cond(x[0, 0] > 0, lambda x: tap(x @ w) @ w.T, lambda x: tap(x * 2), x)


def _until(tap, x, w):
    return lax.while_loop(
        lambda c: (c[1] @ w).max() < 1e9, lambda c: (c[0] + 1, tap(c[1] * 4)), (0, x)
    )[1]


def _gradient(tap, x, w):
    return jax.grad(lambda w: (jnp.tanh(tap(x @ w)) ** 2).sum())(w)


def _checkpointed(tap, x, w):
    # The value is asked for too: without taps nobody would compute it the first time.
    return jax.value_and_grad(lambda w: jax.checkpoint(lambda w: jnp.tanh(tap(x @ w)))(w).sum())(w)


def _resharded(tap, x, w):
    x = tap(spmd.with_sharding_constraint(x, P("model", "data")))
    return tap(spmd.with_sharding_constraint(x @ w, P(None, ("model", "data"))))


def _uneven(tap, x, w):
    return tap(spmd.with_sharding_constraint(x[:5] * 2, P(("model", "data")))) @ w


def _reduced(tap, x, w):
    return tap(x.sum(0)) + tap({"mean": x.mean(), "w": w})["mean"]


# A program, and how often each device taps in it.
PROGRAMS = {
    "elementwise": (lambda tap, x, w: tap(jnp.sin(x)) * 2, 1),
    "contraction": (lambda tap, x, w: tap(x @ w), 1),
    "arguments": (lambda tap, x, w: tap((x, w))[0] @ w, 1),
    "reductions": (_reduced, 2),
    "scan": (_layers, 3),
    "cond": (_branches, 1),
    "while": (_until, None),
    "gradient": (_gradient, 1),
    "checkpoint": (_checkpointed, 2),
    "constraints": (_resharded, 2),
    "uneven": (_uneven, 1),
    "vmap": (lambda tap, x, w: jax.vmap(lambda x: tap(x @ w))(x), 1),
    "unused": (lambda tap, x, w: (tap(x), tap(w), x @ w)[2], 2),
}


def ledger(fun, mesh):
    """The collectives of a program, as a multiset of all but where they come from."""
    run = spmd.pjit(fun, (P("data", "model"), P("model")), mesh=mesh)
    return run, _found(run, X, W)


def _found(run, *args):
    fields = ("kind", "mesh_axes", "shapes", "payload_bytes", "wire_bytes", "group_size")
    fields += ("direction", "combined", "executions", "conditional", "in_loop")
    found = spmd.report(run, *args).collectives
    return collections.Counter(tuple(str(getattr(c, f)) for f in fields) for c in found)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "program",
    some(PROGRAMS, ("contraction", "scan", "cond", "while", "gradient", "constraints", "uneven")),
)
def test_shards_add_no_collective(program):
    """With a tap per shard a program has the collectives that it has without, and no other."""
    fun, calls = PROGRAMS[program]
    mesh, log = mesh_of({"data": 4, "model": 2}), Listener()
    bare, without = ledger(lambda x, w: fun(lambda v: v, x, w), mesh)
    tapped, with_taps = ledger(lambda x, w: fun(log.shards, x, w), mesh)
    assert with_taps == without
    assert log.take() == []
    jax.tree.map(np.testing.assert_array_equal, tapped(X, W), bare(X, W))
    seen = collections.Counter(s.device for s in log.take())
    assert len(seen) == 8
    assert len(set(seen.values())) == 1
    assert calls in (None, *seen.values())


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "function", "where"), SAMPLES)
def test_shards_of_samples_add_no_collective(seed, function, where):
    """The same for the sampler's functions, meshes and specs: arguments and results are tapped."""
    case, log = sample(seed, function, where), Listener()

    def tapped(*args):
        return log.shards(case.fun(*log.shards(args)))

    runs = case.pjit(), dataclasses.replace(case, fun=tapped).pjit()
    without, with_taps = (_found(run, *case.args) for run in runs)
    assert with_taps == without
    out = runs[1](*case.args)
    np.testing.assert_allclose(out, case.reference(*case.args), rtol=2e-5, atol=2e-5)
    seen = log.take()
    assert collections.Counter(s.device for s in seen) == dict.fromkeys(case.mesh.devices.flat, 2)
    for s in seen:
        whole = case.args if isinstance(s.arg, tuple) else (case.reference(*case.args),)
        parts, indices = (
            (s.arg, s.shard.index) if isinstance(s.arg, tuple) else ((s.arg,), (s.shard.index,))
        )
        for value, part, index in zip(whole, parts, indices, strict=True):
            np.testing.assert_allclose(part, value[index], rtol=2e-5, atol=2e-5)


def test_shards_of_a_predicate_add_no_collective():
    """A tap in a predicate adds none; JAX writes that predicate before the loop and in its end."""
    mesh, log = mesh_of({"data": 4, "model": 2}), Listener()

    def fun(tap):
        def run(x, w):
            more = lambda c: tap(c @ w).max() < 1e4  # noqa: E731 - one expression
            return lax.while_loop(more, lambda c: c * 4, x)

        return run

    bare, without = ledger(fun(lambda v: v), mesh)
    tapped, with_taps = ledger(fun(log.shards), mesh)
    assert without
    assert {c[:-3] for c in with_taps} == {c[:-3] for c in without}
    np.testing.assert_array_equal(tapped(X, W), bare(X, W))
    steps = [X]
    while (steps[-1] @ W).max() < 1e4:
        steps.append(steps[-1] * 4)
    seen = [s for s in log.take() if s.device == mesh.devices.flat[3]]
    assert len(seen) == len(steps)
    for s, step in zip(seen, steps, strict=True):
        np.testing.assert_allclose(s.arg, (step @ W)[s.shard.index], rtol=1e-5, atol=1e-3)


def test_ledger_sees_what_a_whole_operand_costs():
    """A tap of the whole operand gathers it: the ledger of the test before would show it."""
    mesh, log = mesh_of({"data": 4, "model": 2}), Listener()
    _, found = ledger(lambda x, w: log.tap(x) * 2, mesh)
    assert {kind for kind, *_ in found} == {"all-gather"}


def test_call_per_shard_adds_no_collective():
    """A call per shard whose stacked results stay where they are needs no collective."""
    mesh = mesh_of({"data": 4, "model": 2})

    def host(x, *, shard):
        return x.sum(axis=0)

    def fun(x, w):
        struct = jax.ShapeDtypeStruct((4,), np.float32)
        return hcb.call(host, x, result_shape=struct, per_shard=True) * 2

    run, found = ledger(fun, mesh)
    assert not found
    assert run(X, W).shape == (8, 4)


# Calls per shard


@every_mesh
def test_results_of_shards_are_stacked(name):
    """The results of all shards are stacked in the order of the mesh, one row on each device."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()
    block = block_of(X, spec, mesh, dict.fromkeys(axes, 0))

    def host(x, *, shard, device):
        log(x, device=device, shard=shard)
        return {"sum": x.sum(), "double": x * 2}

    def fun(x):
        results = {"sum": np.float32(0), "double": jax.ShapeDtypeStruct(block.shape, x.dtype)}
        return hcb.call(host, x, result_shape=results, per_shard=True, call_with_device=True)

    out = spmd.pjit(fun, spec, mesh=mesh)(X)
    assert_shards(log.take(), X, spec, mesh)
    blocks = [
        block_of(X, spec, mesh, dict(zip(axes, at, strict=True)))
        for at, _ in np.ndenumerate(mesh.devices)
    ]
    np.testing.assert_array_equal(out["sum"], [b.sum() for b in blocks])
    np.testing.assert_array_equal(out["double"], np.stack(blocks) * 2)
    held = {s.device: s.index[0] for s in out["double"].addressable_shards}
    places = {d: slice(i, i + 1, None) for i, d in enumerate(mesh.devices.flat)}
    assert {d: range(*s.indices(mesh.size)) for d, s in held.items()} == {
        d: range(*s.indices(mesh.size)) for d, s in places.items()
    }


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_in_shard_map_are_local(around, check_vma):
    """In shard_map each device calls with its block and gets its own result."""
    mesh = mesh_of({"a": 2, "b": 4}, (3, 1, 7, 5, 0, 2, 6, 4))

    def host(x, *, shard):
        return x * 10 + shard.coordinates["a"] + 2 * shard.coordinates["b"]

    def fun(x):
        return hcb.call(host, x, result_shape=x, per_shard=True) + 1

    spec = P("a", "b")
    mapped = jax.shard_map(
        fun, mesh=plain(mesh), in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    rows, columns = np.indices((8, 8))
    np.testing.assert_array_equal(around(mapped)(X), X * 10 + rows // 4 + 2 * (columns // 2) + 1)


def test_results_of_one_device_are_stacked_too():
    """A call per shard on one device gives one row: the shape does not depend on luck."""
    struct = jax.ShapeDtypeStruct((), np.float32)
    for place in (jax.devices()[0], jax.devices()[5]):
        x = jax.device_put(X, place)
        out = jax.jit(
            lambda x: hcb.call(lambda x, *, shard: x.sum(), x, result_shape=struct, per_shard=True)
        )(x)
        np.testing.assert_array_equal(out, [X.sum()])
        assert out.devices() == {place}


# Programs of one device in each


@pytest.mark.parametrize("options", [{}, {"per_shard": True}, {"device_index": 5}], ids=str)
@every_mesh
def test_shard_map_calls_from_every_device(name, options):
    """In shard_map every device calls with its block, and says which device it is."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()
    fun = jax.shard_map(
        lambda x: log.tap(x, **options), mesh=plain(mesh), in_specs=spec, out_specs=spec
    )
    np.testing.assert_array_equal(fun(X), X)
    seen = log.take()
    assert collections.Counter(s.device for s in seen) == dict.fromkeys(mesh.devices.flat, 1)
    of = {s.device: s for s in seen}
    for at, device in np.ndenumerate(mesh.devices):
        coordinate = dict(zip(axes, at, strict=True))
        np.testing.assert_array_equal(of[device].arg, block_of(X, spec, mesh, coordinate))
        if "per_shard" in options:
            assert of[device].shard == hcb.Shard(device=device, coordinates=coordinate, index=None)
        else:
            assert of[device].shard is None


PMAPS = pytest.mark.parametrize("pmap", [jax.pmap, spmd.pmap], ids=["jax", "spmd"])


@PMAPS
@pytest.mark.parametrize("order", [range(8), (5, 2, 7), (4,)], ids=str)
def test_pmap_calls_from_every_device(pmap, order):
    """In pmap every device calls with its element, and says which device it is."""
    devices = [jax.devices()[i] for i in order]
    log, x = Listener(), X[: len(devices)]
    np.testing.assert_array_equal(
        pmap(lambda x: log.tap(x) * 2, axis_name="i", devices=devices)(x), 2 * x
    )
    seen = {s.device: s.arg for s in log.take()}
    assert set(seen) == set(devices)
    for device, row in zip(devices, x, strict=True):
        np.testing.assert_array_equal(seen[device], row)


@PMAPS
@pytest.mark.parametrize("name", [None, "i"])
def test_pmap_coordinates(pmap, name):
    """In pmap a shard lies along the axis that the user named, and there is no global array."""
    log = Listener()
    pmap(log.shards, **({"axis_name": name} if name else {}))(X)
    name = name or ("pmap" if pmap is spmd.pmap else None)
    for s in log.take():
        place = {name: s.device.id} if name else {}
        assert s.shard == hcb.Shard(device=s.device, coordinates=place, index=None)
        np.testing.assert_array_equal(s.arg, X[s.device.id])


def _nested(fun, mesh):
    inner = {"in_specs": P("b"), "out_specs": P("b"), "axis_names": {"b"}}
    outer = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
    return jax.jit(
        jax.shard_map(lambda x: jax.shard_map(fun, **inner)(x), mesh=plain(mesh), **outer)
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="refused there: see the next test")
def test_nested_shard_maps():
    """Where shard_maps in one another cover all axes, every device calls with its block."""
    mesh, log = mesh_of({"a": 4, "b": 2}, (3, 1, 7, 5, 0, 2, 6, 4)), Listener()
    value = np.arange(16, dtype=np.float32)
    np.testing.assert_array_equal(_nested(log.shards, mesh)(value), value)
    seen = log.take()
    assert {s.device for s in seen} == set(mesh.devices.flat)
    for s in seen:
        assert s.shard.coordinates == dict(
            zip("ab", np.argwhere(mesh.devices == s.device)[0], strict=True)
        )
        np.testing.assert_array_equal(
            s.arg, block_of(value, P(("a", "b")), mesh, s.shard.coordinates)
        )


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="works there: see the test before")
def test_nested_shard_maps_are_refused():
    """Where XLA would abort, nested shard_maps are refused as partly manual ones are."""
    with pytest.raises(spmd.OptionError) as e:
        _nested(lambda x: hcb.id_tap(reached, x), mesh_of({"a": 4, "b": 2}))(
            np.ones(16, np.float32)
        )
    assert literal(e).startswith(
        "id_tap cannot reach `reached` from a shard_map over some axes of the mesh.\n"
    )


def test_maps_of_shard_maps():
    """Under vmap, around and inside of shard_map, devices call once, with the batched block."""
    mesh, log = mesh_of({"a": 4, "b": 2}), Listener()
    of = {"mesh": plain(mesh), "in_specs": P("a"), "out_specs": P("a")}
    for fun, transpose in (
        (jax.shard_map(jax.vmap(log.shards), **of), False),
        (jax.vmap(jax.shard_map(log.shards, **of), 1, 1), True),
    ):
        np.testing.assert_array_equal(fun(X), X)
        seen = log.take()
        assert collections.Counter(s.device for s in seen) == dict.fromkeys(jax.devices(), 1)
        for s in seen:
            ((name, params),) = s.transforms
            arg = np.moveaxis(s.arg, params["batch_dims"][0], 1 if transpose else 0)
            assert name == "batch"
            np.testing.assert_array_equal(arg, block_of(X, P("a"), mesh, s.shard.coordinates))


def test_keys_of_random_numbers():
    """Keys arrive as the numbers that they are made of, split as the keys are."""
    mesh, log = mesh_of({"a": 4, "b": 2}), Listener()
    keys = jax.random.split(jax.random.key(7), 8)
    data = np.asarray(jax.random.key_data(keys))
    placed = jax.device_put(keys, NamedSharding(plain(mesh), P(("b", "a"))))
    out = jax.jit(lambda k: log.shards(log.tap(k, device_index=3)))(placed)
    np.testing.assert_array_equal(jax.random.key_data(out), data)
    seen = log.take()
    assert_shards([s for s in seen if s.shard], data, P(("b", "a"), None), mesh)
    (whole,) = [s for s in seen if not s.shard]
    np.testing.assert_array_equal(whole.arg, data)


class Affine:
    """A host function that counts its calls."""

    calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2 + 1


def test_one_host_function_at_many_places():
    """Equal calls in one program, in loops and in shard_map are told apart, run after run."""
    mesh, host = mesh_of({"a": 4, "b": 2}), Affine()

    def call(x):
        return hcb.call(host, x, result_shape=x)

    everywhere = {"mesh": plain(mesh), "in_specs": P(), "out_specs": P(), "check_vma": False}

    def fun(x):
        x = call(call(call(x)))
        x = lax.fori_loop(0, 3, lambda _, x: call(call(x)) - 1, x)
        return call(jax.shard_map(call, **everywhere)(x))

    run = spmd.pjit(fun, P("a"), P("b"), mesh=mesh)
    for i in range(5):
        wanted = X + i
        for _ in range(3):
            wanted = 2 * wanted + 1
        for _ in range(3):
            wanted = 2 * (2 * wanted + 1)
        np.testing.assert_array_equal(run(X + i), 2 * (2 * wanted + 1) + 1)
    assert host.calls == 5 * (3 + 6 + 8 + 1)


def test_one_host_function_on_many_meshes():
    """One host function that is called from equal programs on other meshes is told its place."""
    log = Listener()
    for axes, order, spec in MESHES.values():
        mesh = mesh_of(axes, order)
        spmd.pjit(log.shards, spec, spec, mesh=mesh)(X)
        assert_shards(log.take(), X, spec, mesh)


@pytest.mark.parametrize("number", some(range(8), (0, 5)))
@pytest.mark.parametrize("options", [{}, {"per_shard": True}], ids=str)
def test_program_on_one_device_says_which(number, options):
    """A program on device k calls from device k: jit of committed arrays, eager, default device."""
    device, log = jax.devices()[number], Listener()
    x = jax.device_put(X, device)
    jax.jit(lambda x: log.tap(x, **options))(x)
    log.tap(x, **options)
    with jax.default_device(device):
        jax.jit(lambda: log.tap(jnp.zeros((8, 8)), **options))()
    seen = log.take()
    assert [s.device for s in seen] == [device] * 3
    if options:
        assert {str(s.shard.index) for s in seen} == {str((slice(0, 8), slice(0, 8)))}
        assert all(s.shard.device == device for s in seen)


def test_mesh_of_one_device():
    """On a mesh of one device that device calls, at the origin of the mesh."""
    mesh, log = mesh_of({"a": 1, "b": 1}, (6,)), Listener()
    spmd.pjit(log.shards, P("a", "b"), P("a", "b"), mesh=mesh)(X)
    assert_shards(log.take(), X, P("a", "b"), mesh)


# Shardings in types


def test_shards_of_explicit_axes():
    """Where axes are explicit, taps and calls are split by the type of the value."""
    devices = np.array(jax.devices())[[3, 1, 7, 5, 0, 2, 6, 4]].reshape(4, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    log = Listener()
    with jax.set_mesh(mesh):
        x = jax.device_put(X, P("a", "b"))
        out = jax.jit(lambda x: log.shards(x) * 2)(x)
        np.testing.assert_array_equal(out, X * 2)
        assert_shards(log.take(), X, P("a", "b"), mesh)
        jax.jit(lambda x: log.tap(x, device_index=3))(x)
        (seen,) = log.take()
        np.testing.assert_array_equal(seen.arg, X)
        assert seen.device == devices.flat[3]
        sums = jax.jit(
            lambda x: hcb.call(
                lambda x, *, shard: x.sum(), x, result_shape=np.float32(0), per_shard=True
            )
        )(x)
        blocks = X.reshape(4, 2, 2, 4).transpose(0, 2, 1, 3).reshape(8, -1)
        np.testing.assert_array_equal(sums, blocks.sum(1))


# The other partitioner


@pytest.fixture
def gspmd():
    """Programs are split by GSPMD."""
    flag = "jax_use_shardy_partitioner"
    before = jax.config.values[flag]
    jax.config.update(flag, False)
    yield
    jax.config.update(flag, before)


@pytest.mark.parametrize("name", ["4x2", "2x2x2 permuted", "2x2 of the middle"])
def test_gspmd(name, gspmd):
    """GSPMD splits taps and calls as Shardy does."""
    axes, order, spec = MESHES[name]
    mesh, log = mesh_of(axes, order), Listener()

    def fun(x):
        log.shards(x)
        log.tap(x, device_index=1)
        sums = hcb.call(lambda x, *, shard: x.sum(), x, result_shape=np.float32(0), per_shard=True)
        return hcb.call(lambda x: x + 1, x, result_shape=x), sums

    out, sums = spmd.pjit(fun, spec, mesh=mesh)(X)
    np.testing.assert_array_equal(out, X + 1)
    seen = log.take()
    assert_shards([s for s in seen if s.shard], X, spec, mesh)
    (whole,) = [s for s in seen if not s.shard]
    np.testing.assert_array_equal(whole.arg, X)
    assert whole.device == mesh.devices.flat[1]
    blocks = [
        block_of(X, spec, mesh, dict(zip(axes, at, strict=True)))
        for at, _ in np.ndenumerate(mesh.devices)
    ]
    np.testing.assert_array_equal(sums, [b.sum() for b in blocks])


@PMAPS
def test_gspmd_in_shard_map_and_pmap(gspmd, pmap):
    """Under GSPMD too every device of shard_map and pmap calls, and gets its own result."""
    mesh, log = mesh_of({"a": 4, "b": 2}, range(7, -1, -1)), Listener()
    spec = P("a", "b")

    def fun(x):
        return hcb.call(lambda x: x * 2, log.tap(x), result_shape=x)

    mapped = jax.shard_map(fun, mesh=plain(mesh), in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(mapped)(X), 2 * X)
    for s in log.take():
        (at,) = np.argwhere(mesh.devices == s.device)
        block = block_of(X, spec, mesh, dict(zip("ab", at, strict=True)))
        np.testing.assert_array_equal(s.arg, block)
    np.testing.assert_array_equal(pmap(fun)(X), 2 * X)
    assert {s.device: s.arg[0] for s in log.take()} == {
        d: 8 * i for i, d in enumerate(jax.devices())
    }


def test_gspmd_padding(gspmd):
    """Under GSPMD too the padding of uneven shards is cut off."""
    mesh, log = mesh_of({"x": 8}), Listener()
    sharding, value = NamedSharding(plain(mesh), P("x")), np.arange(13, dtype=np.int32)

    def fun(x):
        return log.shards(lax.with_sharding_constraint(x * 1, sharding)) * 1

    jax.jit(fun)(put(value, mesh, P()))
    assert_shards(log.take(), value, P("x"), mesh)


# Errors


def literal(error):
    """The text of an error."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(error.value))


def reached(arg, transforms=(), **_):
    """A host function with a name."""
    return arg


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_partly_manual_is_refused(around):
    """In a shard_map over some axes nobody can say which device calls: that is an error."""
    mesh = plain(mesh_of({"a": 4, "b": 2}))
    fun = jax.jit(
        jax.shard_map(
            lambda x: hcb.id_tap(reached, x),
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
        )
    )
    with pytest.raises(spmd.OptionError) as e:
        around(fun)(X)
    assert literal(e) == (
        "id_tap cannot reach `reached` from a shard_map over some axes of the mesh.\n"
        "  expected  a shard_map over all axes, or none\n"
        "  fix       leave axis_names out, or call outside of it; a pmap in a pmap is one, too"
    )
    hcb.barrier_wait()


def test_no_such_device_of_the_mesh():
    """An index behind the last device of the mesh is an error that says how many there are."""
    fun = spmd.pjit(
        lambda x: hcb.id_tap(reached, x, device_index=4), P("x"), mesh=mesh_of({"x": 4})
    )
    with pytest.raises(spmd.OptionError) as e:
        fun(X)
    assert literal(e) == (
        "id_tap cannot reach `reached` from device 4.\n"
        "  given     device_index=4\n"
        "  expected  0 to 3: the program runs on 4 devices"
    )
    assert isinstance(e.value, ValueError)


def test_no_such_device_of_one():
    """A program on one device has no device 1."""
    with pytest.raises(spmd.OptionError) as e:
        jax.jit(lambda x: hcb.call(reached, x, result_shape=x, device_index=1))(X)
    assert literal(e) == (
        "call cannot reach `reached` from device 1.\n"
        "  given     device_index=1\n"
        "  expected  0: the program runs on one device"
    )


def test_call_per_shard_of_another_number_of_devices():
    """A call per shard that was traced where nobody knew the mesh is an error that says so."""
    sharding = NamedSharding(plain(mesh_of({"x": 8})), P("x"))
    fun = jax.jit(
        lambda x: hcb.call(reached, x, result_shape=x, per_shard=True), in_shardings=sharding
    )
    with pytest.raises(spmd.OptionError) as e:
        fun(X)
    assert literal(e) == (
        "call cannot reach `reached` from every shard.\n"
        "  given     per_shard=True, traced for 1 device\n"
        "  got       a program on 8 devices\n"
        "  fix       trace it under its mesh: `with spmd.Mesh(...)`, jax.set_mesh, or shard_map"
    )
