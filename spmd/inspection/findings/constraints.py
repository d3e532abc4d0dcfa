"""Logical constraints of Flax that do nothing, and do not say so.

`flax.linen.with_logical_constraint` looks for the mesh of `jax.set_mesh`, and returns its operand
where there is none. Nothing of that is left in the program: it is seen while that is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import sys
from typing import Any

import jax

from spmd.inspection.findings.values import place_of
from spmd.inspection.records.names import is_library
from spmd.inspection.records.report import Finding, Source

#: How many lines a finding names.
_NAMED = 5


class _Rules(tuple):
    """Logical axis rules of Flax that know who reads them."""

    places: dict[tuple[str, int], Source]

    def __iter__(self) -> Iterator[Any]:
        if jax.sharding.get_abstract_mesh().empty and (place := _reader()):
            self.places.setdefault((place.file, place.line), place)
        return super().__iter__()


@contextlib.contextmanager
def ignored_constraints() -> Iterator[dict[tuple[str, int], Source]]:
    """Collects the lines whose logical constraints do nothing, in what is traced meanwhile.

    Only where rules are active; and what JAX has traced before, it does not trace again.
    """
    flax: Any = sys.modules.get("flax.linen")
    rules = flax.get_logical_axis_rules() if flax else ()
    if not rules:
        yield {}
        return
    watched = _Rules(rules)
    watched.places = {}
    with flax.logical_axis_rules(watched):
        yield watched.places


def _reader() -> Source | None:
    """The user's line that asks for a logical constraint without a mesh of its own."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_code.co_name != "with_logical_constraint":
        frame = frame.f_back
    if frame is None or frame.f_locals.get("mesh") is not None:
        return None
    while frame and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return Source(file=code.co_filename, line=frame.f_lineno, column=0, function=code.co_name)


def constraint_finding(places: list[Source]) -> Finding:
    """The finding on constraints that do nothing."""
    several = len(places) > 1
    rest = len(places) - _NAMED
    return Finding(
        kind="ignored-constraint",
        subject=f"with_logical_constraint does nothing on {len(places)} lines"
        if several
        else "with_logical_constraint does nothing on this line",
        source=places[0],
        nbytes=0,
        measure="",
        facts=(
            "Flax looks for the mesh of jax.set_mesh, which neither `with mesh` nor spmd.Mesh sets",
            *([f"on {', '.join(map(place_of, places[:_NAMED]))}"] if several else []),
            *([f"and on {rest} more"] if rest > 0 else []),
        ),
        fix="spmd.pjit in place of jax.jit, or with jax.set_mesh(mesh), or mesh=mesh in the call "
        "of with_logical_constraint",
    )
