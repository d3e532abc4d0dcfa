"""Reports for tests of what is done with them: one made by hand, and a hypothesis strategy."""

import dataclasses

from hypothesis import strategies as st

from spmd import Report
from spmd.inspection import (
    DIRECTIONS,
    KINDS,
    Annotation,
    Argument,
    Buffer,
    Collective,
    Conflict,
    Cost,
    Event,
    Excerpt,
    Exchange,
    Memory,
    Origin,
    Origins,
    Part,
    Reshard,
    Shape,
    Shapes,
    Source,
    Split,
    Step,
    Time,
    Unread,
    ValueOrigins,
)
from spmd.inspection.records.later import known
from spmd.inspection.records.origins import REASONS
from spmd.inspection.records.report import FINDINGS, Finding

MIB = 2**20


def shape(*dims, dtype="f32"):
    """One array."""
    return Shape(dtype=dtype, dims=dims)


def source(line, function="block", file="/w/model/transformer.py"):
    """One line of code."""
    return Source(file=file, line=line, column=3, function=function)


def collective(**fields):
    """An all-reduce of 16 MiB in groups of 4, except for `fields`."""
    both = (shape(2048, 2048),)
    given = {
        "kind": "all-reduce",
        "mesh_axes": ("data",),
        "shapes": Shapes(both, both),
        "dtype": "f32",
        "payload_bytes": 16 * MIB,
        "wire_bytes": 24 * MIB,
        "group_size": 4,
        "executions": 1,
        "source": source(42),
        "direction": "backward",
        "op_name": "jit(step)/transpose(jvp())/dot_general",
        "is_async": False,
        "combined": 1,
    }
    return Collective(**given | fields)


def part(*dims, line=42, **fields):
    """A part of 8 MiB in a combined all-reduce, of one line or of none."""
    both = (shape(*dims),)
    given = {
        "shapes": Shapes(both, both),
        "payload_bytes": 8 * MIB,
        "wire_bytes": 12 * MIB,
        "source": line and source(line),
        "direction": "backward",
        "op_name": "jit(step)/transpose(jvp(Model))/layers_1/mlp/dot_general",
    }
    return Part(**given | fields)


def report(**fields):
    """A report of nothing on a mesh of 8 devices, except for `fields`."""
    given = {
        "name": "step",
        "backend": "tpu",
        "device_kind": "TPU v5 lite",
        "stand_in": False,
        "mesh": {"data": 4, "model": 2},
        "num_devices": 8,
        "versions": {"spmd": "0.1.0", "jax": "0.10.2"},
        "collectives": (),
        "cost": Cost.zeros(),
        "memory": None,
    }
    return Report(**given | fields)


def many(count, **fields):
    """A report of so many collectives, no two of which are alike, with other `fields`."""
    found = tuple(
        collective(
            kind=("all-reduce", "all-gather")[i % 2],
            mesh_axes=(("data",), ("model",), ("data", "model"))[i % 3],
            wire_bytes=(i * 7919) % 2003,
            payload_bytes=i,
            source=source(i % 400, f"block_{i}"),
            frames=(source(i % 400), source(7, "main", "/w/main.py")),
            op_name=f"jit(step)/layer_{i}/dot_general",
        )
        for i in range(count)
    )
    return report(collectives=found, **fields)


_GIVEN = Annotation(kind="argument", name="batch['x']", source=None, spec=(("data",), ()))
_ASKED = Annotation(kind="constraint", name="", source=source(40), spec=((), ("model",)))
_STEP = Step(
    operation="dot_general", source=source(42), way="forward", value="dot_general",
    shape=(8, 4), dimension=0,
)  # fmt: skip


def value_origins(**fields):
    """What a product makes, split over one axis that came forward, except for `fields`."""
    given = {
        "kind": "result",
        "name": "dot_general",
        "shape": (8, 4),
        "dtype": "f32",
        "spec": (("data",), ()),
        "source": source(42),
        "annotation": None,
        "origins": (
            Origin(axis="data", dimension=0, annotation=_GIVEN, priority=None, steps=(_STEP,)),
        ),
        "conflicts": (),
    }
    return ValueOrigins(**given | fields)


def conflict(reason, **fields):
    """An axis that stopped for a reason."""
    given = {
        "axis": "model", "dimension": 1, "operation": "add", "source": source(43), "at": "add",
        "lost": _ASKED, "won": _GIVEN, "against": None, "kept": (), "distance": 0,
    }  # fmt: skip
    return Conflict(reason=reason, **given | fields)


#: An argument, an output and two products of line 42, with conflicts for every reason.
ORIGINS = Origins(
    values=(
        value_origins(
            kind="argument", name="batch['x']", source=None, annotation=_GIVEN,
            origins=(Origin(axis="data", dimension=0, annotation=_GIVEN, priority=1, steps=()),),
        ),
        value_origins(kind="output", name="result['loss']", shape=(), spec=(), origins=()),
        value_origins(),
        value_origins(
            spec=((), ()),
            origins=(),
            conflicts=(
                conflict("closed", distance=1),
                conflict("split", kept=("data",), distance=1200),
                conflict("taken", source=None),
                conflict("tie", won=None, against=_GIVEN),
                conflict("operation", won=None, lost=None),
            ),
        ),
    ),
    left_out=1234,
)  # fmt: skip

#: 12 * 24 MiB, an unknown number of times 48 KiB, 3 * 24 MiB, and nothing.
SMALL = report(
    backend="cpu",
    device_kind="cpu",
    stand_in=True,
    collectives=(
        collective(
            kind="all-gather",
            mesh_axes=("model",),
            shapes=Shapes((shape(64, 128, dtype="bf16"),), (shape(128, 128, dtype="bf16"),)),
            dtype="bf16",
            payload_bytes=32768,
            wire_bytes=16384,
            group_size=2,
            executions=None,
            in_loop=True,
            source=source(57, "mlp"),
            direction="forward",
        ),
        collective(
            shapes=Shapes((shape(2048, 1024),) * 2, (shape(2048, 1024),) * 2),
            executions=12,
            combined=2,
            parts=(part(2048, 1024, line=None, op_name=""), part(2048, 1024, frames=(source(42),))),
            is_async=True,
            frames=(source(42), source(90, "main", "/w/train.py")),
        ),
        collective(
            kind="collective-permute",
            mesh_axes=("data:(2)2", "model"),
            payload_bytes=24 * MIB,
            executions=3,
            conditional=True,
            source=source(9, "ring", "/w/ops.py"),
            source_is_consumer=True,
            direction="other",
        ),
        collective(
            kind="all-to-all",
            mesh_axes=(),
            wire_bytes=0,
            group_size=1,
            source=None,
            op_name="jit(step)/moe/all_to_all",
        ),
    ),
    cost=Cost(flops=123_456_789_012, hbm_bytes=5 * 1024 * MIB, unknown_loops=1, opaque_calls=2),
    memory=Memory(
        arguments=48 * MIB,
        outputs=32 * MIB,
        temporaries=100 * MIB,
        aliased=32 * MIB,
        code=0,
        peak=150 * MIB,
        buffers=(
            Buffer(
                name="fusion.3",
                shape=shape(4096, 4096),
                nbytes=64 * MIB,
                kind="temporary",
                source=source(42),
                op_name="jit(step)/mul",
                at_peak=True,
            ),
            Buffer(
                name="param.1",
                shape=shape(4096),
                nbytes=16384,
                kind="argument",
                source=None,
                op_name="params['w']",
                at_peak=False,
            ),
        ),
    ),
    reshards=(
        Reshard(argument="batch['x']", given="P('data')", wanted="P(None, 'model')", nbytes=MIB),
    ),
    findings=(
        Finding(
            kind="moved-argument",
            subject="batch['x'] is moved before the program starts",
            source=None,
            nbytes=MIB,
            measure="wire",
            facts=("it lies as P('data')", "the program takes P(None, 'model')"),
            fix="make it as P(None, 'model')",
        ),
        Finding(
            kind="unused-axis",
            subject="nothing is split over mesh axis 'model'",
            source=source(7),
            nbytes=0,
            measure="",
            facts=(),
            fix="use a mesh without it",
        ),
    ),
    _origins=known(ORIGINS),
)

#: 6 ms of products, 1 ms for memory, and 3 ms in which the device waits: 2 for the sum over `data`
#: of line 42, whose other 2 are beside work, and 1 for the ring. The gather is all beside work.
TIME = Time(
    chip="v5e",
    seconds=0.010,
    compute=0.006,
    memory=0.001,
    exchanges=(
        Exchange(
            name="ag", mesh_axes=("model",), source=source(57, "mlp"), seconds=0.0005, exposed=0.0
        ),
        Exchange(
            name="ar", mesh_axes=("data",), source=source(42), seconds=0.004, exposed=0.002
        ),
        Exchange(
            name="ring",
            mesh_axes=("data:(2)2", "model"),
            source=source(9, "ring", "/w/ops.py"),
            seconds=0.001,
            exposed=0.001,
        ),
    ),
    hardware_flops=985 * 10**9,
    hfu=0.5,
    source="compiler",
    model_flops=8 * 788 * 10**9,
    mfu=0.4,
    unknown=("the kernel k has no cost_estimate: counted as only what it moves",),
    layer=(
        Event(lane="core", name="mlp", kind="compute", mesh_axes=(), start=0.0, seconds=0.003),
        Event(
            lane="x+", name="all-reduce", kind="exchange", mesh_axes=("data",),
            start=0.001, seconds=0.004,
        ),
        Event(
            lane="core", name="wait for all-reduce", kind="exposed", mesh_axes=("data",),
            start=0.003, seconds=0.002,
        ),
    ),
)  # fmt: skip

#: SMALL on a chip whose figures are known.
TIMED = dataclasses.replace(
    SMALL, backend="tpu", device_kind="TPU v5 lite", stand_in=False, time=TIME
)

# Strategies

counts = st.one_of(st.integers(0, 64), st.integers(0, 2**62))
#: What users and compilers may call things: unicode, control characters, surrogates, markup.
names = st.one_of(
    st.sampled_from(
        ["", "step", "[bold]x[/]", "\x1b[31mred", "ein Name", "層/重み", "e\u0301", "\ud800"]
    ),
    st.text(st.characters(codec=None, categories=None), max_size=12),
)
dims = st.lists(st.sampled_from([0, 1, 8, 1024, 65536]), max_size=4).map(tuple)
shapes = st.builds(Shape, dtype=st.sampled_from(["f32", "bf16", "s4"]), dims=dims)
some_shapes = st.lists(shapes, max_size=3).map(tuple)
files = st.one_of(st.sampled_from(["/w/a.py", "/w/deep/er/b.py", "<stdin>", ""]), names)
sources = st.builds(
    Source, file=files, line=st.integers(0, 10**6), column=st.integers(0, 200), function=names
)
axes = st.sampled_from([(), ("data",), ("model",), ("data", "model"), ("data:(2)2",), ("層",)])
paths = st.sampled_from(["", "jit(f)/add", "jit(f)/jit(g)/add_2", "jit(f)/add_1", "x['w']"])
parts = st.builds(
    Part,
    shapes=st.builds(Shapes, some_shapes, some_shapes),
    payload_bytes=counts,
    wire_bytes=counts,
    source=st.none() | sources,
    direction=st.sampled_from(DIRECTIONS),
    op_name=paths | names,
    source_is_consumer=st.booleans(),
    frames=st.lists(sources, max_size=2).map(tuple),
)
collectives = st.builds(
    Collective,
    parts=st.lists(parts, max_size=2).map(tuple),
    kind=st.sampled_from(KINDS),
    mesh_axes=axes,
    shapes=st.builds(Shapes, some_shapes, some_shapes),
    dtype=st.sampled_from(["f32", "bf16", "f32,bf16"]),
    payload_bytes=counts,
    wire_bytes=counts,
    group_size=st.integers(1, 4096),
    executions=st.none() | st.integers(0, 10**6),
    source=st.none() | sources,
    direction=st.sampled_from(DIRECTIONS),
    op_name=paths | names,
    is_async=st.booleans(),
    combined=st.integers(1, 5),
    source_is_consumer=st.booleans(),
    frames=st.lists(sources, max_size=3).map(tuple),
    conditional=st.booleans(),
    in_loop=st.booleans(),
    name=names,
    groups=st.sampled_from(["", "{{0,1},{2,3}}", "[4,2]<=[8]"]),
    sliced=st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple),
)
buffers = st.builds(
    Buffer,
    name=names,
    shape=shapes,
    nbytes=counts,
    kind=st.sampled_from(["argument", "output", "temporary"]),
    source=st.none() | sources,
    op_name=names,
    at_peak=st.booleans(),
    first=counts,
    last=counts,
)
memories = st.builds(
    Memory,
    arguments=counts,
    outputs=counts,
    temporaries=counts,
    aliased=counts,
    code=counts,
    peak=counts,
    buffers=st.lists(buffers, max_size=3).map(tuple),
    places=counts,
    live=st.lists(counts, max_size=4).map(tuple),
)
reshards = st.builds(Reshard, argument=names, given=names, wanted=names, nbytes=counts)
findings = st.builds(
    Finding,
    kind=st.sampled_from([*FINDINGS]),
    subject=names,
    source=st.none() | sources,
    nbytes=counts,
    measure=st.sampled_from(["memory", "wire", ""]),
    facts=st.lists(names, max_size=2).map(tuple),
    fix=names,
    flops=counts,
)
splits = st.builds(
    Split,
    axes=st.sampled_from([(), ("data",), ("model", "data")]),
    parts=st.integers(1, 64),
    block=counts,
)
arguments = st.integers(0, 3).flatmap(
    lambda rank: st.builds(
        Argument,
        path=names,
        dtype=st.sampled_from(["f32", "key<fry>"]),
        shape=st.lists(counts, min_size=rank, max_size=rank).map(tuple),
        sharding=names,
        splits=st.none() | st.lists(splits, min_size=rank, max_size=rank).map(tuple),
        nbytes=counts,
    )
)
excerpts = st.builds(
    Excerpt, file=files, first=st.integers(1, 10**6), lines=st.lists(names, max_size=3).map(tuple)
)
#: Zero, from a nanosecond to hours, and what is not written with few digits.
seconds = st.sampled_from([0.0, 1e-9, 9.9996e-4, 0.1, 20000.0]) | st.floats(0, 10)
exchanges = st.builds(
    lambda took, part, **fields: Exchange(seconds=took, exposed=took * part, **fields),
    took=seconds,
    part=st.sampled_from([0.0, 0.5, 1.0]),
    name=names,
    mesh_axes=axes,
    source=st.none() | sources,
)
events = st.builds(
    Event,
    lane=st.sampled_from(["core", "memory", "host", "x+", "in box"]),
    name=names,
    kind=st.sampled_from(["compute", "memory", "exchange", "exposed"]),
    mesh_axes=axes,
    start=seconds,
    seconds=seconds,
)


def summed(compute, memory, exchanges, **fields):
    """A time whose parts add up."""
    exchanges = tuple(exchanges)
    whole = compute + memory + sum(one.exposed for one in exchanges)
    return Time(seconds=whole, compute=compute, memory=memory, exchanges=exchanges, **fields)


times = st.builds(
    summed,
    compute=seconds,
    memory=seconds,
    exchanges=st.lists(exchanges, max_size=3),
    chip=names,
    hardware_flops=counts,
    hfu=st.floats(0, 1),
    source=st.sampled_from(["compiler", "predicted"]),
    model_flops=st.none() | counts,
    mfu=st.none() | st.floats(0, 1),
    unknown=st.lists(names, max_size=2).map(tuple),
    layer=st.lists(events, max_size=4).map(tuple),
)
specs = st.lists(axes, max_size=2).map(tuple)
annotations = st.builds(
    Annotation,
    kind=st.sampled_from(["argument", "constraint"]),
    name=names,
    source=st.none() | sources,
    spec=specs,
)
steps = st.builds(
    Step,
    operation=names,
    source=st.none() | sources,
    way=st.sampled_from(["forward", "backward", "sideways", "later"]),
    value=names,
    shape=dims,
    dimension=st.integers(0, 3),
)
some_origins = st.builds(
    Origin,
    axis=names,
    dimension=st.integers(0, 3),
    annotation=st.none() | annotations,
    priority=st.none() | st.integers(0, 3),
    steps=st.lists(steps, max_size=2).map(tuple),
)
conflicts = st.builds(
    Conflict,
    axis=names,
    dimension=st.integers(0, 3),
    operation=names,
    source=st.none() | sources,
    at=names,
    reason=st.sampled_from([*REASONS, "later"]),
    lost=st.none() | annotations,
    won=st.none() | annotations,
    against=st.none() | annotations,
    kept=axes,
    distance=counts,
)
value_records = st.builds(
    ValueOrigins,
    kind=st.sampled_from(["argument", "output", "result"]),
    name=names,
    shape=dims,
    dtype=names,
    spec=specs,
    source=st.none() | sources,
    annotation=st.none() | annotations,
    origins=st.lists(some_origins, max_size=2).map(tuple),
    conflicts=st.lists(conflicts, max_size=2).map(tuple),
)
origins = st.builds(
    Origins, values=st.lists(value_records, max_size=3).map(tuple), left_out=counts, missing=names
)
meshes = st.sampled_from(
    [{}, {"data": 4}, {"data": 4, "model": 2}, {"model": 2, "data": 4, "層": 1}]
)
reports = st.builds(
    Report,
    name=names,
    backend=st.sampled_from(["cpu", "tpu"]),
    device_kind=names,
    stand_in=st.booleans(),
    predicted=st.booleans(),
    unread=st.none() | st.builds(Unread, lines=counts, first=names),
    prediction=st.sampled_from(["", "for cpu: bf16 exchanges are widened to f32"]),
    mesh=meshes,
    num_devices=st.integers(1, 8192),
    versions=st.dictionaries(st.sampled_from(["spmd", "jax", "jaxlib"]), names),
    collectives=st.lists(collectives, max_size=6).map(tuple),
    cost=st.builds(Cost, flops=counts, hbm_bytes=counts, unknown_loops=counts, opaque_calls=counts),
    memory=st.none() | memories,
    reshards=st.lists(reshards, max_size=2).map(tuple),
    arguments=st.lists(arguments, max_size=2).map(tuple),
    device_ids=st.lists(st.integers(0, 8191), max_size=8).map(tuple),
    excerpts=st.lists(excerpts, max_size=2).map(tuple),
    findings=st.lists(findings, max_size=2).map(tuple),
    _origins=origins.map(known),
)


def _with(one, time):
    """A report with a time; a prediction has one exchange for each collective, in their order."""
    if one.predicted:
        found = (
            Exchange(name=c.name, mesh_axes=c.mesh_axes, source=c.source, seconds=0.5, exposed=0.5)
            for c in one.collectives
        )
        time = summed(time.compute, time.memory, found, **_rest(time))
    return dataclasses.replace(one, time=time)


def _rest(time):
    names = ("chip", "hardware_flops", "hfu", "source", "model_flops", "mfu", "unknown", "layer")
    return {name: getattr(time, name) for name in names}


timed_reports = st.builds(_with, reports, times)


def pretty(shown):
    """What a notebook's text output has for a value."""
    written = []

    class Printer:
        text = staticmethod(written.append)

    shown._repr_pretty_(Printer, False)
    return "".join(written)
