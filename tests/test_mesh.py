"""Meshes: what they equal, which one is current, and that every cache knows it."""

import contextlib
import copy
import functools
import pickle
import threading
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import Mesh, current_mesh, make_mesh, pjit, with_sharding_constraint

X = np.arange(32, dtype=np.float32).reshape(8, 4)
NAMES = ("data", "model")


def devices(*shape):
    """The first devices in a grid."""
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


def jax_mesh(mesh):
    """JAX's own mesh that equals one of ours."""
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)


@contextlib.contextmanager
def entered(mesh):
    """JAX's `with mesh:`, which warns when it is entered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield mesh
    finally:
        mesh.__exit__(None, None, None)


@pytest.fixture
def other():
    """The same devices under the same names, 2x4."""
    return Mesh(devices(2, 4), NAMES)


@pytest.fixture
def third():
    """The same devices under the same names, 8x1."""
    return Mesh(devices(8, 1), NAMES)


# The class


def test_equals_the_mesh_of_jax(mesh, other):
    """Our mesh equals JAX's of the same devices and names, both ways round, with one hash."""
    theirs = jax_mesh(mesh)
    assert mesh == theirs
    assert theirs == mesh
    assert not mesh != theirs  # noqa: SIM202 the operator has its own method
    assert hash(mesh) == hash(theirs)
    assert {mesh: 1}[theirs] == {theirs: 1}[mesh] == 1
    assert mesh == Mesh(devices(4, 2), NAMES)
    for different in (other, jax_mesh(other), Mesh(devices(4, 2), ("a", "b")), 3, None):
        assert mesh != different
        assert different != mesh
    assert mesh != Mesh(devices(4, 2)[::-1], NAMES)
    assert mesh != Mesh(devices(4, 2), NAMES, axis_types=(AxisType.Explicit,) * 2)


def test_is_a_mesh_of_jax(mesh):
    """It is accepted wherever JAX wants a mesh, and its shardings equal those of JAX's."""
    assert isinstance(mesh, jax.sharding.Mesh)
    ours, theirs = NamedSharding(mesh, P("data")), NamedSharding(jax_mesh(mesh), P("data"))
    assert ours == theirs
    assert hash(ours) == hash(theirs)
    x = jax.device_put(X, ours)
    np.testing.assert_array_equal(x, X)
    mapped = jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(mapped(x), 2 * X)


def test_attributes(mesh):
    """Devices, names, shape and axis types are those of JAX's."""
    theirs = jax_mesh(mesh)
    for name in ("axis_names", "shape", "axis_types", "size", "abstract_mesh", "empty"):
        assert getattr(mesh, name) == getattr(theirs, name)
    assert (mesh.devices == theirs.devices).all()
    assert list(mesh.local_devices) == list(theirs.local_devices)


def test_single_name():
    """One name for a one-dimensional mesh needs no tuple; a list of devices is an array."""
    mesh = Mesh(jax.devices(), "data")
    assert dict(mesh.shape) == {"data": 8}
    assert mesh == Mesh(devices(8), ("data",))


def test_names_that_do_not_fit():
    """The number of names is the rank of the devices."""
    with pytest.raises(ValueError, match="axis_names"):
        Mesh(devices(4, 2), ("data",))


@pytest.mark.parametrize("remake", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies(mesh, remake):
    """A copy is one of ours and equal."""
    assert type(remake(mesh)) is Mesh
    assert remake(mesh) == mesh


def test_pickle_of_devices_that_are_not_here(mesh):
    """A mesh of devices that this process lacks cannot be read, and says which are missing."""
    text = pickle.dumps(mesh, 0).replace(b"I7\n", b"I77\n")
    with pytest.raises(spmd.MeshError, match=r"(?s)cannot be unpickled.*got       no cpu:77$"):
        pickle.loads(text)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(protocol):
    """What comes out of a pickle is one of ours, equal, and can be entered."""
    before = Mesh(devices(4, 2), NAMES, axis_types=(AxisType.Explicit, AxisType.Auto))
    after = pickle.loads(pickle.dumps(before, protocol))
    assert type(after) is Mesh
    assert after == before
    assert after.axis_types == before.axis_types
    with after:
        assert current_mesh() == before


def test_programs_of_jax_see_one_mesh(mesh):
    """jax.jit does not compile again for results of ours beside its own equal shardings."""
    f = jax.jit(lambda v: v + 1)
    with mesh:
        y = pjit(lambda v: v * 2, P("data"), P("data"))(X)
    f(y)
    f(jax.device_put(X, NamedSharding(jax_mesh(mesh), P("data"))))
    assert f._cache_size() == 1


# Entering and leaving


def test_no_mesh_outside():
    """Outside of any mesh there is none."""
    assert current_mesh() is None


def test_entering_does_not_warn(mesh):
    """Entering our mesh gives no warning, where JAX's own gives one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mesh as bound:
            assert bound is mesh
            assert current_mesh() is mesh
        with pytest.raises(DeprecationWarning):
            jax_mesh(mesh).__enter__()
    assert current_mesh() is None


def test_leaving_restores(mesh, other):
    """Meshes nest, the same one too; leaving one brings back the one around it."""
    with mesh:
        with other:
            with mesh:
                assert current_mesh() is mesh
            assert current_mesh() is other
        assert current_mesh() is mesh
        with mesh:
            pass
        assert current_mesh() is mesh
    assert current_mesh() is None


def test_leaving_by_an_exception(mesh, other):
    """An exception leaves all meshes that it passes."""
    with mesh:
        with pytest.raises(KeyError), other:
            raise KeyError
        assert current_mesh() is mesh


def test_exception_in_a_traced_function(mesh):
    """A function that fails while it is traced leaves no mesh behind."""

    def bad(x):
        assert current_mesh() == mesh
        raise KeyError

    f = pjit(bad, mesh=mesh)
    for _ in range(2):
        with pytest.raises(KeyError):
            f(X)
        assert current_mesh() is None
        assert jax.sharding.get_abstract_mesh().empty
        with pytest.raises(RuntimeError, match="needs a mesh"):
            pjit(lambda v: v)(X)


def test_jax_finds_our_mesh(mesh):
    """What JAX resolves by `with mesh:` finds ours, and nothing once it is left."""

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, P("data"))

    with mesh:
        np.testing.assert_array_equal(jax.jit(constrain)(X), X)
    with pytest.raises(RuntimeError):
        jax.jit(constrain)(X)


def test_body_sees_the_mesh_of_its_call(mesh, other):
    """Inside of a function the mesh of the call is current, for us and for JAX."""

    def body(x):
        seen.append(current_mesh())
        x = jax.lax.with_sharding_constraint(x, P("data"))
        return with_sharding_constraint(x, P(None, "model"))

    seen = []
    np.testing.assert_array_equal(pjit(body, mesh=mesh)(X), X)
    with other:
        np.testing.assert_array_equal(pjit(body, mesh=mesh)(X[:4]), X[:4])
        assert current_mesh() is other
    assert seen == [mesh, mesh]
    assert current_mesh() is None


# Which mesh is current: the table of design.md


# Contexts from outer to inner, and the winner: "a" is mesh 4x2, "b" is mesh 2x4.
CONTEXTS = {
    "ours": (["ours a"], "a"),
    "jax": (["jax b"], "b"),
    "set_mesh": (["set b"], "b"),
    "ours in jax": (["jax b", "ours a"], "a"),
    "jax in ours": (["ours a", "jax b"], "a"),
    "ours in set_mesh": (["set b", "ours a"], "a"),
    "set_mesh in ours": (["ours a", "set b"], "a"),
    "other ours in jax": (["jax a", "ours b"], "b"),
    "jax in other ours": (["ours b", "jax a"], "b"),
    "other ours in set_mesh": (["set a", "ours b"], "b"),
    "set_mesh in other ours": (["ours b", "set a"], "b"),
    "ours in ours": (["ours a", "ours b"], "b"),
    "jax in jax": (["jax a", "jax b"], "b"),
    "set_mesh in set_mesh": (["set a", "set b"], "b"),
    "jax and set_mesh agree": (["jax a", "set a"], "a"),
    "set_mesh and jax agree": (["set b", "jax b"], "b"),
    "ours in both": (["jax a", "set a", "ours b"], "b"),
    "ours in two that differ": (["jax a", "set b", "ours a"], "a"),
}
KINDS = {"ours": lambda m: m, "jax": lambda m: entered(jax_mesh(m)), "set": jax.set_mesh}


@contextlib.contextmanager
def context(name, mesh, other):
    """Enters one of the contexts; gives the mesh that has to win."""
    meshes = {"a": mesh, "b": other}
    steps, winner = CONTEXTS[name]
    with contextlib.ExitStack() as stack:
        for kind, which in map(str.split, steps):
            stack.enter_context(KINDS[kind](meshes[which]))
        yield meshes[winner]


@pytest.mark.parametrize("name", CONTEXTS)
def test_current_mesh(mesh, other, name):
    """Ours beats JAX's contexts whichever is inner; JAX's count where ours is not."""
    with context(name, mesh, other) as winner:
        assert current_mesh() == winner
    assert current_mesh() is None


def swap(x):
    """Splits inside of a function by the mesh that is active."""
    return with_sharding_constraint(x * 2, P("model"))


@pytest.mark.slow
def test_same_function_under_every_context(mesh, other):
    """One function, called under all contexts in turn and again, always runs on the mesh that wins.

    The fast path has all of these contexts in its key by the second round.
    """
    f = pjit(swap, P("data"), P("data"))
    jitted, mapped = jax.jit(f), jax.vmap(f)
    x = jnp.asarray(X)
    for _ in range(3):
        for name in CONTEXTS:
            with context(name, mesh, other) as winner:
                for arg in (x, X):
                    y = f(arg)
                    np.testing.assert_array_equal(y, 2 * X)
                    assert y.sharding.mesh == winner, name
                    assert y.sharding.shard_shape(y.shape) == (8 // winner.shape["data"], 4)
                assert jitted(x).sharding.mesh == winner, name
                assert mapped(x[None]).sharding.mesh == winner, name
                assert with_sharding_constraint(x, P("data")).sharding.mesh == winner, name


@pytest.mark.slow
def test_option_beats_every_context(mesh, other, third):
    """`mesh=` wins everywhere, and where JAX's two contexts differ."""
    f = pjit(swap, P("data"), P("data"), mesh=third)
    x = jnp.asarray(X)
    for _ in range(2):
        for name in CONTEXTS:
            with context(name, mesh, other):
                y = f(x)
                np.testing.assert_array_equal(y, 2 * X)
                assert y.sharding.mesh == third, name
        with entered(jax_mesh(mesh)), jax.set_mesh(jax_mesh(other)):
            assert f(x).sharding.mesh == third
        assert f(x).sharding.mesh == third


def test_lower_under_every_context(mesh, other):
    """Stops on the way are on the mesh that wins, too."""
    f = pjit(swap, P("data"), P("data"))
    for name in CONTEXTS:
        with context(name, mesh, other) as winner:
            assert f.trace(X).mesh == winner, name
            assert f.lower(X).mesh == winner, name


def test_one_trace_per_mesh(mesh, other):
    """However a mesh was entered, an equal one traces, lowers and compiles once."""

    def fresh(x):
        return x - 1

    f = pjit(fresh, P("data"))
    before = spmd.counts()
    for name in CONTEXTS:
        with context(name, mesh, other):
            np.testing.assert_array_equal(f(X), X - 1)
    done = spmd.counts() - before
    assert (done.traces, done.lowerings, done.compiles) == (2, 2, 2)


def test_nested_function_under_two_meshes(mesh, other):
    """A nested function follows the mesh of the outer call, second calls included."""
    inner = pjit(lambda x: x + 1, P("model"), P("model"))
    f = pjit(lambda x: inner(x) * 2, P("data"), P("data"))
    x = jnp.asarray(X)
    for _ in range(3):
        for m in (mesh, other):
            with m:
                y = f(x)
            np.testing.assert_array_equal(y, 2 * (X + 1))
            assert y.sharding.mesh == m


def test_committed_arguments_under_two_meshes(mesh, other):
    """An array that lies on one mesh moves to the other, with its values, on every call."""
    f = pjit(lambda x: x + 1, P("data"), P("data"))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    for _ in range(3):
        for m in (mesh, other):
            with m:
                y = f(x)
            np.testing.assert_array_equal(y, X + 1)
            assert y.sharding.mesh == m


def test_meshes_of_other_devices(mesh):
    """Two meshes without a common device do not take each other's program."""
    f = pjit(lambda x: x + 1, P("data"), P("data"))
    low, high = Mesh(devices(8)[:4], "data"), Mesh(devices(8)[4:], "data")
    for _ in range(3):
        for m in (low, high):
            with m:
                y = f(X)
            np.testing.assert_array_equal(y, X + 1)
            assert y.sharding.device_set == set(m.devices)


def test_devices_in_another_order(mesh):
    """Two meshes that differ in the order of their devices are two meshes."""
    f = pjit(lambda x: x + 1, P("data"), P("data"))
    flipped = Mesh(devices(4, 2)[::-1], NAMES)
    for _ in range(3):
        for m in (mesh, flipped):
            with m:
                y = f(X)
            np.testing.assert_array_equal(y, X + 1)
            first = next(s for s in y.addressable_shards if s.index[0].start in (0, None))
            assert first.device in set(m.devices[0])


# Threads


def test_threads_start_without_a_mesh(mesh):
    """A mesh belongs to the thread that entered it."""
    seen = []
    with mesh:
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
        assert current_mesh() is mesh
    assert seen == [None]


def test_threads_have_their_own_meshes(mesh, other):
    """Threads that run the same function under different meshes at once do not meet."""
    f = pjit(lambda x: x + 1, P("data"), P("data"))
    barrier, failures = threading.Barrier(4, timeout=60), []

    def work(m):
        try:
            with m:
                for _ in range(5):
                    barrier.wait()
                    assert current_mesh() is m
                    y = f(X)
                    assert y.sharding.mesh == m
                    np.testing.assert_array_equal(y, X + 1)
            assert current_mesh() is None
        except BaseException as e:
            failures.append(e)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(m,)) for m in (mesh, other) * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


# Explicit axes


@pytest.fixture
def explicit():
    """A mesh as jax.make_mesh makes it: with axes that are part of types."""
    made = jax.make_mesh((4, 2), NAMES)
    assert set(made.axis_types) == {AxisType.Explicit}
    return made


def auto_inside(x):
    """Fails where the axes that the function sees are not Auto; constrains, which needs that."""
    types = {*jax.sharding.get_abstract_mesh().axis_types, *jax.typeof(x).sharding.mesh.axis_types}
    assert types <= {AxisType.Auto}
    return with_sharding_constraint(x * 2, P(None, "model"))


@pytest.mark.parametrize("how", ["set", "jax", "ours", "option", "sharding", "argument"])
def test_explicit_mesh(explicit, how):
    """A mesh with Explicit axes is accepted in every place; the function sees Auto axes."""
    options, around = {"in_axis_resources": P("data"), "out_axis_resources": P("data")}, None
    x = X
    if how == "set":
        around = functools.partial(jax.set_mesh, explicit)
    elif how == "jax":
        around = functools.partial(entered, explicit)
    elif how == "ours":
        around = functools.partial(Mesh, explicit.devices, NAMES, explicit.axis_types)
    elif how == "option":
        options["mesh"] = explicit
    elif how == "sharding":
        options = dict.fromkeys(options, NamedSharding(explicit, P("data")))
    else:
        options, x = (
            {"in_axis_resources": spmd.FROM_ARRAY},
            jax.device_put(X, NamedSharding(explicit, P("data"))),
        )
    f = pjit(auto_inside, **options)
    for _ in range(3):
        with around() if around else contextlib.nullcontext():
            y = f(x)
        np.testing.assert_array_equal(y, 2 * X)
        assert y.sharding.device_set == set(explicit.devices.flat)
        if how != "argument":
            assert y.sharding.is_equivalent_to(NamedSharding(explicit, P("data")), 2)


def test_arrays_on_an_explicit_mesh(mesh, explicit):
    """An array on the Explicit mesh is in place on the Auto one: nothing moves."""
    f = pjit(auto_inside, P("data"), implicit_reshard="error")
    x = jax.device_put(X, NamedSharding(explicit, P("data")))
    with mesh:
        for _ in range(3):
            np.testing.assert_array_equal(f(x), 2 * X)


# make_mesh


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        ({"data": 4, "model": 2}, (4, 2)),
        ({"data": 8}, (8,)),
        ({"data": 2, "fsdp": 2, "model": 2}, (2, 2, 2)),
        ({"data": -1, "model": 2}, (4, 2)),
        ({"data": -1}, (8,)),
        ({"data": 3}, (3,)),
        ({"a": 1, "b": 1}, (1, 1)),
        ({"a": np.int64(2), "b": 2}, (2, 2)),
    ],
    ids=str,
)
def test_make_mesh(axes, shape):
    """The axes come in order, an open size is what is left, and no device stands twice."""
    mesh = make_mesh(axes)
    assert type(mesh) is Mesh
    assert mesh.axis_names == tuple(axes)
    assert mesh.devices.shape == shape
    assert len(set(mesh.devices.flat)) == mesh.size
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_make_mesh_of_given_devices():
    """Devices that are passed are used, in place of all."""
    chosen = jax.devices()[4:8]
    mesh = make_mesh({"data": -1, "model": 2}, devices=chosen)
    assert mesh.devices.shape == (2, 2)
    assert set(mesh.devices.flat) == set(chosen)


def test_made_mesh_works():
    """A mesh that make_mesh made can be entered, compared and used."""
    with make_mesh({"data": 4, "model": 2}) as mesh:
        y = pjit(lambda x: x + 1, P("data", "model"), P("data", "model"))(X)
    np.testing.assert_array_equal(y, X + 1)
    assert y.sharding.mesh == mesh
