"""What each transformation does to the record of a call, by hand-made records."""

import dataclasses

import pytest

from spmd import P
from spmd._call import PjitCall, batch_resource
from spmd._spec import BATCH, UNSPECIFIED
from spmd.partition_spec import ParsedPartitionSpec, SpecSync


def spec(*entries):
    """A parsed spec as a user wrote it."""
    return ParsedPartitionSpec.from_user_input(P(*entries), "spec")


A, B, C, OUT, OUT2 = spec("a"), spec(None, "b"), spec(("a", "b")), spec("b"), spec("b", "a")


@pytest.fixture
def call():
    """Three inputs, the second donated; two outputs."""
    return PjitCall(
        name="f",
        mesh=None,
        in_axis_resources=(A, B, UNSPECIFIED),
        out_axis_resources=(OUT, OUT2),
        donated_invars=(False, True, False),
        in_positional_semantics=("global", "local", "global"),
        arg_names=("x", "y", "z"),
        given=("in_axis_resources[0]", "in_axis_resources[1]", ""),
        implicit_reshard="error",
    )


def partitions(resources):
    """Partitions of specs; what is no spec as it is."""
    return [r.partitions if isinstance(r, ParsedPartitionSpec) else r for r in resources]


def lengths(call):
    """How many inputs each field per input describes."""
    return {
        len(getattr(call, f))
        for f in (
            "in_axis_resources",
            "donated_invars",
            "in_positional_semantics",
            "arg_names",
            "given",
        )
    }


def test_record_is_frozen_and_hashable(call):
    """Equal records are one key; no field can be changed."""
    assert call == dataclasses.replace(call)
    assert hash(call) == hash(dataclasses.replace(call))
    assert call != dataclasses.replace(call, name="g")
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.name = "g"
    assert not hasattr(call, "__dict__")


def test_founding_names_are_kept():
    """Fields that the founding document names have its names."""
    fields = {f.name for f in dataclasses.fields(PjitCall)}
    assert {
        "name",
        "mesh",
        "in_axis_resources",
        "out_axis_resources",
        "donated_invars",
        "in_positional_semantics",
        "inline",
        "keep_unused",
    } <= fields


def test_keep(call):
    """Keeping some inputs and outputs takes every field along."""
    kept = call.keep([True, False, True], [False, True])
    assert kept.in_axis_resources == (A, UNSPECIFIED)
    assert kept.out_axis_resources == (OUT2,)
    assert kept.donated_invars == (False, False)
    assert kept.arg_names == ("x", "z")
    assert kept.given == ("in_axis_resources[0]", "")
    assert kept.implicit_reshard == "error"
    assert call.keep([True] * 3, [True] * 2) == call


def test_keep_alive(call):
    """An input that is still needed is no longer donated; the others are as before."""
    assert call.keep_alive([1]).donated_invars == (False, False, False)
    assert call.keep_alive([0, 2]).donated_invars == (False, True, False)


@pytest.mark.parametrize("leading", [True, False])
def test_add_inputs(call, leading):
    """New inputs keep whatever sharding they have, are not donated, and are global."""
    more = call.add_inputs(["r0", "r1"], leading=leading)
    new, old = (slice(0, 2), slice(2, 5)) if leading else (slice(3, 5), slice(0, 3))
    assert more.in_axis_resources[new] == (UNSPECIFIED, UNSPECIFIED)
    assert more.in_axis_resources[old] == call.in_axis_resources
    assert more.donated_invars[new] == (False, False)
    assert more.donated_invars[old] == call.donated_invars
    assert more.arg_names[new] == ("r0", "r1")
    assert more.in_positional_semantics[new] == ("global", "global")
    assert lengths(more) == {5}


def test_add_outputs(call):
    """New outputs are the partitioner's choice."""
    assert call.add_outputs(2).out_axis_resources == (OUT, OUT2, UNSPECIFIED, UNSPECIFIED)


def test_batch_without_axis(call):
    """A new dimension goes where it is mapped, and nowhere else."""
    batched = call.batch([0, None, 1], [1, 0], ())
    assert partitions(batched.in_axis_resources) == [
        (BATCH, ("a",)),
        ((), ("b",)),
        UNSPECIFIED,
    ]
    assert partitions(batched.out_axis_resources) == [(("b",), BATCH), (BATCH, ("b",), ("a",))]
    assert batched.in_axis_resources[1] is B
    assert batched.donated_invars == call.donated_invars


def test_batch_over_an_axis(call):
    """`spmd_axis_name` splits the new dimension over its axes."""
    batched = call.batch([1, 2, None], [None, None], ("m", "n"))
    assert partitions(batched.in_axis_resources) == [
        (("a",), ("m", "n")),
        ((), ("b",), ("m", "n")),
        UNSPECIFIED,
    ]
    assert batched.out_axis_resources == call.out_axis_resources


def test_batched_spec_tells_how_far_it_is_from_the_users():
    """After a plain vmap the axes are still the user's; after spmd_axis_name they are not."""
    assert batch_resource(A, 0, ()).sync is SpecSync.DIM_PERMUTE
    assert batch_resource(A, 0, ("m",)).sync is SpecSync.OUT_OF_SYNC
    assert batch_resource(A, None, ("m",)) is A
    assert batch_resource(batch_resource(A, 0, ("m",)), 0, ()).sync is SpecSync.OUT_OF_SYNC


def test_batch_past_the_end_of_a_spec():
    """A spec shorter than the rank is filled up to the new dimension."""
    assert batch_resource(A, 3, ()).partitions == (("a",), (), (), BATCH)


def test_jvp(call):
    """Tangents follow the primals: placed and donated like them, named after them."""
    twice = call.jvp([True, False, True], [False, True])
    assert twice.in_axis_resources == (A, B, UNSPECIFIED, A, UNSPECIFIED)
    assert twice.out_axis_resources == (OUT, OUT2, OUT2)
    assert twice.donated_invars == (False, True, False, False, False)
    assert twice.arg_names == ("x", "y", "z", "the tangent of x", "the tangent of z")
    assert lengths(twice) == {5}
    assert call.jvp([False] * 3, [False] * 2) == call


def test_jvp_of_a_donated_input(call):
    """The tangent of a donated input is donated too."""
    assert call.jvp([False, True, False], [False, False]).donated_invars[3:] == (True,)


def test_transpose(call):
    """Cotangents come in like the outputs and go out like the inputs."""
    back = call.transpose([False, True, False], [True, False], [True, False, False])
    assert back.in_axis_resources == (B, OUT)
    assert back.out_axis_resources == (A,)
    assert back.donated_invars == (False, False)
    assert back.arg_names == ("y", "cotangent 0 of f")
    assert lengths(back) == {2}


def test_inputs_with_resources(call):
    """Added inputs may say where they are."""
    more = call.add_inputs(["r0", "r1"], leading=True, resources=[C, UNSPECIFIED])
    assert more.in_axis_resources == (C, UNSPECIFIED, A, B, UNSPECIFIED)
    assert more.donated_invars == (False, False, False, True, False)
    assert more.given[:2] == ("", "")
    assert lengths(more) == {5}


def test_leading_outputs(call):
    """Added outputs may come before the others."""
    assert call.add_outputs(2, leading=True).out_axis_resources == (
        UNSPECIFIED,
        UNSPECIFIED,
        OUT,
        OUT2,
    )


def test_linear_map(call):
    """The linear map takes and gives tangents, placed and donated like their primals."""
    linear = call.linear_map([True, True, False], [False, True])
    assert linear.in_axis_resources == (A, B)
    assert linear.out_axis_resources == (OUT2,)
    assert linear.donated_invars == (False, True)
    assert linear.arg_names == ("the tangent of x", "the tangent of y")
    assert lengths(linear) == {2}


def test_discharge(call):
    """The last value of a reference comes out where the reference is."""
    assert call.discharge([False, True, False]).out_axis_resources == (OUT, OUT2, B)


def test_series(call):
    """Taylor coefficients follow all values, those of one value together, placed like it."""
    series = call.series(2)
    u = UNSPECIFIED
    assert series.in_axis_resources == (A, B, u, A, A, B, B, u, u)
    assert series.out_axis_resources == (OUT, OUT2, OUT, OUT, OUT2, OUT2)
    assert series.donated_invars == (False, True) + (False,) * 7
    assert lengths(series) == {9}


def test_expand(call):
    """A value of several arrays has no spec, one of a single array keeps its own."""
    parts = call.expand([1, 2, 1], [2, 1])
    assert parts.in_axis_resources == (A, UNSPECIFIED, UNSPECIFIED, UNSPECIFIED)
    assert parts.out_axis_resources == (UNSPECIFIED, UNSPECIFIED, OUT2)
    assert parts.arg_names == ("x", "y", "y", "z")
    assert parts.donated_invars == (False,) * 4


def test_hash_follows_the_fields(call):
    """The hash is computed anew for a changed record, and equal for an equal one."""
    other = dataclasses.replace(call, in_axis_resources=(B, A, UNSPECIFIED))
    assert hash(other) != hash(call)
    assert hash(dataclasses.replace(other, in_axis_resources=call.in_axis_resources)) == hash(call)
