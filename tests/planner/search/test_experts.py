"""Plans that people make by hand, found in the structure of programs."""

import itertools

import jax
import jax.numpy as jnp
from planned_programs import classes, f32, graph_named, mlp, read
import pytest

from spmd import P
from spmd.planner.search.experts import experts, roles_of
from spmd.planner.verify import Program

MESH = {"data": 4, "model": 2}

#: Of each program: the roles of its classes, each by a dimension of an argument that has it.
ROLES = {
    "mlp": {
        "batch": "batch[0]:0",
        "stored": ["state['p'][0]['up']:0"],
        "hidden": ["state['p'][0]['up']:1"],
    },
    "gpt": {
        "batch": "batch[0]:0",
        "length": "batch[0]:1",
        "stored": ["state['p']['embed']:1"],
        "hidden": [
            "state['p']['layers']['up']:2",
            "state['p']['layers']['q']:2",
            "state['p']['embed']:0",
        ],
    },
    "unrolled": {
        "batch": "batch[0]:0",
        "length": "batch[0]:1",
        "stored": ["state['p']['embed']:1"],
        "hidden": [
            "state['p']['layers'][0]['up']:1",
            "state['p']['layers'][0]['q']:1",
            "state['p']['embed']:0",
        ],
    },
    "moe": {
        "batch": "batch[0]:0",
        "length": "batch[0]:1",
        "expert": "state['p']['up']:0",
        "stored": ["state['p']['up']:1"],
        "hidden": ["state['p']['up']:2"],
    },
    "decoding": {
        "batch": "tokens:0",
        "length": "cache['k']:1",
        "stored": ["params['embed']:1"],
        "hidden": ["params['up']:1", "params['o']:0", "params['embed']:0"],
    },
    "elementwise": {"batch": "x:0"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ROLES)
def test_roles_of_classes(name):
    """The batch is what no parameter has, the width what most have, and so on."""
    found = graph_named(name)
    of = classes(found)
    roles = roles_of(found, 2)
    for role in ("batch", "length", "expert"):
        expected = ROLES[name].get(role)
        assert getattr(roles, role) == (of[expected] if expected else None), role
    for role in ("stored", "hidden") if name != "elementwise" else ():
        assert {*getattr(roles, role)} == {of[place] for place in ROLES[name][role]}, role


def test_the_hidden_width_is_no_batch():
    """The mean of the last product has no use for that: no product sums over the hidden width."""

    def loss(weights, x):
        return (jnp.tanh(x @ weights["up"]) @ weights["down"]).mean()

    def sgd(weights, x):
        moved = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, moved)

    weights = {"up": f32(32, 64), "down": f32(64, 32)}
    found = read(Program(function=sgd, args=(weights, f32(16, 32))))
    assert roles_of(found).batch == classes(found)["x:0"]


def specs(found, layout):
    """Where arguments lie."""
    return {one.name: layout.spec(one, MESH) for one in found.tensors if one.kind == "argument"}


#: Where people put the arguments of the GPT: its words, the table of words, a matrix that widens,
#: one that makes narrow again, and the moment of the first.
BY_HAND = {
    "data parallel": ((("data", "model"), None), (None,) * 2, (None,) * 3, (None,) * 3),
    "ZeRO-1": ((("data", "model"), None), (None,) * 2, (None,) * 3, (None,) * 3),
    "FSDP": (
        (("data", "model"), None),
        (None, ("data", "model")),
        (None, ("data", "model"), None),
        (None, None, ("data", "model")),
    ),
    "Megatron": (("data", None), ("model", None), (None, None, "model"), (None, "model", None)),
    "FSDP x TP": (
        ("data", None),
        ("model", "data"),
        (None, "data", "model"),
        (None, "model", "data"),
    ),
    "Megatron + sequence": (
        ("data", "model"),
        ("model", None),
        (None, None, "model"),
        (None, "model", None),
    ),
    "context parallel": (("data", "model"), (None,) * 2, (None,) * 3, (None,) * 3),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_plans_of_a_gpt_are_those_that_people_write(name):
    """The specs of its arguments are those of the papers."""
    found = graph_named("gpt")
    got = specs(found, experts(found, MESH)[name])
    names = ("batch[0]", "state['p']['embed']", "state['p']['layers']['up']")
    names = (*names, "state['p']['layers']['down']")
    assert [got[one] for one in names] == [P(*spec) for spec in BY_HAND[name]]


def test_zero_splits_the_moments_alone():
    """ZeRO-1 is data parallelism whose moments are split as FSDP splits all."""
    found = graph_named("gpt")
    known = experts(found, MESH)
    plain, zero, fsdp = (specs(found, known[n]) for n in ("data parallel", "ZeRO-1", "FSDP"))
    for name, spec in zero.items():
        moment = name.startswith(("state['m']", "state['v']"))
        assert spec == (fsdp if moment else plain)[name], name


def test_experts_have_devices_of_their_own():
    """Matrices of experts are split by expert; examples are split by both axes."""
    found = graph_named("moe")
    got = specs(found, experts(found, MESH)["expert parallel"])
    assert got["state['p']['up']"] == P("model", None, None)
    assert got["state['p']['router']"] == P(None, "model")
    assert got["batch[0]"] == P(("data", "model"), None, None)


def test_what_a_program_has_no_class_for_is_absent():
    """No sequence, no context parallelism; no experts, no devices for them; no moments, no ZeRO."""
    names = experts(graph_named("mlp"), MESH)
    assert {"data parallel", "ZeRO-1", "FSDP", "Megatron", "FSDP x TP"} <= {*names}
    assert not any("sequence" in n or "context" in n or "expert" in n for n in names)
    assert not any("ZeRO" in name for name in experts(graph_named("decoding"), MESH))
    assert {*experts(graph_named("elementwise"), MESH)} <= {"data parallel", "FSDP", "Megatron"}


def test_experts_split_evenly_or_not_at_all():
    """Six rows are no batch for four devices; an odd hidden width is no Megatron for two."""
    odd = read(mlp(rows=6, hidden=129))
    names = experts(odd, MESH)
    assert not any(name.startswith(("Megatron", "FSDP x TP")) for name in names)
    for name, layout in names.items():
        for axis, order in itertools.chain(layout.orders, layout.state):
            batch = classes(odd)["batch[0]:0"]
            assert batch not in order or 6 % MESH[axis] == 0, name


def test_a_mesh_of_one_axis_has_experts_too():
    """All of eight devices in a row: data parallel, FSDP and Megatron."""
    found = graph_named("gpt")
    known = experts(found, {"data": 8, "model": 1})
    assert {"data parallel", "FSDP", "Megatron", "Megatron + sequence", "context parallel"} <= {
        *known
    }
    assert all(axis == "data" for one in known.values() for axis, _ in one.orders)
