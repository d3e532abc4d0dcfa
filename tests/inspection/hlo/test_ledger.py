"""The list of collectives, against programs counted by hand."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from spmd import inspection

AXES = {"data": 4, "model": 2}
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 16), jnp.float32)


@pytest.fixture(name="mesh", scope="module")
def _mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), tuple(AXES))


def _compile(mesh, f, ins, out, *args):
    def place(spec):
        return None if spec is None else NamedSharding(mesh, spec)

    ins, out = jax.tree.map(
        place, (ins, out), is_leaf=lambda spec: spec is None or isinstance(spec, P)
    )
    return jax.jit(f, in_shardings=ins, out_shardings=out).lower(*args).compile()


def _count(mesh, f, ins, out, *args):
    text = _compile(mesh, f, ins, out, *args).as_text()
    return [
        (c.kind, c.mesh_axes, c.group_size, c.payload_bytes, c.executions)
        for c in inspection.collectives(text, mesh.shape)
    ]


def _manual(mesh, f, ins, out):
    return jax.shard_map(f, mesh=mesh, in_specs=ins, out_specs=out)


def test_elementwise_has_none(mesh):
    """A program that needs no exchange has an empty ledger."""
    assert _count(mesh, jnp.sin, P("data", "model"), P("data", "model"), X) == []


def test_all_gather(mesh):
    """Unsharding dimension 0 gathers the 16 x 8 floats over data."""
    found = _count(mesh, lambda x: x, P("data"), P(), X)
    assert found == [("all-gather", ("data",), 4, 16 * 8 * 4, 1)]


def test_all_gather_of_the_minor_axis(mesh):
    """From (data, model) to data on one dimension gathers over model: 4 x 8 floats."""
    found = _count(mesh, lambda x: x, P(("data", "model")), P("data"), X)
    assert found == [("all-gather", ("model",), 2, 4 * 8 * 4, 1)]


def test_contraction_over_a_sharded_dimension(mesh):
    """A product over a dimension split by data sums 16 x 16 floats over data."""
    found = _count(mesh, jnp.matmul, (P(None, "data"), P("data")), P(), X, W)
    assert found == [("all-reduce", ("data",), 4, 16 * 16 * 4, 1)]


def test_sum_over_both_axes(mesh):
    """A psum over the whole mesh is one all-reduce of the 4 x 4 local floats by 8 devices."""
    f = _manual(mesh, lambda x: jax.lax.psum(x, ("data", "model")), P("data", "model"), P())
    found = _count(mesh, f, P("data", "model"), P(), X)
    assert found == [("all-reduce", ("data", "model"), 8, 4 * 4 * 4, 1)]


def test_reduce_scatter_counts_its_operand(mesh):
    """Of a reduce-scatter the operand, twice its result over model, is the payload."""
    f = _manual(
        mesh,
        lambda x: jax.lax.psum_scatter(x, "model", tiled=True),
        P("data"),
        P(("data", "model")),
    )
    found = _count(mesh, f, P("data"), P(("data", "model")), X)
    assert found == [("reduce-scatter", ("model",), 2, 4 * 8 * 4, 1)]


def test_ring_permute(mesh):
    """A ring over data moves each device's 4 x 8 floats within groups of 4."""
    ring = [(i, (i + 1) % 4) for i in range(4)]
    f = _manual(mesh, lambda x: jax.lax.ppermute(x, "data", ring), P("data"), P("data"))
    found = _count(mesh, f, P("data"), P("data"), X)
    assert found == [("collective-permute", ("data",), 4, 4 * 8 * 4, 1)]


def test_all_to_all_in_pieces(mesh):
    """Moving the split from dimension 0 to 1 exchanges the 4 x 8 local floats, given as a tuple."""
    found = _count(mesh, lambda x: x, P("data"), P(None, "data"), X)
    assert found == [("all-to-all", ("data",), 4, 4 * 8 * 4, 1)]


def test_a_part_of_an_axis_is_said(mesh):
    """Swapping the axes of two dimensions crosses a half of data, and the record says so."""
    text = _compile(mesh, lambda x: x, P("data", "model"), P("model", "data"), X).as_text()
    found = inspection.collectives(text, mesh.shape)
    exchange = next(c for c in found if c.kind == "all-to-all")
    assert (exchange.mesh_axes, exchange.group_size) == (("data:(2)2",), 2)
    assert exchange.axis_names == ("data",)


def test_nested_loops_multiply(mesh):
    """An all-reduce of 16 x 8 floats inside a scan of 5 inside a scan of 3 runs 15 times."""

    def inner(x, w):
        y = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))
        return jnp.tanh(y), None

    def outer(x, ws):
        x, _ = jax.lax.scan(inner, x, ws)
        return x, None

    def f(x, ws):
        return jax.lax.scan(outer, x, ws)[0]

    ws = jax.ShapeDtypeStruct((3, 5, 8, 8), jnp.float32)
    found = _count(mesh, f, (P(), P(None, None, "data")), P(), X, ws)
    assert [row for row in found if row[0] == "all-reduce"] == [
        ("all-reduce", ("data",), 4, 16 * 8 * 4, 15)
    ]


def test_an_unknown_trip_count_is_not_one(mesh):
    """What runs as often as the data say has no count, in the body and in the condition."""

    def f(x):
        return jax.lax.while_loop(lambda c: c.sum() < 10.0, lambda c: c + c.max(), x)

    found = _count(mesh, f, P("data"), P("data"), X)
    assert found == [("all-reduce", ("data",), 4, 4, None)] * 2


def test_both_branches_are_marked(mesh):
    """Each branch of a conditional counts once, as something that may not run."""

    def f(flag, x):
        return jax.lax.cond(flag, lambda x: x.sum(0), lambda x: x.max(0), x)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    text = _compile(mesh, f, (P(), P("data")), P(), flag, X).as_text()
    found = inspection.collectives(text, mesh.shape)
    assert [(c.kind, c.payload_bytes, c.executions, c.conditional) for c in found] == [
        ("all-reduce", 8 * 4, 1, True)
    ] * 2
    assert {c.op_name.split("/")[-1] for c in found} == {"reduce_sum", "reduce_max"}


def test_axes_are_those_of_a_mesh_with_another_device_order():
    """Ids in a program are positions on the mesh, so a permuted mesh names the same axis."""
    devices = np.array(jax.devices()[:8])[[7, 0, 3, 5, 1, 6, 2, 4]]
    mesh = Mesh(devices.reshape(4, 2), tuple(AXES))
    found = _count(mesh, jnp.matmul, (P(None, "model"), P("model")), P(), X, W)
    assert found == [("all-reduce", ("model",), 2, 16 * 16 * 4, 1)]


ASYNC = """\
HloModule m, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %exchange = f32[8]{0} all-to-all(%p), channel_id=4, replica_groups=[4,2]<=[8], dimensions={0}
}

ENTRY %main (a: f32[8]) -> f32[16] {
  %a = f32[8]{0} parameter(0)
  %gather = (f32[8]{0}, f32[16]{0}) all-gather-start(%a), channel_id=1, \
replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  %gathered = f32[16]{0} all-gather-done(%gather)
  %sum-start = f32[8]{0} all-reduce-start(%a), channel_id=2, replica_groups={}, \
use_global_device_ids=true, to_apply=%add
  %summed = f32[8]{0} all-reduce-done(%sum-start)
  %move = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(f32[8]{0} %a), \
channel_id=3, source_target_pairs={{0,1},{1,0}}
  %moved = f32[8]{0} collective-permute-done(%move)
  %call = ((f32[8]{0}), f32[8]{0}, s32[]) async-start(%a), calls=%wrapped
  %update = ((f32[8]{0}), f32[8]{0}, s32[]) async-update(%call), calls=%wrapped
  %exchanged = f32[8]{0} async-done(%update), calls=%wrapped
  %to-host = (f32[8]{0}, u32[], token[]) send(%a, %t), channel_id=9, is_host_transfer=true
  %fused = f32[8]{0} fusion(%summed, %all-reduce.9), kind=kLoop, calls=%add, \
metadata={op_name="all-reduce(x)"}
  ROOT %all-gather.99 = f32[16]{0} copy(%gathered)
}
"""


def test_asynchronous_pairs_count_once():
    """Start, update and done are one record, and names, strings and hosts are none."""
    found = inspection.collectives(ASYNC, AXES)
    assert [
        (c.kind, c.name, c.mesh_axes, c.payload_bytes, c.executions, c.is_async) for c in found
    ] == [
        ("all-gather", "gather", ("model",), 64, 1, True),
        ("all-reduce", "sum-start", ("data", "model"), 32, 1, True),
        ("collective-permute", "move", ("model",), 32, 1, True),
        ("all-to-all", "exchange", ("model",), 32, 1, True),
    ]
    assert [str(s) for s in (*found[0].shapes.operands, *found[0].shapes.results)] == [
        "f32[8]",
        "f32[16]",
    ]


def test_totals_add_up(mesh):
    """Sums by kind and axes multiply bytes by executions; an unknown count is told apart."""

    def body(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P())), None

    ws = jax.ShapeDtypeStruct((5, 8, 8), jnp.float32)
    f = lambda x, ws: jax.lax.scan(body, x, ws)[0]  # noqa: E731  one line reads as the formula
    text = _compile(mesh, f, (P(), P(None, "data")), P(), X, ws).as_text()
    found = inspection.collectives(text, mesh.shape)
    total = inspection.totals(found, "kind", "axis")["all-reduce", ("data",)]
    size = 16 * 8 * 4
    assert total == inspection.Total(
        sites=1, unknown=0, executions=5, payload_bytes=5 * size, wire_bytes=5 * 2 * 3 * size // 4
    )
    unknown = inspection.Total.of(dataclasses.replace(found[0], executions=None))
    assert total + unknown == dataclasses.replace(total, sites=2, unknown=1)
    assert inspection.Total.zeros() + total == total
    whole = sum(map(inspection.Total.of, found), inspection.Total.zeros())
    assert inspection.totals(found, "direction") == {"other": whole}


def test_an_empty_module_has_no_collectives():
    """Neither an empty text nor a module without computations is an error."""
    assert inspection.collectives("", AXES) == ()
    assert inspection.totals((), "kind") == {}


@pytest.mark.parametrize("by", [(), ("kinds",)])
def test_totals_by_nothing_known(by):
    """A property that collectives do not have is an error that lists those they have."""
    with pytest.raises(ValueError, match="by kind, axis, line, module, direction"):
        inspection.totals((), *by)


def test_a_gathered_result_has_the_line_that_makes_it(mesh):
    """A gather that only the result needs is of the operation that makes it."""

    def doubled(x):
        return x * 2  # here

    text = _compile(mesh, doubled, P("data"), P(), X).as_text()
    (gather,) = inspection.collectives(text, mesh.shape)
    assert (gather.kind, gather.source.function.split(".")[-1]) == ("all-gather", "doubled")
    assert (
        "# here"
        in inspect.getsource(doubled).splitlines()[
            gather.source.line - inspect.getsourcelines(doubled)[1]
        ]
    )
    assert not gather.source_is_consumer


def test_a_gathered_argument_is_named(mesh):
    """A gather of an argument, for nothing but the result, names it."""
    text = _compile(mesh, lambda weights: weights, P("data"), P(), X).as_text()
    (gather,) = inspection.collectives(text, mesh.shape)
    assert gather.op_name == "weights"


WAITED_FOR = """\
HloModule m, num_partitions=8

FileNames
1 "model.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%start (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %gather.1 = f32[16]{0} all-gather(%p), channel_id=5, replica_groups=[4,2]<=[8], dimensions={0}, \
use_global_device_ids=true, backend_config={"async_collective_fusion_config":{}}
  ROOT %call.1 = f32[16]{0} custom-call(%gather.1), custom_call_target="AsyncCollectiveStart"
}

%wait (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %gather.2 = f32[16]{0} all-gather(%p), channel_id=5, replica_groups=[4,2]<=[8], dimensions={0}, \
use_global_device_ids=true, backend_config={"async_collective_fusion_config":{}}
  ROOT %call.2 = f32[16]{0} custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: f32[8]) -> f32[16] {
  %w = f32[8]{0} parameter(0), metadata={op_name="w"}
  %started = f32[16]{0} fusion(%w), kind=kCustom, calls=%start
  %waited = f32[16]{0} fusion(%started), kind=kCustom, calls=%wait, metadata={op_name="w"}
  ROOT %used = f32[16]{0} negate(%waited), metadata={op_name="jit(f)/jvp()/neg" stack_frame_id=1}
}
"""


def test_a_gather_that_runs_beside_other_work_has_the_line_that_waits_for_it():
    """The gather is one record, found through the fusion that waits, of the line that uses it."""
    (gather,) = inspection.collectives(WAITED_FOR, AXES)
    assert (gather.name, gather.is_async, gather.op_name) == ("gather.1", True, "w")
    assert (str(gather.source), gather.direction) == ("model.py:7", "forward")
    assert gather.source_is_consumer
