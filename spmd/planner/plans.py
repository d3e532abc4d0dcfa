"""What a plan can do: place arrays, tell its code and its prices, and be kept in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
import jax.tree_util as jtu

from spmd import _jax, _mesh
from spmd.errors import ArgumentError, Failure, MeshError, PlanError, explain
from spmd.inspection.records.plan import Placed, Plan
from spmd.inspection.records.plan_codec import load as load, save as save
from spmd.inspection.records.report import Shape
from spmd.inspection.show.plan import difference as _difference, why as why
from spmd.planner.pins import MisfitError, pin
from spmd.planner.program.graph import numbered
from spmd.planner.verify import spec_of_entries


def subject_of(plan: Plan) -> str:
    """The first words of a message."""
    return f"plan of `{plan.name}`"


def mesh_of(plan: Plan) -> Any:
    """A mesh of this process's devices with the axes of a plan."""
    count, there = plan.num_devices, jax.device_count()
    if count != there:
        failure = Failure(
            what="has no devices to run on",
            given=f"a plan for {_mesh.show_axes(plan.axes)}",
            expected=f"{count} devices",
            got=f"{there} of kind {jax.devices()[0].device_kind!r}",
            fix="enter a mesh of the devices that it is for, or plan again for those that are here",
            error=MeshError,
        )
        raise explain(subject_of(plan), [failure])
    return _mesh.make_mesh(dict(plan.axes))


def placed(plan: Plan, args: Sequence[Any]) -> Any:
    """Arrays, put where a plan wants them, as `Plan.place` says."""
    mesh = _mesh.current_mesh()
    mesh = mesh_of(plan) if mesh is None else mesh
    if failure := other_mesh(plan, mesh):
        raise explain(subject_of(plan), [failure])
    leaves, tree = jtu.tree_flatten(tuple(args))
    wanted = plan.arguments[: len(leaves)]
    failures = [*_misplaced(leaves, wanted, plan)]
    if failures:
        raise explain(subject_of(plan), failures)
    plain = _mesh.plain_mesh(mesh)
    shardings = [NamedSharding(plain, spec_of_entries(one.spec)) for one in wanted]
    found = jtu.tree_unflatten(tree, jax.device_put(leaves, shardings))
    return found[0] if len(found) == 1 else found


def _misplaced(leaves: Sequence[Any], wanted: Sequence[Placed], plan: Plan) -> Iterator[Failure]:
    if len(leaves) > len(wanted):
        yield Failure(
            what=f"cannot place {len(leaves)} arrays",
            expected=f"the arguments that were planned, which are {len(plan.arguments)} arrays",
            fix="plan.place(*args), with the arguments of the function that are not static",
            error=ArgumentError,
        )
        return
    for leaf, one in zip(leaves, wanted, strict=True):
        if isinstance(leaf, (jax.ShapeDtypeStruct, _jax.core.ShapedArray)):
            yield Failure(
                what=f"cannot place argument {one.name}: it is no array",
                expected="an array with values",
                got=str(leaf),
                fix="place what the function is called with; a plan needs no more than shapes",
                error=ArgumentError,
            )
            continue
        shape = getattr(leaf, "shape", None)
        shape = jax.numpy.shape(leaf) if shape is None else shape
        if tuple(shape) != one.shape:
            yield Failure(
                what=f"cannot place argument {one.name}",
                expected=f"an array of shape {one.shape}, which was planned",
                got=f"one of shape {tuple(shape)}",
                fix="plan again for these arguments",
                error=ArgumentError,
            )


def difference(plan: Plan, other: Any) -> str:
    """What another plan does otherwise."""
    if not isinstance(other, Plan):
        failure = Failure(
            what="cannot be compared",
            expected="another spmd.Plan",
            got=type(other).__name__,
            fix="spmd.Plan.load(path), of a file",
            error=ArgumentError,
        )
        raise explain(subject_of(plan), [failure])
    return _difference(plan, other)


# Whether a plan is of a program


def other_mesh(plan: Plan, mesh: Any) -> Failure | None:
    """A plan is for a mesh of other sizes."""
    if dict(mesh.shape) == dict(plan.axes):
        return None
    return Failure(
        what="is for another mesh",
        expected=f"axes {_mesh.show_axes(plan.axes)}",
        got=f"axes {_mesh.show_axes(mesh.shape)}",
        fix="enter a mesh of these axes, or plan again for this one",
        error=PlanError,
    )


def stale(plan: Plan, now: Sequence[Placed], versions: Mapping[str, str]) -> list[Failure]:
    """What of a program is not as it was planned: versions, then arguments and results."""
    failures = [
        Failure(
            what=f"was made with another version of {name}",
            expected=f"{name} {made}",
            got=f"{name} {versions[name]}" if versions.get(name) else f"{name} is not installed",
            fix="plan again, or paste what plan.code() prints",
            error=PlanError,
        )
        for name, made in plan.versions.items()
        if made != versions.get(name)
    ]
    if failures:
        return failures
    made = [(one.name, one.dtype, one.shape) for one in (*plan.arguments, *plan.results)]
    found = [(one.name, one.dtype, one.shape) for one in now]
    return [*_other_values(made, found)][:8]


def _other_values(made: Sequence[Any], found: Sequence[Any]) -> Iterator[Failure]:
    there, none = dict(_told_apart(found)), "no such argument or result"
    for (name, n), array in _told_apart(made):
        if (got := there.pop((name, n), none)) != array:
            yield _other_program(name, array, got)
    for name, _ in there:
        yield _other_program(name, none, "one that was not planned")


def _told_apart(values: Sequence[Any]) -> Iterator[tuple[tuple[str, int], str]]:
    """Arrays by their name, and by how many have it before: an argument may be called `result`."""
    seen: Counter[str] = Counter()
    for name, dtype, shape in values:
        yield (name, seen[name]), _show_array(dtype, shape)
        seen[name] += 1


def _other_program(name: str, expected: str, got: str) -> Failure:
    return Failure(
        what=f"is of another program: {name} differs",
        expected=expected,
        got=got,
        fix="plan again for this program",
        error=PlanError,
    )


def _show_array(dtype: str, shape: tuple[int, ...]) -> str:
    return str(Shape(dtype=dtype, dims=shape))


def fingerprint(module: Any) -> str:
    """Tells programs apart by the operations that plans pin, with the types that they have."""
    found = hashlib.sha256()
    with module.context:
        for one in numbered(module.operation):
            types = [str(value.type) for side in (one.operands, one.results) for value in side]
            found.update(f"{one.name} {types}\n".encode())
    return found.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Pinner:
    """Writes the pins of a plan into a lowered module; a part of the program's key.

    Attributes:
        subject: the first words of a message.
        program: fingerprint of what was planned.
        pins: of the plan.
        planned_for: the kind of the devices that it is for.
        here: the kind of those that the program is lowered for.
    """

    subject: str
    program: str
    pins: tuple[Any, ...]
    planned_for: str
    here: str

    def __call__(self, module: Any) -> None:
        """Edits a module.

        Raises:
            PlanError: it is of another program.
        """
        if (found := fingerprint(module)) != self.program:
            raise explain(self.subject, [self._other_program(found)])
        try:
            pin(module, self.pins)
        except MisfitError as e:
            failure = dataclasses.replace(e.args[0], error=PlanError)
            raise explain(self.subject, [failure]) from None

    def _other_program(self, found: str) -> Failure:
        failure = Failure(
            what="is of another program: its products, gathers or scatters differ",
            expected=f"the program {self.program}, which was planned",
            got=f"the program {found}",
            fix="plan again for this program",
            error=PlanError,
        )
        if self.planned_for == self.here:
            return failure
        # `jax.lax.ragged_dot` is one operation on TPUs and several elsewhere.
        return dataclasses.replace(
            failure,
            expected=f"{failure.expected} as JAX lowers it for {self.planned_for!r}",
            got=f"{failure.got}, lowered for {self.here!r}",
            fix="plan again for these devices: JAX may lower a function otherwise for others",
        )


def pinner(plan: Plan, mesh: Any) -> Pinner:
    """What writes the pins of a plan into a program for a mesh, if it is the one of the plan."""
    is_abstract = isinstance(mesh, AbstractMesh)  # of which no device says its kind
    here = plan.device_kind if is_abstract else mesh.devices.flat[0].device_kind
    return Pinner(subject_of(plan), plan.program, plan.pins, plan.device_kind, here)


def code_of(plan: Plan) -> str:
    """What a person pastes."""
    if plan.inside is None:
        failure = Failure(
            what="has no code: it was saved before that was worked out",
            fix="plan again, and call plan.code() or plan.save(...) there",
            error=PlanError,
        )
        raise explain(subject_of(plan), [failure])
    return plan.inside.get().code
