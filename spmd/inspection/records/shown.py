"""What people look at: a record that is printed, shown by a notebook, or written as a page.

Records know no renderer and no reader. What one opens is imported here alone, with its first use.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd.errors import Failure, ReportError, explain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: By name, the module that a record opens.
DOORS = {
    "codec": "spmd.inspection.records.codec",
    "drawn": "spmd.inspection.show.drawn",
    "page": "spmd.inspection.show.page",
    "perfetto": "spmd.inspection.show.perfetto",
    "plans": "spmd.planner.plans",
    "scalars": "spmd.inspection.show.scalars",
    "sums": "spmd.inspection.records.sums",
}


def opened(name: str) -> Any:
    """A module that reads or draws records, which is imported with its first use."""
    return importlib.import_module(DOORS[name])


class Shown:
    """A record that is drawn as text: `print` it, or let a notebook show it."""

    __slots__ = ()

    def __str__(self) -> str:
        return opened("drawn").text_of(self)

    def __rich__(self) -> RenderableType:
        return opened("drawn").drawing(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # the last value of a notebook's cell

    def _print(self, console: Console | None, **options: Any) -> None:
        opened("drawn").show(self, console, **options)


class Paged(Shown):
    """A record that is drawn as a page, too."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        return opened("page").in_notebook(self)

    def to_html(self) -> str:
        """One HTML page that needs no other file and no network.

        Raises:
            ReportError: Jinja2 is not installed.
        """
        return opened("page").page_of(self)


class Saved(Paged):
    """A record that is saved as its page."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file.

        Args:
            path: ends in ``.html``.

        Raises:
            ReportError: the ending is another one, or Jinja2 is missing.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() != ".html":
            failure = Failure(
                what=f"cannot be saved as `{path}`",
                expected="a file name that ends in .html",
                error=ReportError,
            )
            raise explain(type(self).__name__.lower(), [failure])
        path.write_text(self.to_html(), encoding="utf-8")
