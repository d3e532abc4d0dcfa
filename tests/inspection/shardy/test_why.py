"""Where shardings come from: origins, routes and conflicts, by hand and against the compiler."""

import html
import io
import json
from pathlib import Path
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import programs
import pytest
from rich.console import Console

import spmd
from spmd import P
from spmd._spec import UNSPECIFIED
from spmd.inspection import Annotation, Conflict, why
from spmd.inspection.shardy import passes, propagation

FILE = "tests/inspection/shardy/test_why.py"


def f32(*dims):
    """The shape of an array of floats."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def given(name, *spec):
    """The annotation of an argument."""
    return Annotation(kind="argument", name=name, source=None, spec=tuple(spec))


def asked(name, *spec):
    """The annotation of an output."""
    return Annotation(kind="output", name=name, source=None, spec=tuple(spec))


def one(found):
    """The only value that was found."""
    (value,) = found.values
    return value


def hops(origin):
    """The steps of an origin without their lines."""
    return [(s.operation, s.way, s.value, s.dimension) for s in origin.steps]


@pytest.fixture(scope="module")
def grid():
    """A mesh of 8 devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


# Origins


def test_forward_through_a_product(grid):
    """Rows come from the first factor, columns from the second, each by the product."""

    def f(batch, w):
        return {"out": batch["x"] @ w}

    low = spmd.pjit(f, (P("data"), P(None, "model")), mesh=grid).lower({"x": f32(8, 6)}, f32(6, 4))
    value = one(low.why("out['out']"))
    assert (value.kind, value.name, value.shape, value.dtype) == (
        "output",
        "result['out']",
        (8, 4),
        "f32",
    )
    assert value.spec == (("data",), ("model",))
    rows, columns = value.origins
    assert (rows.axis, rows.dimension) == ("data", 0)
    assert rows.annotation == given("batch['x']", ("data",), ())
    assert hops(rows) == [
        ("dot_general", "forward", "dot_general", 0),
        ("return", "forward", "result['out']", 0),
    ]
    assert rows.steps[0].source.file == __file__
    assert (columns.axis, columns.dimension) == ("model", 1)
    assert columns.annotation == given("w", (), ("model",))
    assert [s.shape for s in columns.steps] == [(8, 4), (8, 4)]
    assert value.annotation is None
    assert value.conflicts == ()


def test_an_argument_is_its_own_origin(grid):
    """What the user said about a value needs no steps, even where another says the same."""
    low = spmd.pjit(lambda x: x * 2, P("data"), P("data"), mesh=grid).lower(f32(8))
    for name, annotation in (("x", given("x", ("data",))), ("out", asked("result", ("data",)))):
        value = one(low.why(name))
        (origin,) = value.origins
        assert (origin.annotation, origin.steps, value.annotation) == (annotation, (), annotation)


def test_backward_from_an_output(grid):
    """An argument of unspecified sharding can get it from the output that is made of it."""
    place = NamedSharding(jax.sharding.Mesh(grid.devices, grid.axis_names), P(None, "model"))

    def f(x):
        return jnp.sin(x.T)

    value = one(why(jax.jit(f, out_shardings=place), "x", f32(6, 8)))
    assert value.spec == (("model",), ())
    (origin,) = value.origins
    assert origin.annotation == asked("result", (), ("model",))
    assert [h[:3] for h in hops(origin)] == [
        ("return", "backward", "sine"),
        ("sine", "backward", "transpose"),
        ("transpose", "backward", "x"),
    ]
    assert [s.dimension for s in origin.steps] == [1, 1, 0]


def test_several_outputs(grid):
    """Each of several outputs has its own way, from the annotation over what is returned."""

    def f(x, y):
        s = jnp.exp(y)
        return {"a": jnp.sin(x), "b": jnp.cos(x), "c": x + s, "d": s, "e": jnp.tanh(y)}

    outs = {"a": UNSPECIFIED, "b": UNSPECIFIED, "c": UNSPECIFIED, "d": P(None, "model"), "e": P()}
    low = spmd.pjit(f, (P("data"), UNSPECIFIED), outs, mesh=grid).lower(f32(8, 6), f32(8, 6))
    x = given("x", ("data",), ())
    for name, operation in (("a", "sine"), ("b", "cosine"), ("c", "add")):
        rows = one(low.why(f"out['{name}']")).origins[0]
        assert (rows.axis, rows.annotation) == ("data", x)
        assert [s.operation for s in rows.steps] == [operation, "return"]
    columns = one(low.why("out['c']")).origins[1]
    assert (columns.axis, columns.annotation) == ("model", asked("result['d']", (), ("model",)))
    assert hops(columns) == [
        ("return", "backward", "exponential", 1),
        ("add", "forward", "add", 1),
        ("return", "forward", "result['c']", 1),
    ]


def test_sideways_from_operand_to_operand(grid):
    """An unspecified operand takes the sharding of the other operand of a sum."""
    place = NamedSharding(jax.sharding.Mesh(grid.devices, grid.axis_names), P("data"))
    f = jax.jit(lambda x, y: x + y, in_shardings=(place, None))
    (origin,) = one(why(f, "y", f32(8), f32(8))).origins
    assert origin.annotation == given("x", ("data",))
    assert hops(origin) == [("add", "sideways", "y", 0)]


def test_operations_that_shardy_has_no_rule_for(grid):
    """What XLA replaces before it propagates passes axes on as what it is replaced by."""
    specs = {"in_axis_resources": P("data", "model"), "mesh": grid}
    fun = spmd.pjit(lambda x: jnp.sinh(jnp.square(x)), **specs)
    lowered = fun.lower(f32(16, 32))
    value = one(lowered.why("out"))
    assert value.spec == (("data",), ("model",))
    for origin in value.origins:
        assert origin.annotation == given("x", ("data",), ("model",))
        assert [step.operation for step in origin.steps] == ["square", "sinh", "return"]
    assert lowered.preview().collectives == lowered.compile().report().collectives == ()


def test_what_is_taken_of_rows_lies_as_the_rows(grid):
    """As `jax.lax.top_k` in a router: the rows stay split, and what is taken of each is whole."""
    specs = {"in_axis_resources": P("data"), "mesh": grid}
    fun = spmd.pjit(lambda x: {**dict(zip("vi", lax.top_k(x, 2), strict=True))}, **specs)
    lowered = fun.lower(f32(16, 32))
    for path in ("result['v']", "result['i']"):
        assert one(lowered.why(path)).spec == (("data",), ())
    assert lowered.preview().collectives == ()
    assert {*lowered.compile().out_specs.values()} == {P("data")}


@pytest.mark.parametrize("name", ["square", "sinh", "erf", "erf_inv", "erfc", "lgamma", "atan2"])
def test_element_by_element(grid, name):
    """A function of each element by itself is split, or gathered, as the compiled program's."""
    fun = getattr(lax, name)
    args = [f32(16, 32)] * (2 if name == "atan2" else 1)
    lowered = spmd.pjit(lambda *xs: fun(*xs), P("data", "model"), mesh=grid).lower(*args)
    spec = lowered.compile().out_specs
    axes = [axis for axis in spec if axis is not None]
    assert one(lowered.why("out")).spec == ((("data",), ("model",)) if axes else ((), ()))


def test_a_constraint_has_its_line(grid):
    """An axis that a constraint brings names the constraint's line."""

    def f(x):
        y = x * 2
        y = spmd.with_sharding_constraint(y, P(None, "model"))  # the constraint
        return jnp.sin(y)

    low = spmd.pjit(f, P(), mesh=grid).lower(f32(6, 8))
    (origin,) = one(low.why("out")).origins
    assert (origin.annotation.kind, origin.annotation.spec) == ("constraint", ((), ("model",)))
    assert origin.annotation.source.line == line_of("# the constraint")
    assert [h[0] for h in hops(origin)] == ["sine", "return"]


def line_of(mark):
    """The line of this file that ends in a mark."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (i for i, text in enumerate(lines, 1) if text.endswith("  " + mark))
    return found


def _scanned(x, ws):
    @jax.jit
    def layer(c, w):
        return jnp.tanh(c @ w)  # the layer

    def body(c, w):
        return layer(c, w), jnp.sum(c)

    return lax.scan(body, x, ws)


def test_inside_of_a_loop_and_a_called_function(grid):
    """A value in a function that a scan calls tells the way through the loop and the call."""
    low = spmd.pjit(_scanned, (P("data"), P()), mesh=grid).lower(f32(8, 6), f32(3, 6, 6))
    found = low.why(f"{FILE}:{line_of('# the layer')}")
    product, tanh = found.values
    assert (product.name, tanh.name) == ("dot_general", "tanh")
    assert product.source.line == line_of("# the layer")
    assert product.spec == (("data",), ())
    (origin,) = product.origins
    assert origin.annotation == given("x", ("data",), ())
    # From the loop's first value to what its body returns, and back up through the body.
    ways = [(step.operation, step.way) for step in origin.steps]
    assert ways == [("while", "sideways"), ("tanh", "backward")]
    assert one(low.why("out[0]")).spec == (("data",), ())


def test_the_way_back_through_a_loop(grid):
    """What a gradient makes of the rows of `x` in each turn is split as the program has it.

    The backward loop takes its turn of a stacked array by functions of JAX.
    """

    def loss(ws, x):
        return _scanned(x, ws)[0].sum()

    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(grid, P("data")))
    low = jax.jit(jax.grad(loss)).lower(f32(3, 6, 6), x)
    kinds = ("# the layer", "return lax.scan(body, x, ws)")
    names = [f"{FILE}:{line_of(kind)}" for kind in kinds]
    rows = [v for name in names for v in why(low, name).values if 8 in v.shape]
    taken = [v.name for v in rows].count("dynamic_slice")  # what the way back reads
    assert taken >= 2
    for value in rows:
        assert value.spec[value.shape.index(8)] == ("data",), value
        (origin,) = value.origins
        assert origin.annotation == given("x", ("data",), ())
        assert origin.steps[-1].shape == value.shape
    # So it is in the program, which has a quarter of the rows wherever it has any.
    sizes = {
        n
        for found in re.findall(r"f32\[([\d,]+)\]", low.compile().as_text())
        for n in found.split(",")
    }
    assert "8" not in sizes
    assert "2" in sizes


def test_axes_inside_of_a_shard_map(grid):
    """A manual axis is no axis of a value inside; outside, the annotation is the shard_map's."""
    plain = jax.sharding.Mesh(grid.devices, grid.axis_names)

    def inner(x):
        return lax.psum(x * 2, "model")  # manual

    def f(x):
        y = jax.shard_map(inner, mesh=plain, in_specs=P("data", "model"), out_specs=P("data"))(x)
        return jnp.sin(y)

    low = spmd.pjit(f, P(), mesh=grid).lower(f32(8, 6))
    inside = low.why(f"{FILE}:{line_of('# manual')}").values
    assert {value.spec for value in inside} == {((), ())}
    assert {value.shape for value in inside} == {(2, 3)}
    (origin,) = one(low.why("out")).origins
    assert (origin.axis, origin.annotation.kind) == ("data", "shard_map")
    assert origin.annotation.spec == (("data",), ())


# Against the compiler


def _several(batch, w, ws):
    h = batch["x"] @ w

    def body(c, a):
        return jnp.tanh(c @ a), c[0]

    last, rows = lax.scan(body, h, ws)
    cut = lax.cond(w[0, 0] > 0, lambda v: v * 2, lambda v: v - 1, h)
    return {
        "dot": h,
        "turned": h.T,
        "split": h.reshape(4, 2, 6),
        "joined": h.reshape(48),
        "scan": last,
        "rows": rows,
        "cond": cut,
        "sum": h.sum(0),
        "outer": h[:, None] * w.T[None, :, :1],
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "specs",
    [(P("data"), P(None, "model"), P()), (P("data", "model"), P(), P(None, "model"))],
    ids=["columns", "contracted"],
)
def test_the_spec_is_what_the_compiler_gives(grid, specs):
    """Outputs of unspecified sharding get in the executable what propagation says before it."""
    args = {"x": f32(8, 6)}, f32(6, 6), f32(3, 6, 6)
    low = spmd.pjit(_several, specs, mesh=grid).lower(*args)
    compiled = low.compile().out_specs
    for key, spec in compiled.items():
        said = one(low.why(f"out[{key!r}]")).spec
        wanted = [p if isinstance(p, tuple) else (p,) if p else () for p in spec]
        assert said == (*wanted, *[()] * (len(said) - len(wanted))), key


def _origins_of(name):
    target = programs.cpu_target()
    lowered, _ = programs.PROGRAMS[name][0](target)
    found = propagation.propagate(lowered.compiler_ir(), subject="why")
    from spmd.inspection.shardy import why as shardy_why

    return [shardy_why.describe(found, i) for i in range(len(found.values))]


@pytest.mark.parametrize(
    "name", [name for name, (_, backends, _) in programs.PROGRAMS.items() if "cpu" in backends]
)
def test_every_axis_has_an_origin_that_asks_for_it(name):
    """In each counted program, each axis of each value leads to an annotation that has it."""
    for value in _origins_of(name):
        flat = [axis for axes in value.spec for axis in axes]
        assert [origin.axis for origin in value.origins] == flat
        for origin in value.origins:
            asked_for = [a.partition(":")[0] for axes in origin.annotation.spec for a in axes]
            assert origin.axis.partition(":")[0] in asked_for
            assert origin.steps or origin.annotation == value.annotation
            if origin.steps:
                assert origin.steps[-1].dimension == origin.dimension


# Conflicts


def test_an_axis_that_is_taken(grid):
    """Of two factors that want one axis, one gets it, and the other is said to have lost."""
    low = spmd.pjit(lambda x, w: x @ w, (P("data"), P(None, "data")), mesh=grid).lower(
        f32(8, 6), f32(6, 8)
    )
    value = one(low.why("out"))
    (kept,) = value.origins
    wins, loses = given("x", ("data",), ()), given("w", (), ("data",))
    if kept.dimension == 1:
        wins, loses = loses, wins
    assert kept.annotation == wins
    (lost,) = value.conflicts
    assert (lost.axis, lost.dimension, lost.reason) == ("data", 1 - kept.dimension, "taken")
    assert (lost.lost, lost.won, lost.kept) == (loses, wins, ())
    assert (lost.operation, lost.source.file) == ("dot_general", __file__)


def test_a_dimension_that_is_split_otherwise(grid):
    """An operand with an annotation of its own keeps it, and names what it kept out."""

    def f(x, y):
        return spmd.with_sharding_constraint(x, P("data")) + y  # sum

    low = spmd.pjit(f, (P(), P("model")), P("data"), mesh=grid).lower(f32(8), f32(8))
    value = one(low.why("y"))
    assert value.spec == (("model",),)
    assert [stop.lost.kind for stop in value.conflicts] == ["constraint", "output"]
    for stop in value.conflicts:
        assert (stop.axis, stop.reason, stop.kept) == ("data", "split", ("model",))
        assert stop.won == given("y", ("model",))
        assert (stop.operation, stop.at, stop.distance) == ("add", "y", 0)
        assert stop.source.line == line_of("# sum")


def test_two_operands_that_differ(grid):
    """Where operands of a sum ask for different axes, both are told to have lost its result."""
    low = spmd.pjit(lambda x, y: x + y, (P("data"), P("model")), mesh=grid).lower(f32(8), f32(8))
    value = one(low.why("out"))
    x, y = given("x", ("data",)), given("y", ("model",))
    fields = {
        "dimension": 0,
        "operation": "add",
        "source": value.source,
        "at": "add",
        "reason": "tie",
        "won": None,
        "kept": (),
        "distance": 1,
    }
    assert (value.spec, value.origins) == (((),), ())
    assert value.conflicts == (
        Conflict(axis="data", lost=x, against=y, **fields),
        Conflict(axis="model", lost=y, against=x, **fields),
    )


def test_an_annotation_that_keeps_a_dimension_whole(grid):
    """An output that is asked to be whole keeps out what its operand has."""
    low = spmd.pjit(lambda x: jnp.sin(x), P("data"), P(), mesh=grid).lower(f32(8))
    value = one(low.why("out"))
    assert (value.spec, value.origins, value.annotation) == (((),), (), asked("result", ()))
    (stop,) = value.conflicts
    assert (stop.operation, stop.reason, stop.distance) == ("return", "closed", 0)
    assert (stop.lost, stop.won) == (given("x", ("data",)), asked("result", ()))


def test_a_conflict_further_away(grid):
    """A value that is not split names the constraint upstream that took its axis away."""

    def f(x):
        y = spmd.with_sharding_constraint(x, P(None, None))  # gathered
        return jnp.sin(jnp.cos(y))

    low = spmd.pjit(f, P("data"), mesh=grid).lower(f32(8, 6))
    value = one(low.why("out"))
    assert value.spec == ((), ())
    (stop,) = value.conflicts
    assert (stop.axis, stop.dimension, stop.reason, stop.distance) == ("data", 0, "closed", 3)
    assert stop.lost == given("x", ("data",), ())
    assert (stop.won.kind, stop.won.source.line) == ("constraint", line_of("# gathered"))


def test_an_operation_that_passes_nothing_on(grid):
    """A reshape of 4 parts to 3 rows of 4 cannot keep the parts, and no annotation is to blame."""
    low = spmd.pjit(lambda x: x.reshape(3, 4), P("data"), mesh=grid).lower(f32(12))
    value = one(low.why("out"))
    assert value.spec == ((), ())
    (stop,) = value.conflicts
    assert (stop.axis, stop.reason, stop.operation) == ("data", "operation", "reshape")
    assert (stop.won, stop.against, stop.lost) == (None, None, given("x", ("data",)))


def test_no_conflict_where_nothing_met(grid):
    """Dimensions that nobody annotated have neither origin nor conflict."""
    low = spmd.pjit(lambda x: jnp.sin(x), P("data"), mesh=grid).lower(f32(8, 6))
    value = one(low.why("out"))
    assert (value.spec, value.conflicts) == ((("data",), ()), ())


# Names


@pytest.fixture(scope="module")
def named(grid):
    """A lowered function with a tree of arguments and outputs."""

    def step(batch, w):
        h = batch["x"] @ w
        return {"loss": jnp.sum(h), "h": [h, h.T]}

    specs = ({"x": P("data"), "y": P()}, P())
    return spmd.pjit(step, specs, mesh=grid).lower({"x": f32(8, 6), "y": f32(3)}, f32(6, 4))


def test_the_beginning_of_a_path_means_all_below_it(named):
    """A path that is no leaf gives its leaves, in order."""
    assert [v.name for v in named.why("out['h']").values] == ["result['h'][0]", "result['h'][1]"]
    assert [v.name for v in named.why("result['h']").values] == ["result['h'][0]", "result['h'][1]"]
    assert len(named.why("out").values) == 3
    # Arguments that the function does not use are no part of the program.
    assert [v.name for v in named.why("batch").values] == ["batch['x']"]


def test_an_unknown_name(named):
    """The error tells the nearest name and what there is."""
    with pytest.raises(spmd.ReportError) as error:
        named.why("out['lss']")
    assert str(error.value) == (
        "why knows no value \"out['lss']\" (did you mean \"result['loss']\"?).\n"
        "  expected  a line such as 'model.py:42', or one of batch['x'], w, result['h'][0], "
        "result['h'][1], result['loss']"
    )


def test_an_unknown_line(named):
    """The error tells the lines of the file that make arrays, or else the files."""
    with pytest.raises(spmd.ReportError) as error:
        named.why("test_why.py:1")
    text = str(error.value)
    assert text.startswith(
        "why knows no array that test_why.py:1 makes.\n  expected  one of test_why.py:"
    )
    with pytest.raises(spmd.ReportError) as error:
        named.why("nothing.py:1")
    assert str(error.value) == (
        "why knows no array that nothing.py:1 makes.\n  expected  a line of test_why.py"
    )


def test_a_line_of_a_program_without_arrays_in_between():
    """Where no line makes an array, the error leads to the paths, and has no empty list."""
    mesh = spmd.make_mesh({"data": 8})
    lowered = spmd.pjit(lambda x: x + 1, mesh=mesh).lower(jax.ShapeDtypeStruct((), jnp.float32))
    with pytest.raises(spmd.ReportError) as error:
        lowered.why("test_why.py:1")
    assert str(error.value) == (
        "why knows no array that test_why.py:1 makes.\n"
        "  expected  the path of an argument or output: no line of this program makes an array"
    )
    nothing = spmd.pjit(lambda: None, mesh=mesh).lower()
    with pytest.raises(spmd.ReportError) as error:
        nothing.why("x")
    assert str(error.value) == ("why knows no value 'x'.\n  expected  a line such as 'model.py:42'")


@pytest.mark.parametrize("name", [None, 3, b"out", ["out"]])
def test_names_are_strings(named, name):
    """Anything else is refused with what a name is."""
    for ask in (lambda: named.why(name), lambda: spmd.why(named, name)):
        with pytest.raises(spmd.ArgumentError) as error:
            ask()
        assert str(error.value) == (
            "why takes the name of a value as a string.\n"
            "  expected  a path such as \"out['loss']\", or a line such as 'model.py:42'\n"
            f"  got       {type(name).__name__}: {name!r}"
        )


def test_a_file_is_told_by_whole_parts_of_its_path(named):
    """``y.py:3`` is no line of ``test_why.py``."""
    with pytest.raises(spmd.ReportError, match=r"y\.py:3 makes"):
        named.why("y.py:3")


# JAX 0.10.2 ends the process over names with a backslash or beyond ASCII, and JAX 0.12 raises for a
# single quote: neither is a matter of reports.
@pytest.mark.parametrize("name", ["a{b", "]}", 'a"b', "a, b", "a\nb", "a->b", "a:b", "a:(1)"])
def test_names_of_axes_that_look_like_syntax(name):
    """Origins, preview, report and page call an axis what the user calls it."""
    mesh = spmd.make_mesh({name: 4, "model": 2})
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)

    def f(x, w):
        total = jax.shard_map(
            lambda y: lax.psum(y, name), mesh=plain, in_specs=P(name), out_specs=P()
        )
        return total(jnp.sin(x @ w)), jnp.cos(x)

    specs = {"in_axis_resources": (P(name, "model"), P("model")), "out_axis_resources": P()}
    low = spmd.pjit(f, **specs, mesh=mesh).lower(f32(8, 6), f32(6, 4))
    (origin,) = one(low.why("x")).origins[:1]
    assert (origin.axis, origin.annotation.spec) == (name, ((name,), ("model",)))
    assert low.why("x").mesh == {name: 4, "model": 2}
    report = low.compile().report()
    for found in (low.preview(), report):
        assert {a for c in found.collectives for a in c.mesh_axes} == {name, "model"}
        assert {c.kind for c in found.collectives} == {"all-gather", "all-reduce"}
        assert all(c.wire_bytes for c in found.collectives)
    assert not [one for one in report.findings if one.kind == "unused-axis"]
    assert str(report)
    assert name.replace("\n", "") in html.unescape(report.to_html())


def test_names_of_axes_that_are_escaped():
    """MLIR writes quotes, backslashes and what is not printable ASCII in digits; they are read."""
    text = r'#sdy.sharding<@mesh, [{"a\22b", "\\", "\C3\A9"}, {"\0A":(1)2, ?}]>'
    ((first, second),) = passes.shardings_in(text)
    assert first.axes == ('a"b', "\\", "é")
    assert (second.axes, second.closed) == (("\n:(1)2",), False)


def _turned(axes):
    """A mesh of 8 devices with the axes of `grid` in other sizes."""
    return jax.sharding.Mesh(axes.devices.reshape(2, 4), axes.axis_names)


def test_meshes_that_give_an_axis_several_sizes(grid):
    """An axis of another mesh is another axis: it is named after its mesh, and goes no further."""
    plain = jax.sharding.Mesh(grid.devices, grid.axis_names)
    other = NamedSharding(_turned(grid), P("data", "model"))

    def f(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x), other)  # the other mesh
        return jnp.cos(y)

    given_here = NamedSharding(plain, P("data", "model"))
    low = jax.jit(f, in_shardings=given_here).lower(f32(16, 16))
    result, x = one(why(low, "result")), one(why(low, "x"))
    assert why(low, "x").mesh == {"data": 4, "model": 2, "data@mesh_0": 2, "model@mesh_0": 4}
    assert x.spec == (("data",), ("model",))
    assert result.spec == (("data@mesh_0",), ("model@mesh_0",))
    for origin in result.origins:
        assert origin.annotation.source.line == line_of("# the other mesh")
        assert [step.operation for step in origin.steps] == ["cosine", "return"]
    stops = {(stop.axis, stop.reason, stop.kept) for stop in result.conflicts}
    assert stops == {
        ("data", "split", ("data@mesh_0",)),
        ("model", "split", ("model@mesh_0",)),
    }
    assert {stop.won.kind for stop in result.conflicts} == {"constraint"}
    # The partitioner moves the values from one mesh to the other: only the compiled program has it.
    with pytest.raises(spmd.ReportError) as error:
        spmd.preview(low)
    assert str(error.value) == (
        "preview cannot say what is sent between meshes that give an axis several sizes.\n"
        "  got       several sizes of 'data', 'model'\n"
        "  fix       compile it, and see its report"
    )
    report = spmd.report(low.compile())
    assert report.mesh == {"data": 4, "model": 2}
    assert report.collectives
    assert report.findings == ()


def test_meshes_that_agree_share_their_axes(grid):
    """An axis that two meshes have in one size has one name."""
    plain = jax.sharding.Mesh(grid.devices, grid.axis_names)
    other = jax.sharding.Mesh(grid.devices, ("data", "rest"))

    def f(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(other, P("data", "rest")))

    low = jax.jit(f, in_shardings=NamedSharding(plain, P("data"))).lower(f32(16, 16))
    assert one(why(low, "result")).spec == (("data",), ("rest",))
    assert why(low, "x").mesh == {"data": 4, "model": 2, "rest": 2}


# What is accepted


def test_functions_and_stages_give_the_same(grid):
    """A function with its arguments, its stages, and JAX's stage are all read alike."""
    f = spmd.pjit(lambda x: jnp.sin(x), P("data"), mesh=grid)
    traced = f.trace(f32(8))
    low = traced.lower()
    found = low.why("out")
    assert why(f, "out", f32(8)) == found == why(traced, "out") == why(low.jax_stage, "out")
    assert hash(why(traced, "out")) == hash(found)


def test_a_compiled_program_is_refused(grid):
    """The lowered module is not in it, and the error says how to keep it."""
    compiled = spmd.pjit(lambda x: x, P("data"), mesh=grid).lower(f32(8)).compile()
    with pytest.raises(spmd.ReportError) as error:
        why(compiled, "x")
    assert str(error.value) == (
        "why cannot read propagation out of a compiled program.\n"
        "  expected  a function with its arguments, or what it was lowered to\n"
        "  got       spmd.Compiled\n"
        "  fix       lowered = f.lower(*args); lowered.why(name); compiled = lowered.compile()"
    )


def test_the_module_stays_as_it_is(grid):
    """What is compiled later is what was lowered, and its results are right."""
    low = spmd.pjit(lambda x: jnp.sin(x), P("data"), mesh=grid).lower(f32(8))
    before = low.as_text(debug_info=True)
    low.why("out")
    assert low.as_text(debug_info=True) == before


def test_passes_that_are_missing(grid, monkeypatch):
    """A jaxlib without the passes gets an error that names them."""
    monkeypatch.setattr(propagation, "_PASSES", ("sdy-import-pipeline", "sdy-tell-all{a=b}"))
    low = spmd.pjit(lambda x: x, P("data"), mesh=grid).lower(f32(8))
    with pytest.raises(spmd.ReportError) as error:
        low.why("x")
    lines = str(error.value).splitlines()
    assert lines[0] == "why needs passes of Shardy that this jaxlib does not have."
    assert lines[1] == "  expected  sdy-import-pipeline, sdy-tell-all"
    assert "'sdy-tell-all' does not refer to a registered pass" in lines[2]


def test_a_module_for_the_older_partitioner(grid):
    """What was lowered without Shardy has no origins, and the error says so."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        low = spmd.pjit(lambda x: x + 1, P("data"), mesh=grid).lower(f32(16))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    with pytest.raises(spmd.ReportError) as error:
        low.why("x")
    assert str(error.value).startswith("why was lowered without Shardy")


# Text and JSON


def test_as_text(grid):
    """The text names the spec, each annotation, each step and each conflict with its line."""
    low = spmd.pjit(lambda x, w: jnp.sin(x @ w), (P("data"), P(None, "data")), mesh=grid).lower(
        f32(8, 6), f32(6, 4)
    )
    text = str(low.why("out"))
    place = one(low.why("out")).source
    at = f"{FILE}:{place.line}"
    assert text.splitlines() == [
        "out in <lambda>; mesh data=4, model=2",
        "",
        f"result f32[8,4]: P('data', None); {at}",
        "  data on dimension 0: from argument x P('data', None)",
        f"    -> dot_general [8,4], dimension 0; {at}",
        f"    -> sine [8,4], dimension 0; {at}",
        f"    -> return to result [8,4], dimension 0; {at}",
        "  data did not reach dimension 1: the axis splits another dimension already",
        f"    met at dot_general, 2 operations away; {at}",
        "    lost  argument w P(None, 'data')",
        "    won   argument x P('data', None)",
    ]


def test_in_colour_the_text_is_the_same(named):
    """A terminal gets the same words."""
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="truecolor")
    found = named.why("out['h'][0]")
    found.show(console)
    assert "\x1b[" in out.getvalue()
    words = [w for w in str(found).split() if w.isalpha()]
    assert all(word in out.getvalue() for word in words)


def test_as_json(named):
    """The records are JSON values with a schema of their own."""
    data = json.loads(json.dumps(named.why("out['h'][0]").to_json()))
    assert data["schema"] == "spmd-why/1"
    assert data["mesh"] == [{"axis": "data", "size": 4}, {"axis": "model", "size": 2}]
    (value,) = data["values"]
    assert value["spec"] == [["data"], []]
    assert value["origins"][0]["annotation"]["name"] == "batch['x']"
    assert [s["operation"] for s in value["origins"][0]["steps"]] == ["dot_general", "return"]
