"""Parse: the user's specs become one :class:`ParsedPartitionSpec` per leaf.

This stage knows trees and names; it knows no mesh, no devices and no shapes. What a spec means on
a mesh is decided in :mod:`spmd._resolve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
import itertools
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
import jax.tree_util as jtu

from spmd.errors import Failure, SpecTypeError, explain

#: Leaves a dimension, or with :data:`UNSPECIFIED` a value, to the partitioner.
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


class SpecSync(IntEnum):
    """How far the partitions of a spec are from what the user wrote.

    A message shows the user's own spec only where the two are close enough.
    """

    OUT_OF_SYNC = 0  # anything may have changed, mesh axes included
    DIM_PERMUTE = 1  # dimensions were added or moved; the mesh axes are the user's
    IN_SYNC = 2  # exactly what the user wrote


class _Marker(Enum):
    UNSPECIFIED = "UNSPECIFIED"
    BATCH = "BATCH"

    def __repr__(self) -> str:
        return self.value


#: No spec was given: an input keeps its sharding, an output is the partitioner's choice.
UNSPECIFIED = _Marker.UNSPECIFIED

#: A dimension that `vmap` added: unsharded at an eager boundary, left to the partitioner inside.
BATCH = _Marker.BATCH


class _FromArray:
    """The type of :data:`FROM_ARRAY`."""

    __slots__ = ()
    __module__ = "spmd"

    def __repr__(self) -> str:
        return "FROM_ARRAY"

    def __reduce__(self) -> str:
        # Pickle and copy look the name up in `spmd`, so there is one FROM_ARRAY per process.
        return "FROM_ARRAY"


#: In `in_axis_resources`: take the sharding that the argument already has.
FROM_ARRAY = _FromArray()


class _Auto:
    """The type of :data:`AUTO`."""

    __slots__ = ()
    __module__ = "spmd"

    def __repr__(self) -> str:
        return "AUTO"

    def __reduce__(self) -> str:
        return "AUTO"


#: In `in_axis_resources` and `out_axis_resources`: the planner chooses.
AUTO = _Auto()


class ParsedPartitionSpec:
    """A PartitionSpec with every dimension spelled as a tuple of mesh axes.

    Attributes:
        partitions: One entry per dimension: a tuple of mesh axis names from major to minor
            (empty: not split), or ``UNCONSTRAINED``, or :data:`BATCH`. Dimensions past the end
            are not split.
        unsafe_user_spec: What the user wrote. Only :meth:`unsynced_user_spec` may show it.
        sync: How far `partitions` are from what the user wrote.
        axes: All mesh axes that the spec uses, in order of the dimensions.
        has_unconstrained: Whether the user left a dimension to the partitioner.
    """

    __module__ = "spmd.partition_spec"
    __slots__ = (
        "_hash",
        "axes",
        "has_unconstrained",
        "partitions",
        "sync",
        "unsafe_user_spec",
    )

    def __init__(
        self,
        user_spec: PartitionSpec | None,
        partitions: Sequence[Any],
        sync: SpecSync = SpecSync.IN_SYNC,
    ):
        self.partitions = parts = tuple(partitions)
        self.unsafe_user_spec = user_spec
        self.sync = sync
        self.axes = tuple(a for part in parts if isinstance(part, tuple) for a in part)
        self.has_unconstrained = any(part is UNCONSTRAINED for part in parts)
        self._hash = hash((self.partitions, sync))

    @classmethod
    def from_user_input(
        cls, entry: Any, arg_name: str, *, allow_unconstrained: bool = False
    ) -> ParsedPartitionSpec:
        """Parses what a user wrote for one leaf.

        Args:
            entry: A PartitionSpec, or None for a replicated value.
            arg_name: What to call the leaf in an error, e.g. ``"in_axis_resources['w']"``.
            allow_unconstrained: Whether ``P.UNCONSTRAINED`` may stand in a dimension.

        Raises:
            TypeError: `entry` is neither None nor a PartitionSpec.
            ValueError: A mesh axis stands twice, or ``P.UNCONSTRAINED`` where it may not.
        """
        if failure := _spec_failure(entry, arg_name, allow_unconstrained):
            raise explain("PartitionSpec", [failure])
        return cls(entry, () if entry is None else _partitions(entry))

    @property
    def user_spec(self) -> PartitionSpec | None:
        """The user's own spec; only for a spec that is still in sync with it."""
        return self.unsynced_user_spec(SpecSync.IN_SYNC)

    def unsynced_user_spec(self, min_sync: SpecSync) -> PartitionSpec | None:
        """Returns the user's own spec if it is at least as close as `min_sync`.

        Raises:
            AssertionError: The partitions have moved further from the user's spec than that.
        """
        if self.sync < min_sync:
            raise AssertionError(
                f"{self!r} no longer says what its user wrote "
                f"({self.sync.name} < {min_sync.name}); please report this."
            )
        return self.unsafe_user_spec

    def insert_axis_partitions(self, dim: int, val: Any) -> ParsedPartitionSpec:
        """Returns the spec with a new dimension `dim` that is split over `val`.

        Args:
            dim: Position of the new dimension; missing dimensions before it are not split.
            val: Its mesh axes; ``()``, ``UNCONSTRAINED`` or ``BATCH`` bring in no axis.
        """
        parts = self.partitions + ((),) * (dim - len(self.partitions))
        moved = SpecSync.OUT_OF_SYNC if isinstance(val, tuple) and val else SpecSync.DIM_PERMUTE
        return ParsedPartitionSpec(
            self.unsafe_user_spec,
            (*parts[:dim], val, *parts[dim:]),
            sync=min(self.sync, moved),
        )

    def to_partition_spec(self, batch: Any = None) -> PartitionSpec:
        """Returns the PartitionSpec of the partitions; `batch` stands for :data:`BATCH`."""
        return PartitionSpec(*(_to_entry(part, batch) for part in self.partitions))

    def __str__(self) -> str:
        if self.sync == SpecSync.IN_SYNC:
            return show_spec(self.unsafe_user_spec)
        return show_spec(self.to_partition_spec())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParsedPartitionSpec):
            return NotImplemented
        return (
            self.partitions == other.partitions
            and self.sync == other.sync
            and self.unsafe_user_spec == other.unsafe_user_spec
        )

    def __len__(self) -> int:
        return len(self.partitions)

    def __getitem__(self, i: int) -> Any:
        return self.partitions[i]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.partitions)

    def __repr__(self) -> str:
        return f"ParsedPartitionSpec(partitions={self.partitions}, sync={self.sync.name})"


#: The spec of a value that every device holds whole.
REPLICATED = ParsedPartitionSpec(None, ())


def spec_of(resource: Any) -> ParsedPartitionSpec | None:
    """Returns what a spec or a NamedSharding says of the mesh axes; None for anything else."""
    if isinstance(resource, NamedSharding):
        return ParsedPartitionSpec(resource.spec, _partitions(resource.spec))
    return resource if isinstance(resource, ParsedPartitionSpec) else None


def _partitions(entry: PartitionSpec) -> list[Any]:
    return [
        () if e is None else e if e is UNCONSTRAINED or isinstance(e, tuple) else (e,)
        for e in entry
    ]


def _to_entry(part: Any, batch: Any) -> Any:
    if part is BATCH:
        return batch
    if part is UNCONSTRAINED:
        return part
    return None if not part else part[0] if len(part) == 1 else part


def show_spec(spec: Any) -> str:
    """Returns a spec as a user writes it: ``P('data', None)``."""
    if isinstance(spec, PartitionSpec):
        return f"P({', '.join(_show_entry(e) for e in spec)})"
    if isinstance(spec, NamedSharding):
        return f"NamedSharding({show_spec(spec.spec)})"
    return str(spec) if isinstance(spec, ParsedPartitionSpec) else repr(spec)


def show_origin(spec: ParsedPartitionSpec) -> str:
    """Returns what the user wrote, and what became of it where that is something else."""
    wrote = show_spec(spec.unsafe_user_spec)
    return wrote if spec.sync == SpecSync.IN_SYNC else f"{wrote}, which vmap made {spec}"


def _show_entry(entry: Any) -> str:
    return "P.UNCONSTRAINED" if entry is UNCONSTRAINED else repr(entry)


def _spec_failure(entry: Any, arg_name: str, allow_unconstrained: bool) -> Failure | None:
    if entry is None:
        return None
    if not isinstance(entry, PartitionSpec):
        return _type_failure(entry, arg_name)
    if entry.unreduced or entry.reduced:
        return Failure(
            what=f"cannot use unreduced axes in {arg_name}",
            given=f"{entry!r}",
            expected="mesh axes that split dimensions; sums are left to the partitioner",
            fix="drop unreduced= and reduced= from the spec",
        )
    parts = _partitions(entry)
    if UNCONSTRAINED in parts and not allow_unconstrained:
        results = "out_shardings" if arg_name.startswith("in_shard") else "out_axis_resources"
        return Failure(
            what=f"cannot leave a dimension of {arg_name} unconstrained",
            given=show_spec(entry),
            expected="mesh axes or None: the layout of an input is decided before the call",
            fix=f"use P.UNCONSTRAINED in with_sharding_constraint or {results}",
        )
    axes = [a for part in parts if part is not UNCONSTRAINED for a in part]
    if twice := sorted({repr(a) for a in axes if axes.count(a) > 1}):
        axis, each = ("axis", twice[0]) if len(twice) == 1 else ("axes", "each")
        return Failure(
            what=f"uses mesh {axis} {', '.join(twice)} twice in {arg_name}",
            given=show_spec(entry),
            expected="every mesh axis to split at most one dimension",
            fix=f"keep {each} in one place",
        )
    return None


def _type_failure(entry: Any, arg_name: str) -> Failure:
    fix = "wrap the mesh axes: P('data', None)"
    if isinstance(entry, str):
        is_marker = entry in ("AUTO", "FROM_ARRAY")
        fix = f"write spmd.{entry}, without quotes" if is_marker else f"write P({entry!r})"
    elif entry is UNCONSTRAINED:
        fix = "write P(P.UNCONSTRAINED), with one entry per dimension"
    elif isinstance(entry, Mesh):
        fix = "pass it as mesh=..., or enter it, and write a PartitionSpec here"
    return Failure(
        what=f"cannot read {arg_name}",
        given=f"{entry!r}"[:100],
        expected="a PartitionSpec, None, a sharding, AUTO, or FROM_ARRAY for an input",
        got=type(entry).__qualname__,
        fix=fix,
        error=SpecTypeError,
    )


# Spec trees


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecTree:
    """A parsed tree of specs, hashable; each leaf stands for all leaves below it.

    Attributes:
        name: The option it was given as, e.g. ``"in_axis_resources"``.
        leaves: ParsedPartitionSpec, ``UNSPECIFIED``, ``FROM_ARRAY``, ``AUTO`` or a sharding.
        names: How each leaf is written, e.g. ``"in_axis_resources[0]['w']"``.
        treedef: The structure; None, specs and shardings are leaves.
    """

    name: str
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    treedef: Any

    def indices(self) -> Any:
        """Returns the tree with the index of each leaf in its place."""
        return jtu.tree_unflatten(self.treedef, range(len(self.leaves)))

    def broadcast(self, treedef: Any, value: str) -> list[int] | Failure:
        """Returns the index of a leaf per leaf of `treedef`; see :func:`broadcast_prefix`."""
        return broadcast_prefix(self.indices(), treedef, self.name, value)


def _is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, Sharding))


def parse_specs(tree: Any, name: str, subject: str, *, role: str) -> SpecTree:
    """Parses the specs of an option; `role` is ``"input"``, ``"output"`` or ``"constraint"``."""
    paths, treedef = jtu.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    names = tuple(name + jtu.keystr(path) for path, _ in paths)
    failures = [_leaf_failure(entry, n, role) for (_, entry), n in zip(paths, names, strict=True)]
    if failures := [f for f in failures if f]:
        raise explain(subject, failures)
    leaves = tuple(_parse_leaf(entry) for _, entry in paths)
    return SpecTree(name=name, leaves=leaves, names=names, treedef=treedef)


def _leaf_failure(entry: Any, leaf_name: str, role: str) -> Failure | None:
    if entry is UNSPECIFIED:
        return None
    if isinstance(entry, NamedSharding):
        return _spec_failure(entry.spec, leaf_name, allow_unconstrained=role != "input")
    if isinstance(entry, Sharding):
        return None  # what it says is known with the rank of a value
    if entry is AUTO and role != "constraint":
        return None
    if entry is AUTO:
        return Failure(
            what=f"cannot choose {leaf_name}",
            given="AUTO",
            expected="a spec: AUTO is for arguments and results",
            fix="leave the constraint out: the plan of a pjit writes its own inside",
        )
    if entry is FROM_ARRAY:
        if role == "input":
            return None
        return Failure(
            what=f"cannot take {leaf_name} from an array",
            given="FROM_ARRAY",
            expected="a spec: FROM_ARRAY is for inputs, which exist before the call",
            fix="write the PartitionSpec"
            + (", or leave the option out: the partitioner chooses" if role == "output" else ""),
        )
    return _spec_failure(entry, leaf_name, allow_unconstrained=role != "input")


def _parse_leaf(entry: Any) -> Any:
    if entry is None:
        return REPLICATED
    if isinstance(entry, PartitionSpec):
        return ParsedPartitionSpec(entry, _partitions(entry))
    return entry


def broadcast_prefix(tree: Any, treedef: Any, name: str, value: str) -> list[Any] | Failure:
    """Returns one leaf of a tree, a pytree prefix, per leaf of `treedef`, or why that cannot be.

    A failure calls them by names such as ``"in_axis_resources[0]"`` and ``"batch"``.
    """
    leaves, prefix = jtu.tree_flatten(tree)
    return _broadcast(prefix, leaves, treedef, name, value)


def _broadcast(
    prefix: Any, leaves: Sequence[Any], full: Any, name: str, value: str
) -> list[Any] | Failure:
    """Walks both structures together; a failure names the first place where they part."""
    if prefix.node_data() is None:
        return [*leaves] * full.num_leaves
    spec_keys, value_keys = _mapping_keys(prefix), _mapping_keys(full)
    specs, values = prefix.children(), full.children()
    if spec_keys is not None and value_keys is not None:
        if {*spec_keys} != {*value_keys}:
            return _key_mismatch(name, value, {*spec_keys}, {*value_keys})
        at = {key: i for i, key in enumerate(spec_keys)}
        order, keys = [at[k] for k in value_keys], [f"[{k!r}]" for k in value_keys]
    elif prefix.node_data() != full.node_data() or len(specs) != len(values):
        return _mismatch(name, value, prefix, full)
    else:
        order, keys = [*range(len(values))], _keys(prefix)
    ends = [0, *itertools.accumulate(s.num_leaves for s in specs)]
    out: list[Any] = []
    for key, i, below in zip(keys, order, values, strict=True):
        part = leaves[ends[i] : ends[i + 1]]
        found = _broadcast(specs[i], part, below, name + key, value + key)
        if isinstance(found, Failure):
            return found
        out += found
    return out


def _mapping_keys(treedef: Any) -> list[Any] | None:
    """The keys of a mapping, of whatever class, in the order of its children; None for others."""
    kind, data = treedef.node_data() or (None, None)
    if kind is dict:
        return data
    if not (isinstance(kind, type) and issubclass(kind, Mapping)):
        return None
    dummy = jtu.tree_unflatten(treedef, range(treedef.num_leaves))
    paths, _ = jtu.tree_flatten_with_path(dummy, is_leaf=lambda x: x is not dummy)
    keys = [getattr(path[0], "key", None) for path, _ in paths]
    return keys if {*keys} == {*dummy} else None  # a class may hide its keys


def _mismatch(name: str, value: str, prefix: Any, full: Any) -> Failure:
    spec_node, value_node = prefix.node_data(), full.node_data()
    fix = "give one spec per leaf, or one spec for a whole subtree"
    # A list for a tuple: all of it is there, in another container.
    alike = len(prefix.children()) == len(full.children()) > 0
    if spec_node and value_node and alike and spec_node[0] is not value_node[0]:
        kind = value_node[0].__name__
        fix = f"write {name} as a {kind} of specs, or give one spec for all of {value}"
    return Failure(
        what=f"cannot match {name} with {value}: it is not a pytree prefix",
        given=f"{name} is {_kind(prefix)}",
        expected=f"the structure of {value}, or one spec for all of it",
        got=f"{value} is {_kind(full)}",
        fix=fix,
    )


def _key_mismatch(name: str, value: str, specs: set, values: set) -> Failure:
    missing, extra = sorted(map(repr, values - specs)), sorted(map(repr, specs - values))
    got = [f"no spec for {', '.join(missing)}"] if missing else []
    got += [f"{', '.join(extra)} with no value"] if extra else []
    return Failure(
        what=f"cannot match {name} with {value}: the keys differ",
        given=f"{name} has keys {', '.join(sorted(map(repr, specs)))}",
        expected=f"keys {', '.join(sorted(map(repr, values)))}",
        got="; ".join(got),
        fix="give one spec per key, or one spec for the whole dict",
    )


def _kind(treedef: Any) -> str:
    node = treedef.node_data()
    if node is None:
        return "one leaf"
    if node[0] is type(None):
        return "None"
    n, of = len(treedef.children()), node[0].__name__
    return f"a {of} of {n} element{'s' * (n != 1)}"


def _keys(treedef: Any) -> list[str]:
    """How the children of a node are written after it: ``['w']``, ``[0]``, ``.mu``."""
    kind, data = treedef.node_data()
    if kind is dict:
        return [f"[{k!r}]" for k in data]
    n = len(treedef.children())
    dummy = jtu.tree_unflatten(treedef, [0] * treedef.num_leaves)
    fields = getattr(kind, "_fields", None)
    if fields:
        return [f".{f}" for f in fields]
    # A registered class knows its own keys; ask for them through the leaves below each child.
    if kind not in (tuple, list) and all(c.num_leaves for c in treedef.children()):
        paths = [p[0] for p, _ in jtu.tree_flatten_with_path(dummy)[0]]
        seen = list(dict.fromkeys(paths))
        if len(seen) == n:
            return [jtu.keystr((k,)) for k in seen]
    return [f"[{i}]" for i in range(n)]
