"""Which devices hold which parts of many arrays: a picture for each leaf of a tree."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from spmd.inspection._visualize import Picture, write_page

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Pictures that are drawn of one tree; what it has beyond them is counted.
MOST_DRAWN = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What `visualize` gives for a tree: `print` it, or let a notebook show it.

    Args:
        pictures: by path of the leaf, such as ``['layers'][0]['w']``, in the order of the tree.
    """

    pictures: dict[str, Picture]

    __hash__ = None  # type: ignore[assignment]  # it holds a dict

    @property
    def drawn(self) -> list[tuple[str, Picture]]:
        """The first ones with their paths, as many as are drawn."""
        return [*self.pictures.items()][:MOST_DRAWN]

    @property
    def rest(self) -> str:
        """What is said of those that are not drawn; empty where all are."""
        more = len(self.pictures) - MOST_DRAWN
        return f"and {more:,} more, not drawn: give a part of the tree" if more > 0 else ""

    def __str__(self) -> str:
        from spmd.inspection import _layout, _visualize_text

        return _layout.plain(_visualize_text.render_pictures(self))

    def __rich__(self) -> RenderableType:
        from spmd.inspection import _visualize_text

        return _visualize_text.render_pictures(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str | None:
        from spmd.inspection import _page

        return _page.pictures_fragment(self)

    def to_html(self) -> str:
        """The pictures as one HTML page that needs no other file and no network.

        Raises:
            ReportError: Jinja2 is not installed.
        """
        from spmd.inspection import _page

        return _page.pictures_page(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the pictures as a page.

        Args:
            path: ends in ``.html``.

        Raises:
            ReportError: the ending is another one, or Jinja2 is missing.
            OSError: the file cannot be written.
        """
        write_page(path, self.to_html, "pictures")
