"""One function on meshes of growing size: what each device sends, computes and holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from spmd.errors import ArgumentError, Failure, explain, show_value
from spmd.inspection.hlo.oom import out_of_memory
from spmd.inspection.records.report import Report, Total, Unread

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What a program is on one mesh, per device and call.

    Args:
        label: the topology's name, or how many devices of which kind.
        mesh: size by axis name, major to minor.
        num_devices: of the mesh.
        device_kind: the devices' own name, such as ``TPU v5 lite``.
        stand_in: True where CPU devices stand in for the hardware.
        capacity: bytes of main memory that a device leaves to a program; None if not known.
        seconds: how long it took to trace, lower, compile and read the program.
        report: None where the compiler says that the program does not fit.
        needed: bytes of main memory that the compiler misses where the program does not fit.
    """

    label: str
    mesh: Mapping[str, int]
    num_devices: int
    device_kind: str
    stand_in: bool
    capacity: int | None = None
    seconds: float | None = None
    report: Report | None = None
    needed: int | None = None

    @classmethod
    def of(
        cls,
        report: Report,
        *,
        label: str = "",
        capacity: int | None = None,
        seconds: float | None = None,
    ) -> SweepRow:
        """The row of a report.

        Args:
            report: of the program on one mesh.
            label: the topology's name; by default how many devices of which kind.
            capacity: bytes of main memory of a device.
            seconds: how long it took.
        """
        return cls(
            label=label or f"{report.num_devices} x {report.device_kind}",
            mesh=report.mesh,
            num_devices=report.num_devices,
            device_kind=report.device_kind,
            stand_in=report.stand_in,
            capacity=capacity,
            seconds=seconds,
            report=report,
        )

    @property
    def total(self) -> Total | None:
        """The sum over all collectives; None where the program does not fit."""
        return self.report.total if self.report else None

    @property
    def by_axis(self) -> dict[tuple[str, ...], Total]:
        """The sum over the collectives of each set of mesh axes."""
        return self.report.totals("axis") if self.report else {}

    @property
    def flops(self) -> int | None:
        """Floating-point operations of a device."""
        return self.report.cost.flops if self.report else None

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes that a device reads from and writes to its main memory."""
        return self.report.cost.hbm_bytes if self.report else None

    @property
    def peak(self) -> int | None:
        """The most memory in use at one time, in bytes; None where that is not known."""
        memory = self.report.memory if self.report else None
        return memory.peak if memory else None

    @property
    def unread(self) -> Unread | None:
        """Text of the program that was not understood: what it does is missing in the figures."""
        return self.report.unread if self.report else None

    @property
    def fits(self) -> bool | None:
        """Whether the program fits a device's memory; None where one of the two is not known."""
        if self.report is None:
            return False
        if self.peak is None or self.capacity is None:
            return None
        return self.peak <= self.capacity

    def record(self) -> dict[str, Any]:
        """All figures under flat names; what is not known is None.

        Returns:
            A dictionary of JSON values with the same keys for each row of a sweep, but for
            ``mesh/[axis]`` and ``wire_bytes/[axes]``, whose axes are joined by a plus sign.
        """
        total = self.total
        whole = ("sites", "unknown", "executions", "payload_bytes", "wire_bytes")
        return {
            "label": self.label,
            "num_devices": self.num_devices,
            "device_kind": self.device_kind,
            "stand_in": self.stand_in,
            **{f"mesh/{name}": size for name, size in self.mesh.items()},
            **{name: getattr(total, name) if total else None for name in whole},
            **{
                f"wire_bytes/{'+'.join(a) or 'none'}": t.wire_bytes for a, t in self.by_axis.items()
            },
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "peak": self.peak,
            "needed": self.needed,
            "capacity": self.capacity,
            "fits": self.fits,
            "seconds": self.seconds,
            "unread_lines": self.unread.lines if self.unread else 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep:
    """One function on several meshes.

    Args:
        name: of the function.
        rows: in the order in which the meshes were given.
    """

    name: str
    rows: tuple[SweepRow, ...]

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The sets of mesh axes that any row sends bytes over, the busiest first."""
        most: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            for axes, total in row.by_axis.items():
                most[axes] = max(most.get(axes, 0), total.wire_bytes)
        return tuple(sorted(most, key=lambda axes: -most[axes]))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[SweepRow]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> SweepRow:
        return self.rows[index]

    def records(self) -> list[dict[str, Any]]:
        """The rows as flat dictionaries, for a table or a file of JSON.

        Example:
            pandas.DataFrame(sweep.records())
        """
        return [row.record() for row in self.rows]

    def __repr__(self) -> str:
        return f"<Sweep of {self.name}: {', '.join(row.label for row in self.rows)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # the last value of a notebook's cell

    def __str__(self) -> str:
        from spmd.inspection.show import sweep as show_sweep

        return show_sweep.plain(show_sweep.render_sweep(self))

    def __rich__(self) -> RenderableType:
        from spmd.inspection.show import sweep as show_sweep

        return show_sweep.render_sweep(self)

    def show(self, console: Console | None = None) -> None:
        """Prints the table in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
        """
        from spmd.inspection.show import sweep as show_sweep

        show_sweep.show(self, console)


def sweep(
    f: Any,
    *args: Any,
    meshes: Iterable[Any],
    args_of: Callable[[Any], tuple[Any, ...]] | None = None,
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
    if failure := _bad_call(places, args, args_of):
        raise explain(subject, [failure])
    rows = []
    for label, mesh in places:
        try:
            given = args if args_of is None else _checked(args_of(mesh), subject)
            rows.append(_row(f, given, kwargs, label, mesh, subject))
        except Exception as e:
            e.add_note(f"{subject} was at {label}, {dict(mesh.shape)}.")
            raise
    return Sweep(name=name, rows=tuple(rows))


def _place(one: Any, subject: str) -> tuple[str, Any]:
    """A label and a mesh for what stands for a mesh."""
    from spmd.inspection.compile.topology import topology

    if isinstance(one, str):
        return one, topology(one)
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str):
        return one[0], topology(*one)
    devices = getattr(one, "devices", None)
    if devices is None or not hasattr(one, "axis_names"):
        raise explain(subject, [_no_mesh(one)])
    return f"{devices.size} x {devices.flat[0].device_kind}", one


def _no_mesh(one: Any) -> Failure:
    return Failure(
        what="cannot compile for this",
        expected="a mesh, 'v5e:4x4', or ('v5e:4x4', {'data': 8, 'model': 2})",
        got=show_value(one),
        error=ArgumentError,
    )


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


def _checked(made: Any, subject: str) -> tuple[Any, ...]:
    if isinstance(made, tuple):
        return made
    failure = Failure(
        what="takes a tuple of arguments from args_of",
        got=type(made).__name__,
        fix="return (x,) for a single argument",
        error=ArgumentError,
    )
    raise explain(subject, [failure])


def _row(f: Any, args: Any, kwargs: Any, label: str, mesh: Any, subject: str) -> SweepRow:
    from spmd.inspection.compile.carrying import carried
    from spmd.inspection.compile.program import unbound
    from spmd.inspection.compile.report import report
    from spmd.inspection.compile.topology import hbm_bytes, is_stand_in

    kind = mesh.devices.flat[0].device_kind
    f, args, kwargs = unbound(f, args, kwargs)
    args, kwargs = carried(f, args, kwargs, mesh, subject=subject)
    start = time.perf_counter()
    try:
        found = report(f, *args, mesh=mesh, **kwargs)
    except RuntimeError as e:
        verdict = out_of_memory(e)
        if verdict is None:
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
