"""A report, or the differences of two, as one HTML page that needs nothing from elsewhere.

Text of users (names, paths, lines of code) gets into a page in two ways only: through a template
that escapes it, and as JSON in a data block with every sign of markup escaped. The page's policy
allows no script or style but its own, by their hashes, and no address to load anything from.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
import functools
import hashlib
import html
from importlib import resources
import importlib.util
import json
import re
from typing import TYPE_CHECKING, Any

from spmd.errors import Failure, ReportError, explain
from spmd.inspection.show.page import compare, sheets, view as page_view

if TYPE_CHECKING:
    from spmd.inspection.records.diff import Diff
    from spmd.inspection.records.pictures import Picture, Pictures
    from spmd.inspection.records.report import Report

LARGEST_CELL = 4 * 2**20
"""Bytes of a page that a notebook shows; what is larger would make the notebook's file too slow."""


def report_page(report: Report) -> str:
    """The page of a report, as `Report.to_html` says."""
    return _page("report.html.j2", f"report of `{report.name}`", page_view.view(report))


def diff_page(diff: Diff) -> str:
    """The page of the differences of two reports, as `Diff.to_html` says."""
    return _page("diff.html.j2", "diff", compare.view(diff))


def picture_page(picture: Picture) -> str:
    """The page of a picture, as `Picture.to_html` says."""
    view = sheets.view(picture) | {"fragment": False}
    return _page("picture_page.html.j2", "picture", view, _text("picture.css"))


def picture_fragment(picture: Picture) -> str | None:
    """The picture without a page around it, for notebooks; None where Jinja2 is missing."""
    if importlib.util.find_spec("jinja2") is None:
        return None
    template = _environment("picture").get_template("picture.html.j2")
    view = sheets.view(picture) | {"fragment": True}
    return template.render(**view, picture_style=_text("picture.css"))


def pictures_page(many: Pictures) -> str:
    """The page of the pictures of a tree, as `Pictures.to_html` says."""
    view = sheets.view_of_tree(many) | {"fragment": False}
    return _page("pictures_page.html.j2", "pictures", view, _text("picture.css"))


def pictures_fragment(many: Pictures) -> str | None:
    """The pictures without a page around them; None where Jinja2 is missing."""
    if importlib.util.find_spec("jinja2") is None:
        return None
    template = _environment("pictures").get_template("pictures.html.j2")
    view = sheets.view_of_tree(many) | {"fragment": True}
    return template.render(**view, picture_style=_text("picture.css"))


def in_notebook(shown: Report | Diff) -> str | None:
    """The page in a frame of its own; None where it is too large, or Jinja2 is missing.

    The frame is sandboxed: the page's script runs and reaches nothing of the notebook. A notebook
    that is not trusted strips the frame and keeps the sentence before it.
    """
    if importlib.util.find_spec("jinja2") is None:
        return None
    page = shown.to_html()
    if len(page) > LARGEST_CELL:
        return None
    return (
        f"<p>{html.escape(repr(shown)[1:-1])}</p>"
        f'<iframe sandbox="allow-scripts" title="{type(shown).__name__} of '
        f'{html.escape(_name(shown))}" width="100%" height="720" frameborder="0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def _name(shown: Report | Diff) -> str:
    return " and ".join(getattr(shown, "names", ())) or getattr(shown, "name", "")


def embed(data: Any) -> str:
    """JSON that can stand in a script element: no sign in it begins markup or ends a line.

    Inverse: `json.loads` of it gives `data`.
    """
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _page(template: str, subject: str, view: Mapping[str, Any], more_style: str = "") -> str:
    environment = _environment(subject)
    style, script = _text("page.css") + more_style, _text("page.js")
    page = environment.get_template(template).render(
        **view,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        json=embed(view["data"]),
    )
    # A name may hold a lone surrogate, which no file and no notebook can.
    return page.encode("utf-8", "replace").decode("utf-8")


#: The file and line of a place, without its folders.
_PLACE = re.compile(r"[^\s/\\:;,()]+\.\w+:\d+")


def _unbroken(text: str) -> Any:
    """A text whose places stay whole: it breaks between folders, not in ``model.py:131``."""
    import markupsafe

    pieces, end = [], 0
    for found in _PLACE.finditer(text):
        pieces.append(markupsafe.escape(text[end : found.start()]))
        pieces.append(markupsafe.Markup('<span class="at">{}</span>').format(found[0]))
        end = found.end()
    return markupsafe.Markup().join([*pieces, markupsafe.escape(text[end:])])


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _environment(subject: str) -> Any:
    if importlib.util.find_spec("jinja2") is None:
        failure = Failure(
            what="cannot be drawn as HTML: Jinja2 is not installed",
            fix="pip install 'spmd[html]'",
            error=ReportError,
        )
        raise explain(subject, [failure])
    return _made_environment()


@functools.cache
def _made_environment() -> Any:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = _unbroken
    return made
