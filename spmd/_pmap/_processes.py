"""Several processes: each passes its part of the mapped arguments, and gets that of the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from spmd import _jax
from spmd._plan import Flat
from spmd._pmap._options import PmapOptions, find_mapping, leaf_axes
from spmd._trace import Signature


def globally(options: PmapOptions, flat: Flat) -> Flat:
    """Says what the arguments of one process are parts of; what is global already stays.

    The values become global when the mesh is known, by their semantics.
    """
    processes = jax.process_count()
    is_local = [_is_local(x) for x in flat.leaves]
    own = None if options.axis_size is None else max(1, options.axis_size // processes)
    part = _scaled(options, flat.signature, [not local for local in is_local], 1, processes)
    find_mapping(replace(options, axis_size=own), part)
    return replace(
        flat,
        signature=_scaled(options, flat.signature, is_local, processes, 1),
        semantics=tuple("local" if local else "global" for local in is_local),
    )


def _is_local(value: Any) -> bool:
    if isinstance(value, _jax.core.Tracer):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _scaled(
    options: PmapOptions, signature: Signature, which: Sequence[bool], times: int, over: int
) -> Signature:
    """The signature with other sizes of the mapped axis in some of the leaves."""
    avals = []
    rows = zip(signature.avals, leaf_axes(options, signature), which, strict=True)
    for aval, axis, chosen in rows:
        shape = [*aval.shape]
        if chosen and axis is not None and -aval.ndim <= axis < aval.ndim:
            shape[axis] = shape[axis] * times // over
        avals.append(aval.update(shape=tuple(shape)))
    return replace(signature, avals=tuple(avals))
