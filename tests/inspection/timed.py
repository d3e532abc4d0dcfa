"""A report with a time, made by hand, and a hypothesis strategy for times."""

import dataclasses

from hypothesis import strategies as st
from reports import MIB, axes, collective, names, part, report, reports, shape, source, sources

from spmd.inspection import Event, Exchange, Shapes, Time
from spmd.inspection.records.report import Finding

MS = 1e-3


def exchange(name, seconds, exposed, *mesh_axes, line=42):
    """How long one collective of all takes."""
    return Exchange(
        name=name, mesh_axes=mesh_axes, source=source(line), seconds=seconds, exposed=exposed
    )


def event(lane, name, kind, start, seconds, *mesh_axes):
    """A piece of a lane, in milliseconds."""
    return Event(
        lane=lane, name=name, kind=kind, mesh_axes=mesh_axes, start=start * MS, seconds=seconds * MS
    )


def permute(number, runs):
    """A step of a product that the compiler cut into several."""
    return collective(
        kind="collective-permute", mesh_axes=("model",), executions=runs, wire_bytes=2 * MIB,
        payload_bytes=2 * MIB, source=dataclasses.replace(source(57, "mlp"), column=number),
        direction="forward", is_async=True, name=f"permute.{number}",
        op_name=f"jit(step)/layer_{number}/dot_general", groups=f"{{{{0,{number}}}}}",
    )  # fmt: skip


#: 50 ms of work, 10 ms of memory, and 40 ms of waits, of which 30 over data.
TIME = Time(
    chip="v5e",
    seconds=0.1,
    compute=0.05,
    memory=0.01,
    exchanges=(
        exchange("gather", 12 * MS, 6 * MS, "model", line=57),
        exchange("both", 40 * MS, 30 * MS, "data"),
        exchange("permute.1", 2 * MS, 0.0, "model", line=57),
        exchange("permute.2", 4 * MS, 0.0, "model", line=57),
        exchange("permute.3", 6 * MS, 0.0, "model", line=57),
        exchange("moe", 4 * MS, 4 * MS, line=9),
    ),
    hardware_flops=8 * 10**12,
    hfu=0.4,
    source="compiler",
    model_flops=48 * 10**12,
    mfu=0.3,
    unknown=("the loop while.3 runs an unknown number of times: once here",),
    layer=(
        event("core", "dot_general", "compute", 0, 10),
        event("core", "add", "memory", 10, 2),
        event("core", "wait for all-reduce", "exposed", 12, 6, "data"),
        event("core", "dot_general", "compute", 18, 2),
        event("memory", "copy", "memory", 4, 2),
        event("host", "copy", "memory", 0, 5),
        event("x+", "all-reduce", "exchange", 8, 10, "data"),
        event("x-", "all-reduce", "exchange", 8, 10, "data"),
        event("y+", "collective-permute", "exchange", 2, 4, "model"),
    ),
)

#: Two sums of one line and of none in one, a gather, three steps that are alike, and one exchange.
TIMED = report(
    collectives=(
        collective(
            kind="all-gather", mesh_axes=("model",), wire_bytes=6 * MIB, payload_bytes=12 * MIB,
            executions=2, source=source(57, "mlp"), direction="forward", name="gather",
            op_name="jit(step)/Model/layers_0/dot_general",
        ),
        collective(
            shapes=Shapes((shape(2048, 1024),) * 2, (shape(2048, 1024),) * 2),
            executions=4, combined=2, name="both",
            parts=(part(2048, 1024, line=None, op_name=""), part(2048, 1024)),
        ),
        permute(1, 2),
        permute(2, 4),
        permute(3, 6),
        collective(
            kind="all-to-all", mesh_axes=(), wire_bytes=MIB, group_size=8, name="moe",
            source=source(9, "ring", "/w/ops.py"), direction="other",
        ),
    ),
    findings=(
        Finding(
            kind="collective-in-loop", subject="a loop repeats an all-gather of the same values",
            source=source(57), nbytes=9 * MIB, measure="wire", facts=(), fix="do it before",
        ),
        Finding(
            kind="duplicated-work", subject="devices along 'model' compute the same products",
            source=source(42), nbytes=0, measure="", facts=(), fix="split it", flops=2 * 10**12,
        ),
    ),
    time=TIME,
)  # fmt: skip

seconds = st.sampled_from([0.0, 1e-9, 2.5e-6, 0.0123, 1.0, 4000.0])
lanes = st.sampled_from(["core", "memory", "host", "x+", "y-", "in box", "on chip"])
kinds = st.sampled_from(["compute", "memory", "exchange", "exposed"])
events = st.builds(
    Event, lane=lanes, name=names, kind=kinds, mesh_axes=axes, start=seconds, seconds=seconds
)


@st.composite
def timed_reports(draw):
    """Any report, with any time whose exchanges are some of its collectives."""
    one = draw(reports)
    exchanges = tuple(
        Exchange(
            name=found.name,
            mesh_axes=found.mesh_axes,
            source=draw(st.none() | sources),
            seconds=draw(seconds),
            exposed=draw(seconds),
        )
        for found in one.collectives
        if one.predicted or draw(st.booleans())
    )
    compute, memory = draw(seconds), draw(seconds)
    whole = compute + memory + sum(exchange.exposed for exchange in exchanges)
    time = Time(
        chip=draw(names), seconds=whole or 1.0, compute=compute if whole else 1.0, memory=memory,
        exchanges=exchanges, hardware_flops=draw(st.integers(0, 2**62)), hfu=draw(st.floats(0, 2)),
        source=draw(st.sampled_from(["compiler", "predicted"])),
        mfu=draw(st.none() | st.floats(0, 2)), unknown=tuple(draw(st.lists(names, max_size=2))),
        layer=tuple(draw(st.lists(events, max_size=8))),
    )  # fmt: skip
    return dataclasses.replace(one, time=time)
