"""Plans for tests of what is done with them: two made by hand, and a hypothesis strategy."""

import dataclasses

from hypothesis import strategies as st
from reports import MIB, meshes, names, reports, source, times
from timed import MS, TIME, TIMED

from spmd.inspection.records.later import known
from spmd.inspection.records.plan import (
    Candidate,
    Deviation,
    Inside,
    Pin,
    Placed,
    Plan,
    Price,
    SourceConstraint,
)

GIB = 2**30
DATA, MODEL, BOTH, NONE = ("data",), ("model",), ("data", "model"), ()

#: Shapes and places of the parameters of a GPT whose layers are scanned.
PARAMS = {
    "down": ((4, 4096, 1024), (NONE, MODEL, DATA)),
    "embed": ((32000, 1024), (MODEL, DATA)),
    "norm": ((4, 1024), (NONE, NONE)),
    "out": ((4, 16, 64, 1024), (NONE, MODEL, NONE, DATA)),
    "qkv": ((4, 1024, 3, 16, 64), (NONE, DATA, NONE, MODEL)),
    "up": ((4, 1024, 4096), (NONE, DATA, MODEL)),
}
UP = "state['params']['up']"


def placed(name, shape, spec, **fields):
    """An array with an entry for each dimension."""
    spec = (*spec, *((),) * (len(shape) - len(spec)))
    return Placed(**{"name": name, "dtype": "f32", "shape": shape, "spec": spec} | fields)


def tree(root):
    """Parameters, a count and two moments below a name."""
    below = [f"{root}['params']", f"{root}['opt'].mu", f"{root}['opt'].nu"]
    count = [placed(f"{root}['opt'].count", (), (), dtype="s32")]
    arrays = [[placed(f"{at}['{name}']", *given) for name, given in PARAMS.items()] for at in below]
    return (*arrays[0], *count, *arrays[1], *arrays[2])


def with_prices(one):
    """The place of an array, of which one has prices."""
    prices = (
        Price((NONE, NONE, NONE), 12 * MS, 2.5 * GIB),
        Price((NONE, NONE, MODEL), 1.2 * MS, 192.0 * MIB),
        Price((NONE, MODEL, DATA), -0.05 * MS, -3.0 * MIB),
    )
    return dataclasses.replace(one, prices=prices) if one.name == UP else one


def candidate(name, *, data=4, model=2, predicted=0.11, **fields):
    """A layout that no compiler saw, except for `fields`."""
    parts = {"compute": 0.5 * predicted, "memory": 0.1 * predicted, "exchange": 0.4 * predicted}
    given = {
        "name": name,
        "axes": {"data": data, "model": model},
        "orders": {"data": ("batch", "d_model"), "model": ("heads", "d_ff", "vocab")},
        "estimated": 0.12,
        "estimated_peak": 4 * GIB,
        "predicted": predicted,
        "sent": 300 * MIB,
    }
    return Candidate(**given | parts | fields)


def compiled(name, seconds, peak, **fields):
    """A layout that was compiled for the hardware, all of whose waits are over data."""
    waits = dataclasses.replace(TIME.exchanges[1], exposed=seconds - 0.06)
    time = dataclasses.replace(TIME, seconds=seconds, exchanges=(waits,), layer=())
    return candidate(name, time=time, peak=peak, verified="time", **fields)


CODE = 'specs = {"up": P(None, "data", "model")}\nx = f(x)  # <b>&amp;\n'
CONSTRAINTS = (
    SourceConstraint(
        file="/w/model/transformer.py", line=42, column=8, end_line=42, end_column=20,
        function="block", expression="h @ w['up']",
        spec=(DATA, NONE, MODEL),
    ),
    SourceConstraint(
        file="/w/model/transformer.py", line=57, column=None, end_line=None, end_column=None,
        function="mlp", expression="what a gather makes", spec=(DATA,),
    ),
)  # fmt: skip

DEVIATIONS = (
    Deviation(
        kind="all-reduce", mesh_axes=DATA, source=source(57, "mlp"), predicted=80 * MIB,
        compiled=40 * MIB, cause="a reduce-scatter, not an all-reduce",
    ),
    Deviation(
        kind="all-gather", mesh_axes=BOTH, source=None, predicted=0, compiled=20 * MIB,
        cause="no sharding asks for it",
    ),
)  # fmt: skip

#: FSDP and Megatron for a GPT, compiled, beside experts and what was not compiled.
GPT = Plan(
    name="train_step",
    axes={"data": 4, "model": 2},
    topology="v5e:4x2",
    device_kind="TPU v5 lite",
    chip="v5e",
    budget=5 * GIB,
    arguments=(
        *map(with_prices, tree("state")),
        placed("batch", (64, 512), (DATA,), dtype="s32", is_fixed=True),
    ),
    results=(*tree("result[0]"), placed("result[1]", (), ())),
    pins=(
        Pin(0, "stablehlo.dot_general", ((DATA, NONE, NONE), (DATA, MODEL), (NONE, MODEL))),
        Pin(1, "stablehlo.dot_general", ((DATA, MODEL), (MODEL, NONE), None)),
    ),
    candidates=(
        candidate(
            "found", time=TIME, peak=3 * GIB, verified="time", predicted=0.122, told=320 * MIB
        ),
        compiled("Megatron", 0.112, int(4.5 * GIB), predicted=0.13),
        compiled("FSDP", 0.127, 2 * GIB, data=8, model=1, predicted=0.1),
        compiled("as written", 0.09, 6 * GIB, predicted=0.095),
        candidate("data parallel", data=8, model=1, failure="needs 21.0 GiB of 15.8 GiB"),
        candidate("found", data=2, model=4, predicted=0.14, estimated_peak=3 * GIB),
        candidate("found", data=1, model=8, predicted=0.31, estimated_peak=7 * GIB),
    ),
    report=TIMED,
    tried=2842,
    searched=2.8,
    compiled=51.2,
    compiles=5,
    complete=True,
    program="0123abcd",
    versions={"spmd": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0"},
    deviations=DEVIATIONS,
    inside=known(
        Inside(constraints=CONSTRAINTS, exact=False, note="It has one gather more.", code=CODE)
    ),
)

#: The same on CPU devices, without a search to the end, a budget, or a compile.
BARE = dataclasses.replace(
    GPT,
    topology="",
    device_kind="cpu",
    budget=None,
    candidates=(candidate("found"),),
    report=None,
    compiles=0,
    complete=False,
    arguments=(placed("x", (8, 4), (DATA,)), placed("rate", (), ())),
    results=(placed("result", (8, 4), (BOTH,)),),
    deviations=(),
    pins=(),
    inside=None,
)


# Strategies

ints = st.integers(0, 2**62)
seconds = st.floats(0, 1e4)


def specs_of(axes, rank):
    """Entries that name axes of a mesh, each at most once."""
    used = st.lists(st.sampled_from([*axes, None]), min_size=rank, max_size=rank, unique=True)
    return used.map(lambda some: tuple((axis,) if axis else () for axis in some))


@st.composite
def arrays(draw, axes):
    """An array somewhere on a mesh."""
    shape = tuple(draw(st.lists(st.integers(0, 2**20), max_size=min(2, len(axes) + 1))))
    specs = specs_of(axes, len(shape))
    prices = st.builds(Price, specs, st.floats(-1, 1), st.floats(-1e12, 1e12))
    return Placed(
        name=draw(names), dtype=draw(st.sampled_from(["f32", "s4", "key<fry>"])), shape=shape,
        spec=draw(specs), is_fixed=draw(st.booleans()),
        prices=tuple(draw(st.lists(prices, max_size=2))),
    )  # fmt: skip


candidates = st.builds(
    Candidate,
    name=names,
    axes=meshes,
    orders=st.dictionaries(names, st.lists(names, max_size=2).map(tuple), max_size=2),
    estimated=seconds,
    estimated_peak=ints,
    compute=seconds,
    memory=seconds,
    exchange=seconds,
    predicted=seconds,
    sent=ints,
    told=st.none() | ints,
    time=st.none() | times,
    peak=st.none() | ints,
    verified=st.sampled_from(["", "time", "bytes"]),
    failure=st.just("") | names,
    same=st.lists(names, max_size=3).map(tuple),
)
deviations = st.builds(
    Deviation, kind=names, mesh_axes=st.lists(names, max_size=2).map(tuple),
    source=st.none() | st.builds(source, st.integers(1, 999), names, names), predicted=ints,
    compiled=ints, cause=names,
)  # fmt: skip
places = st.none() | st.integers(0, 10**6)
constraints = st.builds(
    SourceConstraint, file=names, line=ints, column=places, end_line=places, end_column=places,
    function=names, expression=names,
    spec=st.lists(st.sampled_from([(), DATA, BOTH]), max_size=2).map(tuple),
)  # fmt: skip
insides = st.builds(
    Inside,
    code=names,
    constraints=st.lists(constraints, max_size=2).map(tuple),
    exact=st.booleans(),
    note=names,
)


@st.composite
def plans(draw):
    """Any plan."""
    axes = draw(meshes)
    some = st.lists(arrays(axes), max_size=4).map(tuple)
    entries = st.lists(st.sampled_from([(), DATA, BOTH]), max_size=2).map(tuple)
    specs = st.lists(st.none() | entries, max_size=3).map(tuple)
    pins = st.builds(Pin, st.integers(0, 99), names, specs)
    return Plan(
        name=draw(names), axes=axes, topology=draw(names), device_kind=draw(names),
        chip=draw(names), budget=draw(st.none() | ints), arguments=draw(some), results=draw(some),
        pins=tuple(draw(st.lists(pins, max_size=2))),
        candidates=tuple(draw(st.lists(candidates, min_size=1, max_size=4))),
        report=draw(st.none() | reports), tried=draw(ints), searched=draw(seconds),
        compiled=draw(seconds), compiles=draw(ints), complete=draw(st.booleans()),
        program=draw(names),
        versions=draw(st.dictionaries(st.sampled_from(["spmd", "jax"]), names)),
        deviations=tuple(draw(st.lists(deviations, max_size=2))),
        passed_over=draw(st.dictionaries(names, names, max_size=2)),
        inside=draw(st.none() | insides.map(known)),
    )  # fmt: skip
