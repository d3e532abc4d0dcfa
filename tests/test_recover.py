"""OpSharding -> PartitionSpec: what a spec lowers to is read back, and nothing else is.

The oracle is a NumPy count that knows no OpSharding: which block of a value each position of the
mesh holds. Protos are judged by a second count that knows no mesh axes.
"""

from collections import OrderedDict
import itertools
import math

from hypothesis import event, example, given, settings, strategies as st
import jax
from jax import ShapeDtypeStruct
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
import numpy as np
import pytest
from strategies import fake_mesh, mesh_shapes, meshes_and_specs, specs

from spmd import _jax, _recover, op_sharding as door
from spmd._spec import UNCONSTRAINED
from spmd.errors import RecoveryError, ShardingError, SpecTypeError
from spmd.op_sharding import (
    explode_superdims,
    get_array_mapping,
    get_aval_sharding_proto,
    parse_op_sharding,
    strides_for_sizes,
    unflatten_array,
    unflatten_superdims,
)
from spmd.partition_spec import REPLICATED, ParsedPartitionSpec

Type = _jax.core.OpSharding.Type
many = settings(deadline=None, max_examples=300)
BIG = OrderedDict(a=2, b=3, c=4, d=7, e=4)


def struct(rank):
    """A value of that rank."""
    return ShapeDtypeStruct((1,) * rank, np.float32)


def lower(spec, mesh):
    """The proto of a value with one dimension per entry of the spec."""
    return get_aval_sharding_proto(struct(len(spec)), spec, mesh)


def parse(text, mesh):
    """What the sharding that HLO text spells recovers to."""
    return parse_op_sharding(_jax.core.HloSharding.from_string(text).to_proto(), mesh)


def tiled(tiles, devices, groups=()):
    """A tiled proto with an explicit device list; `groups` are the subgroup types."""
    proto = _jax.core.OpSharding()
    proto.type = Type.OTHER
    proto.tile_assignment_dimensions = [int(t) for t in tiles]
    proto.tile_assignment_devices = [int(d) for d in devices]
    proto.last_tile_dims = list(groups)
    return proto


def with_explicit_list(proto):
    """The same sharding with its device list written out."""
    if proto.type != Type.OTHER:
        return proto
    explicit = proto.clone()
    iota = np.arange(math.prod(proto.iota_reshape_dims)).reshape(proto.iota_reshape_dims)
    explicit.tile_assignment_devices = iota.transpose(proto.iota_transpose_perm).ravel().tolist()
    explicit.iota_reshape_dims, explicit.iota_transpose_perm = [], []
    return explicit


def named_text(spec, shape):
    """The same sharding in XLA's newer form, which names mesh axes."""
    axes = ",".join(f"'{n}'={s}" for n, s in shape.items())
    parts = ParsedPartitionSpec.from_user_input(spec, "spec").partitions
    dims = ", ".join("{" + ", ".join(f"'{a}'" for a in part) + "}" for part in parts)
    return f"{{mesh[{axes}], [{dims}]}}"


def canonical(spec, shape):
    """The partitions that must come back: no axes of size 1, and () where nothing is split."""
    parts = ParsedPartitionSpec.from_user_input(spec, "spec").partitions
    parts = tuple(tuple(a for a in part if shape[a] > 1) for part in parts)
    return parts if any(parts) else ()


def blocks(partitions, shape, rank):
    """Oracle: the block of each dimension that each mesh position holds, ``[devices, rank]``."""
    names = list(shape)
    coords = np.indices(tuple(shape.values())).reshape(len(shape), -1)
    held = np.zeros((math.prod(shape.values()), rank), dtype=int)
    for dim, part in enumerate(partitions):
        for axis in part:
            held[:, dim] = held[:, dim] * shape[axis] + coords[names.index(axis)]
    return held


def proto_blocks(tiles, devices, rank):
    """The same, read off a tile assignment and no mesh: where each device stands in it."""
    where = np.argsort(np.asarray(devices))
    return np.stack(np.unravel_index(where, tuple(tiles)), axis=1)[:, :rank]


# Lowering and parsing back


@pytest.mark.slow
@many
@given(meshes_and_specs())
@example((fake_mesh(BIG), P(("e", "a"), None, ("d", "b"))))
@example((fake_mesh(BIG), P(("b", "c"), ("e", "d"), "a")))
@example((fake_mesh({"a": 2, "b": 2, "c": 2}), P(("c", "a"), "b")))
@example((fake_mesh({"a": 2, "b": 1, "c": 4}), P(("b", "c"), "a")))
@example((fake_mesh({"a": 6, "b": 4}), P(("b", "a"))))
def test_round_trip(mesh_and_spec):
    """A spec comes back from both list forms of its proto, up to axes of size 1."""
    mesh, spec = mesh_and_spec
    proto = lower(spec, mesh)
    for form in (proto, with_explicit_list(proto)):
        got = parse_op_sharding(form, mesh)
        assert got.partitions == canonical(spec, mesh.shape)
        assert np.array_equal(
            blocks(got, mesh.shape, len(spec)),
            blocks(canonical(spec, mesh.shape), mesh.shape, len(spec)),
        )


@pytest.mark.slow
@many
@given(st.data())
def test_round_trip_on_the_big_mesh(data):
    """Every deal of the axes of a 2x3x4x7x4 mesh to five dimensions comes back."""
    mesh = fake_mesh(BIG)
    spec = data.draw(specs(BIG, 5))
    proto = lower(spec, mesh)
    for form in (proto, with_explicit_list(proto)):
        assert parse_op_sharding(form, mesh).partitions == canonical(spec, BIG)


@pytest.mark.slow
@many
@given(meshes_and_specs())
def test_round_trip_of_named_shardings(mesh_and_spec):
    """XLA's form with mesh axis names, which the Python proto shows as REPLICATED, comes back."""
    mesh, spec = mesh_and_spec
    got = parse(named_text(spec, mesh.shape), mesh)
    assert got.partitions == canonical(spec, mesh.shape)


@pytest.mark.slow
@many
@given(st.data(), st.randoms(use_true_random=False))
def test_replicas_come_in_any_order(data, random):
    """The order of the devices that hold one tile makes no difference."""
    used = data.draw(mesh_shapes(max_axes=4, max_devices=200))
    spec = data.draw(specs(used, data.draw(st.integers(0, 3))))
    names = data.draw(st.permutations([*used, "unused"]))
    mesh = fake_mesh({n: used.get(n, 4) for n in names})
    proto = with_explicit_list(lower(spec, mesh))
    if proto.type == Type.REPLICATED:
        proto = tiled((mesh.size,), range(mesh.size), [Type.REPLICATED])
    replicas = proto.tile_assignment_dimensions[-1]
    tiles = np.array(proto.tile_assignment_devices).reshape(-1, replicas).tolist()
    for tile in tiles:
        random.shuffle(tile)
    proto.tile_assignment_devices = list(itertools.chain(*tiles))
    assert parse_op_sharding(proto, mesh).partitions == canonical(spec, mesh.shape)


@pytest.mark.slow
@many
@given(st.data())
def test_anything_tiled(data):
    """A tiling gives a spec that places the same blocks, if and only if one exists.

    The tilings are those of an arbitrary factorization of the device count, so most of them use
    parts of axes; every spec of the mesh is tried by brute force.
    """
    shape = data.draw(mesh_shapes(max_axes=3, sizes=(1, 2, 3, 4, 6, 8), max_devices=48))
    n = math.prod(shape.values())
    factors = data.draw(factorizations(n))
    perm = data.draw(st.permutations(range(len(factors))))
    devices = np.arange(n).reshape(factors).transpose(perm).ravel()
    if n > 1 and data.draw(st.integers(0, 4)) == 0:
        i, j = data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
        devices[[i, j]] = devices[[j, i]]
    tiles = data.draw(factorizations(n))
    kinds = [Type.REPLICATED] * data.draw(st.integers(0, len(tiles)))
    rank = len(tiles) - len(kinds)
    want = proto_blocks(tiles, devices, rank)
    possible = [
        p for p in all_partitions(shape, rank) if np.array_equal(blocks(p, shape, rank), want)
    ]
    try:
        got = parse_op_sharding(
            tiled(tiles, devices, kinds), AbstractMesh(tuple(shape.values()), tuple(shape))
        )
    except RecoveryError:
        event("refused")
        assert not possible, f"missing: {possible}"
    else:
        event("recovered")
        assert np.array_equal(blocks(got, shape, rank), want), f"wrong: {got}; possible {possible}"


@st.composite
def factorizations(draw, n):
    """Sizes whose product is `n`, some of them 1."""
    sizes = []
    while n > 1 and len(sizes) < 4:
        sizes.append(draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])))
        n //= sizes[-1]
    return [*sizes, n]


def all_partitions(shape, rank):
    """Every spec without axes of size 1: each order of the axes, cut into `rank` + 1 runs."""
    axes = [a for a, s in shape.items() if s > 1]
    found = set()
    for order in itertools.permutations(axes):
        for cuts in itertools.combinations_with_replacement(range(len(axes) + 1), rank):
            ends = (0, *cuts)
            found.add(tuple(order[i:j] for i, j in itertools.pairwise(ends)))
    return found


# What comes back


def test_unsplit_dimensions_are_kept():
    """A split value gives one entry per dimension, trailing unsplit ones included."""
    mesh = fake_mesh({"x": 4, "y": 2})
    got = parse_op_sharding(get_aval_sharding_proto(struct(3), P("y"), mesh), mesh)
    assert got.partitions == (("y",), (), ())


def test_recovered_spec_shows_itself():
    """No user wrote it, so the spec to show is the recovered one, in sync with the partitions."""
    mesh = fake_mesh({"x": 4, "y": 2, "z": 3})
    got = parse_op_sharding(lower(P("z", None, ("y", "x")), mesh), mesh)
    assert got == ParsedPartitionSpec.from_user_input(P("z", None, ("y", "x")), "spec")
    assert got.user_spec == P("z", None, ("y", "x"))
    assert str(got) == "P('z', None, ('y', 'x'))"


@pytest.mark.parametrize(
    "text",
    [
        "{replicated}",
        "{devices=[1,1,8]<=[8] last_tile_dim_replicate}",
        "{devices=[1,2,4]<=[8] last_tile_dims={replicated, replicated}}",
        "{mesh['x'=4,'y'=2], [{}, {}]}",
    ],
)
def test_replicated_has_one_form(text):
    """A value that nothing splits gives REPLICATED, however its proto spells that."""
    assert parse(text, fake_mesh({"x": 4, "y": 2})) == REPLICATED


@pytest.mark.parametrize("shape", [{"x": 1}, {"x": 1, "y": 1}, {}])
def test_one_device_is_replicated(shape):
    """On a mesh of one device every placement is the whole value, MAXIMAL included."""
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    assert parse("{maximal device=0}", mesh) == REPLICATED
    assert parse("{replicated}", mesh) == REPLICATED
    assert parse_op_sharding(tiled((1, 1), [0]), mesh) == REPLICATED
    assert parse_op_sharding(tiled((1, 1), [0], [Type.MANUAL]), mesh) == REPLICATED


def test_subgroups():
    """Replicated subgroups of any number are left out, and groups of one device of any type."""
    mesh = fake_mesh({"x": 4, "y": 2, "z": 3})
    devices = np.arange(24).reshape(4, 2, 3)
    kinds = [Type.REPLICATED, Type.MANUAL, Type.REPLICATED]
    for perm, rest in (((1, 0, 2), (4, 1, 3)), ((1, 2, 0), (3, 1, 4))):
        proto = tiled((2, *rest), devices.transpose(perm).ravel(), kinds)
        assert parse_op_sharding(proto, mesh).partitions == (("y",),)
    proto = tiled((4, 6), range(24))
    proto.replicate_on_last_tile_dim = True
    assert parse_op_sharding(proto, mesh).partitions == (("x",),)


def test_tuple_is_a_list():
    """A TUPLE gives one spec per element, in order."""
    elements = "{devices=[2,4]<=[4,2]T(1,0)}, {replicated}, {devices=[4,1,2]<=[8]}"
    got = parse(f"{{{elements}}}", fake_mesh({"x": 4, "y": 2}))
    assert [g.partitions for g in got] == [(("y",), ("x",)), (), (("x",), (), ("y",))]
    empty = _jax.core.OpSharding()
    empty.type = Type.TUPLE
    assert parse_op_sharding(empty, fake_mesh({"x": 4, "y": 2})) == []


def test_many_devices():
    """A mesh of 65,536 devices is read in both list forms."""
    mesh = AbstractMesh((16, 16, 16, 16), ("a", "b", "c", "d"))
    proto = lower(P(("c", "a"), None, "d"), mesh)
    for form in (proto, with_explicit_list(proto)):
        assert parse_op_sharding(form, mesh).partitions == (("c", "a"), (), ("d",))


# What no PartitionSpec says

REPLICATED_OR_TILED = "REPLICATED, or dimensions tiled over the devices of the mesh"
ERRORS = {
    "major part": (
        "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
        """\
OpSharding has no PartitionSpec: it splits dimension 0 over a part of mesh axis 'x'.
  given     {devices=[2,1,4]<=[8] last_tile_dim_replicate} on mesh x=4, y=2
  expected  whole mesh axes: a PartitionSpec cannot name a part of one
  got       2 of the 4 positions of 'x', 2 apart
  fix       give the mesh axes of sizes 2, 2 in place of 'x'""",
    ),
    "minor part": (
        "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        """\
OpSharding has no PartitionSpec: it splits dimension 1 over a part of mesh axis 'x'.
  given     {devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate} on mesh x=4, y=2
  expected  whole mesh axes: a PartitionSpec cannot name a part of one
  got       2 of the 4 positions of 'x', 1 apart
  fix       give the mesh axes of sizes 2, 2 in place of 'x'""",
    ),
    "no axis order": (
        "{devices=[4,2]0,1,2,3,4,5,7,6}",
        """\
OpSharding has no PartitionSpec: no order of mesh axes gives its device order.
  given     {devices=[4,2]0,1,2,3,4,5,7,6} on mesh x=4, y=2
  expected  the devices of a mesh in row-major order, moved by whole axes
  got       device order 0, 1, 2, 3, 4, 5, 7, 6
  fix       use the mesh that the sharding was made on""",
    ),
    "manual": (
        "{manual}",
        f"""\
OpSharding has no PartitionSpec: it is MANUAL.
  given     {{manual}} on mesh x=4, y=2
  expected  {REPLICATED_OR_TILED}
  got       MANUAL: the program itself says what each device holds, as in shard_map""",
    ),
    "unknown": (
        "{unknown}",
        f"""\
OpSharding has no PartitionSpec: it is UNKNOWN.
  given     {{unknown}} on mesh x=4, y=2
  expected  {REPLICATED_OR_TILED}
  got       UNKNOWN: the partitioner has not decided yet""",
    ),
    "unreduced": (
        "{unreduced}",
        f"""\
OpSharding has no PartitionSpec: it is UNREDUCED.
  given     {{unreduced}} on mesh x=4, y=2
  expected  {REPLICATED_OR_TILED}
  got       UNREDUCED: the devices hold partial results that are still to be reduced""",
    ),
    "maximal": (
        "{maximal device=3}",
        """\
OpSharding has no PartitionSpec: it is MAXIMAL on a mesh of several devices.
  given     {maximal device=3} on mesh x=4, y=2
  expected  a value that all 8 devices hold, or a part on each
  got       the whole value on device 3 alone""",
    ),
    "manual subgroup": (
        "{devices=[1,4,2]<=[8] last_tile_dims={manual, replicated}}",
        f"""\
OpSharding has no PartitionSpec: groups of 4 devices are MANUAL.
  given     {{devices=[1,4,2]<=[8] last_tile_dims={{manual, replicated}}}} on mesh x=4, y=2
  expected  {REPLICATED_OR_TILED}
  got       MANUAL: the program itself says what each device holds, as in shard_map""",
    ),
    "other device count": (
        "{devices=[2,2]<=[4]}",
        """\
OpSharding has no PartitionSpec: it is tiled over another number of devices.
  given     {devices=[2,2]<=[4]} on mesh x=4, y=2
  expected  tiles for the 8 devices of the mesh
  got       4 tiles
  fix       use the mesh that the sharding was made on""",
    ),
    "every element of a tuple": (
        "{{manual}, {devices=[4,2]<=[8]}, {maximal device=1}}",
        f"""\
OpSharding element [0] has no PartitionSpec: it is MANUAL.
  given     {{manual}} on mesh x=4, y=2
  expected  {REPLICATED_OR_TILED}
  got       MANUAL: the program itself says what each device holds, as in shard_map
OpSharding element [2] has no PartitionSpec: it is MAXIMAL on a mesh of several devices.
  given     {{maximal device=1}} on mesh x=4, y=2
  expected  a value that all 8 devices hold, or a part on each
  got       the whole value on device 1 alone""",
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors(text, message):
    """What no PartitionSpec says is refused, with what it is and the value."""
    with pytest.raises(RecoveryError) as e:
        parse(text, fake_mesh({"x": 4, "y": 2}))
    assert str(e.value) == message
    assert isinstance(e.value, ValueError)
    assert e.value.__context__ is None


def test_error_of_ragged_tiles():
    """Tiles that end inside of an axis, at no part of it, are refused."""
    with pytest.raises(RecoveryError) as e:
        parse("{devices=[3,2]<=[6]}", fake_mesh({"x": 2, "y": 3}))
    assert (
        str(e.value)
        == """\
OpSharding has no PartitionSpec: no order of mesh axes gives its tiles.
  given     {devices=[3,2]<=[6]} on mesh x=2, y=3
  expected  dimension 0 in as many tiles as its mesh axes have positions
  got       3 tiles, which cut across the 2 positions of axis 'x'
  fix       use the mesh that the sharding was made on"""
    )


def test_error_of_a_middle_part_names_three_axes():
    """A part in the middle of an axis asks for an axis on either side of it."""
    with pytest.raises(RecoveryError) as e:
        parse("{devices=[2,4]0,1,4,5,2,3,6,7 last_tile_dim_replicate}", fake_mesh({"x": 8}))
    assert (
        str(e.value)
        == """\
OpSharding has no PartitionSpec: it splits dimension 0 over a part of mesh axis 'x'.
  given     {devices=[2,4]0,1,4,5,2,3,6,7 last_tile_dim_replicate} on mesh x=8
  expected  whole mesh axes: a PartitionSpec cannot name a part of one
  got       2 of the 8 positions of 'x', 2 apart
  fix       give the mesh axes of sizes 2, 2, 2 in place of 'x'"""
    )


def set_iota(proto, sizes, perm):
    """Gives a proto an iota device list."""
    proto.tile_assignment_devices = []
    proto.iota_reshape_dims, proto.iota_transpose_perm = sizes, perm


MALFORMED = {
    "twice": (
        lambda p: setattr(p, "tile_assignment_devices", [0, 1, 2, 3, 4, 5, 6, 6]),
        "{devices=[4,2]0,1,2,3,4,5,6,6}",
        "every device position of 0..7 once",
        "0, 1, 2, 3, 4, 5, 6, 6",
    ),
    "short": (
        lambda p: setattr(p, "tile_assignment_devices", [0, 1, 2]),
        "{devices=[4,2]0,1,2}",
        "every device position of 0..7 once",
        "0, 1, 2",
    ),
    "empty": (
        lambda p: setattr(p, "tile_assignment_devices", []),
        "{devices=[4,2]none}",
        "every device position of 0..7 once",
        "none",
    ),
    "iota size": (
        lambda p: set_iota(p, [2, 2], [1, 0]),
        "{devices=[4,2]<=[2,2]T(1,0)}",
        "every device position of 0..7 once",
        "0, 2, 1, 3",
    ),
    "iota permutation": (
        lambda p: set_iota(p, [4, 2], [1, 1]),
        "{devices=[4,2]<=[4,2]}",
        "iota_transpose_perm to permute the 2 iota_reshape_dims",
        "iota_reshape_dims [4, 2], iota_transpose_perm [1, 1]",
    ),
    "too many subgroups": (
        lambda p: setattr(p, "last_tile_dims", [Type.REPLICATED] * 3),
        "{devices=[4,2]0,1,2,3,4,5,6,7 last_tile_dims={replicated, replicated, replicated}}",
        "at most 2 last_tile_dims",
        "3 last_tile_dims",
    ),
}


@pytest.mark.parametrize(("spoil", "shown", "expected", "got"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_protos(spoil, shown, expected, got):
    """A proto that contradicts itself is refused instead of being read in part."""
    proto = tiled((4, 2), range(8))
    spoil(proto)
    with pytest.raises(RecoveryError) as e:
        parse_op_sharding(proto, fake_mesh({"x": 4, "y": 2}))
    assert str(e.value) == (
        "OpSharding has no PartitionSpec: it is malformed.\n"
        f"  given     {shown} on mesh x=4, y=2\n"
        f"  expected  {expected}\n"
        f"  got       {got}"
    )


def test_long_device_lists_are_cut_in_messages():
    """A message shows the first 16 devices of a long list."""
    order = [*range(30), 31, 30]
    with pytest.raises(RecoveryError) as e:
        parse_op_sharding(tiled((8, 4), order), fake_mesh({"x": 8, "y": 4}))
    shown = ", ".join(map(str, range(16)))
    assert f"  got       device order {shown}, …\n" in str(e.value)
    assert f"{{devices=[8,4]{shown.replace(' ', '')},…}} on mesh x=8, y=4\n" in str(e.value)


def test_no_proto():
    """What is no OpSharding is a TypeError that tells how to get one."""
    with pytest.raises(TypeError) as e:
        parse_op_sharding(_jax.core.HloSharding.from_string("{manual}"), fake_mesh({"x": 4}))
    assert isinstance(e.value, SpecTypeError)
    assert (
        str(e.value)
        == """\
OpSharding cannot be parsed.
  given     {manual}
  expected  an OpSharding proto
  got       jaxlib._hlo.HloSharding
  fix       pass its .to_proto()"""
    )
    with pytest.raises(SpecTypeError) as e:
        parse_op_sharding(None, fake_mesh({"x": 4}))
    assert (
        str(e.value)
        == """\
OpSharding cannot be parsed.
  given     None
  expected  an OpSharding proto
  got       NoneType"""
    )


# Device assignments

SHAPES = [(), (1,), (5,), (2, 2, 2), (2, 3, 4), (4, 2, 2), (6, 4), (1, 3, 1, 2), (3, 3, 1, 3)]


@pytest.mark.parametrize("sizes", SHAPES)
def test_strides(sizes):
    """Strides are those of a row-major NumPy array, in elements."""
    got = strides_for_sizes(sizes)
    assert got.dtype == np.int64
    assert got.tolist() == [s // 8 for s in np.empty(sizes, np.float64).strides]


def rebuild(dims):
    """The assignment of ``(size, stride)`` pairs from minor to major, digit by digit."""
    sizes = [s for s, _ in dims]
    out = []
    for i in range(math.prod(sizes)):
        value = 0
        for size, stride in dims:
            i, digit = divmod(i, size)
            value += digit * stride
        out.append(value)
    return out


@pytest.mark.parametrize("sizes", SHAPES)
def test_unflatten_every_transposition(sizes):
    """Superdimensions rebuild the assignment, are the fewest, and explode into the dimensions."""
    strides = [s // 8 for s in np.empty(sizes, np.float64).strides]
    for perm in itertools.permutations(range(len(sizes))):
        assignment = np.arange(math.prod(sizes)).reshape(sizes).transpose(perm).ravel()
        dims = unflatten_superdims(assignment)
        assert rebuild(dims) == assignment.tolist()
        assert all(t2 != s * t for (s, t), (_, t2) in itertools.pairwise(dims))
        want = [(sizes[i], strides[i]) for i in perm if sizes[i] > 1]
        assert explode_superdims(sizes, dims) == want


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6])
def test_unflatten_every_permutation(n):
    """Of all permutations exactly the flattened transpositions of an array are accepted."""
    shapes = [s for k in range(1, 4) for s in itertools.product(range(1, n + 1), repeat=k)]
    transposed = {
        tuple(np.arange(n).reshape(s).transpose(p).ravel().tolist())
        for s in shapes
        if math.prod(s) == n
        for p in itertools.permutations(range(len(s)))
    }
    accepted = set()
    for assignment in itertools.permutations(range(n)):
        try:
            dims = unflatten_superdims(assignment)
        except RecoveryError:
            continue
        assert rebuild(dims) == list(assignment)
        accepted.add(assignment)
    assert accepted == transposed


def test_superdims_join_neighbours():
    """Dimensions that stay neighbours come as one, from minor to major."""
    assert unflatten_superdims(range(24)) == [(24, 1)]
    assignment = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).ravel()
    assert unflatten_superdims(assignment) == [(6, 4), (4, 1)]
    assert explode_superdims([2, 3, 4], [(6, 4), (4, 1)]) == [(4, 1), (2, 12), (3, 4)]


@pytest.mark.slow
@many
@given(mesh_shapes(), st.data())
def test_unflatten_array(shape, data):
    """The order of axes comes back from its device assignment, without axes of size 1."""
    order = data.draw(st.permutations(list(shape)))
    perm = [list(shape).index(a) for a in order]
    assignment = np.arange(math.prod(shape.values())).reshape(tuple(shape.values())).transpose(perm)
    assert unflatten_array(shape, assignment.ravel()) == [a for a in order if shape[a] > 1]


ASSIGNMENT_ERRORS = {
    "no order": (
        lambda: unflatten_superdims([0, 2, 1, 3, 4, 5, 6, 7]),
        """\
Device assignment has no PartitionSpec: no order of mesh axes gives its device order.
  expected  the devices of a mesh in row-major order, moved by whole axes
  got       device order 0, 2, 1, 3, 4, 5, 6, 7
  fix       use the mesh that the sharding was made on""",
    ),
    "no permutation": (
        lambda: unflatten_superdims([0, 2]),
        """\
Device assignment has no PartitionSpec: it is malformed.
  expected  every device position of 0..1 once
  got       0, 2""",
    ),
    "not whole": (
        lambda: explode_superdims([2, 4], [(4, 2), (2, 1)]),
        """\
Superdimension list has no PartitionSpec: it is not made of whole dimensions.
  given     (size, stride) (4, 2), (2, 1)
  expected  runs of dimensions of an array of sizes 2, 4""",
    ),
    "ragged": (
        lambda: explode_superdims([2, 2], [(3, 1)]),
        """\
Superdimension list has no PartitionSpec: it is not made of whole dimensions.
  given     (size, stride) (3, 1)
  expected  runs of dimensions of an array of sizes 2, 2""",
    ),
    "unknown stride": (
        lambda: explode_superdims([2, 3], [(2, 2)]),
        """\
Superdimension list has no PartitionSpec: it is not made of whole dimensions.
  given     (size, stride) (2, 2)
  expected  runs of dimensions of an array of sizes 2, 3""",
    ),
    "other size": (
        lambda: unflatten_array({"x": 4, "y": 2}, range(4)),
        """\
Device assignment has no PartitionSpec: it is malformed.
  expected  every device position of 0..7 once
  got       0, 1, 2, 3""",
    ),
    "other mesh": (
        lambda: unflatten_array({"x": 2, "y": 3}, [0, 2, 4, 1, 3, 5]),
        """\
Device assignment has no PartitionSpec: no order of mesh axes gives its device order.
  expected  the devices of a mesh in row-major order, moved by whole axes
  got       device order 0, 2, 4, 1, 3, 5
  fix       use the mesh that the sharding was made on""",
    ),
    "part": (
        lambda: unflatten_array({"x": 6}, [0, 3, 1, 4, 2, 5]),
        """\
Device assignment has no PartitionSpec: it moves a part of mesh axis 'x'.
  expected  whole mesh axes: a PartitionSpec cannot name a part of one
  got       3 of the 6 positions of 'x', 1 apart
  fix       give the mesh axes of sizes 2, 3 in place of 'x'""",
    ),
}


@pytest.mark.parametrize(
    ("call", "message"), ASSIGNMENT_ERRORS.values(), ids=ASSIGNMENT_ERRORS.keys()
)
def test_assignment_errors(call, message):
    """An assignment that is no order of whole axes is refused, with the assignment."""
    with pytest.raises(RecoveryError) as e:
        call()
    assert str(e.value) == message
    assert e.value.__context__ is None


# PartitionSpec -> OpSharding


def test_array_mapping():
    """Axes map to their dimensions in order; open dimensions bring none; both spec forms do."""
    spec = P("data", None, UNCONSTRAINED, ("y", "x"))
    want = OrderedDict([("data", 0), ("y", 3), ("x", 3)])
    parsed = ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained=True)
    assert get_array_mapping(spec) == want
    assert get_array_mapping(parsed) == want
    assert get_array_mapping(REPLICATED) == OrderedDict()


def test_sharding_proto():
    """The proto is the one JAX lowers the sharding to; an open dimension counts as unsplit."""
    mesh = fake_mesh({"x": 4, "y": 2})
    aval = ShapeDtypeStruct((5, 7, 3), np.float32)
    proto = get_aval_sharding_proto(aval, P(UNCONSTRAINED, ("y", "x")), mesh)
    assert _jax.core.HloSharding.from_proto(proto) == _jax.core.HloSharding.from_string(
        "{devices=[1,8,1]<=[4,2]T(1,0)}"
    )
    assert isinstance(proto, _jax.core.OpSharding)


def test_sharding_proto_errors():
    """A spec that does not fit the rank or the mesh is refused before JAX sees it."""
    mesh = fake_mesh({"x": 4, "y": 2})
    with pytest.raises(ShardingError, match=r"P\('x', None\) on mesh x=4, y=2"):
        get_aval_sharding_proto(struct(1), P("x", None), mesh)
    with pytest.raises(ShardingError, match="unknown axis 'q'"):
        get_aval_sharding_proto(struct(1), P("q"), mesh)
    with pytest.raises(SpecTypeError):
        get_aval_sharding_proto(struct(1), "x", mesh)


def test_public_door():
    """`spmd.op_sharding` exports what the modules behind it do, and nothing of its own."""
    names = {n for n in vars(door) if n.isidentifier() and not n.startswith("_")}
    assert names == {*_recover.__all__, "get_aval_sharding_proto"}
    assert all(getattr(door, n) is getattr(_recover, n) for n in _recover.__all__)


# Real executables

MESHES = {
    "8": {"x": 8},
    "2x4": {"x": 2, "y": 4},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
    "2x1x4": {"x": 2, "one": 1, "y": 4},
}
ORDERS = {"in order": range(8), "permuted": (3, 1, 6, 0, 7, 5, 2, 4)}


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES.keys())
def test_executable_shardings(shape, order):
    """From a compiled program every spec comes back, for parameters and results."""
    mesh = Mesh(np.array(jax.devices())[[*order]].reshape(tuple(shape.values())), tuple(shape))
    wanted = [P(), *(P(*p) for p in sorted(all_partitions(shape, 2)) if any(p))]
    shardings = [NamedSharding(mesh, s) for s in wanted]
    x = ShapeDtypeStruct((8, 16), jnp.float32)
    double = jax.jit(
        lambda *xs: [v * 2 for v in xs],
        in_shardings=shardings,
        out_shardings=shardings[::-1],
    )
    program = double.lower(*[x] * len(wanted)).compile().runtime_executable()
    want = [canonical(s, shape) for s in wanted]
    parameters = [parse_op_sharding(s, mesh) for s in program.get_parameter_shardings()]
    results = [parse_op_sharding(s, mesh) for s in program.get_output_shardings()]
    assert [p.partitions for p in parameters] == want
    assert [r.partitions for r in results] == want[::-1]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_devices_hold_what_the_spec_says(order):
    """On the device at flat position `i` of the mesh lies block `i` of the recovered spec.

    The output shardings are the compiler's own choice, and the data is read from the devices.
    """
    shape = {"x": 2, "y": 2, "z": 2}
    mesh = Mesh(np.array(jax.devices())[[*order]].reshape(2, 2, 2), tuple(shape))
    x = np.arange(64 * 4, dtype=np.float32).reshape(8, 8, 4)
    placed = jax.device_put(x, NamedSharding(mesh, P(("z", "x"), None, "y")))
    compiled = jax.jit(lambda v: (v + 1, v.T * 2, v.sum(1), v[0, 0] - 1)).lower(placed).compile()
    shardings = compiled.runtime_executable().get_output_shardings()
    outputs = compiled(placed)
    wanted = (x + 1, x.T * 2, x.sum(1), x[0, 0] - 1)
    used = set()
    for proto, out, want in zip(shardings, outputs, wanted, strict=True):
        spec = parse_op_sharding(proto, mesh)
        used |= set(spec.axes)
        held = blocks(spec, shape, want.ndim)
        tiles = held.max(axis=0) + 1
        by_device = {s.device: np.asarray(s.data) for s in out.addressable_shards}
        for position, device in enumerate(mesh.devices.flat):
            size = np.array(want.shape) // tiles
            cut = tuple(
                slice(b * s, (b + 1) * s) for b, s in zip(held[position], size, strict=True)
            )
            np.testing.assert_array_equal(by_device[device], want[cut])
    assert used == {"x", "y", "z"}
