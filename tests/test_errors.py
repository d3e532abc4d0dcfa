"""Every mistake of a user ends in one clear error; the texts are compared to the letter."""
# ruff: noqa: E501 texts are compared as they are printed

from pathlib import Path
import re
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import FROM_ARRAY, NamedSharding, PartitionSpec as P, pjit, with_sharding_constraint
from spmd.errors import Failure, did_you_mean, explain

X = np.ones((8, 4), np.float32)


def step(batch):
    """The function of most tests: a pytree in, its double out."""
    return jax.tree.map(lambda v: v * 2, batch)


def add(x, y):
    """A function of two arguments."""
    return x + y


def told(call, error, message):
    """Checks the class and the whole text of what `call` raises."""
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == textwrap.dedent(message).strip("\n")
    assert caught.value.__cause__ is None


def told_where(call, error, message, *, mark, function):
    """As `told`, for a text with a source line in place of ``LINE``.

    Args:
        call: Raises.
        error: Its class.
        message: The text.
        mark: Ends the line of this file that has to be named.
        function: The function around that line.
    """
    with pytest.raises(error) as caught:
        call()
    text, *places = re.split(r"used at (.*?):(\d+)(?::\d+)? \((.*?)\)", str(caught.value))
    assert len(places) == 4, str(caught.value)
    file, line, name, rest = places
    lines = Path(__file__).read_text().splitlines()
    assert file == __file__
    assert int(line) == 1 + next(i for i, s in enumerate(lines) if s.endswith(f"# {mark}"))
    assert name.split(".")[-1] == function
    assert text + "used at LINE" + rest == textwrap.dedent(message).strip("\n")


@pytest.fixture
def other(mesh):
    """The same devices under the same names, 2x4."""
    return spmd.Mesh(mesh.devices.reshape(2, 4), ("data", "model"))


@pytest.fixture
def half(mesh):
    """A mesh of the first four devices."""
    return spmd.Mesh(mesh.devices.flat[:4], ("data",))


def put(value, mesh, *spec):
    """An array that is committed to a mesh."""
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


# Layout


def test_layout_of_a_failure():
    """A failure prints its rows in the order of the house style, aligned, empty ones left out."""
    failure = Failure(what="failed", fix="one\ntwo", given="g", got="o")
    assert str(explain("pjit of `f`", [failure])) == (
        "pjit of `f` failed.\n  given     g\n  got       o\n  fix       one\n            two"
    )


def test_first_failure_decides_the_class():
    """Several failures are one exception of the first one's class."""
    failures = [Failure(what="a", error=spmd.MeshError), Failure(what="b")]
    error = explain("f", failures)
    assert type(error) is spmd.MeshError
    assert str(error) == "f a.\nf b."


def test_a_thousand_failures_are_not_printed():
    """Twenty failures are told in full, the others are counted."""
    told_21 = str(explain("f", [Failure(what=f"is {i}") for i in range(21)])).splitlines()
    assert told_21[19:] == ["f is 19.", "f has 1 more such failure."]
    assert str(explain("f", [Failure(what="x")] * 1000)).endswith("\nf has 980 more such failures.")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("modl", " (did you mean 'model'?)"), ("zzz", ""), (3, "")],
)
def test_did_you_mean(name, expected):
    """Only a near miss gets a proposal."""
    assert did_you_mean(name, ("data", "model")) == expected


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (spmd.ShardingError, ValueError),
        (spmd.RecoveryError, ValueError),
        (spmd.OptionError, ValueError),
        (spmd.MeshError, RuntimeError),
        (spmd.DonatedArrayError, RuntimeError),
        (spmd.SpecTypeError, TypeError),
        (spmd.ArgumentError, TypeError),
    ],
)
def test_classes(error, base):
    """Every class is an SpmdError, the builtin that a caller catches, and shown as spmd's own."""
    assert issubclass(error, spmd.SpmdError)
    assert issubclass(error, base)
    assert error.__module__ == "spmd"


# No mesh

NO_MESH = """
    pjit of `step` needs a mesh, and there is none here.
      expected  a mesh that is active where the function is called
      fix       with spmd.make_mesh({"data": jax.device_count()}): ...
                or pjit(..., mesh=mesh), or a NamedSharding for every argument
    """


@pytest.mark.parametrize("specs", [{"in_axis_resources": P("data")}, {}], ids=["spec", "nothing"])
@pytest.mark.parametrize("stop", ["__call__", "lower", "trace", "eval_shape"])
def test_no_mesh(specs, stop):
    """A call, and every stop on its way, says that it needs a mesh and how to make one."""
    told(lambda: getattr(pjit(step, **specs), stop)(X), spmd.MeshError, NO_MESH)


def test_no_mesh_after_a_call_that_had_one(mesh):
    """What worked inside of `with mesh:` does not go on working outside of it."""
    f = pjit(step, P("data"))
    with mesh:
        f(X)
        f(X)
    told(lambda: f(X), spmd.MeshError, NO_MESH)


def test_no_mesh_for_a_constraint():
    """A constraint without a mesh says so, with the remedies that it has."""
    told(
        lambda: with_sharding_constraint(X, P("data")),
        spmd.MeshError,
        """
        with_sharding_constraint needs a mesh, and there is none here.
          expected  a mesh that is active where the function is called
          fix       with spmd.make_mesh({"data": jax.device_count()}): ...
                    or a NamedSharding instead of the PartitionSpec
        """,
    )


# Unknown axis


def test_unknown_axis(in_mesh):
    """An axis that the mesh does not have is named with the argument's path and a proposal."""
    told(
        lambda: pjit(step, ({"x": P("dta")},))({"x": X}),
        spmd.ShardingError,
        """
        pjit of `step` cannot split argument batch['x'].
          given     in_axis_resources[0]['x'] = P('dta') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'dta' (did you mean 'data'?)
          fix       use an axis of the mesh, or enter the mesh that has it
        """,
    )


def test_unknown_axis_of_a_result(in_mesh):
    """The same for a result, which has a path too."""
    told(
        lambda: pjit(step, out_axis_resources={"x": P(None, "zzz")})({"x": X}),
        spmd.ShardingError,
        """
        pjit of `step` cannot split result['x'].
          given     out_axis_resources['x'] = P(None, 'zzz') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'zzz'
          fix       use an axis of the mesh, or enter the mesh that has it
        """,
    )


def test_unknown_axis_of_a_constraint(in_mesh):
    """The same for a constraint, eager and inside of a trace."""
    message = """
        with_sharding_constraint cannot split argument x['h'].
          given     axis_resources = P('modle') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'modle' (did you mean 'model'?)
          fix       use an axis of the mesh, or enter the mesh that has it
        """

    def constrain(v):
        return with_sharding_constraint({"h": v}, P("modle"))

    told(lambda: constrain(X), spmd.ShardingError, message)
    told(lambda: jax.jit(constrain)(X), spmd.ShardingError, message)


def test_several_bad_leaves_are_one_error(in_mesh):
    """All bad leaves of a call come at once, good ones are not mentioned, each in its own block."""
    told(
        lambda: pjit(step, ({"a": P("data"), "b": P("dta"), "c": P(None, None, None)},))(
            {"a": X, "b": X, "c": X}
        ),
        spmd.ShardingError,
        """
        pjit of `step` cannot split argument batch['b'].
          given     in_axis_resources[0]['b'] = P('dta') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'dta' (did you mean 'data'?)
          fix       use an axis of the mesh, or enter the mesh that has it
        pjit of `step` cannot split argument batch['c'].
          given     in_axis_resources[0]['c'] = P(None, None, None) on mesh data=4, model=2
          expected  a spec of at most 2 entries
          got       f32[8,4], which has rank 2; the spec has 3 entries
          fix       shorten the spec to 2 entries
        """,
    )


def test_aliases_are_named_as_given(in_mesh):
    """A message names the option that the user wrote, not its alias."""
    told(
        lambda: pjit(add, in_shardings=(None, P("x")))(X, y=X),
        spmd.ShardingError,
        """
        pjit of `add` cannot split argument y.
          given     in_shardings[1] = P('x') on mesh data=4, model=2
          expected  mesh axes out of 'data', 'model'
          got       unknown axis 'x'
          fix       use an axis of the mesh, or enter the mesh that has it
        """,
    )


# An axis twice


def test_axis_twice():
    """At decoration, without a mesh: one axis cannot split two dimensions."""
    told(
        lambda: pjit(step, ({"x": P("data", "data")},)),
        spmd.ShardingError,
        """
        pjit of `step` uses mesh axis 'data' twice in in_axis_resources[0]['x'].
          given     P('data', 'data')
          expected  every mesh axis to split at most one dimension
          fix       keep 'data' in one place
        """,
    )


def test_axes_twice_in_several_leaves():
    """Repetitions inside of tuples count, several axes are listed, all leaves are told."""
    told(
        lambda: pjit(
            step,
            None,
            {"x": P(("data", "model"), "data"), "y": P("a", "b"), "z": P("a", "b", ("b", "a"))},
        ),
        spmd.ShardingError,
        """
        pjit of `step` uses mesh axis 'data' twice in out_axis_resources['x'].
          given     P(('data', 'model'), 'data')
          expected  every mesh axis to split at most one dimension
          fix       keep 'data' in one place
        pjit of `step` uses mesh axes 'a', 'b' twice in out_axis_resources['z'].
          given     P('a', 'b', ('b', 'a'))
          expected  every mesh axis to split at most one dimension
          fix       keep each in one place
        """,
    )


def test_axis_twice_in_a_constraint():
    """A constraint refuses it likewise."""
    told(
        lambda: with_sharding_constraint(X, P("data", "data")),
        spmd.ShardingError,
        """
        with_sharding_constraint uses mesh axis 'data' twice in axis_resources.
          given     P('data', 'data')
          expected  every mesh axis to split at most one dimension
          fix       keep 'data' in one place
        """,
    )


# Longer than the rank


@pytest.mark.parametrize(
    ("spec", "shown"),
    [(P(None, None), "P(None, None)"), (P("data", "model"), "P('data', 'model')")],
    ids=["None", "axes"],
)
def test_spec_longer_than_the_rank(in_mesh, spec, shown):
    """A spec with more entries than dimensions is refused, of Nones too."""
    told(
        lambda: pjit(step, spec)(X[:, 0]),
        spmd.ShardingError,
        f"""
        pjit of `step` cannot split argument batch.
          given     in_axis_resources = {shown} on mesh data=4, model=2
          expected  a spec of at most 1 entry
          got       f32[8], which has rank 1; the spec has 2 entries
          fix       shorten the spec to 1 entry
        """,
    )


def test_spec_longer_than_a_scalar(in_mesh):
    """A scalar has no dimension to split, and the fix for it is P()."""
    told(
        lambda: pjit(step, P(None))({"lr": np.float32(1)}),
        spmd.ShardingError,
        """
        pjit of `step` cannot split argument batch['lr'].
          given     in_axis_resources = P(None) on mesh data=4, model=2
          expected  a spec of at most 0 entries
          got       f32[], which has rank 0; the spec has 1 entry
          fix       write P()
        """,
    )


def test_spec_longer_than_a_result(in_mesh):
    """The rank of a result is known after the trace, and checked then."""
    told(
        lambda: pjit(lambda x: (x, x.sum(0)), None, P(None, "model"))(X),
        spmd.ShardingError,
        """
        pjit of `<lambda>` cannot split result[1].
          given     out_axis_resources = P(None, 'model') on mesh data=4, model=2
          expected  a spec of at most 1 entry
          got       f32[4], which has rank 1; the spec has 2 entries
          fix       shorten the spec to 1 entry
        """,
    )


# A dimension that does not divide


def test_indivisible_argument(in_mesh):
    """Dimension, factor, size and padded size are told."""
    told(
        lambda: pjit(step, ({"x": P("data", None)},))({"x": np.ones((30, 512), np.float32)}),
        spmd.ShardingError,
        """
        pjit of `step` cannot split argument batch['x'].
          given     in_axis_resources[0]['x'] = P('data', None) on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4
          got       f32[30,512]: 30 = 7*4 + 2
          fix       pad dimension 0 to 32, or leave it unsharded with P(None, None)
        """,
    )


def test_indivisible_by_two_axes(in_mesh):
    """The factor of an entry with two axes is their product."""
    told(
        lambda: pjit(add, (None, P(None, ("model", "data"))))(X, np.ones((8, 12), np.int32)),
        spmd.ShardingError,
        """
        pjit of `add` cannot split argument y.
          given     in_axis_resources[1] = P(None, ('model', 'data')) on mesh data=4, model=2
          expected  dimension 1 to be divisible by 8
          got       i32[8,12]: 12 = 1*8 + 4
          fix       pad dimension 1 to 16, or leave it unsharded with P(None, None)
        """,
    )


def test_indivisible_in_two_dimensions(in_mesh):
    """Both dimensions of one argument are told, and the fix keeps the rest of the spec."""
    told(
        lambda: pjit(step, P("data", "model"))(np.ones((3, 5), np.float32)),
        spmd.ShardingError,
        """
        pjit of `step` cannot split argument batch.
          given     in_axis_resources = P('data', 'model') on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4; dimension 1 to be divisible by 2
          got       f32[3,5]: 3 = 0*4 + 3 in dimension 0; 5 = 2*2 + 1 in dimension 1
          fix       pad dimension 0 to 4, or leave it unsharded with P(None, 'model')
        """,
    )


def test_indivisible_result(in_mesh):
    """A result at the boundary divides evenly too."""
    told(
        lambda: pjit(lambda x: {"s": x[:3]}, None, P("data"))(X),
        spmd.ShardingError,
        """
        pjit of `<lambda>` cannot split result['s'].
          given     out_axis_resources = P('data') on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4
          got       f32[3,4]: 3 = 0*4 + 3
          fix       pad dimension 0 to 4, or leave it unsharded with P(None)
        """,
    )


def test_indivisible_local_argument(in_mesh):
    """Under local semantics the message says that the size is that of the local part."""
    told(
        lambda: pjit(step, P("data"), positional_semantics="local")(X[:6]),
        spmd.ShardingError,
        """
        pjit of `step` cannot split local argument batch.
          given     in_axis_resources = P('data') on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4
          got       f32[6,4]: 6 = 1*4 + 2
          fix       pad dimension 0 to 8, or leave it unsharded with P(None)
        """,
    )


def test_indivisible_eager_constraint(in_mesh):
    """An eager constraint places the array, so there the boundary's rule holds."""
    told(
        lambda: with_sharding_constraint({"a": np.ones((30, 2), np.float32)}, P("data")),
        spmd.ShardingError,
        """
        with_sharding_constraint cannot split argument x['a'].
          given     axis_resources = P('data') on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4
          got       f32[30,2]: 30 = 7*4 + 2
          fix       pad dimension 0 to 32, or leave it unsharded with P(None)
        """,
    )


def test_indivisible_mapped_dimension(in_mesh):
    """What spmd_axis_name made of a spec is shown as that, beside what the user wrote."""
    message = """
        pjit of `step` cannot split argument batch.
          given     in_axis_resources = P(None, 'model'), which vmap made P('data', None, 'model') on mesh data=4, model=2
          expected  dimension 0 to be divisible by 4
          got       f32[3,8,4]: 3 = 0*4 + 3
          fix       pad dimension 0 to 4, or leave it unsharded with P(None, None, 'model')
        """
    f = jax.vmap(pjit(step, P(None, "model")), spmd_axis_name="data")
    told(lambda: f(np.ones((3, 8, 4), np.float32)), spmd.ShardingError, message)


# A leaf that is no spec


@pytest.mark.parametrize(
    ("leaf", "given", "got", "fix"),
    [
        ("data", "'data'", "str", "write P('data')"),
        ("AUTO", "'AUTO'", "str", "write spmd.AUTO, without quotes"),
        (3, "3", "int", "wrap the mesh axes: P('data', None)"),
        (
            P.UNCONSTRAINED,
            "UNCONSTRAINED",
            "UnconstrainedSingleton",
            "write P(P.UNCONSTRAINED), with one entry per dimension",
        ),
    ],
    ids=["str", "marker", "int", "unconstrained"],
)
def test_leaf_is_no_spec(leaf, given, got, fix):
    """A leaf that is no spec is refused at decoration, without a mesh, with what to write."""
    told(
        lambda: pjit(step, ({"x": P("data"), "y": leaf},)),
        spmd.SpecTypeError,
        f"""
        pjit of `step` cannot read in_axis_resources[0]['y'].
          given     {given}
          expected  a PartitionSpec, None, a sharding, AUTO, or FROM_ARRAY for an input
          got       {got}
          fix       {fix}
        """,
    )


def test_leaves_are_no_specs():
    """A tuple of axis names in place of a spec names every one of them."""
    told(
        lambda: pjit(step, None, ("data", "model")),
        spmd.SpecTypeError,
        """
        pjit of `step` cannot read out_axis_resources[0].
          given     'data'
          expected  a PartitionSpec, None, a sharding, AUTO, or FROM_ARRAY for an input
          got       str
          fix       write P('data')
        pjit of `step` cannot read out_axis_resources[1].
          given     'model'
          expected  a PartitionSpec, None, a sharding, AUTO, or FROM_ARRAY for an input
          got       str
          fix       write P('model')
        """,
    )


def test_mesh_is_no_spec(mesh):
    """A mesh in place of a spec gets its own advice."""
    with pytest.raises(spmd.SpecTypeError, match=r"fix       pass it as mesh=\.\.\., or enter it"):
        pjit(step, mesh)


def test_sharding_on_other_devices(in_mesh):
    """A sharding without a mesh has to be on the devices of the call, in their order."""
    single = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    told(
        lambda: pjit(step, ({"w": single},))({"w": X}),
        spmd.MeshError,
        """
        pjit of `step` cannot place argument batch['w']: its sharding and the mesh have other devices.
          given     in_axis_resources[0]['w'] = SingleDeviceSharding on device cpu:3
          expected  8 devices cpu:0..7, in the order of mesh data=4, model=2
          fix       write a PartitionSpec, or a NamedSharding on this mesh
        """,
    )


def test_unconstrained_input():
    """P.UNCONSTRAINED belongs in constraints and outputs."""
    told(
        lambda: pjit(step, (P("data", P.UNCONSTRAINED),)),
        spmd.ShardingError,
        """
        pjit of `step` cannot leave a dimension of in_axis_resources[0] unconstrained.
          given     P('data', P.UNCONSTRAINED)
          expected  mesh axes or None: the layout of an input is decided before the call
          fix       use P.UNCONSTRAINED in with_sharding_constraint or out_axis_resources
        """,
    )


def test_unreduced_axes():
    """An axis over which sums are outstanding is no partition, and is not dropped silently."""
    with pytest.raises(ValueError, match="cannot use unreduced axes in in_axis_resources") as e:
        pjit(step, P("data", unreduced={"model"}))
    assert type(e.value) is spmd.ShardingError


# Not a pytree prefix


def test_keys_differ(in_mesh):
    """Dicts with other keys: the path, both sets of keys and the difference are told."""
    told(
        lambda: pjit(step, ({"p": {"w": P(), "z": P()}},))({"p": {"w": X, "b": X}}),
        spmd.ShardingError,
        """
        pjit of `step` cannot match in_axis_resources[0]['p'] with batch['p']: the keys differ.
          given     in_axis_resources[0]['p'] has keys 'w', 'z'
          expected  keys 'b', 'w'
          got       no spec for 'b'; 'z' with no value
          fix       give one spec per key, or one spec for the whole dict
        """,
    )


def test_structure_below_a_leaf(in_mesh):
    """Specs may stop above the values, not below them."""
    told(
        lambda: pjit(step, ({"x": (P(), P())},))({"x": X}),
        spmd.ShardingError,
        """
        pjit of `step` cannot match in_axis_resources[0]['x'] with batch['x']: it is not a pytree prefix.
          given     in_axis_resources[0]['x'] is a tuple of 2 elements
          expected  the structure of batch['x'], or one spec for all of it
          got       batch['x'] is one leaf
          fix       give one spec per leaf, or one spec for a whole subtree
        """,
    )


def test_structure_in_another_container(in_mesh):
    """Specs in a list for a tuple are told what they have to be."""
    told(
        lambda: pjit(step, ([P(), P()],))((X, X)),
        spmd.ShardingError,
        """
        pjit of `step` cannot match in_axis_resources[0] with batch: it is not a pytree prefix.
          given     in_axis_resources[0] is a list of 2 elements
          expected  the structure of batch, or one spec for all of it
          got       batch is a tuple of 2 elements
          fix       write in_axis_resources[0] as a tuple of specs, or give one spec for all of batch
        """,
    )


@pytest.mark.parametrize("specs", [(P(), P()), [P(), P()]], ids=["tuple", "list"])
def test_tuple_for_one_tuple_argument(in_mesh, specs):
    """Specs of the one tuple argument itself need a tuple around them: the classic mistake."""
    told(
        lambda: pjit(step, specs)((X, X)),
        spmd.ShardingError,
        """
        pjit of `step` cannot match in_axis_resources with the arguments: it is not a pytree prefix.
          given     in_axis_resources has 2 entries
          expected  one entry per argument: batch
          got       1 argument
          fix       write (spec,) around what is meant for the one argument
        """,
    )


def test_dict_for_one_dict_argument(in_mesh):
    """A dict whose keys are no parameters gets the same hint."""
    told(
        lambda: pjit(step, {"x": P()})({"x": X}),
        spmd.ShardingError,
        """
        pjit of `step` cannot match in_axis_resources with the arguments: it is not a pytree prefix.
          given     in_axis_resources is a dict with keys 'x'
          expected  one entry per argument: batch
          got       1 argument
          fix       write (spec,) around it, or a dict of entries by name
        """,
    )


@pytest.mark.parametrize(
    ("specs", "entries"), [((P(),), "1 entry"), ((P(),) * 3, "3 entries")], ids=["few", "many"]
)
def test_wrong_number_of_entries(in_mesh, specs, entries):
    """Too few and too many entries for the arguments."""
    told(
        lambda: pjit(add, specs)(X, X),
        spmd.ShardingError,
        f"""
        pjit of `add` cannot match in_axis_resources with the arguments: it is not a pytree prefix.
          given     in_axis_resources has {entries}
          expected  one entry per argument: x, y
          got       2 arguments
          fix       give one entry per argument that is not static, or one spec for all of them
        """,
    )


@pytest.mark.parametrize("specs", [None, (P(), P())], ids=["without", "with"])
def test_one_argument_too_many(in_mesh, specs):
    """More arguments than parameters are told as such, not as a mismatch of specs."""
    told(
        lambda: pjit(add, specs)(X, X, X),
        spmd.ArgumentError,
        """
        pjit of `add` cannot be called like this.
          expected  arguments for the parameters (x, y)
          got       too many positional arguments: 3
        """,
    )


def test_a_method_under_pjit(in_mesh):
    """`@pjit` on a method gets the object as an array: three ways out are told."""

    class Model:
        @pjit
        def step(self, x):
            return x

        def __repr__(self):
            return "Model()"

    told(
        lambda: Model().step(X),
        spmd.ArgumentError,
        """
        pjit of `step` cannot take argument self: it is no array, but the object of a method.
          expected  arrays, numbers, and containers of them
          got       Model: Model()
          fix       take it off the class and apply it to obj.step, which closes over the object;
                    or declare self static with static_argnames, where the object has a hash;
                    or register its class as a pytree
        """,
    )


def test_an_unconstrained_input_by_either_name():
    """The option for results has the style of the option that was given."""
    for name, other in (
        ("in_axis_resources", "out_axis_resources"),
        ("in_shardings", "out_shardings"),
    ):
        with pytest.raises(spmd.ShardingError, match=f"with_sharding_constraint or {other}$"):
            pjit(step, **{name: P(P.UNCONSTRAINED)})


def test_output_is_no_prefix(in_mesh):
    """Results are matched like arguments."""
    told(
        lambda: pjit(add, None, (P(), P()))(X, X),
        spmd.ShardingError,
        """
        pjit of `add` cannot match out_axis_resources with result: it is not a pytree prefix.
          given     out_axis_resources is a tuple of 2 elements
          expected  the structure of result, or one spec for all of it
          got       result is one leaf
          fix       give one spec per leaf, or one spec for a whole subtree
        """,
    )


def test_constraint_is_no_prefix(in_mesh):
    """A constraint's specs are a prefix of its value."""
    told(
        lambda: with_sharding_constraint([{"a": X}], [{"b": P()}]),
        spmd.ShardingError,
        """
        with_sharding_constraint cannot match axis_resources[0] with x[0]: the keys differ.
          given     axis_resources[0] has keys 'b'
          expected  keys 'a'
          got       no spec for 'a'; 'b' with no value
          fix       give one spec per key, or one spec for the whole dict
        """,
    )


# The function and its options


@pytest.mark.parametrize("fun", [3, None, "f"], ids=repr)
def test_not_callable(fun):
    """What is no function is shown, with both ways to use pjit."""
    told(
        lambda: pjit(fun),
        spmd.ArgumentError,
        f"""
        pjit needs a function.
          given     {fun!r}
          expected  something callable
          got       {type(fun).__name__}
          fix       pjit(fun, in_axis_resources=...), or @pjit(in_axis_resources=...) above a def
        """,
    )


def test_decorator_of_no_function():
    """The decorator form refuses it too."""
    with pytest.raises(TypeError, match=r"^pjit needs a function\."):
        pjit(in_axis_resources=P())(3)


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
@pytest.mark.parametrize(("nums", "bad"), [(2, "2"), ((0, 5, -3), "5, -3")], ids=["one", "some"])
def test_argnum_out_of_range(option, nums, bad):
    """A position that the function does not have is refused at decoration."""
    told(
        lambda: pjit(add, **{option: nums}),
        spmd.OptionError,
        f"""
        pjit of `add` has no argument {bad}.
          given     {option}={nums}
          expected  positions from -2 to 1
          got       2 positional arguments: x, y
        """,
    )


def test_argnum_out_of_range_of_a_call(in_mesh):
    """With *args the range is known at the call."""
    told(
        lambda: pjit(lambda *xs: xs[0], static_argnums=3)(X),
        spmd.OptionError,
        """
        pjit of `<lambda>` has no argument 3.
          given     static_argnums=3
          got       a call with 1 positional argument
        """,
    )


@pytest.mark.parametrize("option", ["static_argnames", "donate_argnames"])
def test_unknown_argname(option):
    """A name that the function does not have gets a proposal."""
    told(
        lambda: pjit(step, **{option: "bach"}),
        spmd.OptionError,
        f"""
        pjit of `step` has no argument 'bach' (did you mean 'batch'?).
          given     {option}='bach'
          expected  names out of batch
        """,
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("static_argnums", 1.0, "an int or a sequence of ints"),
        ("donate_argnums", "x", "an int or a sequence of ints"),
        ("static_argnames", 1, "a str or a sequence of strs"),
        ("donate_argnames", (1,), "a str or a sequence of strs"),
    ],
)
def test_option_of_another_type(option, value, expected):
    """Numbers are numbers, names are names."""
    told(
        lambda: pjit(add, **{option: value}),
        spmd.ArgumentError,
        f"""
        pjit of `add` cannot read {option}.
          given     {option}={value!r}
          expected  {expected}
          got       {type(value).__name__}
        """,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1, "donate_argnums": 1},
        {"static_argnames": "y", "donate_argnums": -1},
        {"static_argnums": (0, 1), "donate_argnames": ("y",)},
    ],
    ids=["nums", "name and num", "num and name"],
)
def test_static_and_donated(options):
    """An argument is static or donated, however it is named."""
    told(
        lambda: pjit(add, **options),
        spmd.OptionError,
        """
        pjit of `add` cannot both donate argument y and treat it as static.
          expected  an argument to be static (a Python value) or donated (a buffer), not both
          fix       drop it from one of the two options
        """,
    )


def scaled(x, n):
    """A function with a static argument."""
    return x * n[0]


@pytest.mark.parametrize("option", [{"static_argnums": 1}, {"static_argnames": "n"}], ids=str)
def test_unhashable_static(in_mesh, option):
    """A static argument that cannot be hashed is named, at the first and at later calls."""
    message = """
        pjit of `scaled` cannot hash static argument n.
          expected  a value with __hash__ and __eq__: it is part of the key of the compile cache
          got       list: [2]
          fix       pass something hashable such as a tuple, or do not declare it static
        """
    f = pjit(scaled, **option)
    told(lambda: f(X, [2]), spmd.ArgumentError, message)
    for _ in range(2):
        np.testing.assert_array_equal(f(X, (2,)), 2 * X)
        told(lambda: f(X, n=[2]), spmd.ArgumentError, message)
        told(lambda: f(X, [2]), spmd.ArgumentError, message)


@pytest.mark.parametrize("side", ["in", "out"])
@pytest.mark.parametrize("value", [P("data"), None], ids=str)
def test_both_aliases(side, value):
    """Two names of one option are not both given, None included: it is a spec."""
    names = [f"{side}_axis_resources", f"{side}_shardings"]
    told(
        lambda: pjit(step, **dict.fromkeys(names, value)),
        spmd.OptionError,
        f"""
        pjit of `step` got both {names[0]} and {names[1]}: they are two names of one option.
          fix       keep {names[0]}
        """,
    )


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("implicit_reshard", "maybe", "'allow', 'warn' or 'error'"),
        ("implicit_reshard", False, "'allow', 'warn' or 'error'"),
        ("positional_semantics", "locl", "'global' or 'local'"),
    ],
)
def test_option_out_of_range(option, value, expected):
    """An option with a few values lists them."""
    told(
        lambda: pjit(step, **{option: value}),
        spmd.OptionError,
        f"""
        pjit of `step` cannot read {option}.
          expected  {expected}
          got       {value!r}
        """,
    )


def test_mesh_option_is_no_mesh():
    """`mesh=` takes a mesh."""
    told(
        lambda: pjit(step, mesh="data"),
        spmd.ArgumentError,
        """
        pjit of `step` cannot use this mesh.
          given     mesh='data'
          expected  a spmd.Mesh, a jax.sharding.Mesh or an AbstractMesh
          got       str
        """,
    )


def test_keyword_call_that_does_not_fit(in_mesh):
    """A call that misses a parameter names the function."""
    told(
        lambda: pjit(add)(x=X),
        spmd.ArgumentError,
        """
        pjit of `add` cannot be called like this.
          expected  arguments for the parameters (x, y)
          got       missing a required argument: 'y'
        """,
    )


# Arguments that are no arrays


def test_no_arrays(in_mesh):
    """Every argument that is no array is named by its path."""
    told(
        lambda: pjit(step)({"x": "text", "y": X, "z": [step.__class__]}),
        spmd.ArgumentError,
        """
        pjit of `step` cannot take argument batch['x']: it is no array.
          expected  arrays, numbers, and containers of them
          got       str: 'text'
          fix       declare it static with static_argnames, or convert it with jnp.asarray
        pjit of `step` cannot take argument batch['z'][0]: it is no array.
          expected  arrays, numbers, and containers of them
          got       type: <class 'function'>
          fix       declare it static with static_argnames, or convert it with jnp.asarray
        """,
    )


def test_function_in_a_module(in_mesh):
    """A function that an argument holds, as the activation of a module, is none of its arrays."""
    told(
        lambda: pjit(step)({"x": X, "y": X, "z": [abs]}),
        spmd.ArgumentError,
        """
        pjit of `step` cannot take argument batch['z'][0]: it is no array.
          expected  arrays, numbers, and containers of them
          got       builtin_function_or_method: <built-in function abs>
          fix       pass the arrays alone, with Equinox those of eqx.partition(module, eqx.is_array),
                    and eqx.combine them with the rest inside; or declare its argument static with static_argnames
        """,
    )


def test_array_of_objects(in_mesh):
    """A NumPy array of what JAX has no dtype for is called an array."""
    told(
        lambda: pjit(step)({"x": np.array([None])}),
        spmd.ArgumentError,
        """
        pjit of `step` cannot take argument batch['x']: JAX has no dtype for it.
          expected  an array of numbers or booleans
          got       an array of dtype object
          fix       convert it with astype, or declare it static with static_argnames
        """,
    )


@pytest.mark.parametrize("value", [np.datetime64("2020-01-01"), np.void(b"abc"), np.bytes_(b"a")])
def test_scalar_of_what_jax_has_no_dtype_for(in_mesh, value):
    """JAX gives such scalars of NumPy an abstract value, and the function would be traced."""
    told(
        lambda: pjit(add)(X, value),
        spmd.ArgumentError,
        f"""
        pjit of `add` cannot take argument y: JAX has no dtype for it.
          expected  an array of numbers or booleans
          got       an array of dtype {value.dtype}
          fix       convert it with astype, or declare it static with static_argnames
        """,
    )


def test_number_that_is_too_large(in_mesh):
    """A Python int that 32 bits cannot hold is called a number."""
    told(
        lambda: pjit(add)(X, 2**40),
        spmd.ArgumentError,
        """
        pjit of `add` cannot take argument y: the number is too large.
          expected  a number that fits into int32
          got       int: 1099511627776
          fix       pass a float, or enable jax_enable_x64
        """,
    )


def test_constraint_of_no_array(in_mesh):
    """A constraint names what is no array likewise."""
    told(
        lambda: with_sharding_constraint({"a": "s"}, P()),
        spmd.ArgumentError,
        """
        with_sharding_constraint cannot constrain x['a']: it is no array.
          expected  arrays and numbers
          got       str: 's'
        """,
    )


# Meshes that do not agree


def test_leaves_on_different_meshes(mesh, other, half):
    """NamedShardings on different meshes are all named, at decoration."""
    told(
        lambda: pjit(
            add, (NamedSharding(mesh, P()), NamedSharding(other, P())), NamedSharding(half, P())
        ),
        spmd.MeshError,
        """
        pjit of `add` got shardings on different meshes.
          given     in_axis_resources[0] on mesh data=4, model=2, 8 devices cpu:0..7
                    in_axis_resources[1] on mesh data=2, model=4, 8 devices cpu:0..7
                    out_axis_resources on mesh data=4, 4 devices cpu:0..3
          expected  one mesh for all of them
          fix       build all NamedShardings from the same mesh
        """,
    )


def test_constraint_on_different_meshes(mesh, other):
    """The leaves of one constraint agree too."""
    specs = (NamedSharding(mesh, P()), NamedSharding(other, P()))
    with pytest.raises(RuntimeError, match=r"^with_sharding_constraint got shardings on different"):
        with_sharding_constraint((X, X), specs)


def test_leaf_on_another_mesh_than_the_context(mesh, other):
    """A NamedSharding that is on another mesh than the active one is named."""
    f = pjit(add, (None, NamedSharding(other, P("data"))))
    message = """
        pjit of `add` cannot use in_axis_resources[1]: it is on another mesh.
          given     NamedSharding(P('data')) on mesh data=2, model=4
          expected  mesh data=4, model=2, from the context
          fix       use PartitionSpecs, or build the NamedShardings from this mesh
        """
    with mesh:
        told(lambda: f(X, X), spmd.MeshError, message)


def test_leaf_on_another_mesh_than_the_option(mesh, other):
    """The same for `mesh=`, at decoration."""
    told(
        lambda: pjit(add, None, {"z": NamedSharding(other, P("data"))}, mesh=mesh),
        spmd.MeshError,
        """
        pjit of `add` cannot use out_axis_resources['z']: it is on another mesh.
          given     NamedSharding(P('data')) on mesh data=2, model=4
          expected  mesh data=4, model=2, from the option mesh
          fix       use PartitionSpecs, or build the NamedShardings from this mesh
        """,
    )


NESTED = """
    pjit of `step` cannot change the mesh inside of pjit of `outer`.
      given     mesh data=2, model=4, used at LINE
      expected  the mesh of the outer function: mesh data=4, model=2
      fix       call it outside, or enter one mesh around both
    """


def test_nested_pjit_under_another_mesh(mesh, other):
    """A mesh that is entered inside of a pjit function is refused with the inner call's line."""

    def outer(x):
        with other:
            return pjit(step, P("data"))(x)  # nested with

    with mesh:
        told_where(
            lambda: pjit(outer)(X),
            spmd.MeshError,
            NESTED,
            mark="nested with",
            function="outer",
        )


def test_nested_pjit_with_another_mesh_option(mesh, other):
    """So is `mesh=` of the inner function."""
    inner = pjit(step, P("data"), mesh=other)

    def outer(x):
        return inner(x)  # nested option

    told_where(
        lambda: pjit(outer, P("data"), mesh=mesh)(X),
        spmd.MeshError,
        NESTED,
        mark="nested option",
        function="outer",
    )


def test_the_innermost_of_several_functions_is_named(mesh, other):
    """Where functions nest, the message names the one around the call, not the outermost."""
    inner = pjit(step, P("data"), mesh=other)

    def outer(x):
        return inner(x)  # nested twice

    told_where(
        lambda: pjit(lambda x: pjit(outer, P("data"))(x), P("data"), mesh=mesh)(X),
        spmd.MeshError,
        NESTED,
        mark="nested twice",
        function="outer",
    )


def test_nested_pjit_with_shardings_on_another_mesh(mesh, other):
    """So is a NamedSharding of the inner function."""
    inner = pjit(step, NamedSharding(other, P("data")))

    def outer(x):
        return inner(x)  # nested sharding

    with mesh:
        told_where(
            lambda: pjit(outer, P("data"))(X),
            spmd.MeshError,
            NESTED,
            mark="nested sharding",
            function="outer",
        )


def test_nested_pjit_that_ran_before(mesh, other):
    """An inner function that has run under its own mesh before is refused all the same."""
    inner = pjit(step, P("data"), mesh=other)
    inner(X)
    jitted = jax.jit(inner)
    jitted(X)

    def outer(x):
        return jitted(x)  # nested jit

    with mesh:
        told_where(
            lambda: pjit(outer)(X),
            spmd.MeshError,
            NESTED,
            mark="nested jit",
            function="outer",
        )


def test_nested_constraint_on_another_mesh(mesh, other):
    """A constraint on another mesh is refused with its line."""

    def outer(x):
        return with_sharding_constraint(x, NamedSharding(other, P("data")))  # nested constraint

    with mesh:
        told_where(
            lambda: pjit(outer)(X),
            spmd.MeshError,
            """
            with_sharding_constraint cannot change the mesh inside of pjit of `outer`.
              given     mesh data=2, model=4, used at LINE
              expected  the mesh of the outer function: mesh data=4, model=2
              fix       call it outside, or enter one mesh around both
            """,
            mark="nested constraint",
            function="outer",
        )


def test_ambiguous_contexts(mesh):
    """JAX's two contexts that differ are an error with three ways out; each way works."""
    a = jax.sharding.Mesh(mesh.devices.reshape(-1), ("a",))
    b = jax.sharding.Mesh(mesh.devices, ("a", "b"))
    message = """
        Mesh is ambiguous here.
          given     `with mesh:` on mesh a=8 and jax.set_mesh on mesh a=4, b=2
          expected  one mesh: JAX does not record which of the two is inner
          fix       enter one of them only, use `with spmd.Mesh(...)`, or pass pjit(..., mesh=...)
        """
    f, g = pjit(step, P("a")), pjit(step, P("data"), mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        entered = a.__enter__()
    try:
        with jax.set_mesh(b):
            told(lambda: f(X), spmd.MeshError, message)
            told(spmd.current_mesh, spmd.MeshError, message)
            assert g(X).sharding.mesh == mesh
            with spmd.Mesh(a.devices, ("a",)):
                assert f(X).sharding.mesh == a
    finally:
        entered.__exit__(None, None, None)


# make_mesh


@pytest.mark.parametrize(
    ("axes", "given", "expected", "got", "needed"),
    [
        ({"data": 16}, "data=16", "is at most", "16 on 8 devices", 16),
        ({"data": 3, "model": 3}, "data=3, model=3", "is at most", "3*3 = 9 on 8 devices", 9),
        ({"data": -1, "model": 3}, "data=-1, model=3", "divides", "3 on 8 devices", 0),
        ({"a": 4, "b": -1, "c": 4}, "a=4, b=-1, c=4", "divides", "4*4 = 16 on 8 devices", 16),
    ],
)
def test_sizes_that_do_not_fit(axes, given, expected, got, needed):
    """Sizes that the devices do not give are told with their product; too few, with the flag."""
    fix = "choose other sizes, or pass other devices"
    if needed:
        fix = "choose other sizes, or have JAX start on more virtual devices:"
        fix += f"\n                    JAX_NUM_CPU_DEVICES={needed} in the environment,"
        fix += f"\n                    or --devices {needed} for a command of spmd"
    told(
        lambda: spmd.make_mesh(axes),
        spmd.MeshError,
        f"""
        Mesh cannot be built.
          given     {given}
          expected  sizes whose product {expected} the number of devices
          got       {got}
          fix       {fix}
        """,
    )


def test_sizes_that_do_not_fit_the_devices_given():
    """The devices that are passed count, not those that exist: no flag makes them more."""
    with pytest.raises(RuntimeError, match=r"got       4 on 1 device\n.*, or pass other devices$"):
        spmd.make_mesh({"data": 4}, devices=jax.devices()[:1])


@pytest.mark.parametrize("axes", [{}, {"a": 0}, {"a": 2, "b": -2}, {"a": -1, "b": -1}], ids=str)
def test_sizes_that_are_none(axes):
    """No axes, sizes below one and two open sizes cannot be."""
    told(
        lambda: spmd.make_mesh(axes),
        spmd.MeshError,
        f"""
        Mesh cannot be built.
          given     {axes}
          expected  one axis or more of positive sizes, of which one may be -1
        """,
    )


@pytest.mark.parametrize("axes", [{"a": 2.0}, {"a": "2"}, (4, 2)], ids=str)
def test_axes_of_another_type(axes):
    """Axes are a dict of whole numbers."""
    told(
        lambda: spmd.make_mesh(axes),
        spmd.ArgumentError,
        f"""
        Mesh cannot be built.
          given     {axes}
          expected  a dict of sizes by name, such as {{'data': 4, 'model': 2}}
        """,
    )


@pytest.mark.parametrize(
    ("args", "given"),
    [
        (((4, 2), ("data", "model")), "(4, 2), ('data', 'model')"),
        (([4, 2], ["data", "model"]), "[4, 2], ['data', 'model']"),
        (([("data", 4), ("model", 2)],), "[('data', 4), ('model', 2)]"),
        (({"data": 4, "model": 2}, ("x", "y")), "{'data': 4, 'model': 2}, ('x', 'y')"),
    ],
    ids=str,
)
def test_sizes_and_names_as_elsewhere(args, given):
    """What `jax.make_mesh` takes, and pairs, are answered with what to write."""
    told(
        lambda: spmd.make_mesh(*args),
        spmd.ArgumentError,
        f"""
        Mesh cannot be built.
          given     {given}
          expected  a dict of sizes by name, such as {{'data': 4, 'model': 2}}
          fix       spmd.make_mesh({{'data': 4, 'model': 2}})
        """,
    )


def test_axes_of_one_name(mesh):
    """Two axes of one name are refused by Mesh, where JAX fails much later."""
    told(
        lambda: spmd.Mesh(mesh.devices, ("data", "data")),
        spmd.MeshError,
        """
        Mesh cannot be built.
          given     axis_names=('data', 'data')
          expected  a name of its own for each axis
          fix       rename one of them: a PartitionSpec could not tell them apart
        """,
    )


# FROM_ARRAY


def test_from_array_of_host_values(in_mesh):
    """A host array and a number have no sharding to take; an uncommitted array may."""
    told(
        lambda: pjit(step, FROM_ARRAY)({"a": X, "b": 1.0, "c": jnp.ones(3)}),
        spmd.ShardingError,
        """
        pjit of `step` cannot take the sharding of argument batch['a'] from the array.
          given     FROM_ARRAY
          expected  a jax.Array (or struct) with a sharding
          got       a host array
          fix       write a PartitionSpec, or jax.device_put the array first
        pjit of `step` cannot take the sharding of argument batch['b'] from the array.
          given     FROM_ARRAY
          expected  a jax.Array (or struct) with a sharding
          got       a float
          fix       write a PartitionSpec, or jax.device_put the array first
        """,
    )


def test_from_array_of_a_host_array_after_a_good_one(mesh):
    """A host array is refused after arrays with a sharding went through, on every later call."""
    f = pjit(step, FROM_ARRAY)
    with mesh:
        good = put(X, mesh, "data")
        for _ in range(3):
            np.testing.assert_array_equal(f(good), 2 * X)
            with pytest.raises(ValueError, match="got       a host array"):
                f(X)


def test_from_array_of_a_foreign_mesh(mesh, other):
    """An array on another mesh is refused, though its devices are the same; later calls too."""
    message = """
        pjit of `step` cannot take the sharding of argument batch['x'] from an array on another mesh.
          given     FROM_ARRAY
          expected  an array on mesh data=4, model=2
          got       an array on mesh data=2, model=4
          fix       place it on this mesh, or write a PartitionSpec
        """
    f = pjit(step, ({"x": FROM_ARRAY},))
    with mesh:
        for _ in range(2):
            f({"x": put(X, mesh, "data")})
            foreign = {"x": put(X, other, "data")}
            told(lambda foreign=foreign: f(foreign), spmd.ShardingError, message)


@pytest.mark.parametrize("stop", ["lower", "trace"])
def test_from_array_of_a_struct(in_mesh, stop):
    """A struct without a sharding has none to take; with one it has."""
    f = pjit(step, FROM_ARRAY)
    told(
        lambda: getattr(f, stop)(jax.ShapeDtypeStruct((8,), jnp.float32)),
        spmd.ShardingError,
        """
        pjit of `step` cannot take the sharding of argument batch from the array.
          given     FROM_ARRAY
          expected  a jax.Array (or struct) with a sharding
          got       a ShapeDtypeStruct without a sharding
          fix       write a PartitionSpec, or give the struct a sharding
        """,
    )
    good = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(in_mesh, P("data")))
    getattr(f, stop)(good)


def test_from_array_in_an_output():
    """A result does not exist before the call."""
    told(
        lambda: pjit(step, None, {"x": FROM_ARRAY}),
        spmd.ShardingError,
        """
        pjit of `step` cannot take out_axis_resources['x'] from an array.
          given     FROM_ARRAY
          expected  a spec: FROM_ARRAY is for inputs, which exist before the call
          fix       write the PartitionSpec, or leave the option out: the partitioner chooses
        """,
    )


def test_from_array_in_a_constraint(in_mesh):
    """A constraint says where a value goes, not where it is."""
    told(
        lambda: with_sharding_constraint(X, FROM_ARRAY),
        spmd.ShardingError,
        """
        with_sharding_constraint cannot take axis_resources from an array.
          given     FROM_ARRAY
          expected  a spec: FROM_ARRAY is for inputs, which exist before the call
          fix       write the PartitionSpec
        """,
    )


# Devices


@pytest.mark.parametrize("spec", [{"in_axis_resources": P("data")}, {}], ids=["spec", "nothing"])
@pytest.mark.parametrize("stop", ["__call__", "lower"])
def test_committed_to_other_devices(mesh, half, spec, stop):
    """Arrays that are committed to other devices than the mesh has are all named."""
    batch = {"x": put(X, half, "data"), "y": jax.device_put(X, jax.devices()[3]), "z": X}
    with mesh:
        told(
            lambda: getattr(pjit(step, **spec), stop)(batch),
            spmd.MeshError,
            """
            pjit of `step` cannot take argument batch['x'] from other devices.
              given     P('data') on mesh data=4
              expected  8 devices cpu:0..7 of mesh data=4, model=2
              got       4 devices cpu:0..3
              fix       jax.device_put(x, NamedSharding(mesh, spec)), or leave the array uncommitted
            pjit of `step` cannot take argument batch['y'] from other devices.
              given     SingleDeviceSharding on device cpu:3
              expected  8 devices cpu:0..7 of mesh data=4, model=2
              got       device cpu:3
              fix       jax.device_put(x, NamedSharding(mesh, spec)), or leave the array uncommitted
            """,
        )


def test_committed_to_other_devices_after_good_calls(mesh, half):
    """The fast path does not let an array of other devices through either."""
    f = pjit(step, P("data"))
    with mesh:
        good, bad = put(X, mesh, "data"), put(X, half, "data")
        for _ in range(3):
            f(good)
            with pytest.raises(RuntimeError, match=r"got       4 devices cpu:0\.\.3"):
                f(bad)


# Implicit resharding


def test_refused_reshard(mesh):
    """The error names both specs as written, and FROM_ARRAY; what is in place passes."""
    f = pjit(step, ({"x": P("data", None), "y": None, "z": P("data")},), implicit_reshard="error")
    with mesh:
        batch = {
            "x": put(X, mesh, None, "model"),
            "y": put(X, mesh, "data"),
            "z": put(X, mesh, "data"),
        }
        for _ in range(2):
            told(
                lambda: f(batch),
                spmd.ShardingError,
                """
                pjit of `step` has to reshard argument batch['x'].
                  given     in_axis_resources[0]['x'] = P('data', None) on mesh data=4, model=2
                  expected  the argument to be there already
                  got       P(None, 'model') on mesh data=4, model=2
                  fix       place it so before the call, or take what it has with FROM_ARRAY
                pjit of `step` has to reshard argument batch['y'].
                  given     in_axis_resources[0]['y'] = None on mesh data=4, model=2
                  expected  the argument to be there already
                  got       P('data') on mesh data=4, model=2
                  fix       place it so before the call, or take what it has with FROM_ARRAY
                """,
            )
        good = {"x": put(X, mesh, "data"), "y": put(X, mesh), "z": X}
        np.testing.assert_array_equal(f(good)["x"], 2 * X)


def test_refused_reshard_of_a_mapped_argument(mesh):
    """What vmap made of a spec is not shown as the user's."""
    f = jax.vmap(pjit(step, P("model"), implicit_reshard="error"))
    with mesh:
        told(
            lambda: f(put(X, mesh, "data")),
            spmd.ShardingError,
            """
            pjit of `step` has to reshard argument batch.
              given     in_axis_resources = P('model'), which vmap made P(None, 'model') on mesh data=4, model=2
              expected  the argument to be there already
              got       P('data') on mesh data=4, model=2
              fix       place it so before the call, or take what it has with FROM_ARRAY
            """,
        )


def test_environment_refuses(mesh, monkeypatch):
    """SPMD_IMPLICIT_RESHARD governs what pjit leaves open, and pjit's own word wins."""
    bad = put(X, mesh)
    with mesh:
        monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "error")
        with pytest.raises(ValueError, match=r"^pjit of `step` has to reshard argument batch\."):
            pjit(step, P("data"))(bad)
        np.testing.assert_array_equal(pjit(step, P("data"), implicit_reshard="allow")(bad), 2 * X)


def test_environment_out_of_range(mesh, monkeypatch):
    """A word that is no mode is refused with the variable's name."""
    monkeypatch.setenv("SPMD_IMPLICIT_RESHARD", "never")
    with mesh:
        told(
            lambda: pjit(step, P("data"))(put(X, mesh)),
            spmd.OptionError,
            """
            SPMD_IMPLICIT_RESHARD is not a mode of implicit resharding.
              expected  'allow', 'warn' or 'error'
              got       'never'
            """,
        )


def test_warned_reshard(mesh):
    """Under "warn" every call warns, at the user's line, with the same text, and goes on."""
    f = pjit(step, P("data"), implicit_reshard="warn")
    bad = put(X, mesh)
    with mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            np.testing.assert_array_equal(f(bad), 2 * X)
    assert [w.category for w in caught] == [spmd.ImplicitReshardWarning] * 2
    assert {w.filename for w in caught} == {__file__}
    assert str(caught[0].message).startswith("pjit of `step` has to reshard argument batch.\n")


# Donated arrays

GONE = """
    pjit of `{}` cannot use argument batch['x']: its buffers are gone.
      expected  an array that was not donated to an earlier call and not deleted
      fix       use the result of the call that took it, or do not donate it
    """


def twice(batch):
    """Another function than `step`."""
    return {"x": batch["x"] * 3}


def test_donated_array_used_again(mesh):
    """Every later use is one error: by the same function and by another, warm or not."""
    take, look = pjit(step, P("data"), donate_argnums=0), pjit(twice, P("data"))
    with mesh:
        for _ in range(3):  # both dispatchers know arguments of this kind now
            take({"x": put(X, mesh, "data")})
            look({"x": put(X, mesh, "data")})
        state = {"x": put(X, mesh, "data")}
        look(state)
        np.testing.assert_array_equal(take(state)["x"], 2 * X)
        assert state["x"].is_deleted()
        for _ in range(3):
            told(lambda: take(state), spmd.DonatedArrayError, GONE.format("step"))
            told(lambda: look(state), spmd.DonatedArrayError, GONE.format("twice"))
        np.testing.assert_array_equal(look({"x": put(X, mesh, "data")})["x"], 3 * X)


def test_donated_to_a_compiled_function(mesh):
    """An array that a compiled program took is gone for everyone, and the other way round."""
    look = pjit(twice, P("data"))
    with mesh:
        compiled = pjit(step, P("data"), donate_argnums=0).lower({"x": X}).compile()
        for _ in range(3):
            look({"x": put(X, mesh, "data")})
        state = {"x": put(X, mesh, "data")}
        compiled(state)
        for _ in range(3):
            told(lambda: look(state), spmd.DonatedArrayError, GONE.format("twice"))
            told(lambda: compiled(state), spmd.DonatedArrayError, GONE.format("step"))


def test_donated_array_that_had_to_move(mesh):
    """An argument that is donated and resharded on the way is gone as well."""
    take = pjit(step, P("model"), donate_argnums=0)
    with mesh:
        state = {"x": put(X, mesh, "data")}
        np.testing.assert_array_equal(take(state)["x"], 2 * X)
        for _ in range(3):
            told(lambda: take(state), spmd.DonatedArrayError, GONE.format("step"))


def test_deleted_array(mesh):
    """A deleted array is told like a donated one, on the fast path too."""
    f = pjit(step, P("data"))
    with mesh:
        state = {"x": put(X, mesh, "data")}
        f(state)
        f(state)
        state["x"].delete()
        for _ in range(3):
            told(lambda: f(state), spmd.DonatedArrayError, GONE.format("step"))


def test_constraint_of_a_donated_array(mesh):
    """An eager constraint does not hand on an array that is gone."""
    with mesh:
        x = put(X, mesh, "data")
        x.delete()
        told(
            lambda: with_sharding_constraint({"h": x}, P("data")),
            spmd.DonatedArrayError,
            """
            with_sharding_constraint cannot use argument x['h']: its buffers are gone.
              expected  an array that was not donated to an earlier call and not deleted
              fix       use the result of the call that took it, or do not donate it
            """,
        )


@pytest.mark.parametrize("donate", [(0,), (0, 1)], ids=str)
def test_donated_and_used_in_one_call(mesh, donate):
    """One array is not donated and used in the same call, which can crash the runtime."""
    f = pjit(add, P("data"), donate_argnums=donate)
    with mesh:
        x = put(X, mesh, "data")
        told(
            lambda: f(x, x),
            spmd.DonatedArrayError,
            """
            pjit of `add` cannot donate argument x and use it as argument y too.
              expected  a donated array to be one argument only: its buffers are given away
              fix       do not donate it, or pass a copy
            """,
        )
        assert not x.is_deleted()


# Axes that are taken


def split_data(x):
    """Splits an input over an axis that is taken."""
    return pjit(step, P("data"))(x)  # manual input


def split_result(x):
    """Splits a result over an axis that is taken."""
    return pjit(step, None, P("data"))(x)  # manual output


def split_constraint(x):
    """Constrains a value to an axis that is taken."""
    return with_sharding_constraint(x, P(None, "data"))  # manual constraint


@pytest.mark.parametrize("around", [jax.jit, pjit], ids=["jit", "pjit"])
@pytest.mark.parametrize(
    ("body", "mark", "what", "given"),
    [
        (
            split_data,
            "manual input",
            "pjit of `step` cannot split argument batch",
            "in_axis_resources = P('data')",
        ),
        (
            split_result,
            "manual output",
            "pjit of `step` cannot split result",
            "out_axis_resources = P('data')",
        ),
        (
            split_constraint,
            "manual constraint",
            "with_sharding_constraint cannot split argument x",
            "axis_resources = P(None, 'data')",
        ),
    ],
    ids=["input", "output", "constraint"],
)
def test_axis_of_an_enclosing_shard_map(in_mesh, around, body, mark, what, given):
    """An axis that shard_map maps over is gone inside; the inner function and its line are told."""
    mapped = jax.shard_map(
        body, mesh=in_mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    told_where(
        lambda: around(mapped)(X),
        spmd.ShardingError,
        f"""
        {what} over mesh axis 'data'.
          given     {given}, used at LINE
          expected  axes that no enclosing shard_map maps over: inside of it they are gone
          fix       drop 'data' from the spec, or from the shard_map's axis_names
        """,
        mark=mark,
        function=body.__name__,
    )


def test_other_axis_inside_of_shard_map(in_mesh):
    """An axis that shard_map leaves alone can be used inside, with the right values."""
    mapped = jax.shard_map(
        pjit(step, P(None, "model")),
        mesh=in_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    np.testing.assert_array_equal(jax.jit(mapped)(X), 2 * X)


def map_data(f, x):
    """Maps over a mesh axis."""
    return jax.vmap(f, spmd_axis_name="data")(x)  # spmd_axis_name


MAPPED = np.ones((4, 8, 4), np.float32)


@pytest.mark.parametrize(
    ("f", "subject", "spec"),
    [
        (pjit(step, P("data")), "pjit of `step`", "P('data')"),
        (pjit(step, None, P(None, "data")), "pjit of `step`", "P(None, 'data')"),
        (
            lambda x: with_sharding_constraint(x, P("data")),
            "with_sharding_constraint",
            "P('data')",
        ),
    ],
    ids=["input", "output", "constraint"],
)
def test_axis_of_spmd_axis_name(in_mesh, f, subject, spec):
    """An axis that the mapped dimension uses cannot be used inside; function and line are told."""
    constraint = subject == "with_sharding_constraint"
    if constraint:
        f = constrained
    told_where(
        lambda: map_data(f, MAPPED),
        spmd.ShardingError,
        f"""
        {subject} cannot be mapped over mesh axis 'data'.
          given     vmap(spmd_axis_name='data'), used at LINE
          expected  a mesh axis that the mapped function does not use
          got       the spec {spec}
          fix       drop 'data' from the spec, or map over another axis
        """,
        mark="mapped constraint" if constraint else "spmd_axis_name",
        function="constrained" if constraint else "map_data",
    )


def constrained(x):
    """Constrains a value to an axis that is mapped over."""
    return with_sharding_constraint(x, P("data"))  # mapped constraint


def test_axis_of_two_spmd_axis_names(in_mesh):
    """An axis that an inner vmap brought in is not shown as the user's."""
    with pytest.raises(ValueError, match=r"got       the spec P\(\), which vmap made P\('data'\)"):
        map_data(lambda x: map_data(pjit(step, P()), x), MAPPED)


def test_unknown_spmd_axis_name(in_mesh):
    """An axis that the mesh does not have is told before a spec is made with it."""
    with pytest.raises(ValueError) as e:
        jax.vmap(pjit(step, P("model")), spmd_axis_name="dta")(MAPPED)
    assert type(e.value) is spmd.ShardingError
    assert re.sub("used at .*", "used at LINE", str(e.value)) == textwrap.dedent(
        """\
        pjit of `step` cannot be mapped over mesh axis 'dta'.
          given     vmap(spmd_axis_name='dta'), used at LINE
          expected  mesh axes out of 'data', 'model'
          got       an unknown axis (did you mean 'data'?)
          fix       use an axis of the mesh, or enter the mesh that has it"""
    )
