"""What a user wants of a plan, read and checked: meshes, a chip, a budget, what is fixed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import numbers
import re
from typing import Any

import jax
from jax.sharding import NamedSharding

from spmd import _mesh
from spmd._resolve import spec_failure
from spmd._spec import AUTO, ParsedPartitionSpec
from spmd.errors import (
    ArgumentError,
    Failure,
    MeshError,
    OptionError,
    PlanError,
    SpmdError,
    did_you_mean,
    explain,
)
from spmd.inspection.compile.timed import asked as read_chip
from spmd.inspection.compile.topology import given_mesh, limit_of, topology as describe
from spmd.inspection.records.names import is_below
from spmd.inspection.records.plan import Placed
from spmd.inspection.records.sizes import parse_bytes
from spmd.inspection.timing.chips import CHIPS, Chip, chip_of
from spmd.planner.program.layout import Fixed, spec_of
from spmd.planner.program.structure import Graph

_DEEPER = re.compile(r"[.\[]")
"""What stands in a path after the argument, or the result."""
STAND_IN = "v5e"
"""Whose figures a plan uses for devices that have none, such as CPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a plan is for.

    Attributes:
        meshes: to choose among.
        topology: name of described hardware, or empty.
        chip: whose figures to use.
        budget: bytes that a device may hold; None for no limit.
    """

    meshes: tuple[Any, ...]
    topology: str
    chip: Chip
    budget: int | None


def hardware(
    topology: Any, mesh: Any, axes: Any, memory: Any, chip: Any, *, subject: str
) -> Hardware:
    """Reads the options that say what a plan is for."""
    meshes = tuple(_meshes(topology, mesh, axes, subject))
    if not all(isinstance(axis, str) for axis in meshes[0].shape):
        raise explain(subject, [_no_names(tuple(meshes[0].shape))])
    device = meshes[0].devices.flat[0]
    wish = read_chip(chip, None, subject=subject).chip
    return Hardware(
        meshes=meshes,
        topology=topology if isinstance(topology, str) else "",
        chip=wish or chip_of(device.device_kind) or CHIPS[STAND_IN],
        budget=_budget(memory, device, subject),
    )


def _budget(memory: Any, device: Any, subject: str) -> int | None:
    if memory is None:
        return limit_of(device)
    try:
        found = parse_bytes(memory)
    except ValueError as e:
        failure = Failure(what="cannot read memory", got=str(e), error=OptionError)
        raise explain(subject, [failure]) from None
    if found <= 0:
        failure = Failure(
            what="cannot keep to this memory",
            expected="bytes of one device, above 0",
            got=repr(memory),
            error=OptionError,
        )
        raise explain(subject, [failure])
    return found


# Meshes


def _meshes(topology: Any, mesh: Any, axes: Any, subject: str) -> Iterator[Any]:
    if isinstance(topology, str):
        if isinstance(mesh, jax.sharding.Mesh):
            mesh = dict(mesh.shape)
        if mesh is not None:
            yield describe(topology, mesh)
            return
        names = _axis_names(axes, subject)
        for sizes in factorisations(describe(topology).size, len(names)):
            yield describe(topology, dict(zip(names, sizes, strict=True)))
        return
    found = given_mesh(topology, mesh, subject)
    found = _mesh.current_mesh() if found is None else found
    if found is None:
        raise explain(subject, [_no_hardware()])
    yield found


def _no_hardware() -> Failure:
    return Failure(
        what="needs a mesh or a topology, and there is none here",
        expected="what the plan is for",
        fix="topology='v5e:4x4', which chooses the mesh too; mesh=spmd.make_mesh({'data': 8});\n"
        "or a mesh that is active",
        error=MeshError,
    )


def _axis_names(axes: Any, subject: str) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes or ())
    if names and len({*names}) == len(names) and all(isinstance(n, str) and n for n in names):
        return names
    raise explain(subject, [_no_names(axes)])


def _no_names(axes: Any) -> Failure:
    return Failure(
        what="cannot use these axes",
        expected="names of mesh axes, each once, such as ('data', 'model')",
        got=repr(axes)[:100],
        error=OptionError,
    )


def factorisations(count: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number of devices as a product of so many sizes, in order."""
    if parts == 1:
        yield (count,)
        return
    for first in (d for d in range(count, 0, -1) if count % d == 0):
        for rest in factorisations(count // first, parts - 1):
            yield (first, *rest)


def different(meshes: Sequence[Any], named: Iterable[str]) -> tuple[Any, ...]:
    """The meshes, but one of those that differ only in which of their axes have size 1.

    The axes that are `named` in the program, or in what its user asks for, tell meshes apart.
    """
    found: dict[Any, Any] = {}
    kept = {*named}
    for mesh in meshes:
        axes = tuple((a if a in kept else "", size) for a, size in mesh.shape.items() if size > 1)
        found.setdefault(axes, mesh)
    return tuple(found.values())


# What is fixed, and what never


def check_options(subject: str, *, top: Any, timeout: Any, seed: Any) -> None:
    """Checks the numbers among the options."""
    failures = [
        Failure(
            what=f"cannot read {name}", expected=expected, got=repr(value)[:60], error=OptionError
        )
        for name, value, expected, right in (
            ("top", top, "how many layouts to compile, at least 0", _is_whole(top) and top >= 0),
            ("seed", seed, "a whole number", _is_whole(seed)),
            ("timeout", timeout, "seconds above 0, or None", timeout is None or _is_above(timeout)),
        )
        if not right
    ]
    if failures:
        raise explain(subject, failures)


def check_kinds(subject: str, *, axes: Any, never: Any, classes: Any, fixed: Any) -> None:
    """Checks what the options are that hold several things."""
    failures = [
        Failure(
            what=f"cannot read {name}", expected=expected, got=repr(value)[:60], error=ArgumentError
        )
        for name, value, expected, kind in (
            ("axes", axes, "names of mesh axes, such as ('data', 'model')", Iterable),
            ("never", never, "pairs of a dimension and a mesh axis", Iterable),
            ("classes", classes, "a dict, such as {'vocab': \"state['embed']:0\"}", Mapping),
            ("fixed", fixed, "a dict of paths and specs, such as {'batch': P('data')}", Mapping),
        )
        if value is not None and not isinstance(value, kind)
    ]
    if failures:
        raise explain(subject, failures)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_above(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0


def leaves_of(
    given: Mapping[str, Any], names: Sequence[str], subject: str
) -> dict[int, tuple[str, Any]]:
    """By leaf the key that says most of it, and its value; all below a path has its spec."""
    found: dict[int, tuple[str, Any]] = {}
    failures = []
    for key in sorted(given, key=lambda k: len(str(k))):
        at = [i for i, name in enumerate(names) if isinstance(key, str) and is_below(name, key)]
        found.update(dict.fromkeys(at, (key, given[key])))
        if not at:
            failures.append(unknown_path(key, names))
    if failures:
        raise explain(subject, failures)
    return found


def unknown_path(key: Any, names: Sequence[str]) -> Failure:
    """The failure of a path that names no argument and no result."""
    whole = (_DEEPER.split(name, maxsplit=1)[0] for name in names)
    known = [*dict.fromkeys((*whole, *names))]
    return Failure(
        what=f"has no argument or result {key or repr(key)}{did_you_mean(key, known)}",
        expected=f"a path such as {', '.join(known[:3])}" + (", ..." if len(known) > 3 else ""),
        error=ArgumentError,
    )


def fixed_specs(
    given: Mapping[str, Any],
    leaves: Sequence[Placed],
    avals: Sequence[Any],
    meshes: Sequence[Any],
    subject: str,
) -> tuple[dict[int, ParsedPartitionSpec], tuple[Any, ...]]:
    """The specs that are fixed, by leaf, and the meshes that they fit."""
    rows = leaves_of(given, [one.name for one in leaves], subject)
    rows = {i: row for i, row in rows.items() if row[1] is not AUTO}
    parsed = {i: _parsed(spec, f"fixed[{key!r}]", subject) for i, (key, spec) in rows.items()}
    by_mesh = {mesh: [*_misfits(rows, parsed, leaves, avals, mesh)] for mesh in meshes}
    fitting = tuple(mesh for mesh, failures in by_mesh.items() if not failures)
    if not fitting:
        raise explain(subject, by_mesh[meshes[0]])
    return parsed, fitting


def _misfits(
    rows: Mapping[int, tuple[str, Any]],
    parsed: Mapping[int, ParsedPartitionSpec],
    leaves: Sequence[Placed],
    avals: Sequence[Any],
    mesh: Any,
) -> Iterator[Failure]:
    """The specs that do not fit a mesh, each once: a path may stand for many arrays."""
    seen: set[str] = set()
    for i, spec in parsed.items():
        key, given = rows[i]
        where = f"fixed[{key!r}]"
        if where in seen:
            continue
        found = _of_other_mesh(where, given, mesh)
        if found or (found := _misfit(leaves[i], avals[i], spec, where, mesh)):
            seen.add(where)
            yield found


def _of_other_mesh(where: str, given: Any, mesh: Any) -> Failure | None:
    """The failure of a sharding over axes of other sizes than the plan's mesh has."""
    if not isinstance(given, NamedSharding):
        return None
    axes = ParsedPartitionSpec.from_user_input(given.spec, where).axes
    sizes = {axis: size for axis, size in given.mesh.shape.items() if axis in axes}
    if all(mesh.shape.get(axis, size) == size for axis, size in sizes.items()):
        return None
    return Failure(
        what=f"cannot use {where}: it is a sharding of another mesh",
        given=_mesh.show_axes(given.mesh.shape),
        expected=f"axes of these sizes: {_mesh.show_axes(mesh.shape)}",
        fix="give its PartitionSpec",
        error=MeshError,
    )


def _parsed(spec: Any, where: str, subject: str) -> ParsedPartitionSpec:
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    try:
        return ParsedPartitionSpec.from_user_input(spec, where)
    except SpmdError as e:
        text = str(e).partition(" ")[2]
        raise type(e)(f"{subject} {text}") from None


def _misfit(
    leaf: Placed, aval: Any, spec: ParsedPartitionSpec, where: str, mesh: Any
) -> Failure | None:
    kind = "" if leaf.name.startswith("result") else "argument "
    return spec_failure(spec, aval, mesh, kind + leaf.name, where, boundary=True)


def places_of(spec: ParsedPartitionSpec) -> dict[str, int]:
    """The dimension that each axis splits."""
    return {
        axis: d
        for d, part in enumerate(spec.partitions)
        if isinstance(part, tuple)
        for axis in part
    }


# Classes


def class_names(graph: Graph, given: Mapping[str, Any] | None, subject: str) -> dict[str, int]:
    """Classes by the names that a user gave them."""
    return {str(name): class_of(place, graph, {}, subject) for name, place in (given or {}).items()}


def class_of(place: Any, graph: Graph, names: Mapping[str, int], subject: str) -> int:
    """The class of a dimension: a name, ``"path:dimension"``, or a pair of both."""
    if isinstance(place, str) and place in names:
        return names[place]
    path, d = place.rpartition(":")[::2] if isinstance(place, str) else _pair(place)
    tensors = {one.name: one for one in graph.tensors if one.kind != "result"}
    if path in tensors and str(d).isdigit() and int(d) < len(tensors[path].classes):
        found = tensors[path].classes[int(d)]
        if found is not None and found in graph.sizes:
            return found
    places = ((n, i, c) for n, one in tensors.items() for i, c in enumerate(one.classes))
    known = [*names, *(f"{n}:{i}" for n, i, c in places if c in graph.sizes)]
    failure = Failure(
        what=f"has no dimension {place!r} to split{did_you_mean(place, known)}",
        expected="a name in classes=, or a path and a dimension, such as "
        + ", ".join(known[:2] or ["x:0"]),
        error=ArgumentError,
    )
    raise explain(subject, [failure])


def _pair(place: Any) -> tuple[Any, Any]:
    return (place[0], place[1]) if _is_pair(place) else (None, None)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def never_pairs(
    given: Iterable[Any], graph: Graph, names: Mapping[str, int], axes: Sequence[str], subject: str
) -> frozenset[tuple[int, str]]:
    """Pairs of a class and an axis that may not split it."""
    found = []
    for place, axis in pairs_in(given, subject):
        if axis not in axes:
            failure = Failure(
                what=f"has no mesh axis {axis!r}{did_you_mean(axis, axes)}",
                expected=f"one of {', '.join(map(repr, axes))}",
                error=ArgumentError,
            )
            raise explain(subject, [failure])
        found.append((class_of(place, graph, names, subject), axis))
    return frozenset(found)


def pairs_in(never: Iterable[Any], subject: str) -> list[tuple[Any, str]]:
    """The pairs of a dimension and a mesh axis that a user gave."""
    for pair in never:
        if not _is_pair(pair) or not isinstance(pair[1], str):
            failure = Failure(
                what="cannot read never",
                expected="pairs of a dimension and a mesh axis, such as ('tokens:1', 'data')",
                got=repr(pair)[:100],
                error=ArgumentError,
            )
            raise explain(subject, [failure])
    return [(place, axis) for place, axis in never]


def check_never(
    never: frozenset[tuple[int, str]], fixed: Fixed, graph: Graph, subject: str
) -> None:
    """Checks that what is fixed splits nothing that must not be split."""
    if failures := [*_barred(never, fixed, graph)]:
        raise explain(subject, failures)


def _barred(never: frozenset[tuple[int, str]], fixed: Fixed, graph: Graph) -> Iterator[Failure]:
    for i, places in fixed.to_dict().items():
        tensor = graph.tensors[i]
        for axis in (axis for axis, d in places.items() if (tensor.classes[d], axis) in never):
            yield Failure(
                what=f"fixes {tensor.name} as never= bars it",
                given=f"{tensor.name}: {spec_of(places, len(tensor.shape))}",
                expected=f"{axis!r} on none of what is one with dimension {places[axis]}",
                fix="leave one of both out",
                error=ArgumentError,
            )


def label_of(number: int, graph: Graph, names: Mapping[str, int]) -> str:
    """What to call a class: the user's name, else the shortest dimension that is in it."""
    for name, one in names.items():
        if one == number:
            return name
    places = graph.classes.get(number) or ()
    return min((f"{path}:{d}" for path, d in places), key=len, default=f"inner {number}")


def no_links(mesh: Any) -> Failure:
    """The failure of a mesh whose links are not known."""
    return Failure(
        what="has no answer: what joins the devices of several slices is not known",
        given=_mesh.show_mesh(mesh),
        expected="devices of one slice",
        error=PlanError,
    )


def no_program(said: str) -> Failure:
    """The failure of a program that the compiler does not take, however it is laid out."""
    return Failure(
        what="has no plan: the compiler takes it in none of the layouts",
        expected="a program that compiles",
        got=said,
        fix="compile it without a plan, whose error says more: pjit(f, mesh=mesh).lower(...)"
        ".compile()",
        error=PlanError,
    )


def changes_in_place(names: Sequence[str]) -> Failure:
    """The failure of a function that changes its arguments, such as modules of Flax."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return Failure(
        what="has no plan: the function changes its arguments in place, and no result has that",
        expected="a function that returns what it changes",
        got=f"changes of {', '.join(names[:3])}{more}",
        fix="with Flax: graphdef, state = nnx.split(model), take the state, nnx.merge(graphdef, "
        "state)\ninside, and return nnx.state(model); jax.jit in the place of nnx.jit",
        error=PlanError,
    )


def nothing_to_split(names: Sequence[str]) -> Failure:
    """The failure of a program of scalars."""
    return Failure(
        what="has nothing to split: no argument and no result has a dimension",
        got=", ".join(names[:5]) or "no arguments and no results",
        expected="arrays of rank 1 or more",
        fix="call it with pjit as it is: scalars are replicated",
        error=PlanError,
    )
