"""Replica groups, and the mesh axes they lie along."""

import itertools
import math

import numpy as np
import pytest

from spmd.inspection.hlo import groups as hlo_groups, text as hlo_text

MESH = {"data": 4, "model": 2}
DATA = ((0, 2, 4, 6), (1, 3, 5, 7))
MODEL = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", MODEL),
        ("{{0, 2, 4, 6}, {1, 3, 5, 7}}", DATA),
        ("{}", ()),
        ("[4,2]<=[8]", MODEL),
        ("[2,4]<=[4,2]T(1,0)", DATA),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", DATA),
        ("mesh['data'=4,'model'=2] {'model'}", MODEL),
        ("mesh['data'=4,'model'=2] {'data','model'}", (tuple(range(8)),)),
        ("mesh['data'=4,'model'=2] {'data':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['data'=4,'model'=2] {'data':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        (
            "mesh['a'=1,'b'=1,'axis_2'=2,'axis_3'=4], device_ids=([4,2]T(1,0)) {'axis_2'}",
            MODEL,
        ),
        (
            "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(0,2,1)) {'axis_1':(2)2}",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", ((3, 1), (2, 0))),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'x'}", ((3, 2), (1, 0))),
    ],
)
def test_every_spelling_expands_to_the_same_groups(text, groups):
    """The four spellings of replica groups give the ids that they stand for."""
    assert sorted(hlo_groups.expand_replica_groups(text)) == sorted(groups)


ODD_NAMES = [
    "a{b",
    "a}b",
    'a"b',
    "a[b",
    "a]b",
    "a,b",
    "a\nb",
    "a\rb",
    "a->b",
    "] {}",
    "{0,1}",
    "x=4",
]


@pytest.mark.parametrize("name", ODD_NAMES)
@pytest.mark.parametrize("order", ["", ", device_ids=([8])"])
def test_names_of_axes_that_look_like_syntax(name, order):
    """Whatever an axis is called, an instruction is read with its groups and what it calls."""
    line = (
        f"  %sum = f32[2]{{0}} all-reduce(%x), channel_id=1, replica_groups=mesh['{name}'=4,"
        f"'model'=2]{order} {{'{name}'}}, use_global_device_ids=true, to_apply=%add, "
        "metadata={op_name=\"it's 'so'\"}"
    )
    head = "HloModule jit_f, num_partitions=8\n\n"
    text = f"{head}ENTRY %main (x: f32[2]) -> f32[2] {{\n{line}\n  %y = f32[] constant(0)\n}}\n"
    (computation,) = hlo_text.parse_module(text).computations.values()
    one, after = computation.instructions
    assert (one.opcode, after.name, one.op_name) == ("all-reduce", "y", "it's 'so'")
    assert one.callees() == {"to_apply": ("add",)}
    assert one.attribute("use_global_device_ids") == "true"
    assert hlo_groups.expand_replica_groups(one.attribute("replica_groups")) == DATA
    assert hlo_groups.logical_groups(one, hlo_text.parse_module(text)) == DATA
    part = f"mesh['{name}'=4,'model'=2] {{'{name}':(2)2}}"
    assert hlo_groups.expand_replica_groups(part) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_an_unknown_spelling_is_an_error():
    """A fifth spelling is not silently taken for no groups."""
    with pytest.raises(ValueError, match="unknown spelling: 'blob'"):
        hlo_groups.expand_replica_groups("blob")


def _partition(sizes: dict[str, int], axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Brute force: devices go together where their coordinates on all other axes agree."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, coordinate in enumerate(itertools.product(*map(range, sizes.values()))):
        key = tuple(c for c, name in zip(coordinate, sizes, strict=True) if name not in axes)
        groups.setdefault(key, []).append(device)
    return tuple(map(tuple, groups.values()))


def test_every_subset_of_axes_is_recognised():
    """Groups made from a subset of axes by brute force are matched to that subset, in order."""
    sizes = {"a": 2, "b": 3, "one": 1, "c": 4}
    for count in range(4):
        for axes in itertools.combinations(("a", "b", "c"), count):
            groups = _partition(sizes, axes)
            assert hlo_groups.mesh_axes_of(groups, sizes) == axes
            backwards = tuple(tuple(reversed(g)) for g in reversed(groups))
            assert hlo_groups.mesh_axes_of(backwards, sizes) == axes
            assert hlo_groups.groups_along(axes, sizes) == groups


@pytest.mark.parametrize("name", ["a:b", "it's", "x:(2)2", "{x}", "x:part"])
def test_axes_are_found_whatever_they_are_called(name):
    """Names, and parts of them, with what a text of groups has for itself."""
    sizes = {"x": 2, name: 4}
    for axes in (("x",), (name,), ("x", name)):
        groups = _partition(sizes, axes)
        assert hlo_groups.mesh_axes_of(groups, sizes) == axes
        assert hlo_groups.groups_along(axes, sizes) == groups
    halves = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert hlo_groups.mesh_axes_of(halves, sizes) == (f"{name}:(2)2",)
    assert hlo_groups.groups_along([f"{name}:(2)2"], sizes) == halves
    assert hlo_groups.groups_along([f"{name}:part"], sizes) == _partition(sizes, (name,))


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("data:(2)2",)),  # neighbours within a half of an axis
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("data:(1)2",)),  # the same place in both halves
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("data:(2)2", "model")),
        (((0, 2, 4, 6),), ("data",)),  # whole groups, though not all devices
        (((0, 1), (2, 4, 6), (3, 5)), ("data:part", "model:part")),  # of several sizes
        (((2, 4), (3, 5)), ("data:part",)),  # across the two halves
        (((0, 3), (1, 2), (4, 7), (5, 6)), ("data:part", "model:part")),  # a diagonal
        (((0, 2, 4), (1, 3, 5)), ("data:part",)),  # three of four
        (((0, 2), (1, 7)), ("data:part",)),  # the first is a part, the second only begins like one
    ],
)
def test_a_part_of_an_axis_is_named(groups, axes):
    """What crosses a part of an axis says which part, and what is no such part says that."""
    assert hlo_groups.mesh_axes_of(groups, MESH) == axes


def test_parts_of_an_axis_are_those_of_shardy():
    """Part `(before)count` of an axis is the digit of the coordinate that a reshape makes."""
    sizes, before, count = {"a": 2, "b": 24}, 2, 3
    grid = np.arange(48).reshape(2, before, count, 24 // (before * count))
    groups = tuple(map(tuple, grid.transpose(0, 1, 3, 2).reshape(-1, count).tolist()))
    assert hlo_groups.mesh_axes_of(groups, sizes) == ("b:(2)3",)


def test_groups_outside_the_mesh_have_no_axes():
    """A program for more devices than the mesh has is not forced onto it."""
    assert hlo_groups.mesh_axes_of(((0, 8),), MESH) == ()


def test_pairs_of_a_permute_are_joined():
    """A ring is one group, and a device that keeps its own data is one by itself."""
    assert hlo_groups.connected([(0, 2), (2, 4), (4, 0), (1, 3), (5, 5)]) == (
        (0, 2, 4),
        (1, 3),
        (5,),
    )


def _logical(opcode: str, attributes: str, replicas: int, partitions: int):
    instruction = hlo_text.Instruction(
        name="x", opcode=opcode, type="f32[]", operands="", attributes=attributes
    )
    module = hlo_text.Module(
        name="m", entry="", computations={}, num_replicas=replicas, num_partitions=partitions
    )
    return hlo_groups.logical_groups(instruction, module)


@pytest.mark.parametrize(
    ("opcode", "attributes", "groups"),
    [
        # Flattened ids: replica * partitions + partition.
        (
            "all-reduce",
            "channel_id=1, replica_groups={{0,5},{1,4}}, use_global_device_ids=true",
            [(0, 5), (1, 4)],
        ),
        # Without a channel: replicas, within each partition.
        ("all-reduce", "replica_groups={{0,1}}", [(0, 3), (1, 4), (2, 5)]),
        ("all-to-all", "replica_groups={}", [(0, 3), (1, 4), (2, 5)]),
        # With a channel and no flag: replicas, with all their partitions.
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}", [(0, 1, 2), (3, 4, 5)]),
        ("all-gather", "channel_id=1, replica_groups={{0,1}}", [(0, 1, 2, 3, 4, 5)]),
        ("reduce-scatter", "channel_id=1, replica_groups={{0},{1}}", [(0, 1, 2), (3, 4, 5)]),
        # These have no flag: with a channel they name partitions, within each replica.
        ("all-to-all", "channel_id=1, replica_groups={{0,2},{1}}", [(0, 2), (1,), (3, 5), (4,)]),
        (
            "collective-permute",
            "channel_id=1, source_target_pairs={{0,1},{1,2}}",
            [(0, 1, 2), (3, 4, 5)],
        ),
    ],
)
def test_participants_are_numbered_as_the_attributes_say(opcode, attributes, groups):
    """Ids count replicas, partitions or both, by channel and flag, on 2 replicas x 3 partitions."""
    assert sorted(_logical(opcode, attributes, 2, 3)) == sorted(groups)


def test_the_mesh_form_agrees_with_numpy_on_random_meshes():
    """Random meshes, device orders and axes expand as NumPy moves those axes to the end."""
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(1, 4, size=random.integers(1, 5)).tolist()
        order = random.permutation(math.prod(sizes))
        named = random.permutation(len(sizes))[: random.integers(1, len(sizes) + 1)].tolist()
        axes = ",".join(f"'a{i}'={n}" for i, n in enumerate(sizes))
        names = ",".join(f"'a{i}'" for i in named)
        text = f"mesh[{axes}], device_ids=({','.join(map(str, order))}) {{{names}}}"
        rest = [i for i in range(len(sizes)) if i not in named]
        wanted = order.reshape(sizes).transpose(rest + named)
        wanted = wanted.reshape(-1, math.prod(sizes[i] for i in named))
        np.testing.assert_array_equal(hlo_groups.expand_replica_groups(text), wanted)
