"""Sweeps: rows from reports, the table to the letter, and real compiles on growing meshes."""

import dataclasses
import io
import json
from pathlib import Path

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest
from reports import pretty
from rich.console import Console

import spmd
from spmd import pjit, sweep, topology
from spmd.inspection import Collective, Cost, Memory, Report, Shape, Shapes, Sweep, SweepRow, Unread
from spmd.inspection.show.layout import plain
from spmd.inspection.show.sweep import render_sweep


def exchange(*axes, wire, executions=1):
    """A collective of which only the axes and the bytes matter here."""
    shape = Shape(dtype="f32", dims=(4,))
    return Collective(
        kind="all-reduce",
        mesh_axes=axes,
        shapes=Shapes((shape,), (shape,)),
        dtype="f32",
        payload_bytes=2 * wire,
        wire_bytes=wire,
        group_size=2,
        executions=executions,
        source=None,
        direction="forward",
        op_name="",
        is_async=False,
        combined=1,
    )


def report_of(mesh, *collectives, peak=2**30, kind="TPU v5 lite", flops=3 * 10**9):
    """A report by hand."""
    memory = Memory(arguments=0, outputs=0, temporaries=0, aliased=0, code=0, peak=peak or 0)
    return Report(
        name="step",
        backend="cpu" if kind == "cpu" else "tpu",
        device_kind=kind,
        stand_in=kind == "cpu",
        mesh=mesh,
        num_devices=int(np.prod([*mesh.values()])),
        versions={},
        collectives=collectives,
        cost=Cost(flops=flops, hbm_bytes=5 * 2**20),
        memory=None if peak is None else memory,
    )


def sweep_by_hand():
    """Five rows in which everything occurs that a table has to show."""
    small = report_of(
        {"data": 2, "model": 2},
        exchange("data", wire=2**20),
        exchange("model", wire=2**10, executions=4),
    )
    unknown = report_of(
        {"data": 4, "model": 4},
        exchange("data", wire=2**20),
        exchange("data", "model", wire=7, executions=None),
    )
    large = report_of({"data": 1}, peak=20 * 2**30)
    stand_in = report_of({"data": 8}, exchange("data", wire=3000), peak=None, kind="cpu")
    capacity = 16 * 2**30
    return Sweep(
        name="step",
        rows=(
            SweepRow.of(small, label="v5e:2x2", capacity=capacity, seconds=1.5),
            SweepRow.of(unknown, label="v5e:4x4", capacity=capacity, seconds=20),
            SweepRow.of(large, label="v5e:1x1", capacity=capacity),
            SweepRow.of(stand_in),
            SweepRow(
                label="v2:2x2",
                mesh={"data": 8},
                num_devices=8,
                device_kind="TPU v2",
                stand_in=False,
                capacity=8 * 2**30,
                seconds=0.3,
                needed=384 * 2**30,
            ),
        ),
    )


# Rows


def test_a_row_is_what_its_report_says():
    """Bytes per axis and in total, executions, FLOPs, traffic and memory are the report's."""
    row = sweep_by_hand()[0]
    assert (row.label, row.mesh, row.num_devices) == ("v5e:2x2", {"data": 2, "model": 2}, 4)
    assert row.total.wire_bytes == 2**20 + 4 * 2**10
    assert row.total.payload_bytes == 2 * row.total.wire_bytes
    assert (row.total.sites, row.total.executions) == (2, 5)
    assert {axes: t.wire_bytes for axes, t in row.by_axis.items()} == {
        ("data",): 2**20,
        ("model",): 4 * 2**10,
    }
    assert (row.flops, row.hbm_bytes, row.peak) == (3 * 10**9, 5 * 2**20, 2**30)
    assert (row.capacity, row.seconds, row.fits) == (16 * 2**30, 1.5, True)


def test_whether_a_row_fits():
    """A program fits, or not, or nobody knows; one that the compiler refused does not."""
    assert [row.fits for row in sweep_by_hand()] == [True, True, False, None, False]
    exact = report_of({"data": 1}, peak=100)
    assert SweepRow.of(exact, capacity=100).fits is True
    assert SweepRow.of(exact, capacity=99).fits is False
    assert SweepRow.of(exact).fits is None


def test_a_row_without_a_label_names_its_devices():
    """A mesh that is no topology is labelled by how many devices of which kind it has."""
    assert sweep_by_hand()[3].label == "8 x cpu"


def test_axes_of_a_sweep():
    """The axes of all rows, busiest first, are the columns."""
    assert sweep_by_hand().axes == (("data",), ("model",), ("data", "model"))
    assert Sweep(name="f", rows=()).axes == ()


def test_records_are_json():
    """Rows are flat dictionaries of JSON values; what is not known is None."""
    records = sweep_by_hand().records()
    assert json.loads(json.dumps(records)) == records
    assert records[0] == {
        "label": "v5e:2x2",
        "num_devices": 4,
        "device_kind": "TPU v5 lite",
        "stand_in": False,
        "mesh/data": 2,
        "mesh/model": 2,
        "sites": 2,
        "unknown": 0,
        "executions": 5,
        "payload_bytes": 2105344,
        "wire_bytes": 1052672,
        "wire_bytes/data": 1048576,
        "wire_bytes/model": 4096,
        "flops": 3000000000,
        "hbm_bytes": 5242880,
        "peak": 1073741824,
        "needed": None,
        "capacity": 17179869184,
        "fits": True,
        "seconds": 1.5,
        "step_seconds": None,
        "exposed_seconds": None,
        "mfu": None,
        "hfu": None,
        "unread_lines": 0,
    }
    assert records[1]["unknown"] == 1
    assert records[4]["wire_bytes"] is None
    assert records[4]["needed"] == 384 * 2**30


# The table

GOLDEN = Path(__file__).parents[1] / "goldens" / "sweep.txt"


def test_the_table():
    """A wide log has one line per mesh, and says what is unknown, too large and a stand-in."""
    assert plain(render_sweep(sweep_by_hand()), width=160) + "\n" == GOLDEN.read_text()


@pytest.mark.parametrize("width", [1, 8, 20, 40, 60, 80, 100, 200])
def test_no_figure_is_lost_in_a_narrow_terminal(width):
    """At any width no line is longer than it, and every figure stands somewhere in whole."""
    text = plain(render_sweep(sweep_by_hand()), width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert not any(line != line.rstrip() for line in text.splitlines())
    together = "".join(text.split())
    for figure in ("1.0MiB", "4.0KiB", "3.0G", "2,850", "20.0GiB", "384.0GiB", "toolarge"):
        assert figure in together


def test_text_that_was_not_understood_is_told_at_its_row():
    """A row whose figures lack something says so: as a record, and under the row of the table."""
    known, unread = report_of({"data": 1}), Unread(lines=2, first="a line")
    partly = dataclasses.replace(known, unread=unread)
    made = Sweep(name="step", rows=(SweepRow.of(known), SweepRow.of(partly)))
    assert [row["unread_lines"] for row in made.records()] == [0, 2]
    assert [row.unread for row in made] == [None, unread]
    *_, whole, row, told = str(made).splitlines()
    assert whole == row
    assert told.strip() == str(unread)


def test_a_sweep_prints_and_shows():
    """`print` gives the plain table, `show` draws on the console that it is given."""
    made = sweep_by_hand()
    assert str(made) == plain(render_sweep(made))
    file = io.StringIO()
    made.show(Console(file=file, width=160))
    assert "v5e:4x4" in file.getvalue()


def test_an_empty_sweep_and_odd_names():
    """No rows, no axes, a name that is no ASCII and one with a control character are drawn."""
    assert plain(render_sweep(Sweep(name="schritt_ä\x1b", rows=()))).startswith(
        "schritt_ä\\x1b on 0 meshes, per device and call\n"
    )
    alone = SweepRow.of(report_of({}, peak=10), label="one")
    assert "none" in str(Sweep(name="f", rows=(alone,)))


# Sweeping


def weighted(w, x):
    """A product whose gradient by `w` is summed over the batch."""
    return jnp.sum(x @ w)


def step():
    """The gradient of `weighted`, data-parallel."""
    return pjit(jax.grad(weighted), in_axis_resources=(None, P("data")), out_axis_resources=None)


W = jax.ShapeDtypeStruct((64, 32), np.float32)


def test_a_sweep_over_stand_ins():
    """The gradient's all-reduce has the bytes of a ring on every mesh, by hand."""
    x = jax.ShapeDtypeStruct((16, 64), np.float32)
    found = sweep(step(), W, x, meshes=[(f"cpu:{n}", {"data": n}) for n in (2, 4, 16)])
    assert found.name == "weighted"
    assert [row.label for row in found] == ["cpu:2", "cpu:4", "cpu:16"]
    assert [row.num_devices for row in found] == [2, 4, 16]
    # f32[64,32] twice (n-1)/n times over the ring.
    hand = [2 * (n - 1) * 64 * 32 * 4 // n for n in (2, 4, 16)]
    assert [row.total.wire_bytes for row in found] == hand
    assert [row.by_axis["data",].wire_bytes for row in found] == hand
    assert all(row.stand_in and row.capacity is None and row.seconds > 0 for row in found)


def test_a_sweep_makes_the_arguments_for_each_mesh():
    """With `args_of` the batch grows with the mesh: the product per device stays as it is."""
    f = pjit(lambda w, x: x @ w, in_axis_resources=(None, P("data")), out_axis_resources=P("data"))

    def args_of(mesh):
        return W, jax.ShapeDtypeStruct((4 * mesh.shape["data"], 64), np.float32)

    meshes = [topology("cpu:2", {"data": 2}), spmd.make_mesh({"data": 8})]
    found = sweep(f, meshes=meshes, args_of=args_of)
    assert [row.label for row in found] == ["2 x cpu", "8 x cpu"]
    assert [row.flops for row in found] == [2 * 4 * 64 * 32] * 2


def test_a_sweep_of_jax_jit():
    """A jax.jit function is swept through the shardings of its arguments."""

    def args_of(mesh):
        x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(mesh, P("data")))
        w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P()))
        return w, x

    meshes = [("cpu:2", {"data": 2}), ("cpu:4", {"data": 4})]
    found = sweep(jax.jit(jax.grad(weighted)), meshes=meshes, args_of=args_of)
    assert [row.num_devices for row in found] == [2, 4]


@needs_libtpu
def test_a_program_that_does_not_fit_is_a_row():
    """On one chip the compiler refuses the program, on sixteen it fits: both are rows."""
    f = pjit(lambda x: x * 2, in_axis_resources=P("data"), out_axis_resources=P("data"))
    x = jax.ShapeDtypeStruct((2**13, 2**18), np.float32)  # 8 GiB in, 8 GiB out, 15.75 GiB there
    found = sweep(f, x, meshes=[("v5e:1x1", {"data": 1}), ("v5e:4x4", {"data": 16})])
    alone, many = found
    assert (alone.fits, many.fits) == (False, True)
    assert alone.report is None
    assert alone.needed >= 16 * 2**30
    assert alone.capacity == many.capacity == int(15.75 * 2**30)
    assert many.peak >= 2**30
    assert "does not fit: the compiler needs 16.0 GiB of 15.8 GiB" in str(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: sweep(step(), meshes=[]),
            "sweep of `weighted` has no mesh to compile for.\n  expected  one mesh or more",
        ),
        (
            lambda: sweep(step(), W, meshes=["cpu:2"], args_of=lambda mesh: (W,)),
            "sweep of `weighted` takes arguments, or args_of to make them, and not both.\n"
            "  got       args_of and 1 argument",
        ),
        (
            lambda: sweep(step(), meshes=[("cpu:2", {"data": 2}), 3]),
            "sweep of `weighted` cannot compile for this.\n"
            "  expected  a mesh, 'v5e:4x4', or ('v5e:4x4', {'data': 8, 'model': 2})\n"
            "  got       int: 3",
        ),
        (
            lambda: sweep(step(), meshes=["cpu:2"], args_of=lambda mesh: W),
            "sweep of `weighted` takes a tuple of arguments from args_of.\n"
            "  got       ShapeDtypeStruct\n  fix       return (x,) for a single argument",
        ),
    ],
    ids=["none", "both", "mesh", "tuple"],
)
def test_calls_that_are_wrong(call, message):
    """No mesh, two sources of arguments, and things that are none are TypeErrors."""
    with pytest.raises(spmd.ArgumentError) as caught:
        call()
    assert str(caught.value) == message


def test_a_function_of_another_mesh():
    """A function that is bound to a mesh is not compiled for it again under other names."""
    x = jax.ShapeDtypeStruct((16,), np.float32)
    mesh = topology("cpu:2", {"data": 2})
    bound = pjit(jnp.sum, in_axis_resources=P("data"), out_axis_resources=None, mesh=mesh)
    with pytest.raises(spmd.MeshError) as caught:
        sweep(bound, x, meshes=[mesh, ("cpu:4", {"data": 4})])
    assert str(caught.value) == (
        "report cannot compile for another mesh than the function's own.\n"
        "  given     mesh data=4\n"
        "  expected  mesh data=2, to which the function is bound"
    )
    assert "sweep of `sum` was at cpu:4, {'data': 4}." in caught.value.__notes__


def test_an_error_says_at_which_mesh():
    """What goes wrong on one mesh is raised as it is, with a note that names the mesh."""
    x = jax.ShapeDtypeStruct((30, 64), np.float32)
    with pytest.raises(spmd.ShardingError) as caught:
        sweep(step(), W, x, meshes=[("cpu:2", {"data": 2}), ("cpu:4", {"data": 4})])
    assert "sweep of `weighted` was at cpu:4, {'data': 4}." in caught.value.__notes__


def test_shardings_of_arguments_are_carried_over(mesh):
    """Arrays on one mesh are split on each mesh of a sweep over the axes of the same names."""
    x = jax.device_put(np.ones((64, 16), np.float32), NamedSharding(mesh, P("data", "model")))
    meshes = [("cpu:4", {"data": 2, "model": 2}), ("cpu:16", {"data": 4, "model": 4})]
    found = sweep(jax.jit(lambda x: x * 2.0), x, meshes=meshes)
    assert [row.report.memory.arguments for row in found] == [64 * 16 * 4 // n for n in (4, 16)]
    with pytest.raises(spmd.ShardingError, match="cannot split argument x there as it is here"):
        sweep(jax.jit(lambda x: x * 2.0), x, meshes=["cpu:4"])


def test_a_sweep_in_a_notebook():
    """The last value of a notebook's cell is the table, in lists a sweep is a sentence."""
    found = sweep_by_hand()
    assert repr(found).startswith(f"<Sweep of {found.name}: {found[0].label}, ")
    assert pretty(found) == str(found)
