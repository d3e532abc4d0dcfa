"""Arguments of a mapped function: where they lie, donation, and what is refused by which words."""

import glob
import logging
import tracemalloc

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
from oracle import mesh_of
import pytest

import spmd
from spmd import pmap

X = np.arange(8, dtype=np.float32).reshape(4, 2)


def pointers(x):
    """Where each device holds its part."""
    return {s.device: s.data.unsafe_buffer_pointer() for s in x.addressable_shards}


def along(x, axis_name="a", devices=None):
    """An array with one row per device."""
    devices = jax.devices()[: len(x)] if devices is None else devices
    mesh = jax.sharding.Mesh(np.array(devices), (axis_name,))
    return jax.device_put(x, NamedSharding(mesh, P(axis_name)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["self", "call", "line"])
def test_a_keyword_argument_may_have_any_name(name):
    """Names of our own parameters are free for those of a user's function."""
    fun, given = pmap(lambda x, **others: x + sum(others.values())), {name: 2 * X}
    for _ in range(2):
        np.testing.assert_array_equal(fun(X, **given), 3 * X)
    np.testing.assert_array_equal(fun.lower(X, **given).compile()(X, **given), 3 * X)
    with jax.disable_jit():
        np.testing.assert_array_equal(fun(X, **given), 3 * X)


def test_rightly_placed_arrays_are_not_copied():
    """The program reads the buffers that are there: donated, they are those of the result."""
    fun = pmap(lambda x: x + 1, donate_argnums=0)
    # A NumPy array may be what the first device has, and cannot be given away.
    for x in (pmap(lambda x: x * 2, "a")(X), pmap(lambda x: x * 2)(X)):
        before = pointers(x)
        out = fun(x)
        assert pointers(out) == before
        assert x.is_deleted()


def test_arrays_elsewhere_are_moved():
    """Shards of other devices, of one device, or of another split arrive where they have to be."""
    fun = pmap(lambda x: x * 2 + lax.axis_index("i").astype(x.dtype), "i")
    want = X * 2 + np.arange(4, dtype=np.float32)[:, None]
    whole = jax.device_put(X, NamedSharding(mesh_of({"a": 4}), P()))
    by_columns = jax.device_put(X, NamedSharding(mesh_of({"a": 2}), P(None, "a")))
    elsewhere = [along(X, devices=jax.devices()[4:]), along(X, devices=jax.devices()[3::-1])]
    for _ in range(2):
        for x in (X, jnp.asarray(X), along(X), whole, by_columns, *elsewhere):
            out = fun(x)
            np.testing.assert_array_equal(out, want)
            assert [*out.sharding.mesh.devices.flat] == jax.devices()[:4]


def test_donation_on_repeated_calls():
    """A state that is donated at every call stays in its buffers."""
    step = pmap(lambda state, x: state + x, donate_argnums=0)
    state = pmap(lambda x: x)(X)
    before = pointers(state)
    for i in range(4):
        old, state = state, step(state, X)
        assert old.is_deleted()
        # A copy: JAX 0.11 does not donate what NumPy looks at.
        np.testing.assert_array_equal(state + 0, X * (i + 2))
    assert pointers(state) == before


@pytest.mark.parametrize("donates", [False, True])
def test_arrays_that_are_gone(donates):
    """A donated or deleted array is named, on the first call and on repeated ones."""
    fun = pmap(lambda x, y: x + y, donate_argnums=0 if donates else ())
    keep = along(X)
    message = (
        "pmap of `<lambda>` cannot use argument x: its buffers are gone.\n"
        "  expected  an array that was not donated to an earlier call and not deleted\n"
        "  fix       use the result of the call that took it, or do not donate it"
    )
    for _ in range(3):
        fun(along(X), keep)
        gone = along(X)
        pmap(lambda x: x * 2, donate_argnums=0)(gone)
        with pytest.raises(spmd.DonatedArrayError) as raised:
            fun(gone, keep)
        assert str(raised.value) == message
    deleted = along(X)
    deleted.delete()
    with pytest.raises(spmd.DonatedArrayError):
        fun(deleted, keep)


def one(x):
    """What one device computes."""
    return x


def two(x, y):
    """Of two arguments."""
    return {"sum": x, "other": y}


REFUSED = {
    "sizes": (
        lambda: pmap(two, in_axes=(0, {"a": 1}))(X, {"a": X}),
        spmd.OptionError,
        """
pmap of `two` cannot map over axes of different sizes.
  expected  one size
  got       argument x: 4 along axis 0
            argument y['a']: 2 along axis 1
""",
    ),
    "axis_size": (
        lambda: pmap(one, axis_size=3)(X),
        spmd.OptionError,
        """
pmap of `one` cannot map over axes of different sizes.
  expected  axis_size=3
  got       argument x: 4 along axis 0
""",
    ),
    "a scalar": (
        lambda: pmap(two)(X, 2.0),
        spmd.OptionError,
        """
pmap of `two` cannot map argument y over axis 0.
  expected  an axis of f32[]
  got       a scalar
  fix       say None in in_axes for what all devices get whole
""",
    ),
    "an axis out of range": (
        lambda: pmap(one, in_axes=-3)(X),
        spmd.OptionError,
        """
pmap of `one` cannot map argument x over axis -3.
  expected  an axis of f32[4,2]
  got       2 axes
""",
    ),
    "too few devices": (
        lambda: pmap(one)(np.zeros((9, 2), np.float32)),
        spmd.DeviceCountError,
        """
pmap of `one` needs 9 devices.
  expected  a mapped axis of size 8 or less: each element has a device
  got       8 cpu devices
  fix       map with jax.vmap, or with pmap of vmap over [devices, elements of each]
""",
    ),
    "other devices": (
        lambda: pmap(one, devices=jax.devices()[:3])(X),
        spmd.DeviceCountError,
        """
pmap of `one` needs another number of devices.
  given     devices= with 3
  expected  4, the size of the mapped axis
""",
    ),
    "nothing mapped": (
        lambda: pmap(one, in_axes=None)(X),
        spmd.OptionError,
        """
pmap of `one` maps nothing: no argument has an axis to map.
  expected  at least one argument without None in in_axes, or axis_size
""",
    ),
    "a prefix": (
        lambda: pmap(two, in_axes=(0, (0, 1)))(X, X),
        spmd.ShardingError,
        """
pmap of `two` cannot match in_axes[1] with args[1]: it is not a pytree prefix.
  given     in_axes[1] is a tuple of 2 elements
  expected  the structure of args[1], or one spec for all of it
  got       args[1] is one leaf
  fix       give one spec per leaf, or one spec for a whole subtree
""",
    ),
    "a prefix, and names": (
        lambda: pmap(two, in_axes=(0, 0))(X, y=X),
        spmd.ShardingError,
        """
pmap of `two` cannot match in_axes with args: it is not a pytree prefix.
  given     in_axes is a tuple of 2 elements
  expected  the structure of args, or one spec for all of it
  got       args is a tuple of 1 element
  fix       leave out what is passed by name: that is mapped over its axis 0
""",
    ),
    "an unhashable static": (
        lambda: pmap(two, static_broadcasted_argnums=1)(X, [2]),
        spmd.StaticArgumentError,
        """
pmap of `two` cannot hash static argument y.
  expected  a value with __hash__ and __eq__: it is part of the key of the compile cache
  got       list: [2]
  fix       pass something hashable such as a tuple, or do not declare it static
""",
    ),
    "a static by name": (
        lambda: pmap(two, static_broadcasted_argnums=1)(X, y=2),
        spmd.OptionError,
        """
pmap of `two` has no positional argument 1.
  given     static_broadcasted_argnums=1
  expected  these arguments by position, not by name
  got       a call with 1 positional argument
""",
    ),
    "no array": (
        lambda: pmap(one)({"a": "text"}),
        spmd.ArgumentError,
        """
pmap of `one` cannot take argument x['a']: it is no array.
  expected  arrays, numbers, and containers of them
  got       str: 'text'
  fix       declare it static with static_broadcasted_argnums, or convert it with jnp.asarray
""",
    ),
    "a result that is no array": (
        lambda: pmap(lambda x: {"a": "text"})(X),
        spmd.ArgumentError,
        """
pmap of `<lambda>` cannot return result['a']: it is no array.
  expected  arrays, numbers, None, and containers of them
  got       str: 'text'
""",
    ),
    "an axis of a result": (
        lambda: pmap(two, out_axes={"sum": 0, "other": 2})(X, X),
        spmd.OptionError,
        """
pmap of `two` cannot put the mapped axis of result['other'] at 2.
  given     f32[2] on each device
  expected  an axis from -2 to 1
""",
    ),
    "axes of results": (
        lambda: pmap(two, out_axes=(0, 0))(X, X),
        spmd.ShardingError,
        """
pmap of `two` cannot match out_axes with result: it is not a pytree prefix.
  given     out_axes is a tuple of 2 elements
  expected  the structure of result, or one spec for all of it
  got       result is a dict of 2 elements
  fix       write out_axes as a dict of specs, or give one spec for all of result
""",
    ),
    "no function": (
        lambda: pmap(3),
        spmd.ArgumentError,
        """
pmap needs a function.
  given     3
  expected  something callable
  got       int
  fix       pmap(fun, axis_name='i'), or @pmap(axis_name='i') above a def
""",
    ),
    "options": (
        lambda: pmap(one, ("i",), in_axes=(True,), out_axes={"a": 0.5}, axis_size=0, devices=[]),
        spmd.ArgumentError,
        """
pmap of `one` cannot read in_axes[0].
  expected  the number of an axis, or None
  got       bool: True
pmap of `one` cannot read out_axes['a'].
  expected  the number of an axis, or None
  got       float: 0.5
pmap of `one` cannot use this axis_name.
  expected  a string, or None
  got       tuple: ('i',)
pmap of `one` cannot map over an axis of this size.
  given     axis_size=0
  expected  a positive integer
pmap of `one` has no device to run on.
  given     devices=()
  expected  at least one device, or None for those of the backend
""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages(case):
    """Each mistake has one error, with the path of the argument."""
    thunk, error, golden = REFUSED[case]
    with pytest.raises(error) as raised:
        thunk()
    assert type(raised.value) is error
    assert str(raised.value) == golden.strip("\n")


@pytest.mark.parametrize(
    ("case", "ours"),
    [
        ("too few devices", spmd.MeshError),
        ("other devices", spmd.MeshError),
        ("an unhashable static", spmd.ArgumentError),
    ],
)
def test_classes_of_the_classic_api(case, ours):
    """What was a ValueError there is one here, too, beside our own class."""
    for kind in (ours, ValueError):
        with pytest.raises(kind):
            REFUSED[case][0]()


def test_host_arrays_are_split_without_a_copy():
    """The parts of a host array go to their devices as they lie: NumPy takes no memory for them."""
    f = pmap(lambda x: x[0, 0] + 1)
    x = np.ones((8, 1024, 1024), np.float32)  # 4 MiB for each device
    f(x)
    tracemalloc.start()
    try:
        for _ in range(3):
            np.testing.assert_array_equal(f(x), np.full(8, 2, np.float32))
        _, peak = tracemalloc.get_traced_memory()
        x.copy()
        _, copied = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    assert copied >= 2**25  # a copy would have been seen


def test_logged_misses(caplog):
    """`jax_explain_cache_misses` says what differs from the nearest earlier call, and where."""

    def told(x):
        return x + 1

    f = pmap(told)
    jax.config.update("jax_explain_cache_misses", True)
    try:
        with caplog.at_level(logging.WARNING, logger="spmd._trace"):
            f(np.ones((8, 2), np.float32))
            f(np.ones((8, 2), np.float32))
            f(np.ones((8, 3), np.float32))
    finally:
        jax.config.update("jax_explain_cache_misses", False)
    said = [r.getMessage() for r in caplog.records if r.name == "spmd._trace"]
    assert len(said) == 2
    assert "it was never traced before" in said[0]
    assert "x is f32[8,3], before f32[8,2]" in said[1]
    assert all("pmap of `told`" in m and "test_pmap_arguments.py" in m for m in said)


@pytest.mark.slow
def test_profile_shows_the_call(tmp_path):
    """A profile has an event with the function's name around each call."""

    def very_visible(x):
        return x + 1

    f = pmap(very_visible)
    x = f(f(f(np.ones((8, 2), np.float32))))
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            f(x).block_until_ready()
    (path,) = glob.glob(f"{tmp_path}/**/*.xplane.pb", recursive=True)
    profile = jax.profiler.ProfileData.from_file(path)
    events = [e for p in profile.planes for line in p.lines for e in line.events]
    starts = {e.start_ns for e in events if e.name == "PjitFunction(very_visible)"}
    assert len(starts) >= 3


def test_an_axis_without_a_name():
    """A collective over an axis that was not named says how to name it; other names stay errors."""
    with pytest.raises(NameError) as e:
        pmap(lambda x: lax.psum(x, "i"))(X)
    assert str(e.value) == (
        "pmap of `<lambda>` names the axis 'i', which nothing around it maps.\n"
        "  expected  a name\n"
        "  got       no axis_name\n"
        "  fix       pmap(fun, axis_name='i')"
    )
    with pytest.raises(NameError, match="name 'unknown' is not defined"):
        pmap(lambda x: unknown(x))(X)  # noqa: F821 - what this is about
