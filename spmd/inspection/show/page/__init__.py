"""A report, the differences of two, a sweep or a plan as one HTML page that needs no other file.

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
from typing import Any

from spmd.errors import Failure, ReportError, explain
from spmd.inspection.records.diff import Diff
from spmd.inspection.records.pictures import Picture, Pictures
from spmd.inspection.records.plan import Plan
from spmd.inspection.records.report import Report
from spmd.inspection.records.shown import Paged
from spmd.inspection.records.sizes import show_bytes
from spmd.inspection.records.sweep import Sweep
from spmd.inspection.show import words
from spmd.inspection.show.page import choices, compare, curves, sheets, view as page_view

LARGEST_CELL = 4 * 2**20
"""Bytes of a page that a notebook shows; what is larger would make the notebook's file too slow."""


#: What the script is told where it has nothing to draw on demand.
_NO_DATA = {"details": [], "frames": [], "mesh": [], "devices": [], "arguments": []}


def page_of(record: Paged) -> str:
    """The page of a record, as `Paged.to_html` says."""
    match record:
        case Report():
            return _page("report.html.j2", f"report of `{record.name}`", page_view.view(record))
        case Diff():
            return _page("diff.html.j2", "diff", compare.view(record))
        case Sweep():
            return _page("sweep.html.j2", f"sweep of `{record.name}`", curves.view(record))
        case Plan():
            return _page("plan.html.j2", f"plan of `{record.name}`", choices.view(record))
        case Picture() | Pictures():
            view = sheets.view(record) | {"fragment": False}
            subject = type(record).__name__.lower()
            return _page("pictures_page.html.j2", subject, view, _text("picture.css"))
    raise TypeError(type(record))


def in_notebook(record: Paged) -> str | None:
    """A record in a cell of a notebook; None where it is too large, or Jinja2 is missing.

    Pictures come without a page around them. A page has a frame of its own, which is sandboxed:
    the page's script runs and reaches nothing of the notebook. A notebook that is not trusted
    strips the frame and keeps the sentence before it.
    """
    if not _has_jinja2():
        return None
    if isinstance(record, (Picture, Pictures)):
        view = sheets.view(record) | {"fragment": True, "picture_style": _text("picture.css")}
        return _environment().get_template("pictures.html.j2").render(**view)
    page = record.to_html()
    if len(page) > LARGEST_CELL:
        return None
    name = " and ".join(getattr(record, "names", ())) or getattr(record, "name", "")
    return (
        f"<p>{html.escape(repr(record)[1:-1])}</p>"
        f'<iframe sandbox="allow-scripts" title="{type(record).__name__} of '
        f'{html.escape(name)}" width="100%" height="720" frameborder="0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def embed(data: Any) -> str:
    """JSON that can stand in a script element: no sign in it begins markup or ends a line.

    Inverse: `json.loads` of it gives `data`.
    """
    text = json.dumps(data, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _page(template: str, subject: str, view: Mapping[str, Any], more_style: str = "") -> str:
    if not _has_jinja2():
        failure = Failure(
            what="cannot be drawn as HTML: Jinja2 is not installed",
            fix="pip install 'spmd[html]'",
            error=ReportError,
        )
        raise explain(subject, [failure])
    style, script = _text("page.css") + more_style, _text("page.js")
    page = (
        _environment()
        .get_template(template)
        .render(
            **view,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
            json=embed(view.get("data", _NO_DATA)),
        )
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


def _has_jinja2() -> bool:
    return importlib.util.find_spec("jinja2") is not None


@functools.cache
def _environment() -> Any:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"unbroken": _unbroken, "typeset": page_view.typeset}
    made.globals |= {"words": words, "page": page_view, "show_bytes": show_bytes}
    return made
