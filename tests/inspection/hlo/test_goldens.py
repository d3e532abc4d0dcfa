"""The ledger of HLO texts that are kept as they were compiled, on every JAX and without libtpu.

Each ``goldens/NAME.hlo.txt`` has a ``NAME.ledger.txt`` beside it with what the ledger must say: a
mesh, then a line for each record. ``goldens/write.py`` made the texts, except for those named
``by-hand-*``, whose first line says why they had to be written by hand. The ledgers of these were
written from their texts. The others were printed by the ledger, then checked: against the counts
of `programs.py`, and reshards of 24 x 40 floats against the text.
"""

import itertools
import math
from pathlib import Path
import re

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

from spmd import inspection
from spmd.inspection.hlo import groups as hlo_groups, text as hlo_text

GOLDENS = Path(__file__).parents[1] / "goldens"
TEXTS = sorted(GOLDENS.glob("*.hlo.txt"))
BACKENDS = ("cpu-0.10", "cpu-0.12", "tpu-0.10", "tpu-0.12")


def _line(one):
    """A record as a line of a golden ledger."""
    before, after = (" + ".join(map(str, shapes)) for shapes in one.shapes)
    assert one.dtype == ", ".join(dict.fromkeys(s.dtype for s in one.shapes.operands))
    parts = [
        f"{one.kind} over {', '.join(one.mesh_axes) or 'no axis'} of {before} -> {after}: "
        f"{one.payload_bytes} bytes",
        f"{one.wire_bytes} sent",
        f"{one.group_size} devices",
        f"{'unknown' if one.executions is None else one.executions} times",
        one.direction,
    ]
    if one.source:
        used = "used by " if one.source_is_consumer else ""
        place = f"{one.source}:{one.source.column} in {one.source.function or '?'}"
        parts.append(used + place)
    parts += ["async"] * one.is_async + [f"{one.combined} combined"] * (one.combined > 1)
    whole = ", ".join(parts + ["conditional"] * one.conditional)
    return "\n".join([whole, *map(_part, one.parts)])


def _part(part):
    """What one exchange has in a combined one, as a line below it."""
    operand, result = (" + ".join(map(str, shapes)) for shapes in part.shapes)
    used = "used by " if part.source_is_consumer else ""
    place = f"{used}{part.source} in {part.source.function}" if part.source else "no line"
    about = f"{part.payload_bytes} bytes, {part.wire_bytes} sent, {part.direction}, {place}"
    return f"    {operand} -> {result}: {about}"


def _golden(text):
    """The mesh and the lines of the ledger beside a text."""
    mesh, *lines = text.with_name(text.name.replace(".hlo.", ".ledger.")).read_text().splitlines()
    sizes = dict(re.findall(r"(\w+)=(\d+)", mesh))
    return {name: int(size) for name, size in sizes.items()}, lines


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name.removesuffix(".hlo.txt"))
def test_a_kept_text_has_the_ledger_beside_it(text):
    """Every record of every text is the line that was counted for it, in program order."""
    mesh, lines = _golden(text)
    found = [_line(one) for one in inspection.collectives(text.read_text(), mesh)]
    assert "\n".join(found).splitlines() == lines


def test_every_spelling_and_backend_is_kept():
    """There are texts of both backends and both JAX ends, and of each spelling of groups."""
    texts = {path.name: path.read_text() for path in TEXTS}
    assert all(any(name.startswith(b) for name in texts) for b in BACKENDS)
    groups = " ".join(
        found for text in texts.values() for found in re.findall(r"replica_groups=(.*)", text)
    )
    for spelling in (
        r"\{\{0,2,4,6\},\{1,3,5,7\}\}",
        r"\{\},",
        r"\[4,2\]<=\[8\],",
        r"\[2,4\]<=\[4,2\]T\(1,0\),",
        r"mesh\['axis_0'=4,'axis_1'=2\] \{'axis_0'\}",
        r"mesh\['axis_0'=2,'axis_1'=1,'axis_2'=4\], device_ids=\(\[4,2\]T\(1,0\)\) \{'axis_0'\}",
        r"mesh\['axis_0'=2,'axis_1'=4\], device_ids=\(\[2,2,2\]T\(0,2,1\)\) \{'axis_1':\(2\)2\}",
        r"mesh\['data'=4,'model'=2\] \{'data'\}",
        r"mesh\['data'=4,'model'=2\] \{'data':\(2\)2,'model'\}",
        r"mesh\['a'=2,'b'=2,'c'=2\] \{'c','a'\}",
    ):
        assert re.search(spelling, groups), spelling


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text.name.removesuffix(".hlo.txt"))
def test_a_kept_text_is_small_and_names_no_machine(text):
    """Texts stay readable in a review, and no path of the machine that made them is left."""
    content = text.read_text()
    assert len(content) < 60_000
    assert not re.search(r"/(?:work|tmp|root)/|\.pyenv", content)


def test_a_module_of_nothing_has_no_collectives():
    """A header alone, and an entry of one parameter, are empty ledgers."""
    assert inspection.collectives("HloModule nothing\n", {"data": 8}) == ()
    entry = "HloModule m\n\nENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
    assert inspection.collectives(entry, {}) == ()


def test_a_ring_through_the_largest_pod_is_one_group():
    """Thousands of pairs are joined, whichever way round they are listed."""
    ring = [(i, (i + 1) % 8192) for i in range(8192)]
    order = np.random.default_rng(0).permutation(8192)
    for pairs in (ring, [ring[i] for i in order], [(b, a) for a, b in ring]):
        assert hlo_groups.connected(pairs) == (tuple(range(8192)),)


# The four spellings, made from one mesh


@st.composite
def _meshes(draw):
    """A mesh of up to 48 devices in any order, and some of its axes, in any order."""
    sizes = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 48)
    )
    order = draw(st.permutations(range(math.prod(sizes))))
    axes = draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    return tuple(sizes), tuple(order), tuple(axes)


def _members(sizes, order, axes):
    """Brute force: a group for each coordinate on the other axes, in the order of the named."""
    ids = np.array(order).reshape(sizes)
    rest = [i for i in range(len(sizes)) if i not in axes]
    groups = []
    for outside in itertools.product(*(range(sizes[i]) for i in rest)):
        group = []
        for inside in itertools.product(*(range(sizes[i]) for i in axes)):
            at = dict(zip((*rest, *axes), (*outside, *inside), strict=True))
            group.append(int(ids[tuple(at[i] for i in range(len(sizes)))]))
        groups.append(tuple(group))
    return groups


def _listed(groups):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def _iota(sizes, axes):
    """Spells groups as a count upwards that is reshaped and transposed; devices are in order."""
    perm = [i for i in range(len(sizes)) if i not in axes] + list(axes)
    count = math.prod(sizes[i] for i in axes)
    shape, dims = f"[{math.prod(sizes) // count},{count}]", ",".join(map(str, sizes))
    return f"{shape}<=[{dims}]T({','.join(map(str, perm))})"


def _over_mesh(sizes, order, axes, name):
    """Spells groups over a mesh with a list of devices."""
    mesh = ",".join(f"'{name(i)}'={size}" for i, size in enumerate(sizes))
    devices = "" if order is None else f", device_ids=({','.join(map(str, order))})"
    return f"mesh[{mesh}]{devices} {{{','.join(repr(name(i)) for i in axes)}}}"


def _axes_of(text, mesh, count):
    """The mesh axes of a collective with these groups in a program of `count` partitions."""
    found = hlo_text.parse_module(
        f"HloModule m, num_partitions={count}\n\nENTRY %main (a: f32[]) -> f32[] {{\n"
        "  %a = f32[] parameter(0)\n"
        f"  ROOT %sum = f32[] all-reduce(%a), channel_id=1, replica_groups={text}, "
        "use_global_device_ids=true\n}\n"
    )
    one = found.computations["main"].instructions[1]
    return hlo_groups.mesh_axes_of(hlo_groups.logical_groups(one, found), mesh)


@settings(max_examples=60, deadline=None)
@given(_meshes())
def test_all_spellings_of_the_same_groups_are_the_same(mesh):
    """Lists, iotas, synthetic and own mesh names give the groups of brute force, and its axes."""
    sizes, order, axes = mesh
    plain = tuple(range(math.prod(sizes)))
    own, synthetic = "abcd".__getitem__, "axis_{}".format
    spelled = {
        plain: [
            _listed(_members(sizes, plain, axes)),
            _iota(sizes, axes),
            _over_mesh(sizes, None, axes, own),
        ],
        order: [
            _listed(_members(sizes, order, axes)),
            _over_mesh(sizes, order, axes, synthetic),
            _over_mesh(sizes, order, axes, own),
        ],
    }
    for devices, texts in spelled.items():
        wanted = sorted(_members(sizes, devices, axes))
        for text in texts:
            assert sorted(hlo_groups.expand_replica_groups(text)) == wanted, text
    # Numbers are positions on the mesh, so axes can be told where the order is plain.
    crossed = tuple(own(i) for i in sorted(axes) if sizes[i] > 1)
    for text in spelled[plain]:
        named = dict(zip("abcd", sizes, strict=False))
        assert _axes_of(text, named, len(plain)) == crossed, text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 3), min_size=1, max_size=4), st.data())
def test_a_part_of_an_axis_is_named_as_it_is_spelled(factors, data):
    """A part ``x:(before)size`` of an axis is expanded by brute force, and named back the same."""
    at = data.draw(st.integers(0, len(factors) - 1))
    size, before, part = math.prod(factors), math.prod(factors[:at]), factors[at]
    text = f"mesh['m'=2,'x'={size}] {{'x':({before}){part}}}"
    split = np.arange(2 * size).reshape(2 * before, part, -1)
    wanted = sorted(map(tuple, split.transpose(0, 2, 1).reshape(-1, part).tolist()))
    assert sorted(hlo_groups.expand_replica_groups(text)) == wanted
    name = "x" if part == size else f"x:({before}){part}"
    assert _axes_of(text, {"m": 2, "x": size}, 2 * size) == (name,)
