"""The partitioner's full rematerializations: read, and shown with a way out."""

import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import Mesh, P, pjit, with_sharding_constraint as constrain
from spmd.inspection import parse_module
from spmd.inspection.compile import warned
from spmd.inspection.findings import rematerialization as remat

MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
SIZES = {"x": 2, "y": 2, "z": 2}
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
NO_MODULE = parse_module("")


@functools.cache
def line_of(marker):
    """The line of this file that ends in ``# here: marker``."""
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, text in enumerate(file, 1) if text.endswith(f"# here: {marker}\n"))


def full(report):
    """The findings of this kind."""
    return [one for one in report.findings if one.kind == "full-rematerialization"]


def step(a, *between):
    """Two constraints that have too little in common, with others in between."""
    a = constrain(a, P("z"))  # here: given
    for spec in between:
        a = constrain(a, spec)
    return constrain(jnp.sin(a), P(None, ("z", "y")))


def jitted(fun, ins=None):
    """The function on the mesh of this file."""
    return pjit(fun, in_axis_resources=ins, mesh=MESH)


# From a program


def test_finding(capfd):
    """The warning becomes a finding, leaves the standard error, and is there in a second report."""
    f = jitted(step)
    first, again = spmd.report(f, X), spmd.report(f, X)
    assert full(first) == full(again)
    (one,) = full(first)
    assert (one.source.file, one.source.line) == (__file__, line_of("given"))
    assert one.source.function == "step"
    assert (one.nbytes, one.measure) == (8 * 8 * 4, "memory")
    assert one.subject == (
        "f32[8,8] of sharding_constraint is gathered whole, only to be split otherwise"
    )
    assert one.facts == (
        "it is split as P('z')",
        "it is wanted as P(None, ('z', 'y'))",
        "every device holds all of it in between",
    )
    assert one.fix == "with_sharding_constraint(value, P(None, 'z')) in between"
    assert "rematerialization" not in capfd.readouterr().err


def test_fix():
    """With the constraint that the finding suggests, there is no such finding."""
    assert not full(spmd.report(jitted(lambda a: step(a, P(None, "z"))), X))


def test_compiled_before(capfd):
    """A program that others compiled has no such finding; its warning went where it always goes."""
    compiled = jitted(lambda a: step(a)).lower(X).compile()
    assert "Involuntary full rematerialization" in capfd.readouterr().err
    assert not full(spmd.report(compiled))


def layers(a):
    """The two constraints in turns, outside and inside of a loop."""
    a = constrain(a, P("z"))  # here: outside
    a = jnp.cos(constrain(jnp.sin(a), P(None, ("z", "y"))))

    def layer(a, _):
        a = constrain(2 * a, P("z"))  # here: inside
        a = constrain(jnp.sin(a), P(None, ("z", "y")))
        return jnp.cos(a), None  # here: end of the body

    a = constrain(a, P(None, ("z", "y")))  # here: before the loop
    return lax.scan(layer, a, None, length=3)[0]


def test_lines():
    """In loops and outside of them, the line is the one that makes the value."""
    found = {(one.source.line, one.facts[:2]) for one in full(spmd.report(jitted(layers), X))}
    there = ("it is split as P('z')", "it is wanted as P(None, ('z', 'y'))")
    back = ("it is split as P(None, ('z', 'y'))", "it is wanted as P('z')")
    assert found == {
        (line_of("outside"), there),
        (line_of("before the loop"), back),
        (line_of("inside"), there),
        (line_of("end of the body"), back),
    }


def test_argument():
    """An argument has a path and no line; bytes are those with the padding of an uneven split."""
    f = jitted(lambda batch: jnp.sin(constrain(batch["x"], P(None, ("z", "y")))), P("z"))
    (one,) = full(spmd.report(f, {"x": X}))
    assert one.source is None
    assert one.subject == ("f32[8,8] of batch['x'] is gathered whole, only to be split otherwise")
    (one,) = full(spmd.report(jitted(step), jax.ShapeDtypeStruct((7, 6), jnp.float32)))
    assert one.nbytes == 8 * 6 * 4


def test_jax_jit():
    """A program of `jax.jit` has its finding by its own mesh, whatever the order of its devices."""
    mesh = jax.sharding.Mesh(
        np.array(jax.devices())[[3, 1, 2, 0, 7, 5, 6, 4]].reshape(2, 2, 2), ("a", "data", "model")
    )

    def split(*spec):
        return NamedSharding(mesh, P(*spec))

    @jax.jit
    def f(a):
        a = lax.with_sharding_constraint(a, split("model"))
        return lax.with_sharding_constraint(jnp.sin(a), split(None, ("model", "data")))

    (one,) = full(spmd.report(f, X, mesh=mesh))
    assert one.facts[:2] == (
        "it is split as P('model')",
        "it is wanted as P(None, ('model', 'data'))",
    )
    assert one.fix == "jax.lax.with_sharding_constraint(value, P(None, 'model')) in between"


SPECS = [
    (names[:k], names[k:])
    for n in (1, 2, 3)
    for names in itertools.permutations("xyz", n)
    for k in range(n + 1)
]


def chain(*specs):
    """A function that constrains its argument to one spec after the other."""

    def f(a):
        for spec in specs:
            a = jnp.sin(constrain(a, spec))
        return a

    return pjit(f, in_axis_resources=specs[0], out_axis_resources=specs[-1], mesh=MESH)


@pytest.mark.slow
def test_every_route():
    """Whatever two shardings the partitioner warns of, it warns of no step by way of the route."""
    pairs = [*itertools.permutations(SPECS, 2)]
    count = 0
    for i in np.random.default_rng(0).permutation(len(pairs))[:80]:
        given, wanted = (P(*spec) for spec in pairs[i])
        with warned.caught() as lines:
            module = parse_module(chain(given, wanted).lower(X).compile().as_text())
        for one in remat.rematerializations(lines, module, SIZES):
            count += 1
            assert (one.shape.dims, one.nbytes) == ((8, 8), 256)
            assert one.route
            assert "P()" not in one.route  # which would be as bad
            route = [eval(text, {"P": P}) for text in one.route]
            assert not full(spmd.report(chain(given, *route, wanted), X)), (given, route, wanted)
    print(f"{count} of 80 pairs")
    assert count > 5


# From a text

FORM = (
    "W1122 22:03:00.674385    8792 spmd_partitioner.cc:656] [SPMD] Involuntary full "
    "rematerialization. The compiler cannot go from sharding {} to {} efficiently for HLO "
    "operation %copy.2 = {}{{1,0}} copy(%sin), sharding={}{}. As the last resort, SPMD will "
    "replicate the tensor and then partition it to obtain the target sharding, which is "
    "inefficient."
)
ROWS = "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"
COLUMNS = "{devices=[1,4,2]<=[2,2,2]T(2,1,0) last_tile_dim_replicate}"


def warning(given=ROWS, wanted=COLUMNS, shape="f32[4,8]", metadata=""):
    """A warning as XLA writes it."""
    return FORM.format(given, wanted, shape, given, metadata)


def read(*args, sizes=SIZES, **kwargs):
    """The record of one warning."""
    (one,) = remat.rematerializations([warning(*args, **kwargs)], NO_MODULE, sizes)
    return one


def test_without_metadata():
    """A warning without metadata has no line and no name."""
    one = read()
    assert (one.source, one.op_name, one.sites) == (None, "", 1)
    assert (one.given, one.wanted, one.route) == (
        "P('z')",
        "P(None, ('z', 'y'))",
        ("P(None, 'z')",),
    )
    assert (str(one.shape), one.nbytes) == ("f32[8,8]", 256)


def test_name():
    """The name stack is that of the metadata, with its quotes undone."""
    one = read(metadata=", metadata={op_name=\"batch[\\'x\\']\" stack_frame_id=7}")
    assert (one.op_name, one.source) == ("batch['x']", None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{mesh['x'=2,'y'=2,'z'=2], [{'z'}, {}]}", "P('z')"),
        ("{mesh['x'=2,'y'=2,'z'=2], [{?}, {'z', 'y', ?}]}", "P(None, ('z', 'y'))"),
        ("{mesh['a'=4,'b'=2], [{'b'}, {}], replicated={'a'}}", "P('z')"),
        ("{mesh['a'=8], [{}, {'a':(2)2}]}", "P(None, 'y')"),
        ("{mesh['x'=2,'y'=2,'z'=2], device_ids=([4,2]T(1,0)), [{'x'}, {}]}", "P('z')"),
        ("{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}", "P('z')"),
        ("{devices=[8,1]<=[8]}", "P(('x', 'y', 'z'))"),
        ("{devices=[2,2,1,2]<=[8] last_tile_dims={replicated, replicated}}", "P('x', 'y')"),
        ("{devices=[2,1,2,2]<=[2,2,2]T(2,0,1) last_tile_dims={manual, replicated}}", None),
        ("{mesh['x'=2,'y'=2,'z'=2], [{'z'}, {}], unreduced={'x'}}", None),
        ("{devices=[2,1,4]0,3,4,6,1,2,5,7 last_tile_dim_replicate}", None),
        ("{replicated}", None),
        ("{maximal device=0}", None),
        ("{something new}", None),
    ],
)
def test_spellings(text, shown):
    """What is a PartitionSpec on the mesh is shown as one, and all else as XLA writes it."""
    one = read(wanted=text)
    assert one.wanted == (shown or text)


@pytest.mark.parametrize(
    ("given", "wanted", "route"),
    [
        ("[{'z'}, {}]", "[{}, {'z', 'y'}]", ("P(None, 'z')",)),
        ("[{}, {'z', 'y'}]", "[{'z'}, {}]", ("P(None, 'z')",)),
        ("[{'x'}, {}]", "[{}, {'z', 'y'}]", ("P('x', ('z', 'y'))",)),
        ("[{'x', 'y'}, {}]", "[{'z'}, {'y'}]", ("P('y')", "P(None, 'y')")),
    ],
)
def test_route(given, wanted, route):
    """The way leads over the axes of both sides, or over all of them where they share none."""
    mesh = "{mesh['x'=2,'y'=2,'z'=2], "
    assert read(given=mesh + given + "}", wanted=mesh + wanted + "}").route == route


def test_without_a_mesh():
    """Without a mesh there are no axes to name: shardings are shown as XLA writes them."""
    one = read(sizes={})
    assert (one.given, one.wanted, one.route) == (ROWS, COLUMNS, ())
    assert one.nbytes == 256


@pytest.mark.parametrize("sizes", [SIZES, {"data": 4, "model": 2}, {"a": 2, "b": 1, "c": 4}])
def test_every_sharding(sizes):
    """What XLA prints of a PartitionSpec is read as that PartitionSpec, without axes of size 1."""
    mesh = Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))
    for names in itertools.chain(
        *(itertools.permutations(sizes, n + 1) for n in range(len(sizes)))
    ):
        for cut in range(len(names) + 1):
            dims = [names[:cut], names[cut:]]
            text = str(NamedSharding(mesh, P(*dims))._to_xla_hlo_sharding(2))
            real = [tuple(n for n in one if sizes[n] > 1) for one in dims]
            if not any(real):
                continue
            entries = [repr(one[0] if len(one) == 1 else one or None) for one in real]
            wanted = f"P({', '.join(entries if real[1] else entries[:1])})"
            assert read(given=text, sizes=sizes).given == wanted
            parts = [int(np.prod([sizes[n] for n in one])) for one in real]
            assert read(given=text, sizes=sizes).shape.dims == (4 * parts[0], 8 * parts[1])


def test_places_of_one_line():
    """Warnings of one line and the same shardings are one record, which counts them."""
    text = (
        'HloModule m\n\nFileNames\n1 "a.py"\n\nFunctionNames\n1 "f"\n\nFileLocations\n'
        "1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=4 end_column=9}\n\n"
        "StackFrames\n1 {file_location_id=1 parent_frame_id=1}\n"
    )
    lines = [
        warning(metadata=f', metadata={{op_name="{name}" stack_frame_id=1}}')
        for name in ("jit(f)/jvp()/sin", "jit(f)/transpose(jvp())/mul")
    ]
    (one,) = remat.rematerializations(lines, parse_module(text), SIZES)
    assert (str(one.source), one.op_name, one.sites) == ("a.py:3", "jit(f)/jvp()/sin", 2)


def test_other_texts():
    """A text that is no such warning gives no record."""
    assert remat.rematerializations(["", "W1122 [SPMD] Involuntary"], NO_MODULE, SIZES) == ()
