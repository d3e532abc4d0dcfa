"""What host functions get: every tree, dtype and size, in memory of its own."""

import collections
from dataclasses import dataclass

import jax
from jax import lax
from jax.experimental.layout import Format, Layout
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from oracle import mesh_of, put
import pytest
from tapped import WAYS, Log, inline, mainly, run, same

from spmd import P, host_callback as hcb, pjit

F = np.float32

all_ways = pytest.mark.parametrize("way", WAYS)


def got(fun, *args):
    """Runs a function of a log; returns the one value that it sent, and its result."""
    log = Log()
    result = fun(log)(*args)
    ((_, value, _),) = log.take()
    return value, result


def same_bits(got, want):
    """Asserts equal dtypes, shapes and bits, NaN payloads and signs of zeros included."""
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


# Trees


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class Pair:
    """A custom node with data that is no array."""

    left: object
    right: object
    name: str

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("left"), self.left), (key("right"), self.right)), self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        return cls(*children, name)


Named = collections.namedtuple("Named", ["first", "second"])
TREES = {
    "leaf": F(1),
    "none": None,
    "empty tuple": (),
    "empty list": [],
    "empty dict": {},
    "nones": (None, [None, {}], {"a": None}),
    "dict": {"b": F(1), "a": np.arange(3, dtype=np.int32)},
    "ordered dict": collections.OrderedDict([("b", F(1)), ("a", F(2))]),
    "default dict": collections.defaultdict(list, {"x": F(1)}),
    "named tuple": Named(F(1), (F(2), None)),
    "custom": Pair(F(1), [np.zeros((2, 0), F), None], "a name"),
    "custom in custom": Pair(Pair(None, (), "inner"), Named([], F(3)), "outer"),
    "deep": [[[[[{"x": (F(1), [F(2)])}]]]]],
    "many": [np.full(i % 3, i, F) for i in range(200)],
}


@pytest.mark.few(14)
@all_ways
@pytest.mark.parametrize("name", TREES)
def test_trees(name, way):
    """The argument arrives in its tree, as NumPy arrays, and is returned in the same tree."""
    tree = TREES[name]
    sent, result = got(lambda log: WAYS[way](lambda t: log.tap("t", t)), tree)
    for tree_of in (sent, result):
        same(tree_of, tree)
        assert type(tree_of) is type(tree) or not isinstance(tree, (tuple, list, dict, Pair))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(sent))
    if isinstance(tree, dict):
        assert [*sent] == [*tree] or type(tree) is dict  # JAX sorts the keys of plain ones


@pytest.mark.few(14)
@all_ways
@pytest.mark.parametrize("name", TREES)
def test_trees_through_calls(name, way):
    """A call gets and returns any tree."""
    tree = TREES[name]
    seen = []

    def host(arg):
        seen.append(arg)
        return arg

    result = run(WAYS[way](lambda t: hcb.call(host, t, result_shape=tree)), tree)
    same(result, tree)
    hcb.barrier_wait()  # there may be no result to wait for
    (sent,) = seen
    same(sent, tree)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(sent))


def test_python_numbers_arrive_as_jax_reads_them():
    """Numbers of Python arrive in the dtypes that JAX gives them."""
    sent, result = got(lambda log: lambda t: log.tap("t", t), (True, 2, 3.5, 1 + 2j))
    want = (np.array(True), np.array(2, np.int32), np.array(3.5, F), np.array(1 + 2j, np.complex64))
    same(sent, want)
    same(result, want)


# Dtypes

PLAIN = ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"]
PLAIN += ["float16", "float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
SMALL = [
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int4", "uint4", "int2", "uint2", "float4_e2m1fn"),
]

_NARROW = {"int4": (-8, 8), "uint4": (0, 16), "int2": (-2, 2), "uint2": (0, 4)}


def every_value(name):
    """Values of a dtype: all that it has if these are few, and odd ones."""
    dtype = np.dtype(name) if name in PLAIN + WIDE else np.dtype(getattr(ml_dtypes, name))
    if name == "bool":
        return np.array([True, False, True])
    if name.startswith(("float8", "float4")):
        return np.arange(16 if name.startswith("float4") else 256, dtype=np.uint8).view(dtype)
    if name in _NARROW:
        return np.arange(*_NARROW[name]).astype(dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, 0, 1, info.max // 3], dtype)
    if dtype.kind == "c":
        part = every_value({8: "float32", 16: "float64"}[dtype.itemsize])
        return np.stack([part, part[::-1]], -1).view(dtype)[:, 0]
    if name == "bfloat16":
        return np.arange(0, 2**16, 97, dtype=np.uint16).view(dtype)
    odd = [0, -0.0, 1, -1 / 3, np.inf, -np.inf, np.nan, np.finfo(dtype).max, np.finfo(dtype).tiny]
    found = np.array([*odd, np.finfo(dtype).smallest_subnormal], dtype)
    payload = found[6:7].view(f"u{dtype.itemsize}") | 5
    return np.concatenate([found, payload.view(dtype)])


def roundtrip(way, value, log):
    """Sends a value through a tap and a call; returns what the call returned."""

    def host(arg):
        log.calls.append(("call", arg, ()))
        return arg

    def fun(x):
        x = log.tap("tap", x)
        return hcb.call(host, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))

    return jax.block_until_ready(WAYS[way](fun)(value))


@pytest.mark.few(6)
@pytest.mark.parametrize("way", mainly(WAYS))
@pytest.mark.parametrize("name", PLAIN + SMALL)
def test_dtypes(name, way):
    """Every dtype arrives as it is, bit for bit, from a tap and from a call, and comes back."""
    value = every_value(name)
    for shaped in (value, value[1], value[:0]):
        shaped = np.asarray(shaped)
        log = Log()
        result = roundtrip(way, shaped, log)
        for _, sent in log.values():
            same_bits(sent, shaped)
        assert result.dtype == shaped.dtype
        same_bits(np.asarray(result), shaped)


@all_ways
@pytest.mark.parametrize("name", WIDE)
def test_wide_dtypes(name, way):
    """Under x64, dtypes of 64 and 128 bits do too."""
    value = every_value(name)
    log = Log()
    with jax.enable_x64(True):
        result = roundtrip(way, value, log)
        taken = log.values()
    assert len(taken) == 2
    for _, sent in taken:
        same_bits(sent, value)
    same_bits(np.asarray(result), value)


@pytest.mark.parametrize("name", WIDE)
def test_wide_dtypes_without_x64(name):
    """Without x64 a wide value arrives as JAX reads it, jitted, eager and inline."""
    value = np.array([1, 2, 3], name)
    want = np.asarray(jnp.asarray(value))
    log = Log()
    log.tap("eager", value)
    jax.jit(lambda x: log.tap("jit", x))(value)
    hcb.barrier_wait()
    with inline():
        result = log.tap("inline", value)
    same_bits(np.asarray(result), want)
    taken = log.values()
    assert [n for n, _ in taken] == ["eager", "jit", "inline"]
    for _, sent in taken:
        same_bits(sent, want)


@pytest.mark.parametrize("name", ["int4", "uint4", "bool", "float8_e4m3fn", "bfloat16"])
def test_dtypes_of_shards(name):
    """Small dtypes arrive whole from a sharded array, and shard by shard."""
    mesh = mesh_of({"a": 4})
    value = np.resize(every_value(name), (8, 6))
    whole, shards = [], []
    fun = pjit(
        lambda x: hcb.id_tap(
            lambda v, t, shard: shards.append((shard.index, v)),
            hcb.id_tap(lambda v, t: whole.append(v), x),
            per_shard=True,
        ),
        P("a"),
        P("a"),
        mesh=mesh,
    )
    result = fun(value)
    hcb.barrier_wait()
    same_bits(np.asarray(result), value)
    same_bits(*whole, value)
    assert len(shards) == 4
    for index, shard in shards:
        same_bits(shard, value[index])


@all_ways
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys(impl, way):
    """A PRNG key arrives as the numbers behind it, and comes back as a key."""
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    sent, result = got(lambda log: WAYS[way](lambda k: log.tap("k", k)), {"keys": keys})
    same(sent["keys"], np.asarray(jax.random.key_data(keys)))
    assert result["keys"].dtype == keys.dtype
    same(jax.random.key_data(result["keys"]), jax.random.key_data(keys))


# Shapes and memory

SHAPES = [(), (1,), (0,), (3, 0, 2), (1,) * 12, (2, 3, 5, 7), (1000, 1), (257, 3)]


@all_ways
def test_shapes(way):
    """Any shape arrives, of one element, of none, and of many dimensions."""
    values = [np.arange(np.prod(s, dtype=int), dtype=F).reshape(s) for s in SHAPES]
    sent, _ = got(lambda log: WAYS[way](lambda *v: log.tap("t", v)), *values)
    for got_value, want in zip(sent, values, strict=True):
        same_bits(got_value, want)


@all_ways
def test_transposed_and_sliced(way):
    """What the compiler may keep in another layout arrives in that of NumPy."""
    x = np.arange(2 * 3 * 64, dtype=F).reshape(2, 3, 64)

    def views(x):
        return x.T, x[:, ::-1, 5:9], x.transpose(1, 2, 0), jnp.broadcast_to(x[0, 0, :1], (4, 4))

    sent, _ = got(lambda log: WAYS[way](lambda x: log.tap("t", views(x))), x)
    for got_value, want in zip(sent, views(x), strict=True):
        same_bits(got_value, np.asarray(want))
        assert got_value.flags.c_contiguous


def test_arrays_in_another_layout():
    """An array that lies column by column in memory arrives as it reads."""
    x = np.arange(12, dtype=F).reshape(3, 4)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    columns = jax.device_put(x, Format(Layout(major_to_minor=(1, 0)), one))
    for fun in (lambda x: x, jax.jit):
        sent, _ = got(lambda log, fun=fun: fun(lambda x: log.tap("t", x)), columns)
        same_bits(sent, x)
    with inline():
        sent, _ = got(lambda log: lambda x: log.tap("t", x), columns)
    same_bits(sent, x)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2**20 + 1, 16 * 2**20])
def test_large(size):
    """4 MB and 64 MB arrive whole, from a tap and from a call, and come back."""
    value = np.arange(size, dtype=F)
    log = Log()
    result = roundtrip("jit", value, log)
    taken = log.values()
    assert [n for n, _ in taken] == ["tap", "call"]
    for _, sent in taken:
        np.testing.assert_array_equal(sent, value)
    np.testing.assert_array_equal(np.asarray(result), value)


@pytest.mark.slow
def test_larger_than_the_queue():
    """64 MB pass a queue of 32 MB, one after the other, and none changes another."""
    hcb.configure(max_queue_bytes=2**25)
    log = Log()
    fun = jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: log.tap(i, c) + 1, x, unroll=True))
    log.tap = lambda name, x: hcb.id_tap(lambda v, t: log.calls.append((v[0], v[-1], v.size)), x)
    run(fun, jnp.zeros(2**24, F))
    assert log.take() == [(i, i, 2**24) for i in range(3)]


def own(arrays):
    """Asserts that arrays can be written to and share no memory."""
    for array in arrays:
        assert array.flags.writeable
        array[...] = -1
    for i, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:i])


@all_ways
@pytest.mark.parametrize("size", [1, 100_000])
def test_host_functions_keep_what_they_get(size, way):
    """What a host function keeps stays as it was, while the device goes on with its memory."""
    log = Log()

    def fun(x):
        return lax.fori_loop(0, 20, lambda i, c: log.tap("t", c) + 1, x)

    fun = WAYS[way](fun)
    run(fun, np.zeros(size, F)), run(fun, np.full(size, 20, F))
    kept = [value for _, value in log.values()]
    assert [(v.min(), v.max()) for v in kept] == [(i, i) for i in range(40)]
    own(kept)


@pytest.mark.parametrize("way", [*WAYS, "inline"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_host_functions_write_to_what_they_get(size, way):
    """What a host function writes changes neither the argument nor what the program computes."""
    seen = []

    def tapped(value, transforms):
        seen.append(value.sum().item())
        value += 100

    def called(value):
        seen.append(value.sum().item())
        value *= -1
        return value

    def fun(x):
        x = hcb.id_tap(tapped, x)
        y = hcb.call(called, x, result_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
        hcb.id_tap(tapped, x)
        hcb.id_tap(tapped, y)
        return x, y

    ones, given = np.ones(size, F), jnp.ones(size, F)
    for arg in (ones, given):
        if way == "inline":
            with inline():
                x, y = fun(arg)
        else:
            x, y = WAYS[way](fun)(arg)
        hcb.barrier_wait()
        same(x, np.ones(size, F))
        same(y, np.full(size, -1, F))
    same(ones, np.ones(size, F))
    same(given, np.ones(size, F))
    assert seen == [size, size, size, -size] * 2


@pytest.mark.parametrize("way", [*WAYS, "inline"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_host_functions_write_to_what_they_returned(size, way):
    """A host function that returns one array again and again may write to it in between."""
    buffer = np.zeros(size, F)

    def host(_):
        buffer[...] += 1
        return buffer

    def fun(x):
        shape = jax.ShapeDtypeStruct((size,), F)
        return [hcb.call(host, x, result_shape=shape) for _ in range(3)]

    if way == "inline":
        with inline():
            outs = fun(F(0))
            buffer[...] = 9
            same(outs, [np.full(size, i, F) for i in (1, 2, 3)])
    else:
        outs = jax.block_until_ready(WAYS[way](fun)(F(0)))
        buffer[...] = 9
        same(outs, [np.full(size, i, F) for i in (1, 2, 3)])


def test_a_call_may_return_views():
    """What a host function returns need not be contiguous, nor an array of NumPy's own class."""
    x = np.arange(6, dtype=F).reshape(2, 3)
    views = {
        "transposed": (lambda v: v.T, x.T),
        "reversed": (lambda v: v[::-1, ::-1], x[::-1, ::-1]),
        "strided": (lambda v: v[:, ::2], x[:, ::2]),
        "broadcast": (lambda v: np.broadcast_to(v[0], (5, 3)), np.broadcast_to(x[0], (5, 3))),
        "jax": (lambda v: jnp.asarray(v) * 2, x * 2),
        "list": (lambda v: np.array(v.tolist()), x),
        "number": (lambda v: float(v.sum()), F(15)),
        "scalar": (lambda v: v.sum(), F(15)),
    }
    for host, want in views.values():
        want = np.asarray(want)
        shape = jax.ShapeDtypeStruct(want.shape, want.dtype)
        fun = jax.jit(lambda x, h=host, s=shape: hcb.call(h, x, result_shape=s))
        same(run(fun, x), want)


# result=


@all_ways
def test_result_is_returned_and_not_sent(way):
    """With `result` a tap returns that, and only its argument goes to the host."""
    log = Log()

    def fun(x):
        return log.tap("t", x, result={"y": x + 1, "none": None})

    same(run(WAYS[way](fun), F(3)), {"y": F(4), "none": None})
    assert log.scalars() == [("t", 3)]
    (eqn,) = [e for e in jax.make_jaxpr(fun)(F(3)).eqns if e.primitive.name == "host_tap"]
    assert len(eqn.invars) == 1


def test_result_of_any_kind():
    """A `result` is returned as it is, whatever it is, by `id_tap` and `id_print`."""
    log = Log()
    thing = object()
    assert log.tap("t", F(1), result=thing) is thing
    assert log.tap("t", F(1), result=()) == ()
    assert log.tap("t", F(1), result=0) == 0
    assert hcb.id_print(F(1), result=thing, output_stream=Sink()) is thing
    assert log.scalars() == [("t", 1)] * 3


class Sink:
    """Swallows what is printed."""

    def write(self, text):
        """Does nothing."""


def test_sharding_of_what_is_returned():
    """A tap leaves its argument where it is, with its sharding."""
    mesh = mesh_of({"a": 4, "b": 2})
    x = put(np.arange(16, dtype=F).reshape(4, 4), mesh, P("a", "b"))
    log = Log()
    for fun in (lambda x: log.tap("t", x), jax.jit(lambda x: log.tap("t", x))):
        y = fun(x)
        assert y.sharding.is_equivalent_to(x.sharding, 2)
        assert y.committed
    last = jax.device_put(F(1), jax.devices()[7])
    assert log.tap("t", last).devices() == {jax.devices()[7]}
    assert not log.tap("t", jnp.ones(1)).committed
    hcb.barrier_wait()
