"""What a report holds for its page: arguments on the mesh, source text, and what is alive."""

import itertools
import linecache
import math
import textwrap

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest
from reports import collective, source

import spmd
from spmd import P
from spmd.inspection import Report, parse_module
from spmd.inspection.compile.report import AROUND, excerpts
from spmd.inspection.hlo.memory import STRETCHES, memory_of

MESH = spmd.make_mesh({"data": 4, "model": 2})
SPECS = {"a": P("data"), "b": P(None, ("model", "data")), "c": P(), "d": P("model", None, "data")}
SHAPES = {"a": (8, 3), "b": (2, 16), "c": (), "d": (2, 5, 4)}
ARGS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


def total(tree, scale):
    """A sum of everything."""
    return sum(leaf.sum() for leaf in tree.values()) * scale


SCALE = jax.ShapeDtypeStruct((), jnp.float32)


@pytest.fixture(scope="module", params=["pjit", "jit", "jit of arrays"])
def found(request):
    """The report of one function, of `spmd.pjit` and of `jax.jit`."""
    if request.param == "pjit":
        return spmd.report(spmd.pjit(total, (SPECS, P()), mesh=MESH), ARGS, SCALE)
    shardings = {name: NamedSharding(MESH, spec) for name, spec in SPECS.items()}
    if request.param == "jit":
        f = jax.jit(total, in_shardings=(shardings, NamedSharding(MESH, P())))
        return spmd.report(f, ARGS, SCALE)
    arrays = {n: jax.device_put(np.ones(SHAPES[n], np.float32), shardings[n]) for n in ARGS}
    return spmd.report(jax.jit(total), arrays, jax.device_put(np.float32(1), shardings["c"]))


def test_arguments_lie_where_jax_has_them(found):
    """Path, shape, bytes and the part of each device are those of JAX, and come back from JSON."""
    names = [*(f"tree['{name}']" for name in SPECS), "scale"]
    assert [one.path for one in found.arguments] == names
    assert found.device_ids == tuple(d.id for d in MESH.devices.flat)
    assert Report.from_json(found.to_json()).arguments == found.arguments
    axes = dict(MESH.shape)
    for name, one in zip(SPECS, found.arguments, strict=False):
        sharding, shape = NamedSharding(MESH, SPECS[name]), SHAPES[name]
        assert (one.shape, one.dtype) == (shape, "f32")
        assert one.nbytes == 4 * math.prod(sharding.shard_shape(shape))
        want = sharding.devices_indices_map(shape)
        for place in itertools.product(*map(range, axes.values())):
            index = want[MESH.devices[place]]
            got = one.shard_at(dict(zip(axes, place, strict=True)), axes)
            assert got == tuple(p.indices(n)[:2] for p, n in zip(index, shape, strict=True))


def test_arguments_without_a_mesh():
    """A program of one device has arguments that no mesh splits."""
    (one,) = spmd.report(jax.jit(lambda x: x * 2), jnp.ones((2, 3))).arguments
    assert (one.path, one.shape, one.splits, one.nbytes) == ("x", (2, 3), None, 24)
    assert one.shard_at({}, {}) is None


def test_an_argument_that_is_not_used():
    """What the program drops is an argument of the call all the same, or is left out by JAX."""
    f = spmd.pjit(lambda x, y: x * 2, (P("data"), P("model")), mesh=MESH)
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert [one.path for one in spmd.report(f, x, x).arguments] == ["x", "y"]
    sharding = NamedSharding(MESH, P("data"))
    g = jax.jit(lambda x, y: x * 2, in_shardings=(sharding, sharding))
    paths = [one.path for one in spmd.report(g, x, x).arguments]
    assert paths in ([], ["args[0]", "args[1]"])


# Source text


def test_excerpts(tmp_path):
    """Lines around each frame, runs that meet in one, nothing of libraries or missing files."""
    file = tmp_path / "model.py"
    file.write_text("".join(f"line {i}\n" for i in range(1, 61)))
    frames = tuple(source(n, file=str(file)) for n in (3, 12, 40, 59, 999))
    library = source(3, file=linecache.__file__)
    one = collective(source=frames[0], frames=(*frames, library, source(1, file="/no/such.py")))
    found = excerpts([one], None)
    assert [(e.first, e.first + len(e.lines) - 1) for e in found] == [(1, 16), (36, 44), (55, 60)]
    assert {e.file for e in found} == {str(file)}
    for excerpt in found:
        numbers = range(excerpt.first, excerpt.first + len(excerpt.lines))
        assert excerpt.lines == tuple(f"line {i}" for i in numbers)
    far = collective(source=source(3 + 2 * AROUND + 2, file=str(file)), frames=frames[:1])
    assert len(excerpts([far], None)) == 2


def test_excerpts_of_names_that_are_no_files(tmp_path, monkeypatch):
    """A relative name is not looked for, a changed file is read anew, and a cell is known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linecache.py").write_text("secret\n")
    for name in ("linecache.py", "<stdin>", "", "os.py"):
        assert excerpts([collective(source=source(1, file=name))], None) == ()
    cell = "/tmp/ipykernel_1/1.py"
    monkeypatch.setitem(linecache.cache, cell, (5, None, ["h = x\n", "y = h"], cell))
    (one,) = excerpts([collective(source=source(2, file=cell))], None)
    assert one.lines == ("h = x", "y = h")
    file = tmp_path / "m.py"
    for text in ("one\n", "two, longer\n"):
        file.write_text(text)
        (one,) = excerpts([collective(source=source(1, file=str(file)))], None)
        assert one.lines == (text.rstrip(),)


def test_long_lines_are_cut(tmp_path):
    """A line of a megabyte, as of generated code, does not make a report of a megabyte."""
    file = tmp_path / "m.py"
    file.write_text("x" * 10**6)
    (one,) = excerpts([collective(source=source(1, file=str(file)))], None)
    assert one.lines == ("x" * 500,)


# What is alive


class Plan:
    """What a compiler tells of its plan."""

    argument_size_in_bytes = 4096
    output_size_in_bytes = 4096
    temp_size_in_bytes = 12288
    generated_code_size_in_bytes = 0
    alias_size_in_bytes = 0


HLO = """\
HloModule m, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[1024]{0} pad(f32[8]{0} %x, f32[] %z), padding=0_1016
  %b = f32[2048]{0} concatenate(f32[1024]{0} %a, f32[1024]{0} %a), dimensions={0}
  %c = f32[8]{0} slice(f32[2048]{0} %b), slice={[0:8]}
  ROOT %d = f32[8]{0} add(f32[8]{0} %c, f32[8]{0} %x)
}
"""


def test_what_is_alive_over_program_order():
    """A module of five lines, by hand: bytes of temporaries by place, and lives of buffers."""
    memory = memory_of(parse_module(textwrap.dedent(HLO)), Plan())
    lives = {b.name: (b.first, b.last) for b in memory.buffers}
    makes = {name: first for name, (first, _) in lives.items()}
    assert makes["a"] < makes["b"] < makes["d"]
    assert lives["b"][1] == lives["b"][0] + 1
    assert len(memory.live) == memory.places
    # a and b are alive together when b is made: 4 KiB and 8 KiB.
    assert memory.live[makes["b"]] == 12288
    assert max(memory.live) == 12288
    assert memory.live[0] == 0


def long_program(count, large=0):
    """The text of a chain of so many values of 1 KiB; one of them may have 1 MiB."""
    shapes = {i: "f32[262144]" if i == large else "f32[256]" for i in range(1, count)}
    lines = [f"  %v{i} = {s}{{0}} sine(f32[256]{{0}} %v{i - 1})" for i, s in shapes.items()]
    return "\n".join(
        ["HloModule m, is_scheduled=true", "", "ENTRY %main (v0: f32[256]) -> f32[256] {",
         "  %v0 = f32[256]{0} parameter(0)", *lines,
         f"  ROOT %r = f32[256]{{0}} add(f32[256]{{0}} %v{count - 1}, f32[256]{{0}} %v0)", "}", ""]
    )  # fmt: skip


@pytest.mark.parametrize("place", range(500, 506))
def test_a_peak_of_one_place_is_in_one_stretch(place):
    """Wherever it stands in its stretch of four places, the most of the stretch is the peak."""
    memory = memory_of(parse_module(long_program(1000, place)), Plan())
    assert sum(alive >= 1 << 20 for alive in memory.live) in (1, 2)


def test_a_long_program_is_told_in_stretches():
    """Many places become as many numbers as a picture has points, and the peak stays."""
    memory = memory_of(parse_module(long_program(2000)), Plan())
    assert len(memory.live) == STRETCHES
    assert memory.places >= 2000
