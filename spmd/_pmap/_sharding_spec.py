"""The code of `spmd.sharding_spec`, whose docstring says what the fields of its records mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, SingleDeviceSharding
import numpy as np

from spmd import _jax, errors
from spmd._pmap._options import is_integer
from spmd._recover import tile_axes
from spmd._resolve import get_aval_sharding_proto, spec_failure
from spmd._spec import ParsedPartitionSpec, show_spec
from spmd.errors import Failure, explain, refuse, show_value

#: Per dimension a slice, or a number where the parts do not have the dimension.
Index = tuple[slice | int, ...]

# How a dimension is split


@dataclass(frozen=True, slots=True)
class NoSharding:
    """A dimension that is not split."""

    __module__ = "spmd.sharding_spec"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Chunked:
    """A dimension that is split into chunks of one size, those into smaller ones, and so on.

    Attributes:
        chunks: Into how many at each step; each is a sharded axis.

    Raises:
        TypeError: A number of chunks is no integer.
        ValueError: It is below 1, or there is none.

    Example:
        >>> Chunked(2, 4) == Chunked([2, 4])  # eight parts
        True
    """

    chunks: tuple[int, ...]

    __module__ = "spmd.sharding_spec"

    def __init__(self, *chunks: int | Iterable[int]):
        given: Any = chunks
        if len(chunks) == 1 and isinstance(chunks[0], Iterable):
            given = tuple(chunks[0])
        if not given:
            what = "needs a number of chunks"
            fix = "say NoSharding() for a dimension that is not split"
            raise explain("Chunked", [Failure(what=what, fix=fix)])
        refuse("Chunked", [_count_failure("chunks", n, 1) for n in given])
        object.__setattr__(self, "chunks", tuple(int(n) for n in given))

    def __repr__(self) -> str:
        return f"Chunked({','.join(map(str, self.chunks))})"


@dataclass(frozen=True, slots=True)
class Unstacked:
    """A dimension of which each part has one element, and has the dimension no more.

    Attributes:
        size: The size of the dimension, which is one sharded axis.

    Raises:
        TypeError: `size` is no integer.
        ValueError: It is below 1.
    """

    size: int

    __module__ = "spmd.sharding_spec"

    def __post_init__(self) -> None:
        refuse("Unstacked", [_count_failure("size", self.size, 1)])
        object.__setattr__(self, "size", int(self.size))

    def __repr__(self) -> str:
        return f"Unstacked({self.size})"


# What a mesh axis does


@dataclass(frozen=True, slots=True)
class ShardedAxis:
    """A mesh axis along which the parts of a dimension lie.

    Attributes:
        axis: Which sharded axis.

    Raises:
        TypeError: `axis` is no integer.
        ValueError: It is negative.
    """

    axis: int

    __module__ = "spmd.sharding_spec"

    def __post_init__(self) -> None:
        refuse("ShardedAxis", [_count_failure("axis", self.axis, 0)])
        object.__setattr__(self, "axis", int(self.axis))


@dataclass(frozen=True, slots=True)
class Replicated:
    """A mesh axis along which all devices hold the same.

    Attributes:
        replicas: The size of the axis.

    Raises:
        TypeError: `replicas` is no integer.
        ValueError: It is below 1.
    """

    replicas: int

    __module__ = "spmd.sharding_spec"

    def __post_init__(self) -> None:
        refuse("Replicated", [_count_failure("replicas", self.replicas, 1)])
        object.__setattr__(self, "replicas", int(self.replicas))


Sharding = NoSharding | Chunked | Unstacked
Assignment = ShardedAxis | Replicated

# Both together


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How an array is split, and over which axes of a mesh.

    Attributes:
        sharding: Per dimension :class:`NoSharding`, :class:`Chunked` or :class:`Unstacked`.
        mesh_mapping: Per mesh axis, from major to minor, :class:`ShardedAxis` or
            :class:`Replicated`.

    Raises:
        TypeError: An entry is none of these.
        ValueError: A sharded axis is not that of exactly one mesh axis.

    Example:
        A ``[8, 6]`` array, its rows on 4 devices and each of them on 2:

        >>> ShardingSpec((Chunked(4), NoSharding()), (ShardedAxis(0), Replicated(2)))
    """

    sharding: tuple[Sharding, ...]
    mesh_mapping: tuple[Assignment, ...]

    __module__ = "spmd.sharding_spec"

    def __post_init__(self) -> None:
        sharding, mapping = tuple(self.sharding), tuple(self.mesh_mapping)
        kinds = (("sharding", sharding, Sharding), ("mesh_mapping", mapping, Assignment))
        rows = [(f"{name}[{i}]", e, kind) for name, es, kind in kinds for i, e in enumerate(es)]
        refuse("ShardingSpec", [_kind_failure(*row) for row in rows])
        object.__setattr__(self, "sharding", sharding)
        object.__setattr__(self, "mesh_mapping", mapping)
        refuse("ShardingSpec", [_mapping_failure(self)])

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the mesh axes, from major to minor."""
        sizes = [size for _, size in _sharded_axes(self)]
        return tuple(
            m.replicas if isinstance(m, Replicated) else sizes[m.axis] for m in self.mesh_mapping
        )

    def unstacked(self, shape: Sequence[int]) -> ShardingSpec:
        """The form that `pmap` uses: dimensions with one element per part are :class:`Unstacked`.

        Args:
            shape: Of the whole array.

        Raises:
            ValueError: The array cannot be split so.
        """
        refuse("ShardingSpec", _shape_failures(self, shape))
        parts = [
            Unstacked(n) if isinstance(s, Chunked) and s.chunks == (n,) else s
            for s, n in zip(self.sharding, shape, strict=True)
        ]
        return ShardingSpec(tuple(parts), self.mesh_mapping)

    def to_partition_spec(self, axis_names: Sequence[Any] | None = None) -> PartitionSpec:
        """The spec of the same parts, over a mesh of this :attr:`mesh_shape`.

        There every part has every dimension, of size 1 where it is :class:`Unstacked`.

        Args:
            axis_names: Names of the mesh axes, those that replicate included; by default
                ``"axis_0"`` and so on.

        Raises:
            ValueError: The number of names is not that of the mesh axes.
        """
        names = self._names(axis_names)
        along = _along(self, names)
        entries: list[tuple[Any, ...]] = [()] * len(self.sharding)
        for axis, (dim, _) in enumerate(_sharded_axes(self)):
            entries[dim] += (along[axis],)
        return PartitionSpec(*[e or None for e in entries])

    def to_named_sharding(
        self, devices: Sequence[Any] | None = None, axis_names: Sequence[Any] | None = None
    ) -> NamedSharding:
        """The sharding of the same parts on devices.

        Args:
            devices: As many as the mesh has places, in its order; by default the first of
                `jax.devices()`.
            axis_names: As in :meth:`to_partition_spec`.

        Raises:
            ValueError: There are too few devices, or another number was given; or as above.
        """
        count = math.prod(self.mesh_shape)
        found = np.array(jax.devices()[:count] if devices is None else devices, dtype=object)
        if found.size != count:
            failure = Failure(
                what="needs another number of devices",
                expected=f"{count} for its {'x'.join(map(str, self.mesh_shape)) or '1'} mesh",
                got=str(found.size),
            )
            raise explain("ShardingSpec", [failure])
        names = self._names(axis_names)
        spec = self.to_partition_spec(names)
        # A sharding needs a mesh with an axis, even for one device.
        shape, names = (self.mesh_shape, names) if names else ((1,), ("axis_0",))
        return NamedSharding(jax.sharding.Mesh(found.reshape(shape), tuple(names)), spec)

    def to_op_sharding(self) -> Any:
        """The ``OpSharding`` proto of the same parts."""
        names = self._names(None)
        mesh = AbstractMesh(self.mesh_shape or (1,), tuple(names) or ("axis_0",))
        value = jax.ShapeDtypeStruct((1,) * len(self.sharding), np.float32)
        return get_aval_sharding_proto(value, self.to_partition_spec(names), mesh)

    @classmethod
    def from_partition_spec(cls, spec: PartitionSpec, mesh: Any, ndim: int) -> ShardingSpec:
        """Says what a PartitionSpec says of an array on a mesh.

        Args:
            spec: Without ``P.UNCONSTRAINED``.
            mesh: A mesh that has its axes; an ``AbstractMesh`` will do.
            ndim: The rank of the array.

        Raises:
            ValueError: No ShardingSpec says it; the message tells why.
        """
        parsed = ParsedPartitionSpec.from_user_input(spec, "spec", allow_unconstrained=True)
        value = jax.ShapeDtypeStruct((1,) * ndim, np.float32)
        failure = spec_failure(parsed, value, mesh, "the array", "spec", boundary=False)
        refuse("PartitionSpec", [failure or _vague_failure(spec)])
        split = [*parsed.partitions, *[()] * (ndim - len(parsed.partitions))]
        numbers = {name: i for i, name in enumerate(n for part in split for n in part)}
        sharding = [
            Chunked(*(mesh.shape[n] for n in part)) if part else NoSharding() for part in split
        ]
        mapping = [
            ShardedAxis(numbers[name]) if name in numbers else Replicated(size)
            for name, size in mesh.shape.items()
        ]
        return cls(tuple(sharding), tuple(mapping))

    @classmethod
    def from_named_sharding(cls, sharding: NamedSharding, ndim: int) -> ShardingSpec:
        """Says what a NamedSharding says of an array, its devices left out.

        Args:
            sharding: On any mesh.
            ndim: The rank of the array.

        Raises:
            ValueError: No ShardingSpec says it; the message tells why.
        """
        return cls.from_partition_spec(sharding.spec, sharding.mesh, ndim)

    @classmethod
    def from_op_sharding(cls, op_sharding: Any, ndim: int, num_devices: int) -> ShardingSpec:
        """Says what an OpSharding says of an array, over the smallest mesh that can.

        Args:
            op_sharding: An ``OpSharding`` proto.
            ndim: The rank of the array.
            num_devices: How many devices its program has; a replicated one does not say.

        Raises:
            ValueError: No ShardingSpec says it; the message tells why.
            TypeError: `op_sharding` is no OpSharding.
        """
        found = tile_axes(op_sharding, num_devices)
        if isinstance(found, Failure):
            raise explain("OpSharding", [found])
        rank, axes = found
        if rank not in (None, ndim):
            raise explain("OpSharding", [_rank_failure(rank, ndim)])
        chunks = [tuple(a.size for a in axes if a.dim == dim) for dim in range(ndim)]
        order = sorted(range(len(axes)), key=lambda i: -axes[i].stride)
        mapping = [
            Replicated(axes[i].size) if axes[i].dim is None else ShardedAxis(i) for i in order
        ]
        return cls(tuple(Chunked(*c) if c else NoSharding() for c in chunks), tuple(mapping))

    def _names(self, axis_names: Sequence[Any] | None) -> Sequence[Any]:
        count = len(self.mesh_mapping)
        if axis_names is None:
            return [f"axis_{i}" for i in range(count)]
        if len(axis_names) != count:
            failure = Failure(
                what="needs another number of axis names",
                given=f"axis_names={axis_names!r}"[:100],
                expected=f"{count}, one for each entry of mesh_mapping",
                got=str(len(axis_names)),
            )
            raise explain("ShardingSpec", [failure])
        return axis_names


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> tuple[Index, ...]:
    """Returns which part of an array each device holds.

    Args:
        shape: Of the whole array.
        spec: How it is split.

    Returns:
        Per device, in the order of the mesh, an index into the whole array.

    Raises:
        ValueError: The array has another rank, or a dimension that cannot be split so.
    """
    refuse("ShardingSpec", _shape_failures(spec, shape))
    return tuple(_index(shape, spec, place) for place in np.ndindex(*spec.mesh_shape))


def sharding_spec_of(x: jax.Array) -> ShardingSpec:
    """Returns how an array is split, in the form that `pmap` uses.

    Args:
        x: An array that exists, with any sharding.

    Raises:
        TypeError: `x` is no array, or a tracer, whose parts nobody knows yet.
        ValueError: No ShardingSpec says how it is split; the message tells why.
    """
    if not isinstance(x, jax.Array) or isinstance(x, _jax.core.Tracer):
        raise explain("sharding_spec_of", [_no_array(x)])
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        spec = ShardingSpec.from_named_sharding(sharding, x.ndim)
    elif isinstance(sharding, SingleDeviceSharding):
        spec = ShardingSpec((NoSharding(),) * x.ndim, ())
    else:
        proto = _jax.dispatch.op_sharding(sharding, x.ndim)
        spec = ShardingSpec.from_op_sharding(proto, x.ndim, len(sharding.device_set))
    return spec.unstacked(x.shape)


def _sharded_axes(spec: ShardingSpec) -> list[tuple[int, int]]:
    """The sharded axes: of which dimension each is, and its size."""
    axes = []
    for dim, entry in enumerate(spec.sharding):
        if isinstance(entry, Chunked):
            axes += [(dim, n) for n in entry.chunks]
        elif isinstance(entry, Unstacked):
            axes.append((dim, entry.size))
    return axes


def _along(spec: ShardingSpec, values: Sequence[Any]) -> dict[int, Any]:
    """Of values, one per mesh axis, that of each sharded axis."""
    pairs = zip(spec.mesh_mapping, values, strict=True)
    return {m.axis: value for m, value in pairs if isinstance(m, ShardedAxis)}


def _index(shape: Sequence[int], spec: ShardingSpec, place: Sequence[int]) -> Index:
    """The part of the device at a place in the mesh."""
    along = _along(spec, place)
    starts, sizes = [0] * len(shape), [*shape]
    for axis, (dim, parts) in enumerate(_sharded_axes(spec)):
        sizes[dim] //= parts
        starts[dim] += along[axis] * sizes[dim]
    return tuple(
        slice(None) if isinstance(entry, NoSharding)
        else start if isinstance(entry, Unstacked)
        else slice(start, start + size)
        for entry, start, size in zip(spec.sharding, starts, sizes, strict=True)
    )  # fmt: skip


# Failures


def _count_failure(name: str, value: Any, least: int) -> Failure | None:
    if is_integer(value) and value >= least:
        return None
    return Failure(
        what=f"cannot take this {name}",
        expected=f"an integer from {least}",
        got=show_value(value),
        error=errors.ShardingError if is_integer(value) else errors.ArgumentError,
    )


def _kind_failure(name: str, value: Any, kinds: Any) -> Failure | None:
    if isinstance(value, kinds):
        return None
    expected = " or ".join(k.__name__ for k in kinds.__args__)
    return Failure(
        what=f"cannot read {name}",
        expected=expected,
        got=show_value(value),
        error=errors.SpecTypeError,
    )


def _mapping_failure(spec: ShardingSpec) -> Failure | None:
    count = len(_sharded_axes(spec))
    used = [m.axis for m in spec.mesh_mapping if isinstance(m, ShardedAxis)]
    if sorted(used) == [*range(count)]:
        return None
    return Failure(
        what="does not put each sharded axis on one mesh axis",
        given=f"{spec!r}"[:200],
        expected=f"ShardedAxis of {_listed(range(count))}, each once",
        got=f"ShardedAxis of {_listed(used)}",
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _shape_failures(spec: ShardingSpec, shape: Sequence[int]) -> list[Failure]:
    if len(shape) != len(spec.sharding):
        return [_rank_failure(len(spec.sharding), len(shape))]
    rows = enumerate(zip(spec.sharding, shape, strict=True))
    return [
        Failure(
            what=f"does not fit dimension {dim}",
            given=repr(entry),
            expected=f"a multiple of {math.prod(entry.chunks)}"
            if isinstance(entry, Chunked)
            else f"size {entry.size}",
            got=f"size {n} in shape {tuple(shape)}",
        )
        for dim, (entry, n) in rows
        if (isinstance(entry, Chunked) and n % math.prod(entry.chunks))
        or (isinstance(entry, Unstacked) and n != entry.size)
    ]


def _rank_failure(rank: int | None, ndim: int) -> Failure:
    return Failure(
        what="is of an array of another rank",
        expected=f"an array of {rank} dimensions",
        got=f"one of {ndim}",
    )


def _vague_failure(spec: PartitionSpec) -> Failure | None:
    if not any(e is PartitionSpec.UNCONSTRAINED for e in spec):
        return None
    return Failure(
        what="has no ShardingSpec: it leaves a dimension to the partitioner",
        given=show_spec(spec),
        fix="take that of the array that exists, with sharding_spec_of",
        error=errors.RecoveryError,
    )


def _no_array(value: Any) -> Failure:
    traced = isinstance(value, _jax.core.Tracer)
    return Failure(
        what="cannot tell how it is split" if traced else "needs an array",
        expected="a jax.Array that exists",
        got="a tracer: the program decides" if traced else show_value(value),
        error=errors.ArgumentError,
    )
