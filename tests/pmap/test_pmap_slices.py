"""Slices of mapped arrays on their own devices, and arrays made of one value per device."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import pmap, shard_at, unstack

X = np.arange(24, dtype=np.float32).reshape(8, 3)
DEVICES = jax.devices()


def mapped(value=X, **options):
    """An array of which each device holds one element."""
    return pmap(jnp.array, **options)(value)


def pointer(x):
    """Where an array on one device begins."""
    return x.unsafe_buffer_pointer()


def parts(x):
    """Where the parts of an array begin."""
    return [pointer(s.data) for s in x.addressable_shards]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_slices_are_those_of_numpy(count):
    """Each slice has the values that NumPy finds, on the device of its element."""
    x = mapped(X[:count])
    assert len(unstack(x)) == count
    for i, found in enumerate(unstack(x)):
        for one in (found, shard_at(x, i), shard_at(x, i - count), shard_at(x, np.int64(i))):
            np.testing.assert_array_equal(one, X[i])
            assert one.devices() == {DEVICES[i]}
            assert (one.shape, one.dtype) == ((3,), np.float32)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.bool_, np.complex64, np.int8, jnp.bfloat16, jnp.float8_e4m3fn], ids=str
)
def test_no_copy(dtype):
    """A slice lies in the memory of the array that it is of."""
    x = mapped(X.astype(dtype))
    assert [pointer(s) for s in unstack(x)] == parts(x)
    np.testing.assert_array_equal(shard_at(x, 5), np.asarray(X.astype(dtype))[5])


def test_elements_of_less_than_a_byte():
    """int4 has no memory that could be shared; the values are right."""
    x = pmap(lambda v: v.astype(jnp.int4))(np.arange(8) - 4)
    assert [int(s) for s in unstack(x)] == [*range(-4, 4)]
    assert shard_at(x, 1).dtype == jnp.int4
    assert shard_at(x, 1).devices() == {DEVICES[1]}


def test_keys():
    """A slice of PRNG keys is a key."""
    keys = pmap(jax.random.key)(np.arange(8))
    for i, key in enumerate(unstack(keys)):
        assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(i)).tolist()


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_the_mapped_axis_may_be_any(axis):
    """The axis is found by itself, or said."""
    value = np.arange(48.0, dtype=np.float32).reshape(8, 2, 3)
    x = mapped(value, out_axes=axis)
    for i in range(8):
        np.testing.assert_array_equal(shard_at(x, i), value[i])
        np.testing.assert_array_equal(shard_at(x, i, axis), value[i])
    assert [pointer(s) for s in unstack(x, axis)] == parts(x)


def test_slices_of_nested_maps_stay_split():
    """A slice along one level is split along the other, and can be sliced again."""
    value = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    x = pmap(lambda v: pmap(lambda u: u * 1, "j")(v), "i")(value)
    row = shard_at(x, 1)
    np.testing.assert_array_equal(row, value[1])
    assert [s.device for s in row.addressable_shards] == DEVICES[2:4]
    assert [pointer(s) for s in unstack(row)] == parts(x)[2:4]
    column = shard_at(x, 1, axis=1)
    np.testing.assert_array_equal(column, value[:, 1])
    assert [s.device for s in column.addressable_shards] == DEVICES[1::2]


@pytest.mark.parametrize("axes", [("data", "model"), ("model", "data")], ids="-".join)
def test_slices_over_two_mesh_axes(mesh, axes):
    """The first axis of a spec is the major one, whatever the order of the mesh."""
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(axes)))
    devices = mesh.devices.ravel() if axes[0] == "data" else mesh.devices.T.ravel()
    for i, one in enumerate(unstack(x)):
        np.testing.assert_array_equal(one, X[i])
        assert one.devices() == {devices[i]}


def test_slices_outlive_the_array():
    """A slice keeps its values when the array is deleted, donated or dropped."""
    double = pmap(lambda x: x * 2, donate_argnums=0)
    x, y, z = mapped(), mapped(), mapped()
    kept = [shard_at(x, 3), shard_at(y, 3), shard_at(z, 3)]
    x.delete()
    again = double(y)
    del z
    gc.collect()
    np.testing.assert_array_equal(again, X * 2)
    assert y.is_deleted()
    others = [mapped(X + i) for i in range(20)]  # would take memory that is free
    for slice_ in kept:
        np.testing.assert_array_equal(slice_, X[3])
    del others


def test_a_slice_takes_part_in_programs():
    """A slice is an array like any other: it may be computed with, donated and put elsewhere."""
    x = mapped()
    piece = shard_at(x, 2)
    np.testing.assert_array_equal(jnp.sin(piece), np.sin(X[2]))
    assert jnp.sin(piece).devices() == {DEVICES[2]}
    np.testing.assert_array_equal(jax.jit(lambda v: v + 1, donate_argnums=0)(piece), X[2] + 1)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(jax.device_put(shard_at(x, 1), DEVICES[5]), X[1])


def test_weak_types_stay():
    """A slice of a weakly typed array is weakly typed."""
    x = pmap(lambda i: jnp.asarray(2.0) * 1, axis_size=8)(np.arange(8))
    assert x.weak_type
    assert shard_at(x, 1).weak_type


def test_what_has_no_slices():
    """Each refusal says what is expected."""
    whole = pmap(lambda x: x.sum(), out_axes=None)(X)
    cases = [
        (
            lambda: shard_at(mapped(), 8),
            IndexError,
            "shard_at has no slice 8.\n  expected  -8 to 7: the mapped axis has size 8",
        ),
        (
            lambda: shard_at(mapped(), "a"),
            TypeError,
            "shard_at cannot read the index.\n  expected  an integer\n  got       str: 'a'",
        ),
        (
            lambda: unstack(whole),
            ValueError,
            "unstack finds no mapped axis.\n"
            "  expected  an axis of which each device holds one element, as in results of pmap\n"
            f"  got       shape (), {whole.sharding}\n"
            "  fix       index it: x[i] gathers what is needed",
        ),
        (
            lambda: shard_at(X, 0),
            TypeError,
            "shard_at takes arrays only.\n  expected  an array that exists\n"
            f"  got       ndarray: {X!r}".split("\n  got")[0],
        ),
        (
            lambda: jax.jit(lambda x: shard_at(x, 0))(mapped()),
            TypeError,
            "shard_at cannot say where a traced value lies.\n"
            "  expected  an array that exists\n"
            "  got       a value inside of jit, grad or vmap\n"
            "  fix       call it on what the transformed function returns",
        ),
    ]
    for call, error, text in cases:
        with pytest.raises(error) as e:
            call()
        assert str(e.value).startswith(text)
        assert isinstance(e.value, spmd.SpmdError)
    for axis in (1, 2, -3):
        with pytest.raises(spmd.ShardingError, match=f"cannot take slices along axis {axis}"):
            shard_at(mapped(), 0, axis)
    with pytest.raises(spmd.ShardingError, match="finds no mapped axis"):
        shard_at(jnp.ones(3), 0)
    gone = mapped()
    gone.delete()
    with pytest.raises(spmd.DonatedArrayError, match="its buffers are gone"):
        shard_at(gone, 0)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_device_put_sharded(count):
    """One value per device becomes one array per leaf, as `pmap` takes and gives them."""
    values = [{"a": i, "b": (X[i], np.float32(i))} for i in range(count)]
    devices = DEVICES[-count:]
    found = spmd.device_put_sharded(values, devices)
    np.testing.assert_array_equal(found["a"], np.arange(count))
    np.testing.assert_array_equal(found["b"][0], X[:count])
    for leaf in jax.tree.leaves(found):
        assert [s.device for s in leaf.addressable_shards] == devices
        assert [s.data.shape[0] for s in leaf.addressable_shards] == [1] * count
    f = pmap(lambda t: t["b"][0] + t["b"][1], devices=devices)
    np.testing.assert_array_equal(f(found), X[:count] + np.arange(count)[:, None])


def test_what_is_put_is_not_moved_again():
    """`pmap` takes the arrays as they lie: donated, its results lie in their memory."""
    found = spmd.device_put_sharded([jnp.ones(5) * i for i in range(8)], DEVICES)
    before = parts(found)
    assert parts(pmap(lambda x: x + 1, "i", donate_argnums=0)(found)) == before


@pytest.mark.parametrize("count", [1, 2, 8])
def test_device_put_replicated(count):
    """A value stands on each device, behind a new axis."""
    found = spmd.device_put_replicated({"a": X, "b": 2.5}, DEVICES[:count])
    np.testing.assert_array_equal(found["a"], np.stack([X] * count))
    np.testing.assert_array_equal(found["b"], np.full(count, 2.5, np.float32))
    assert [s.device for s in found["a"].addressable_shards] == DEVICES[:count]


def test_what_cannot_be_put():
    """Each refusal names the value."""
    put, two = spmd.device_put_sharded, DEVICES[:2]
    cases = [
        (lambda: put([1, 2], DEVICES[:3]), "needs one value per device.\n  expected  3 values"),
        (lambda: put(X[:2], two), "takes one value per device.\n  expected  a list or tuple"),
        (lambda: put([1, "a"], two), "cannot put shards[1]: it is no array"),
        (
            lambda: put([{"a": 1}, {"b": 1}], two),
            "cannot stack shards[1]: it has another structure",
        ),
        (lambda: put([{"a": 1}, {"a": X}], two), "cannot stack values of different kinds at ['a']"),
        (lambda: put([], []), "has no device"),
    ]
    for call, text in cases:
        with pytest.raises(spmd.SpmdError) as e:
            call()
        assert str(e.value).startswith("device_put_sharded " + text)
    with pytest.raises(spmd.OptionError) as e:
        spmd.device_put_replicated(1, [DEVICES[0]] * 2)
    assert str(e.value) == "device_put_replicated has cpu:0 twice.\n  expected  each device once"


def test_global_arg_shapes():
    """The shapes that classic code may say are compared with what comes."""
    f = pmap(lambda x, y: x + y, in_axes=(0, None), global_arg_shapes=((3,), None))
    np.testing.assert_array_equal(f(X, 1.0), X + 1)
    with pytest.raises(spmd.OptionError) as e:
        f(X[:, :2], 1.0)
    assert str(e.value) == (
        "pmap of `<lambda>` was told another shape of argument x.\n"
        "  expected  elements of shape (3,), from global_arg_shapes\n"
        "  got       elements of shape (2,)\n"
        "  fix       leave global_arg_shapes out: an element is never split between processes here"
    )
    with pytest.raises(spmd.ArgumentError, match="cannot read global_arg_shapes"):
        pmap(lambda x: x, global_arg_shapes=3)


def test_a_function_mapped_anew_finds_its_program():
    """Code that maps in a loop traces and compiles once; `clear_cache` forgets that, too."""
    traced = []

    def add(x):
        traced.append(1)
        return x + 1

    before = spmd.counts()
    wrappers = [pmap(add) for _ in range(5)]
    for f in wrappers:
        np.testing.assert_array_equal(f(X), X + 1)
        assert f._cache_size == 1
    after = spmd.counts()
    assert (len(traced), after.compiles - before.compiles) == (1, 1)
    wrappers[0].clear_cache()
    pmap(add)(X)
    assert len(traced) == 2


def test_a_failed_trace_is_not_kept():
    """After a trace that failed, a function mapped anew is traced once, not at each call."""
    traced = []

    def sometimes(x):
        traced.append(1)
        if len(traced) == 1:
            raise RuntimeError("once")
        return x

    with pytest.raises(RuntimeError, match="once"):
        pmap(sometimes)(X)
    for _ in range(3):
        np.testing.assert_array_equal(pmap(sometimes)(X), X)
    assert len(traced) == 2


class Strange:
    """A callable that has no hash, and that nothing can refer to weakly."""

    __slots__ = ()
    __hash__ = None

    def __call__(self, x):
        return x + 1


def test_any_callable():
    """A callable without a hash or weak references is mapped, under its type's name."""
    f = pmap(Strange())
    np.testing.assert_array_equal(f(X), X + 1)
    assert f.__name__ == "Strange"


def test_one_and_several_devices_in_one_function():
    """A function called with 1 and with 8 elements is right in any order, second calls too."""
    f = pmap(lambda x: jax.lax.psum(x, "i"), "i")
    for count in (1, 1, 8, 8, 1, 8, 1, 1):
        value = X[:count]
        np.testing.assert_array_equal(f(value), np.tile(value.sum(0), (count, 1)))
        np.testing.assert_array_equal(f(f(value)), np.tile(value.sum(0) * count, (count, 1)))
    assert f._cache_size == 2
