"""assert_sharding: what it accepts, what it refuses, and what it then says."""
# ruff: noqa: E501 texts are compared as they are printed

import textwrap

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.testing import assert_sharding

U = P.UNCONSTRAINED


def placed(mesh, spec, shape=(16, 8)):
    """Ones with a sharding."""
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))


def told(message, error, *args, **kwargs):
    """Checks the class and the whole text of what the assertion raises."""
    with pytest.raises(error) as caught:
        assert_sharding(*args, **kwargs)
    assert str(caught.value) == textwrap.dedent(message).strip("\n")


def differs(*args, **kwargs):
    """Whether the assertion fails; any other error is an error."""
    try:
        assert_sharding(*args, **kwargs)
    except AssertionError:
        return True
    return False


# Meaning, not spelling


@pytest.mark.parametrize("spec", [P("data"), P("data", None), P(("data",)), P(("data",), ())])
def test_equal_specs(mesh, spec):
    """However a spec is spelled, it is the same split of the same dimension."""
    assert_sharding(placed(mesh, P("data")), spec)
    assert_sharding(placed(mesh, spec), P("data"))


@pytest.mark.parametrize(
    "spec",
    [P(), None, P("model"), P(None, "data"), P("data", "model"), P(("data", "model"))],
)
def test_other_specs(mesh, spec):
    """Another axis, another dimension, one axis more or none: each is another sharding."""
    assert differs(placed(mesh, P("data")), spec)


def test_order_of_axes(mesh):
    """`('data', 'model')` and `('model', 'data')` put other rows on the devices."""
    assert differs(placed(mesh, P(("data", "model"))), P(("model", "data")))


@pytest.mark.parametrize("spec", [None, P(), P(None), P(None, None)])
def test_replicated(mesh, spec):
    """None and an empty spec both say that every device holds all of it."""
    assert_sharding(placed(mesh, P()), spec)
    assert differs(placed(mesh, P("model")), spec)


def test_axes_of_size_one():
    """An axis of one device splits nothing, wherever it stands."""
    mesh = spmd.Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("data", "model"))
    x = placed(mesh, P("data"))
    for spec in (P("data", "model"), P(("model", "data")), P(("data", "model"), None)):
        assert_sharding(x, spec)
    assert_sharding(x, P(U, "model"))
    assert_sharding(placed(mesh, P("model")), None)


def test_unconstrained_dimensions(mesh):
    """What a spec leaves open may be anything; what it says must hold."""
    x = placed(mesh, P("data", "model"))
    assert_sharding(x, P("data", U))
    assert_sharding(x, P(U, "model"))
    assert_sharding(x, P(U, U))
    assert_sharding(placed(mesh, P("data")), P(U))
    assert differs(x, P(U))  # dimension 1 is not left open: it is said to be whole
    assert differs(x, P(U, "data"))
    assert differs(x, P("model", U))
    assert differs(placed(mesh, P()), P("data", U))


def test_named_shardings(mesh):
    """A NamedSharding brings its own mesh, and another order of devices is another sharding."""
    x = placed(mesh, P("data"))
    assert_sharding(x, NamedSharding(mesh, P("data", None)))
    turned = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    assert differs(x, NamedSharding(turned, P("data")))
    assert differs(x, P("data"), mesh=turned)
    assert differs(x, P("data", U), mesh=turned)
    other_names = jax.sharding.Mesh(mesh.devices, ("a", "b"))
    assert_sharding(x, P("a"), mesh=other_names)
    assert_sharding(x, P("a", U), mesh=other_names)
    assert differs(x, P("b", U), mesh=other_names)


def test_other_shardings():
    """Any sharding of JAX can be expected."""
    x = jax.device_put(np.ones(3, np.float32), jax.devices()[2])
    assert_sharding(x, SingleDeviceSharding(jax.devices()[2]))
    assert differs(x, SingleDeviceSharding(jax.devices()[3]))


def test_explicit_meshes():
    """An array on a mesh of explicit axes is compared as any other, and so are abstract structs."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = placed(mesh, P("data"))
    assert_sharding(x, P("data", None))
    with jax.set_mesh(mesh):
        struct = jax.eval_shape(lambda v: v * 2, x)
    for on in (None, mesh, jax.sharding.Mesh(mesh.devices, mesh.axis_names)):
        assert_sharding(struct, P("data"), mesh=on)
        assert differs(struct, P("model"), mesh=on)
        assert_sharding(x, P("data"), mesh=mesh.abstract_mesh)


def test_memory_kinds(mesh):
    """A spec says nothing of memory, a NamedSharding does."""
    sharding = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    x = jax.device_put(np.ones((16, 8), np.float32), sharding)
    assert_sharding(x, P("data"))
    assert_sharding(x, P("data", U))
    assert_sharding(x, sharding)
    assert differs(x, NamedSharding(mesh, P("data", U)))
    told(
        """
        assert_sharding finds x sharded otherwise.
          expected  P('data') on mesh data=4, model=2, 8 devices cpu:0..7, memory device; f32[4,8] per device
          got       P('data') on mesh data=4, model=2, 8 devices cpu:0..7, memory pinned_host; f32[4,8] per device
        """,
        AssertionError,
        x,
        NamedSharding(mesh, P("data")),
    )


def gspmd(mesh, spec):
    """An array with the sharding class that JAX keeps for what no spec was given for."""
    named = NamedSharding(mesh, spec)
    kind = next(c for c in jax.sharding.Sharding.__subclasses__() if c.__name__ == "GSPMDSharding")
    sharding = kind(tuple(mesh.devices.flat), named._to_xla_hlo_sharding(2))
    return jax.device_put(np.ones((16, 8), np.float32), sharding)


def test_shardings_without_a_spec(mesh):
    """A sharding that only the compiler's proto describes is compared, recovered and shown."""
    x = gspmd(mesh, P("data"))
    with mesh:
        assert_sharding(x, P("data"))
        assert differs(x, P("model"))
    assert_sharding(x, P("data", U), mesh=mesh)
    told(
        """
        assert_sharding finds x sharded otherwise.
          expected  P('model') on mesh data=4, model=2; f32[8,8] per device
          got       P('data', None) on mesh data=4, model=2; f32[4,8] per device
        """,
        AssertionError,
        x,
        P("model"),
        mesh=mesh,
    )
    told(
        """
        assert_sharding needs a mesh to read P('data') for x, and there is none here.
          got       x on 8 devices cpu:0..7
          fix       assert_sharding(x, spec, mesh=mesh), or place x with a NamedSharding
        """,
        AssertionError,
        x,
        P("data"),
    )


# Trees


def test_prefix_trees(mesh):
    """A leaf of the specs stands for all arrays below it, as in `in_axis_resources`."""
    x = {"w": [placed(mesh, P("data")), placed(mesh, P("data"))], "b": placed(mesh, P()), "n": None}
    assert_sharding(x, {"w": P("data"), "b": None, "n": None})
    assert_sharding(x, {"w": [P("data"), P("data", None)], "b": P(), "n": P()})
    assert differs(x, P("data"))
    assert_sharding(x["w"], P("data"))


def test_every_bad_leaf_is_told(mesh):
    """All wrong leaves are named by their paths, and none that is right."""
    x = {"a": placed(mesh, P("data")), "b": [placed(mesh, P()), placed(mesh, P("model"), (8,))]}
    told(
        """
        assert_sharding finds x['a'] sharded otherwise.
          expected  P('model') on mesh data=4, model=2; f32[8,8] per device
          got       P('data') on mesh data=4, model=2; f32[4,8] per device
        assert_sharding finds x['b'][0] sharded otherwise.
          expected  P('model') on mesh data=4, model=2; f32[8,8] per device
          got       P() on mesh data=4, model=2; f32[16,8] per device
        """,
        AssertionError,
        x,
        P("model"),
    )


def test_specs_that_match_no_tree(mesh):
    """A tree of specs that is no prefix is a ValueError that says where they part."""
    with pytest.raises(ValueError, match=r"cannot match expected with x: the keys differ"):
        assert_sharding({"w": placed(mesh, P())}, {"v": P()})
    with pytest.raises(ValueError, match=r"cannot match expected with x: it is not a pytree"):
        assert_sharding([placed(mesh, P())], (P(),))


def test_leaves_that_are_no_specs(mesh):
    """A string where a spec belongs is a TypeError with the fix."""
    told(
        """
        assert_sharding cannot read expected['w'].
          given     'data'
          expected  a PartitionSpec, None for replicated, or a Sharding
          fix       write P('data')
        """,
        spmd.SpecTypeError,
        {"w": placed(mesh, P())},
        {"w": "data"},
    )


def test_nothing_to_look_at():
    """A tree without arrays would pass whatever is expected."""
    with pytest.raises(TypeError, match="assert_sharding has nothing to look at"):
        assert_sharding({"w": None}, P("data"))


# Specs that do not fit


def test_an_unknown_axis(mesh):
    """An axis that the array's mesh does not have is told with the nearest."""
    told(
        """
        assert_sharding cannot split x['w'].
          given     expected['w'] = P('modle') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'modle' (did you mean 'model'?)
          fix       use an axis of the mesh, or enter the mesh that has it
        """,
        AssertionError,
        {"w": placed(mesh, P())},
        {"w": P("modle")},
    )


def test_too_many_dimensions(mesh):
    """A spec with more entries than the array has dimensions is no sharding of it."""
    x = placed(mesh, P("data"), (8,))
    for spec in (P("data", None), NamedSharding(mesh, P("data", None)), P("data", U)):
        with pytest.raises(AssertionError, match="expected  a spec of at most 1 entry"):
            assert_sharding(x, spec)


def test_an_axis_twice(mesh):
    """A spec that no array can have is refused as such."""
    with pytest.raises(ValueError, match="uses mesh axis 'data' twice in expected"):
        assert_sharding(placed(mesh, P()), P("data", "data"))


def test_uneven_expectations(mesh):
    """Where a dimension would not divide, the sizes per device are left out of the message."""
    told(
        """
        assert_sharding finds x sharded otherwise.
          expected  P('data') on mesh data=4, model=2
          got       P() on mesh data=4, model=2; f32[30] per device
        """,
        AssertionError,
        placed(mesh, P(), (30,)),
        P("data"),
    )


# Values without a place


def test_one_device(mesh):
    """An array that nobody placed is told as such, and one on a single device as that."""
    told(
        """
        assert_sharding finds x on one device only.
          expected  P('data') on mesh data=4, model=2; f32[4,8] per device
          got       f32[16,8] on device cpu:0, where nobody has placed it
          fix       jax.device_put(x, NamedSharding(mesh, spec)), or return it from a pjit function
        """,
        AssertionError,
        jnp.ones((16, 8), jnp.float32),
        P("data"),
        mesh=mesh,
    )
    told(
        """
        assert_sharding finds x on one device only.
          expected  P() on mesh data=4, model=2; f32[16,8] per device
          got       f32[16,8] on device cpu:3
          fix       jax.device_put(x, NamedSharding(mesh, spec)), or return it from a pjit function
        """,
        AssertionError,
        jax.device_put(np.ones((16, 8), np.float32), jax.devices()[3]),
        None,
        mesh=mesh,
    )


def test_one_device_is_enough_for_a_mesh_of_one():
    """On a mesh of one device, an array on it is sharded in every way."""
    mesh = spmd.Mesh(np.array(jax.devices()[:1]), ("data",))
    with mesh:
        assert_sharding(jnp.ones(4, jnp.float32), P("data"))


def test_values_without_a_sharding(mesh):
    """Host arrays, numbers and structs without a sharding are told as what they are."""
    value = {"a": np.ones(4), "b": 3.0, "c": jax.ShapeDtypeStruct((4,), jnp.float32)}
    told(
        """
        assert_sharding finds x['a'] without a sharding.
          expected  P('data')
          got       a NumPy array, which is on the host
          fix       jax.device_put(x, sharding)
        assert_sharding finds x['b'] without a sharding.
          expected  P('data')
          got       a float
          fix       give a jax.Array
        assert_sharding finds x['c'] without a sharding.
          expected  P('data')
          got       a ShapeDtypeStruct without a sharding
          fix       jax.ShapeDtypeStruct(..., sharding=)
        """,
        AssertionError,
        value,
        P("data"),
    )


def test_structs(mesh):
    """A struct with a sharding is compared as an array is."""
    sharding = NamedSharding(mesh, P("data"))
    struct = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=sharding)
    assert_sharding(struct, P("data"))
    assert differs(struct, P("model"))


def test_keys(mesh):
    """An array of PRNG keys has the dimensions that its user sees."""
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("data")))
    assert_sharding(keys, P("data"))
    assert differs(keys, P("model"))


def test_inside_of_a_function(in_mesh):
    """A traced value has no place yet: the error says what to write instead."""

    def f(x):
        assert_sharding({"w": x}, P("data"))
        return x

    with pytest.raises(spmd.ArgumentError) as caught:
        spmd.pjit(f, P("data"), P("data"))(np.ones((8, 8), np.float32))
    assert str(caught.value) == textwrap.dedent("""\
        assert_sharding cannot see where x['w'] is: it is traced, and has no place yet.
          expected  arrays, outside of jit, grad, vmap and shard_map
          got       1 tracer
          fix       inside of a function, demand the sharding: x = with_sharding_constraint(x, spec);
                    or assert on the function's result, outside of it""")


def test_a_mesh_that_is_none(mesh):
    """Something else than a mesh is a TypeError."""
    with pytest.raises(TypeError, match="assert_sharding cannot read mesh"):
        assert_sharding(placed(mesh, P()), P(), mesh={"data": 4})


def test_results_of_pjit(in_mesh):
    """What a pjit function returns lies where its specs say, and where the compiler chose."""
    f = spmd.pjit(lambda x: (x * 2, x.T), P("data", "model"), (P("data", "model"), None))
    kept, whole = f(np.ones((16, 8), np.float32))
    assert_sharding((kept, whole), (P("data", "model"), None))
    chosen = spmd.pjit(lambda x: x.T, P("data", "model"))(np.ones((16, 8), np.float32))
    assert_sharding(chosen, P("model", "data"))
