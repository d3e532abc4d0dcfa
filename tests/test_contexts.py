"""In which contexts a constraint of JAX, Flax or ours is applied, does nothing or raises."""

import contextlib

from flax import nnx
import flax.linen as nn
import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import P

DEVICES = np.array(jax.devices()).reshape(4, 2)
PLAIN = jax.sharding.Mesh(DEVICES, ("data", "model"))
RULES = (("batch", "data"),)

CONTEXTS = {
    "none": contextlib.nullcontext,
    "with mesh": lambda: PLAIN,
    "spmd.Mesh": lambda: spmd.Mesh(DEVICES, ("data", "model")),
    "jax.set_mesh": lambda: jax.set_mesh(PLAIN),
}


def logical(x):
    """The constraint that models of Flax linen write."""
    return nn.with_logical_constraint(x, ("batch", None), rules=RULES)


CONSTRAINTS = {
    "linen": logical,
    "linen, mesh=": lambda x: nn.with_logical_constraint(x, ("batch", None), RULES, PLAIN),
    "nnx": lambda x: nnx.Param(x, out_sharding=P("data"))[...],
    "lax": lambda x: jax.lax.with_sharding_constraint(x, P("data")),
    "lax, NamedSharding": lambda x: jax.lax.with_sharding_constraint(
        x, NamedSharding(PLAIN, P("data"))
    ),
    "spmd": lambda x: spmd.with_sharding_constraint(x, P("data")),
}


ANYWHERE = {"numpy": lambda x: x, "one device": lambda x: jax.device_put(x, jax.devices()[0])}

# For each context: with an argument that lies nowhere yet, and with one committed to one device.
JIT = {
    "linen": "no-op no-op | no-op no-op | no-op no-op | applied ValueError",
    "linen, mesh=": "applied ValueError | " * 3 + "applied ValueError",
    "nnx": "ValueError ValueError | " * 3 + "applied ValueError",
    "lax": "RuntimeError RuntimeError | " + "applied ValueError | " * 2 + "applied ValueError",
    "lax, NamedSharding": "applied ValueError | " * 3 + "applied ValueError",
    "spmd": "MeshError MeshError | " + "applied ValueError | " * 2 + "applied ValueError",
}
# Without a mesh, a committed argument has the mesh of its own device, which has no axis `data`.
INSIDE = "applied MeshError | " * 2 + "applied MeshError"
PJIT = {
    "linen": "MeshError ValueError | " + INSIDE,
    "linen, mesh=": "MeshError DeviceAssignmentMismatchError | " + INSIDE,
    "nnx": "MeshError ValueError | " + INSIDE,
    "lax": "MeshError ValueError | " + INSIDE,
    "lax, NamedSharding": "MeshError DeviceAssignmentMismatchError | " + INSIDE,
    "spmd": "MeshError ShardingError | " + INSIDE,
}


def outcome(context, wrap, constraint, x):
    """What a constraint does to a function of one argument."""
    fun = wrap(lambda x: constraint(x) * 2)
    try:
        with CONTEXTS[context]():
            sharding = fun(x).sharding
    except Exception as e:
        return type(e).__name__
    return "applied" if len(sharding.device_set) == 8 and sharding.spec == P("data") else "no-op"


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("wrap", [jax.jit, spmd.pjit], ids=["jit", "pjit"])
def test_table(wrap, name):
    """Each context, with both kinds of arguments, does what the table of the page says."""
    x = np.ones((8, 8), np.float32)
    got = [
        " ".join(outcome(context, wrap, CONSTRAINTS[name], place(x)) for place in ANYWHERE.values())
        for context in CONTEXTS
    ]
    assert " | ".join(got) == (JIT if wrap is jax.jit else PJIT)[name]


def test_our_mesh_is_not_the_mesh_of_jax():
    """`with spmd.Mesh` leaves JAX's mesh unset: eager code on arrays of one device goes on."""
    x = jax.device_put(np.ones((8, 8), np.float32), jax.devices()[0])
    with spmd.Mesh(DEVICES, ("data", "model")):
        assert jax.sharding.get_abstract_mesh().empty
        assert (x + 1).sharding.device_set == {jax.devices()[0]}
    with jax.set_mesh(PLAIN), pytest.raises(ValueError, match="incompatible devices"):
        x + 1


# What a report says


def constrained(x):
    """A function whose constraints are logical."""
    y = nn.with_logical_constraint(jax.numpy.sin(x), ("batch", None))  # first
    return nn.with_logical_constraint(y * 2, ("batch", None))  # second


def ignored(context, wrap, rules=RULES):
    """The finding of a report on constraints that do nothing, if there is one."""
    fun = wrap(lambda x: constrained(x))
    with CONTEXTS[context](), nn.logical_axis_rules(rules):
        report = spmd.report(fun, jax.ShapeDtypeStruct((8, 8), np.float32))
    return [one for one in report.findings if one.kind == "ignored-constraint"]


@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
@pytest.mark.parametrize("context", ["with mesh", "spmd.Mesh"])
def test_a_report_names_constraints_that_do_nothing(context):
    """Both lines, the reason, and what to write instead, each of which helps."""
    (one,) = ignored(context, jax.jit)
    line = constrained.__code__.co_firstlineno + 2
    assert one.subject == "with_logical_constraint does nothing on 2 lines"
    assert (one.source.file, one.source.line) == (__file__, line)
    assert one.facts == (
        "Flax looks for the mesh of jax.set_mesh, which neither `with mesh` nor spmd.Mesh sets",
        f"on test_contexts.py:{line}, test_contexts.py:{line + 1}",
    )
    assert one.fix == (
        "spmd.pjit in place of jax.jit, or with jax.set_mesh(mesh), or mesh=mesh in the call of "
        "with_logical_constraint"
    )
    assert ignored(context, spmd.pjit) == []
    assert ignored("jax.set_mesh", jax.jit) == []


@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
def test_constraints_that_are_no_findings():
    """Nothing is said of a constraint with a mesh, nor without rules, nor where no mesh is."""
    jitted = jax.jit(lambda x: nn.with_logical_constraint(x, ("batch", None), mesh=PLAIN) * 2)
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    with PLAIN, nn.logical_axis_rules(RULES):
        kinds = [one.kind for one in spmd.report(jitted, x).findings]
    assert "ignored-constraint" not in kinds
    assert ignored("with mesh", jax.jit, rules=()) == []
    assert ignored("none", jax.jit) == []


def test_shardings_without_a_context():
    """A program that only its shardings make one of several devices has the finding too."""
    place = NamedSharding(PLAIN, P("data"))
    with nn.logical_axis_rules(RULES):
        report = spmd.report(
            jax.jit(lambda x: constrained(x), in_shardings=place),
            jax.ShapeDtypeStruct((8, 8), np.float32),
        )
    assert report.findings[0].kind == "ignored-constraint"


@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
def test_rules_are_what_they_were():
    """After a report Flax has the same rules, and during it they read the same."""
    seen = []

    def fun(x):
        seen.append(tuple(nn.get_logical_axis_rules()))
        return constrained(x)

    with PLAIN, nn.logical_axis_rules(RULES):
        spmd.report(jax.jit(fun), jax.ShapeDtypeStruct((8, 8), np.float32))
        assert nn.get_logical_axis_rules() is RULES
    assert seen == [RULES]
