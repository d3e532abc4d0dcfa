"""Pictures of sharded arrays: the right devices in the right cells, at any rank and size."""

import itertools
import math
import re

from browser import chromium, opened
from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
import numpy as np
import pytest
from rich.console import Console

import spmd
from spmd import P, Picture
from spmd.errors import ArgumentError, MeshError, OptionError, ReportError, ShardingError
from spmd.inspection import Shard
from spmd.inspection.records.pictures import of_argument, sheets, show_devices

MESH = spmd.make_mesh({"data": 4, "model": 2})
CUBE = spmd.make_mesh({"a": 2, "b": 2, "c": 2})
ENTRIES = {
    MESH: [None, "data", "model", ("data", "model"), ("model", "data")],
    CUBE: [None, "a", "b", "c", ("a", "b"), ("c", "a"), ("b", "c", "a")],
}


@st.composite
def placements(draw):
    """A mesh, a spec that uses no axis twice, and a shape that may be uneven."""
    mesh = draw(st.sampled_from([MESH, CUBE]))
    spec, used = [], set()
    for _ in range(draw(st.integers(0, 4))):
        entry = draw(st.sampled_from(ENTRIES[mesh]))
        axes = set((entry,) if isinstance(entry, str) else entry or ())
        spec.append(None if axes & used else entry)
        used |= axes if spec[-1] is not None else set()
    shape = tuple(draw(st.integers(0, 9)) for _ in spec)
    return mesh, P(*spec), shape


def parts_of(mesh, entry):
    """In how many parts an entry of a spec cuts its dimension."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh.shape[axis] for axis in axes)


@settings(deadline=None, max_examples=150)
@given(placements())
def test_every_device_is_where_jax_has_it(placement):
    """For dimensions that divide, the parts and their devices are those of JAX."""
    mesh, spec, shape = placement
    shape = tuple(n * parts_of(mesh, e) for n, e in zip(shape, spec, strict=True))
    sharding = NamedSharding(mesh, spec)
    want = {
        device.id: tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    picture = spmd.visualize(sharding, shape=shape)
    got = {device: shard.index for shard in picture.shards for device in shard.devices}
    assert got == want
    assert len({shard.index for shard in picture.shards}) == len(picture.shards)


@settings(deadline=None, max_examples=100)
@given(placements())
def test_uneven_dimensions(placement):
    """An array that is padded, split evenly and cut back has the parts that are drawn."""
    mesh, spec, shape = placement
    picture = spmd.visualize(NamedSharding(mesh, spec), shape=shape)
    whole = np.arange(math.prod(shape)).reshape(shape)
    pads = [(0, -n % parts_of(mesh, e)) for n, e in zip(shape, spec, strict=True)]
    padded = np.pad(whole, pads, constant_values=-1) if shape else whole
    even = NamedSharding(mesh, spec).devices_indices_map(padded.shape)
    want = {device.id: padded[index] for device, index in even.items()}
    for shard in picture.shards:
        part = whole[tuple(slice(*r) for r in shard.index)]
        for device in shard.devices:
            assert sorted(part.flat) == sorted(v for v in want[device].flat if v >= 0)


@settings(deadline=None, max_examples=60)
@given(placements())
def test_every_shard_is_drawn_once(placement):
    """The sheets of a picture hold each shard in one cell, and the text names its devices."""
    mesh, spec, shape = placement
    picture = spmd.visualize(NamedSharding(mesh, spec), shape=shape)
    drawn = [shard for sheet in sheets(picture) for shard in sheet.cells.values()]
    assert sorted(drawn, key=repr) == sorted(picture.shards, key=repr)
    if len(sheets(picture)) <= 6:
        text = str(picture)
        assert all(show_devices(shard.devices) in text for shard in picture.shards)


PICTURES = {
    (P("data", "model"), (8, 16)): """\
[8,16] as P('data', 'model') on mesh data=4, model=2
8 shards of [2,8], each on 1 device
+-----+---------+---------+
|     |   0:8   |  8:16   |
+-----+---------+---------+
| 0:2 |  cpu 0  |  cpu 1  |
+-----+---------+---------+
| 2:4 |  cpu 2  |  cpu 3  |
+-----+---------+---------+
| 4:6 |  cpu 4  |  cpu 5  |
+-----+---------+---------+
| 6:8 |  cpu 6  |  cpu 7  |
+-----+---------+---------+""",
    (P("model"), (5,)): """\
[5] as P('model') on mesh data=4, model=2
2 shards of [3] down to [2], each on 4 devices
+---------------+---------------+
|      0:3      |      3:5      |
+---------------+---------------+
|  cpu 0,2,4,6  |  cpu 1,3,5,7  |
+---------------+---------------+""",
    (P(), ()): """\
[] as P() on mesh data=4, model=2
1 shard of [], on 8 devices
+-----------+
|  cpu 0-7  |
+-----------+""",
    (P("data"), (6, 4)): """\
[6,4] as P('data') on mesh data=4, model=2
3 shards of [2,4], each on 2 devices; 2 devices with nothing
+-----+-----------+
|     |    0:4    |
+-----+-----------+
| 0:2 |  cpu 0,1  |
+-----+-----------+
| 2:4 |  cpu 2,3  |
+-----+-----------+
| 4:6 |  cpu 4,5  |
+-----+-----------+
| 6:6 |    6,7    |
+-----+-----------+""",
    (P("model", None, "data"), (4, 3, 8)): """\
[4,3,8] as P('model', None, 'data') on mesh data=4, model=2
8 shards of [2,3,2], each on 1 device; dimension 0 down, dimension 2 to the right
+-----+---------+---------+---------+---------+
|     |   0:2   |   2:4   |   4:6   |   6:8   |
+-----+---------+---------+---------+---------+
| 0:2 |  cpu 0  |  cpu 2  |  cpu 4  |  cpu 6  |
+-----+---------+---------+---------+---------+
| 2:4 |  cpu 1  |  cpu 3  |  cpu 5  |  cpu 7  |
+-----+---------+---------+---------+---------+""",
}


@pytest.mark.parametrize(("spec", "shape"), PICTURES, ids=lambda x: str(x))
def test_text(spec, shape):
    """Pictures of rank 0 to 3 look as they are here, to the letter."""
    with MESH:
        assert str(spmd.visualize(spec, shape=shape)) == PICTURES[spec, shape]


def test_three_cut_dimensions():
    """What two dimensions cannot show comes as one picture for each block of the others."""
    text = str(spmd.visualize(NamedSharding(CUBE, P("a", "b", "c")), shape=(4, 4, 4)))
    assert re.findall(r"^\[.*\]$", text, re.M) == ["[0:2, :, :]", "[2:4, :, :]"]
    assert text.count("| 0:2 |") == 2


def test_arrays_and_structs():
    """Arrays and structs bring their shape, dtype and sharding; any other sharding draws too."""
    sharding = NamedSharding(MESH, P("data"))
    x = jax.device_put(np.ones((8, 8), np.float32), sharding)
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    assert spmd.visualize(x) == spmd.visualize(struct)
    assert str(spmd.visualize(x)).startswith(
        "f32[8,8] as P('data') on mesh data=4, model=2\n"
        "4 shards of f32[2,8] (64 B), each on 2 devices\n"
    )
    alone = spmd.visualize(jax.device_put(np.ones(3, np.float32), jax.devices()[3]))
    assert alone.shards == (Shard(index=((0, 3),), devices=(3,)),)
    halves = spmd.visualize(jax.jit(lambda x: x[:4])(x))
    assert {d for s in halves.shards for d in s.devices} == set(range(8))
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding)
    assert spmd.visualize(keys).dtype == "key<fry>"


def test_a_described_pod():
    """8,192 devices take a screen: the first and last parts, with what is between left out."""
    mesh = AbstractMesh((64, 128), ("data", "model"))
    one = spmd.visualize(NamedSharding(mesh, P("data", "model")), shape=(640, 1280))
    assert len(one.shards) == 8192
    lines = str(one).split("\n")
    assert len(lines) < 50
    assert max(map(len, lines)) <= 100
    assert lines[1] == "8,192 shards of [10,10], each on 1 device"
    cells = [cell.strip() for cell in lines[-3].strip("|").split("|")]
    assert cells[:3] == ["630:640", "8064", "8065"]
    assert cells[-2:] == ["...", "8191"]
    assert lines[-1] == (
        "No devices are known: numbers are places on the mesh, the last axis fastest."
    )
    copies = spmd.visualize(NamedSharding(mesh, P(None, "model")), shape=(640, 1280))
    assert "0-8064 by 128" in str(copies)


def test_width_and_colour():
    """A narrow terminal gets fewer columns, and colour changes nothing but colour."""
    picture = spmd.visualize(NamedSharding(MESH, P(None, ("data", "model"))), shape=(2, 64))
    for width in (40, 60, 120):
        console = Console(width=width, color_system="standard", force_terminal=True, _environ={})
        with console.capture() as captured:
            console.print(picture)
        text = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
        assert max(map(len, text.splitlines())) <= width
        assert ("..." in text) == (width < 120)
        assert "cpu 7" in text


def test_device_lists():
    """Runs and equal steps are one range; the rest is listed as far as there is room."""
    assert [show_devices(ids) for ids in ((3,), (0, 1), (0, 1, 2), (0, 2, 4), range(0, 64, 8))] == [
        "3", "0,1", "0-2", "0,2,4", "0-56 by 8",
    ]  # fmt: skip
    assert show_devices((0, 1, 4, 5, 8, 9)) == "0,1,4,5,8,... (6)"


# While a function is traced


def traced(mesh, function_of, spec, shape=(8, 8), **options):
    """The picture that is made in the body of a `shard_map`."""
    seen = []

    def body(x):
        seen.append(spmd.visualize(function_of(x)))
        return x

    x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options))(x)
    return seen[0]


def typed(kind):
    """The mesh of 4 by 2 with axes of one type."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_inside_of_shard_map(kind):
    """A value of `shard_map` differs along the axes that JAX says, and nowhere else."""
    mesh = typed(kind)
    one = traced(mesh, lambda x: x, P("data"))
    assert one.shape == (2, 8)
    assert [(s.at, s.devices) for s in one.shards] == [
        ((("data", i),), (2 * i, 2 * i + 1)) for i in range(4)
    ]
    assert "The value is the same along model." in one.notes
    both = traced(mesh, lambda x: x + jax.lax.axis_index("model").astype(x.dtype), P("data"))
    assert [len(s.devices) for s in both.shards] == [1] * 8
    summed = traced(mesh, lambda x: jax.lax.psum(x, "data"), P("data"))
    assert [s.devices for s in summed.shards] == [tuple(range(8))]
    unchecked = traced(mesh, lambda x: x, P("data"), check_vma=False)
    assert len(unchecked.shards) == 8
    assert "check_vma=False: what is drawn apart may be the same." in unchecked.notes


MANUAL = """\
f32[2,8] as P(None, None) on mesh data=4, model=2
4 shards of f32[2,8] (64 B), each on 2 devices
+--------+--------+--------+--------+
| data=0 | data=1 | data=2 | data=3 |
+--------+--------+--------+--------+
|   0,1  |   2,3  |   4,5  |   6,7  |
+--------+--------+--------+--------+
Inside of shard_map over data: the shape is that of one place.
How model splits it, the partitioner decides later.
No devices are known: numbers are places on the mesh, the last axis fastest."""


def test_partly_manual():
    """Axes that `shard_map` leaves to the partitioner are said to be open."""
    assert str(traced(typed(AxisType.Auto), lambda x: x, P("data"), axis_names={"data"})) == MANUAL


def test_explicit_axes():
    """On Explicit axes the type of a traced value says where it lies, also above two dimensions."""
    mesh, seen = typed(AxisType.Explicit), []
    x = jax.device_put(
        np.ones((8, 4, 8), np.float32), NamedSharding(mesh, P("data", None, "model"))
    )
    with jax.set_mesh(mesh):
        jax.jit(lambda x: seen.append(spmd.visualize(x)) or x)(x)
    assert seen[0] == spmd.visualize(x)
    inside = traced(mesh, lambda x: x, P("data"), axis_names={"data"})
    assert all(len(s.devices) == 2 for s in inside.shards)


def test_auto_axes_are_not_guessed():
    """Where the partitioner decides later, nothing is drawn and that is said."""
    seen = []
    with MESH:
        spmd.pjit(lambda x: seen.append(spmd.visualize(x)) or x, P("data"))(np.ones((8, 2)))
    jax.jit(lambda x: seen.append(spmd.visualize(x)) or x)(np.ones(3, np.float32))
    assert [one.shards for one in seen] == [(), ()]
    assert all("partitioner decides" in one.notes[-1] for one in seen)
    assert str(seen[1]).startswith("f32[3] as a traced value\n")


def test_under_eager_grad():
    """Eager `grad` works on an array, which lies where it lies."""
    x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(MESH, P("data")))
    seen = []
    jax.grad(lambda x: seen.append(spmd.visualize(x)) or x.sum())(x)
    assert seen == [spmd.visualize(x)]


# HTML


@pytest.mark.slow
def test_html(tmp_path):
    """The page shows the same devices in the same cells, and needs nothing from elsewhere."""
    picture = spmd.visualize(NamedSharding(MESH, P("data", "model")), shape=(8, 16))
    picture.save(tmp_path / "p.html")
    with chromium() as browser, opened(browser, tmp_path / "p.html", width=400) as tab:
        rows = tab.eval_on_selector_all(
            ".spmd-picture tr", "rows => rows.map(row => [...row.cells].map(c => c.innerText))"
        )
        assert rows[0] == ["", "0:8", "8:16"]
        assert rows[1:] == [[f"{2 * i}:{2 * i + 2}", str(2 * i), str(2 * i + 1)] for i in range(4)]
        assert tab.get_attribute("td.s3", "title") == "[2:4, 8:16] on cpu 3"
        colors = "cells => new Set(cells.map(c => getComputedStyle(c).backgroundColor)).size"
        assert tab.eval_on_selector_all("td[title]", colors) == 8
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400


def test_html_is_escaped():
    """Names of axes are text in a notebook and on a page."""
    mesh = AbstractMesh((2,), ("</style><script>x</script>",))
    one = spmd.visualize(NamedSharding(mesh, P(mesh.axis_names[0])), shape=(4,))
    for text in (one._repr_html_(), one.to_html()):
        assert "<script>x" not in text
        assert "&lt;/style&gt;&lt;script&gt;x" in text


@pytest.mark.slow
def test_html_of_a_pod_stays_small():
    """A picture of 8,192 parts is a page that a browser opens at once."""
    mesh = AbstractMesh((64, 128), ("data", "model"))
    one = spmd.visualize(NamedSharding(mesh, P("data", "model")), shape=(640, 1280))
    assert len(one._repr_html_()) < 600_000


# Arguments of reports, and errors


def test_argument_of_a_report():
    """An argument of a saved report draws as the array itself would."""
    f = spmd.pjit(lambda t, r: t["x"] * r, ({"x": P("data", "model")}, P()), mesh=MESH)
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)
    found = spmd.report(f, {"x": x}, jax.ShapeDtypeStruct((), jnp.bfloat16))
    found = spmd.Report.from_json(found.to_json())
    struct = jax.ShapeDtypeStruct(
        (8, 16), jnp.bfloat16, sharding=NamedSharding(MESH, P("data", "model"))
    )
    assert of_argument(found, "t['x']") == spmd.visualize(struct)
    assert of_argument(found, "r").shards == (Shard(index=(), devices=tuple(range(8))),)
    with pytest.raises(OptionError) as e:
        of_argument(found, "t['y']")
    assert str(e.value) == (
        "report of `<lambda>` has no argument t['y'] (did you mean \"t['x']\"?).\n"
        "  expected  one of t['x'], r"
    )


ERRORS = [
    (
        lambda: spmd.visualize(P("data"), shape=(8,)),
        MeshError,
        "visualize needs a mesh for a PartitionSpec, and there is none here.\n"
        '  fix       with spmd.make_mesh({"data": 4, "model": 2}): ...\n'
        "            or give a NamedSharding",
    ),
    (
        lambda: spmd.visualize("w"),
        ArgumentError,
        "visualize finds no sharding in what it is given.\n"
        "  expected  an array of JAX, a ShapeDtypeStruct with a sharding, a sharding or a "
        "PartitionSpec\n"
        "  got       a value of type str",
    ),
    (
        lambda: spmd.visualize({"a": np.ones(3), "b": [jax.ShapeDtypeStruct((3,), np.float32)]}),
        ArgumentError,
        "visualize finds no sharding in leaf ['b'][0].\n"
        "  expected  an array of JAX, a ShapeDtypeStruct with a sharding, a sharding or a "
        "PartitionSpec\n"
        "  got       a value of type ShapeDtypeStruct",
    ),
    (
        lambda: spmd.visualize(NamedSharding(MESH, P("data"))),
        OptionError,
        "visualize needs the shape of the array: a NamedSharding has none.\n"
        "  fix       spmd.visualize(..., shape=(8, 16))",
    ),
    (
        lambda: spmd.visualize(jnp.ones(3), shape=(3,)),
        OptionError,
        "visualize takes no shape with an array, which has one.\n"
        "  given     shape=(3,)\n"
        "  fix       leave it out",
    ),
    *(
        (
            lambda shape=shape: spmd.visualize(NamedSharding(MESH, P("data")), shape=shape),
            OptionError,
            "visualize takes the shape of the array.\n"
            "  expected  a tuple of whole numbers that are not negative, such as shape=(8, 16)\n"
            f"  got       shape={shown}",
        )
        for shape, shown in (
            (8, "int: 8"),
            ("88", "str: '88'"),
            ((-4, 4), "tuple: (-4, 4)"),
            ((4.9, 4), "tuple: (4.9, 4)"),
        )
    ),
    (
        lambda: spmd.visualize(NamedSharding(MESH, P("data", "model")), shape=(3,)),
        ShardingError,
        "visualize cannot split the array.\n"
        "  given     the spec = P('data', 'model') on mesh data=4, model=2\n"
        "  expected  a spec of at most 1 entry\n"
        "  got       f32[3], which has rank 1; the spec has 2 entries\n"
        "  fix       shorten the spec to 1 entry",
    ),
    (
        lambda: spmd.visualize(jnp.ones(3)).save("p.png"),
        ReportError,
        "picture cannot be saved as `p.png`.\n  expected  a file name that ends in .html",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "text"), ERRORS, ids=lambda x: getattr(x, "__name__", "")
)
def test_errors(make, error, text):
    """What cannot be drawn is told with what to write instead."""
    with pytest.raises(error) as e:
        make()
    assert str(e.value) == text


def test_an_unknown_axis():
    """A spec for a mesh in context is checked in the words of the rest of the package."""
    with MESH, pytest.raises(ShardingError, match="unknown axis 'modle' \\(did you mean 'model'"):
        spmd.visualize(P("modle"), shape=(8,))


def test_pictures_are_values():
    """Equal facts make equal pictures, of which each device is in one shard only."""
    made = [spmd.visualize(NamedSharding(CUBE, P("a")), shape=(4,)) for _ in range(2)]
    assert made[0] == made[1]
    assert isinstance(made[0], Picture)
    devices = list(itertools.chain.from_iterable(s.devices for s in made[0].shards))
    assert sorted(devices) == list(range(8))


def test_an_array_of_the_host():
    """An array of NumPy is drawn where JAX would place it, as its own conversion says."""
    x = np.ones((4, 3), np.float32)
    assert str(spmd.visualize(x)) == (
        "f32[4,3] as SingleDeviceSharding on device cpu:0\n"
        "1 shard of f32[4,3] (48 B), on 1 device\n"
        "+-----+---------+\n"
        "|     |   0:3   |\n"
        "+-----+---------+\n"
        "| 0:4 |  cpu 0  |\n"
        "+-----+---------+\n"
        "It is in the memory of the host: this is where jax.numpy.asarray places it."
    )
    with jax.default_device(jax.devices()[3]):
        (shard,) = spmd.visualize(x).shards
        assert shard.devices == (jnp.asarray(x).device.id,) == (3,)
    with pytest.raises(OptionError, match="takes no shape with an array"):
        spmd.visualize(x, shape=(4, 3))


def _tree():
    split = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(MESH, P("data", "model")))
    return {"layers": [split, jax.device_put(split, NamedSharding(MESH, P("model")))], "step": 0}


def test_a_tree_is_drawn_leaf_by_leaf():
    """Each leaf has its own picture under its path, the same as alone."""
    tree = _tree()
    found = spmd.visualize(tree)
    assert list(found.pictures) == ["['layers'][0]", "['layers'][1]", "['step']"]
    for path, leaf in zip(found.pictures, jax.tree.leaves(tree), strict=True):
        assert found.pictures[path] == spmd.visualize(leaf)
    parts = [f"{path}\n{picture}" for path, picture in found.pictures.items()]
    assert str(found) == "\n".join(parts)


def test_a_tree_as_html(tmp_path):
    """The page and the fragment have every picture once, with its path and one style."""
    found = spmd.visualize(_tree())
    found.save(tmp_path / "t.html")
    for page in ((tmp_path / "t.html").read_text(), found._repr_html_()):
        assert page.count('<div class="spmd-picture">') == 3
        assert page.count("<h2><code>[&#39;layers&#39;][1]</code></h2>") == 1
    assert found._repr_html_().count("<style>") == 1
    with pytest.raises(ReportError, match=r"^pictures cannot be saved as `t.png`"):
        found.save("t.png")


def test_of_a_large_tree_the_first_twenty_are_drawn():
    """What is not drawn is counted, in the terminal and on the page."""
    found = spmd.visualize([0] * 23)
    assert len(found.pictures) == 23
    for text in (str(found), found._repr_html_()):
        assert "and 3 more, not drawn: give a part of the tree" in text
        assert ("[19]" in text, "[20]" in text) == (True, False)
