"""One function on meshes of growing size: what each device sends, computes and holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import time
from typing import Any

from spmd.errors import ArgumentError, Failure, explain, show_value
from spmd.inspection.compile.carrying import carried
from spmd.inspection.compile.program import unbound
from spmd.inspection.compile.report import report
from spmd.inspection.compile.timed import Asked, asked
from spmd.inspection.compile.topology import hbm_bytes, is_stand_in, topology
from spmd.inspection.hlo.oom import out_of_memory
from spmd.inspection.records.sweep import Sweep, SweepRow


def sweep(
    f: Any,
    *args: Any,
    meshes: Iterable[Any],
    args_of: Callable[[Any], tuple[Any, ...]] | None = None,
    chip: Any = None,
    model_flops: float | Callable[[Any], float] | None = None,
    **kwargs: Any,
) -> Sweep:
    """Compiles a function for several meshes, and compares what each device does.

    A program that is too large for a device is a row of its own, not an error.

    Args:
        f: a function of `spmd.pjit` that is bound to no mesh, or one of `jax.jit` whose arguments
            have shardings; see `report`.
        *args: what it is called with; arrays or `jax.ShapeDtypeStruct`s. Those that lie on other
            devices are split over the axes of the same names.
        meshes: of each row a mesh, the name of a topology, or a name and the sizes of its axes:
            ``("v5e:4x4", {"data": 8, "model": 2})``.
        args_of: instead of `args`: makes them, as a tuple, for each mesh, such as a batch that
            grows with it.
        chip: whose figures the times are to use, as `report` takes it.
        model_flops: of one call on all devices, for the MFU, as `report` takes it; or a function
            that says it for each mesh.
        **kwargs: keyword arguments of the call.

    Returns:
        One row for each mesh, in their order.

    Raises:
        TypeError: there is no mesh, or both `args` and `args_of` are given.
        RuntimeError: there is no such topology, or `f` is bound to another mesh.

    Example:
        >>> print(
        ...     sweep(
        ...         step,
        ...         meshes=[(f"v5e:{n}x{n}", {"data": n, "model": n}) for n in (2, 4, 8, 16)],
        ...         args_of=lambda mesh: (state, batch_of(32 * mesh.shape["data"])),
        ...     )
        ... )
    """
    name = getattr(f, "__name__", type(f).__name__)
    subject = f"sweep of `{name}`"
    # All of them first: a mistake in the last is no reason to compile for the others.
    places = [_place(one, subject) for one in meshes]
    flops = model_flops if callable(model_flops) else lambda mesh: model_flops
    wishes = [asked(chip, flops(mesh), subject=subject) for _, mesh in places]
    if failure := _bad_call(places, args, args_of):
        raise explain(subject, [failure])
    rows = []
    for (label, mesh), wish in zip(places, wishes, strict=True):
        try:
            given = args if args_of is None else args_of(mesh)
            if not isinstance(given, tuple):
                failure = Failure(
                    what="takes a tuple of arguments from args_of",
                    got=type(given).__name__,
                    fix="return (x,) for a single argument",
                    error=ArgumentError,
                )
                raise explain(subject, [failure])
            rows.append(_row(f, given, kwargs, label, mesh, wish, subject))
        except Exception as e:
            e.add_note(f"{subject} was at {label}, {dict(mesh.shape)}.")
            raise
    return Sweep(name=name, rows=tuple(rows))


def _place(one: Any, subject: str) -> tuple[str, Any]:
    """A label and a mesh for what stands for a mesh."""
    if isinstance(one, str):
        return one, topology(one)
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
        return one[0], topology(*one)
    devices = getattr(one, "devices", None)
    if devices is None or not hasattr(one, "axis_names"):
        failure = Failure(
            what="cannot compile for this",
            expected="a mesh, 'v5e:4x4', or ('v5e:4x4', {'data': 8, 'model': 2})",
            got=show_value(one),
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    return f"{devices.size} x {devices.flat[0].device_kind}", one


def _bad_call(places: list, args: tuple, args_of: Any) -> Failure | None:
    if not places:
        return Failure(
            what="has no mesh to compile for", expected="one mesh or more", error=ArgumentError
        )
    if args and args_of is not None:
        return Failure(
            what="takes arguments, or args_of to make them, and not both",
            got=f"args_of and {len(args)} argument{'s' * (len(args) != 1)}",
            error=ArgumentError,
        )
    return None


def _row(
    f: Any, args: Any, kwargs: Any, label: str, mesh: Any, wish: Asked, subject: str
) -> SweepRow:
    kind = mesh.devices.flat[0].device_kind
    f, args, kwargs = unbound(f, args, kwargs)
    args, kwargs = carried(f, args, kwargs, mesh, subject=subject)
    start = time.perf_counter()
    try:
        found = report(f, *args, mesh=mesh, chip=wish.chip, model_flops=wish.model_flops, **kwargs)
    except RuntimeError as e:
        if (verdict := out_of_memory(e)) is None:
            raise
        return SweepRow(
            label=label,
            mesh=dict(mesh.shape),
            num_devices=mesh.devices.size,
            device_kind=kind,
            stand_in=is_stand_in(mesh),
            capacity=verdict.available or hbm_bytes(kind),
            seconds=time.perf_counter() - start,
            needed=verdict.needed,
        )
    seconds = time.perf_counter() - start
    return SweepRow.of(found, label=label, capacity=hbm_bytes(kind), seconds=seconds)
