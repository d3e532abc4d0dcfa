"""One function on meshes of growing size: what each device sends, computes and holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
from typing import TYPE_CHECKING, Any

from spmd.inspection.records.report import Report, Total, Unread
from spmd.inspection.records.shown import Saved
from spmd.inspection.records.time import Time

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """What a program is on one mesh, per device and call.

    Attributes:
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
    def time(self) -> Time | None:
        """How long a call takes; None where that is not known."""
        return self.report.time if self.report else None

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
            "step_seconds": self.time.seconds if self.time else None,
            "exposed_seconds": sum(self.time.exposed_by_axes.values()) if self.time else None,
            "mfu": self.time.mfu if self.time else None,
            "hfu": self.time.hfu if self.time else None,
            "unread_lines": self.unread.lines if self.unread else 0,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Saved):
    """One function on several meshes.

    Attributes:
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

    def show(self, console: Console | None = None) -> None:
        """Prints the table in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
        """
        self._print(console)
