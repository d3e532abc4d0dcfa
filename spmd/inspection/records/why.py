"""What `why` finds: the values of a name, with the origins of their shardings."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import TYPE_CHECKING, Any

from spmd.inspection.records.origins import ValueOrigins
from spmd.inspection.records.shown import Shown, opened

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Why(Shown):
    """What `why` found.

    Args:
        name: what was asked for.
        function: the function's name.
        mesh: size by axis name.
        values: that have the name: one for a path, all below it for the beginning of one, all that
            a line makes for a line.
    """

    name: str
    function: str
    mesh: Mapping[str, int]
    values: tuple[ValueOrigins, ...]

    def __hash__(self) -> int:
        return hash((self.name, self.function, *self.mesh.items(), self.values))

    __repr__ = Shown.__str__

    def show(self, console: Console | None = None) -> None:
        """Prints it in colour, as wide as the terminal is.

        Args:
            console: a console of rich; None for one on the standard output.
        """
        self._print(console)

    def to_json(self) -> dict[str, Any]:
        """The records as JSON values, for `json.dumps`."""
        mesh = [{"axis": name, "size": size} for name, size in self.mesh.items()]
        return {"schema": "spmd-why/1", **opened("codec").values(self), "mesh": mesh}
