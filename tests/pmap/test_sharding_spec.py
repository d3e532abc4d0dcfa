"""Value types of `pmap`: literal texts, indices by brute force, and the way to shardings and back.

The oracle of the indices asks of each element of an array, one at a time, who holds it.
"""

import copy
import itertools
import math
import pickle

from hypothesis import given, settings, strategies as st
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
import numpy as np
from oracle import mesh_of, put
import pytest
from strategies import fake_mesh

import spmd
from spmd import _jax, pjit, sharding_spec as door
from spmd.op_sharding import get_aval_sharding_proto
from spmd.sharding_spec import (
    Chunked,
    NoSharding,
    Replicated,
    ShardedAxis,
    ShardingSpec,
    Unstacked,
    sharding_spec_of,
    spec_to_indices,
)

many = settings(deadline=None, max_examples=200)
NO = NoSharding()
ROWS = ShardingSpec((Chunked(4), NO), (ShardedAxis(0), Replicated(2)))
VALUES = [NO, Chunked(2, 4), Unstacked(8), ShardedAxis(1), Replicated(2), ROWS]

# Values


def test_reprs():
    """As classic code prints them; the text makes the value again."""
    assert [repr(v) for v in VALUES] == [
        "NoSharding()",
        "Chunked(2,4)",
        "Unstacked(8)",
        "ShardedAxis(axis=1)",
        "Replicated(replicas=2)",
        "ShardingSpec(sharding=(Chunked(4), NoSharding()), "
        "mesh_mapping=(ShardedAxis(axis=0), Replicated(replicas=2)))",
    ]
    assert [eval(repr(v), vars(door)) for v in VALUES] == VALUES


def test_equality_and_hash():
    """Values are equal by what they say, and never to those of another type."""
    again = [NoSharding(), Chunked([2, 4]), Unstacked(8), ShardedAxis(1), Replicated(2)]
    again.append(ShardingSpec([Chunked([4]), NoSharding()], iter([ShardedAxis(0), Replicated(2)])))
    for i, a in enumerate(VALUES):
        for j, b in enumerate(again):
            assert (a == b) == (i == j)
            assert (hash(a) == hash(b)) or i != j
    assert Chunked(2) != Unstacked(2)
    assert ShardedAxis(2) != Replicated(2)
    assert Chunked(2, 4) != Chunked(4, 2)
    assert ShardingSpec((Chunked(4), NO), (Replicated(2), ShardedAxis(0))) != ROWS
    assert NO != 0


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_are_values(value):
    """They cannot be changed, and copies of any kind are equal."""
    for field in (*value.__dataclass_fields__, "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(value, field, 3)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value
    assert copy.deepcopy(value) == copy.copy(value) == value


def test_integers_of_numpy():
    """They become Python's, as in the text."""
    assert repr(Chunked(np.array([2, 4]))) == "Chunked(2,4)"
    assert repr(Unstacked(np.int64(3))) == "Unstacked(3)"
    assert type(Replicated(np.int32(2)).replicas) is int


REFUSED = {
    "no chunks": (
        lambda: Chunked([]),
        spmd.ShardingError,
        "Chunked needs a number of chunks.\n"
        "  fix       say NoSharding() for a dimension that is not split",
    ),
    "chunks": (
        lambda: Chunked(2, 0, "3"),
        spmd.ShardingError,
        "Chunked cannot take this chunks.\n  expected  an integer from 1\n  got       int: 0\n"
        "Chunked cannot take this chunks.\n  expected  an integer from 1\n  got       str: '3'",
    ),
    "size": (
        lambda: Unstacked(2.0),
        spmd.ArgumentError,
        "Unstacked cannot take this size.\n  expected  an integer from 1\n  got       float: 2.0",
    ),
    "axis": (
        lambda: ShardedAxis(-1),
        spmd.ShardingError,
        "ShardedAxis cannot take this axis.\n  expected  an integer from 0\n  got       int: -1",
    ),
    "replicas": (
        lambda: Replicated(True),
        spmd.ArgumentError,
        "Replicated cannot take this replicas.\n  expected  an integer from 1\n"
        "  got       bool: True",
    ),
    "entries": (
        lambda: ShardingSpec((2, NO), (ShardedAxis(0), NO)),
        spmd.SpecTypeError,
        "ShardingSpec cannot read sharding[0].\n"
        "  expected  NoSharding or Chunked or Unstacked\n  got       int: 2\n"
        "ShardingSpec cannot read mesh_mapping[1].\n"
        "  expected  ShardedAxis or Replicated\n  got       NoSharding: NoSharding()",
    ),
    "an axis twice": (
        lambda: ShardingSpec((Chunked(2, 2),), (ShardedAxis(0), ShardedAxis(0))),
        spmd.ShardingError,
        "ShardingSpec does not put each sharded axis on one mesh axis.\n"
        "  given     ShardingSpec(sharding=(Chunked(2,2),), "
        "mesh_mapping=(ShardedAxis(axis=0), ShardedAxis(axis=0)))\n"
        "  expected  ShardedAxis of 0, 1, each once\n  got       ShardedAxis of 0, 0",
    ),
    "an axis left out": (
        lambda: ShardingSpec((Unstacked(2),), (Replicated(2),)),
        spmd.ShardingError,
        "ShardingSpec does not put each sharded axis on one mesh axis.\n"
        "  given     ShardingSpec(sharding=(Unstacked(2),), "
        "mesh_mapping=(Replicated(replicas=2),))\n"
        "  expected  ShardedAxis of 0, each once\n  got       ShardedAxis of none",
    ),
    "rank": (
        lambda: spec_to_indices((8,), ROWS),
        spmd.ShardingError,
        "ShardingSpec is of an array of another rank.\n"
        "  expected  an array of 2 dimensions\n  got       one of 1",
    ),
    "sizes": (
        lambda: spec_to_indices(
            (6, 3), ShardingSpec((Chunked(2, 2), Unstacked(2)), map(ShardedAxis, range(3)))
        ),
        spmd.ShardingError,
        "ShardingSpec does not fit dimension 0.\n  given     Chunked(2,2)\n"
        "  expected  a multiple of 4\n  got       size 6 in shape (6, 3)\n"
        "ShardingSpec does not fit dimension 1.\n  given     Unstacked(2)\n"
        "  expected  size 2\n  got       size 3 in shape (6, 3)",
    ),
    "devices": (
        lambda: ROWS.to_named_sharding(jax.devices()[:3]),
        spmd.ShardingError,
        "ShardingSpec needs another number of devices.\n  expected  8 for its 4x2 mesh\n"
        "  got       3",
    ),
    "names": (
        lambda: ROWS.to_partition_spec(["rows"]),
        spmd.ShardingError,
        "ShardingSpec needs another number of axis names.\n  given     axis_names=['rows']\n"
        "  expected  2, one for each entry of mesh_mapping\n  got       1",
    ),
    "unconstrained": (
        lambda: ShardingSpec.from_partition_spec(P(P.UNCONSTRAINED), fake_mesh({"a": 2}), 1),
        spmd.RecoveryError,
        "PartitionSpec has no ShardingSpec: it leaves a dimension to the partitioner.\n"
        "  given     P(P.UNCONSTRAINED)\n"
        "  fix       take that of the array that exists, with sharding_spec_of",
    ),
    "unreduced": (
        lambda: ShardingSpec.from_partition_spec(P(None, unreduced={"a"}), fake_mesh({"a": 2}), 1),
        spmd.ShardingError,
        None,
    ),
    "an unknown axis": (
        lambda: ShardingSpec.from_partition_spec(P("b"), fake_mesh({"a": 2}), 1),
        spmd.ShardingError,
        None,
    ),
    "a long spec": (
        lambda: ShardingSpec.from_partition_spec(P("a", None), fake_mesh({"a": 2}), 1),
        spmd.ShardingError,
        None,
    ),
    "manual": (
        lambda: ShardingSpec.from_op_sharding(_jax.core.HloSharding.manual().to_proto(), 1, 2),
        spmd.RecoveryError,
        "OpSharding has no ShardingSpec: it is MANUAL.\n  given     {manual}\n"
        "  expected  REPLICATED, or dimensions tiled over the devices of the mesh\n"
        "  got       MANUAL: the program itself says what each device holds, as in shard_map",
    ),
    "a device order of no mesh": (
        lambda: ShardingSpec.from_op_sharding(proto("{devices=[4]0,1,3,2}"), 1, 4),
        spmd.RecoveryError,
        "OpSharding has no ShardingSpec: no order of mesh axes gives its device order.\n"
        "  given     {devices=[4]0,1,3,2}\n"
        "  expected  the devices of a mesh in row-major order, moved by whole axes\n"
        "  got       device order 0, 1, 3, 2\n"
        "  fix       use the mesh that the sharding was made on",
    ),
    "a tuple": (
        lambda: ShardingSpec.from_op_sharding(proto("{{replicated}, {replicated}}"), 1, 4),
        spmd.RecoveryError,
        "OpSharding has no ShardingSpec: it is a TUPLE.\n  given     {tuple}\n"
        "  fix       take its tuple_shardings one by one",
    ),
    "an OpSharding of another rank": (
        lambda: ShardingSpec.from_op_sharding(proto("{devices=[2,2]<=[4]}"), 1, 4),
        spmd.ShardingError,
        "OpSharding is of an array of another rank.\n  expected  an array of 2 dimensions\n"
        "  got       one of 1",
    ),
    "no OpSharding": (
        lambda: ShardingSpec.from_op_sharding(3, 1, 4),
        spmd.SpecTypeError,
        "OpSharding cannot be parsed.\n  given     3\n  expected  an OpSharding proto\n"
        "  got       int",
    ),
    "no array": (
        lambda: sharding_spec_of(np.zeros(3)),
        spmd.ArgumentError,
        "sharding_spec_of needs an array.\n  expected  a jax.Array that exists\n"
        "  got       ndarray: array([0., 0., 0.])",
    ),
    "a tracer": (
        lambda: jax.jit(sharding_spec_of)(np.zeros(3, np.float32)),
        spmd.ArgumentError,
        "sharding_spec_of cannot tell how it is split.\n  expected  a jax.Array that exists\n"
        "  got       a tracer: the program decides",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages(case):
    """What cannot be is refused where it is made, by its own words."""
    thunk, error, golden = REFUSED[case]
    with pytest.raises(error) as raised:
        thunk()
    assert type(raised.value) is error
    assert golden in (None, str(raised.value))


# Indices


@st.composite
def spec_and_shape(draw, max_devices=96):
    """A spec, and the shape of an array that it fits."""
    room = max_devices

    def factor():
        nonlocal room
        n = draw(st.sampled_from([n for n in (1, 2, 2, 3, 4) if n <= room]))
        room //= n
        return n

    sharding, shape = [], []
    for kind in draw(st.lists(st.sampled_from("NCCU"), max_size=3)):
        if kind == "N":
            sharding.append(NO)
            shape.append(draw(st.integers(0, 3)))
        elif kind == "U":
            sharding.append(Unstacked(factor()))
            shape.append(sharding[-1].size)
        else:
            sharding.append(Chunked(*(factor() for _ in range(draw(st.integers(1, 2))))))
            shape.append(math.prod(sharding[-1].chunks) * draw(st.integers(0, 3)))
    axes = sum(len(getattr(s, "chunks", (0,) * isinstance(s, Unstacked))) for s in sharding)
    mapping = [ShardedAxis(i) for i in range(axes)]
    mapping += [Replicated(factor()) for _ in range(draw(st.integers(0, 2)))]
    return ShardingSpec(sharding, draw(st.permutations(mapping))), tuple(shape)


def holds(spec, shape, element, device):
    """Whether a device holds an element, by counting in which chunk of which chunk it is."""
    digits = []
    for entry, i, n in zip(spec.sharding, element, shape, strict=True):
        chunks = {NoSharding: (), Unstacked: (n,)}.get(type(entry)) or getattr(entry, "chunks", ())
        for chunk in chunks:
            n //= chunk
            digits.append((i // n, chunk))
            i %= n
    for entry in reversed(spec.mesh_mapping):
        size = entry.replicas if isinstance(entry, Replicated) else digits[entry.axis][1]
        device, at = divmod(device, size)
        if isinstance(entry, ShardedAxis) and digits[entry.axis][0] != at:
            return False
    return True


@pytest.mark.slow
@many
@given(spec_and_shape())
def test_indices_are_those_of_brute_force(drawn):
    """Each device has exactly the elements whose chunks are its own, without unstacked dims."""
    spec, shape = drawn
    x = np.arange(math.prod(shape)).reshape(shape)
    indices = spec_to_indices(shape, spec)
    assert len(indices) == math.prod(spec.mesh_shape)
    kept = [n for n, s in zip(shape, spec.sharding, strict=True) if not isinstance(s, Unstacked)]
    for device, index in enumerate(indices):
        wanted = [x[e] for e in np.ndindex(shape) if holds(spec, shape, e, device)]
        assert x[index].ravel().tolist() == wanted
        assert x[index].ndim == len(kept)


def test_indices_by_hand():
    """Rows on four devices, twice; a stack; chunks of chunks, minor first; a scalar."""
    rows = [slice(2 * i, 2 * i + 2) for i in range(4)]
    assert spec_to_indices((8, 6), ROWS) == tuple((r, slice(None)) for r in rows for _ in range(2))
    stack = ShardingSpec((Unstacked(3), NO), (ShardedAxis(0),))
    assert spec_to_indices((3, 5), stack) == tuple((i, slice(None)) for i in range(3))
    minor_first = ShardingSpec((Chunked(2, 3),), (ShardedAxis(1), ShardedAxis(0)))
    assert [i[0].start for i in spec_to_indices((6,), minor_first)] == [0, 3, 1, 4, 2, 5]
    assert spec_to_indices((), ShardingSpec((), (Replicated(2),))) == ((), ())
    assert spec_to_indices((4,), ShardingSpec((NO,), ())) == ((slice(None),),)


# NamedSharding and PartitionSpec


def spelled(index, shape):
    """An index with every dimension as a slice with ends."""
    return tuple(
        slice(i, i + 1) if isinstance(i, int) else slice(*i.indices(n)[:2])
        for i, n in zip(index, shape, strict=True)
    )


@pytest.mark.slow
@many
@given(spec_and_shape(max_devices=8))
def test_named_sharding_is_what_jax_makes_of_it(drawn):
    """On eight real devices JAX gives each the same part, and the spec comes back."""
    spec, shape = drawn
    devices = jax.devices()[: math.prod(spec.mesh_shape)][::-1]
    sharding = spec.to_named_sharding(devices)
    found = sharding.devices_indices_map(shape)
    wanted = spec_to_indices(shape, spec)
    assert [spelled(found[d], shape) for d in devices] == [spelled(i, shape) for i in wanted]
    back = ShardingSpec.from_named_sharding(sharding, len(shape))
    chunked = tuple(Chunked(s.size) if isinstance(s, Unstacked) else s for s in spec.sharding)
    mapping = spec.mesh_mapping or (Replicated(1),)
    assert back == ShardingSpec(chunked, mapping)


def test_names_of_axes():
    """Mesh axes are named in the order of the mapping, replicas too."""
    spec = ShardingSpec((NO, Chunked(2, 3)), (Replicated(4), ShardedAxis(1), ShardedAxis(0)))
    assert spec.mesh_shape == (4, 3, 2)
    assert spec.to_partition_spec() == P(None, ("axis_2", "axis_1"))
    assert spec.to_partition_spec("abc") == P(None, ("c", "b"))
    sharding = ROWS.to_named_sharding(axis_names=("rows", "copies"))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "copies"))
    assert sharding == NamedSharding(mesh, P("rows", None))


# OpSharding


def proto(text):
    """The proto of what HLO text spells."""
    return _jax.core.HloSharding.from_string(text).to_proto()


@pytest.mark.slow
@many
@given(spec_and_shape(max_devices=48))
def test_op_sharding_says_the_same(drawn):
    """By way of its OpSharding a spec has the same indices, up to unstacking."""
    spec, shape = drawn
    count = math.prod(spec.mesh_shape)
    found = ShardingSpec.from_op_sharding(spec.to_op_sharding(), len(shape), count)
    first, second = (spec_to_indices(shape, s) for s in (spec, found))
    assert [spelled(i, shape) for i in first] == [spelled(i, shape) for i in second]
    again = ShardingSpec.from_op_sharding(found.to_op_sharding(), len(shape), count)
    assert again == found


def all_specs(tiles, count):
    """Every spec with these tiles over so many devices: all factors, all orders."""

    def factorizations(n):
        yield ()
        if n > 1:
            for f in range(2, n + 1):
                if n % f == 0:
                    yield from ((f, *rest) for rest in factorizations(n // f) if _full(rest, n, f))

    def _full(rest, n, f):
        return math.prod(rest) == n // f

    ways = [[f for f in factorizations(t) if math.prod(f) == t] for t in tiles]
    left = count // math.prod(tiles)
    replicas = [f for f in factorizations(left) if math.prod(f) == left]
    for *chunks, copies in itertools.product(*ways, replicas):
        sharding = [Chunked(*c) if c else NO for c in chunks]
        mapping = [ShardedAxis(i) for i in range(sum(map(len, chunks)))]
        mapping += [Replicated(r) for r in copies]
        for order in itertools.permutations(mapping):
            yield ShardingSpec(sharding, order)


@pytest.mark.parametrize(
    ("tiles", "count"), [((4,), 4), ((2, 2), 4), ((2,), 4), ((6,), 6), ((2,), 6), ((2, 3), 6)]
)
def test_every_device_order(tiles, count):
    """Of all device orders those of some mesh give its spec, all others an error."""
    shape = tiles
    sayable = {}
    for spec in all_specs(tiles, count):
        indices = spec_to_indices(shape, spec)
        sayable[tuple(tuple(s.start or 0 for s in i) for i in indices)] = spec
    for order in itertools.permutations(range(count)):
        sharding = _jax.core.OpSharding()
        sharding.type = _jax.core.OpSharding.Type.OTHER
        sharding.tile_assignment_dimensions = [*tiles, count // math.prod(tiles)]
        sharding.last_tile_dims = [_jax.core.OpSharding.Type.REPLICATED]
        sharding.tile_assignment_devices = list(order)
        places = np.empty((count, len(tiles)), int)
        for at, device in zip(np.ndindex(*tiles, count // math.prod(tiles)), order, strict=True):
            places[device] = at[: len(tiles)]
        key = tuple(map(tuple, places.tolist()))
        try:
            found = ShardingSpec.from_op_sharding(sharding, len(tiles), count)
        except spmd.RecoveryError:
            assert key not in sayable
        else:
            indices = spec_to_indices(shape, found)
            assert tuple(tuple(s.start or 0 for s in i) for i in indices) == key


# Arrays


def test_spec_of_arrays():
    """Of host, single-device, replicated, split and unstacked arrays, permuted meshes included."""
    mesh = mesh_of({"a": 2, "b": 4}, (3, 1, 7, 5, 0, 2, 6, 4))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    assert sharding_spec_of(jax.numpy.asarray(x)) == ShardingSpec((NO, NO), ())
    on_one = jax.device_put(x, SingleDeviceSharding(jax.devices()[5]))
    assert sharding_spec_of(on_one) == ShardingSpec((NO, NO), ())
    replicas = (Replicated(2), Replicated(4))
    assert sharding_spec_of(put(x, mesh, P())) == ShardingSpec((NO, NO), replicas)
    cases = {
        P("b"): ShardingSpec((Chunked(4), NO), (Replicated(2), ShardedAxis(0))),
        P("b", "a"): ShardingSpec((Chunked(4), Chunked(2)), (ShardedAxis(1), ShardedAxis(0))),
        P(None, ("b", "a")): ShardingSpec((NO, Chunked(4, 2)), (ShardedAxis(1), ShardedAxis(0))),
    }
    for spec, wanted in cases.items():
        found = sharding_spec_of(put(x, mesh, spec))
        assert found == wanted
        held = {s.device: np.asarray(s.data) for s in put(x, mesh, spec).addressable_shards}
        for device, index in zip(mesh.devices.flat, spec_to_indices(x.shape, found), strict=True):
            np.testing.assert_array_equal(held[device], x[index])
    stack = put(x[:4], mesh, P("b"))
    assert sharding_spec_of(stack) == ShardingSpec(
        (Unstacked(4), NO), (Replicated(2), ShardedAxis(0))
    )


def test_spec_of_what_the_compiler_chose():
    """A sharding that names no mesh axes is read from its OpSharding."""
    mesh = mesh_of({"a": 2, "b": 4})
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    text = get_aval_sharding_proto(aval, P("b", "a"), mesh)
    sharding = _jax.core.sharding_impls.GSPMDSharding([*mesh.devices.flat], text)
    found = sharding_spec_of(jax.device_put(x, sharding))
    assert found == ShardingSpec((Chunked(4), Chunked(2)), (ShardedAxis(1), ShardedAxis(0)))
    out = pjit(lambda x: x * 2, P("a"), P("a"), mesh=mesh)(x)
    assert sharding_spec_of(out) == ShardingSpec((Chunked(2), NO), (ShardedAxis(0), Replicated(4)))


def test_unstacked():
    """Only a dimension with one element per part is one, and only in one step."""
    spec = ShardingSpec((Chunked(4), Chunked(2, 2)), [ShardedAxis(i) for i in range(3)])
    assert spec.unstacked((8, 4)) == spec
    assert spec.unstacked((4, 4)).sharding == (Unstacked(4), Chunked(2, 2))
    with pytest.raises(spmd.ShardingError, match="does not fit dimension 0"):
        spec.unstacked((6, 4))
