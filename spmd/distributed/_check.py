"""Comparing what the processes are about to run, before they run it.

Processes that call different programs wait for one another for ever: each collective needs all of
its devices. With the check, every call whose devices belong to several processes is first told to
the others; it costs a round trip, and calls in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
import hashlib
from itertools import zip_longest
import json
import re
from typing import Any
import zlib

import jax

from spmd import _dispatch, _jax
from spmd._call import PjitCall
from spmd._mesh import show_mesh
from spmd._spec import UNSPECIFIED, show_spec
from spmd.distributed._exchange import divergence, exchange
from spmd.errors import SpmdError

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def check(on: bool = True) -> None:
    """Compares all calls of functions of `spmd` across processes before they run, or stops that.

    Every process has to switch it on at the same place of the program. A call in which processes
    differ in function, shapes, specs, mesh or operations raises `spmd.DivergenceError` in all of
    them, and shows both sides; without the check they would hang.

    Args:
        on: Whether to compare from now on.
    """
    _dispatch.announce = _compare if on else None
    _jax.dispatch.clear_dispatch_cache()  # what C++ has learned tells nobody


def _compare(args: Sequence[Any], call: PjitCall, jaxpr: Any) -> None:
    """Tells the other processes of a mesh what this one is about to call."""
    if call.mesh is None or isinstance(call.mesh, jax.sharding.AbstractMesh):
        return
    processes = sorted({d.process_index for d in call.mesh.devices.flat})
    if len(processes) == 1 or jax.process_index() not in processes:
        return
    rows = _rows(args, call)
    digest = hashlib.sha256(_text(jaxpr).encode()).hexdigest() if jaxpr is not None else ""
    told = {"at": _jax.core.current_source() or "", "rows": rows, "program": digest}
    found = exchange(call.subject, json.dumps(told).encode(), processes=processes)
    sides = dict(zip(processes, map(json.loads, found), strict=True))
    if all(_common(side) == _common(told) for side in sides.values()):
        return
    if len({tuple(s["rows"]) for s in sides.values()}) == 1 and jaxpr is not None:
        texts = exchange(call.subject, zlib.compress(_text(jaxpr).encode()), processes=processes)
        lines = [zlib.decompress(t).decode().splitlines() for t in texts]
        for side, rows in zip(sides.values(), _apart(lines), strict=True):
            side["rows"] = rows
    raise _differs(call.subject, sides)


def _apart(texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """The first line of each text in which not all are the same."""
    rows = zip_longest(*texts, fillvalue="")
    row = next((row for row in rows if len({*row}) > 1), [""] * len(texts))
    return [[f"operation {line.strip()}"] for line in row]


def _common(side: dict[str, Any]) -> tuple[list[str], str]:
    return side["rows"], side["program"]


def _rows(args: Sequence[Any], call: PjitCall) -> list[str]:
    """What the processes have to have in common, a line each."""
    ins = zip(call.arg_names, args, call.in_axis_resources, strict=True)
    return [
        show_mesh(call.mesh),
        *(
            f"argument {n}: {_jax.core.short_aval(_jax.core.abstractify(x))} {_shown(r)}"
            for n, x, r in ins
        ),
        *(f"result {i}: {_shown(r)}" for i, r in enumerate(call.out_axis_resources)),
    ]


def _shown(resource: Any) -> str:
    return "as it comes" if resource is UNSPECIFIED else show_spec(resource)


@_jax.core.weakref_lru_cache
def _text(jaxpr: Any) -> str:
    return _ADDRESS.sub("0x", str(jaxpr))


def _differs(subject: str, sides: dict[int, dict[str, Any]]) -> SpmdError:
    """Shows the rows in which two processes differ: those of 0 and of the first other one."""
    first = min(sides)
    other = next(p for p, side in sides.items() if _common(side) != _common(sides[first]))
    lines = []
    for process, against in ((first, other), (other, first)):
        side, rows = sides[process], sides[against]["rows"]
        at = f", at {side['at']}" if side["at"] else ""
        lines += [f"process {process}{at}:"]
        lines += [f"  {row}" for row in side["rows"] if row not in rows]
    return divergence(
        subject,
        "is not the same program in every process",
        expected="the same functions, shapes, specs and mesh in all of them, in the same order",
        got="\n".join(lines),
        fix="make what the function depends on equal in all processes: "
        "spmd.distributed.assert_equal_across_processes finds what is not",
    )
