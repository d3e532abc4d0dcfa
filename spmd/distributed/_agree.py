"""Values of all processes: gathered, broadcast from one, and compared.

What the processes hold is compared before anything is sent: a collective of different sizes would
wait for ever, or mix up what it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import hashlib
import json
from typing import Any
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from spmd import _jax
from spmd.distributed._arrays import flatten
from spmd.distributed._exchange import divergence, exchange, grouped
from spmd.errors import ArgumentError, Failure, OptionError, SpmdError, explain


def process_allgather(tree: Any, tiled: bool = False) -> Any:
    """Gathers the values of all processes, in every process.

    Args:
        tree: A pytree of arrays and numbers, of the same structure, shapes and dtypes in every
            process. 64-bit values keep their width. A global array, of which each process holds a
            part, comes back whole; it needs ``tiled=True``.
        tiled: Whether the values are concatenated along their dimension 0; they are stacked along
            a new one otherwise. Numbers are always stacked.

    Returns:
        A pytree of NumPy arrays ``[processes, ...]``, or of ``[processes * n, ...]`` if `tiled`;
        random keys come back as such.

    Raises:
        RuntimeError: The processes differ in structure, shape or dtype, or one did not come.
        TypeError: A leaf is no array.
        ValueError: A leaf is a global array, and `tiled` is not set.
    """
    subject = "process_allgather"
    names, values, treedef = _flatten(subject, tree)
    whole = [not _is_host_value(v) for v in values]
    _refuse(
        subject,
        [n for n, w in zip(names, whole, strict=True) if w and not tiled],
        "cannot stack {}: it is a global array, of which each process holds a part",
        fix="process_allgather(..., tiled=True), which returns it whole",
    )
    _check_structure(subject, names, values)
    data = [*map(_data, values)]
    own = [np.asarray(v) for v, w in zip(data, whole, strict=True) if not w]
    stacked = iter(_split(_gathered(_packed(own)), own))
    gather = functools.partial(multihost_utils.process_allgather, tiled=True)
    found = [gather(v) if w else next(stacked) for v, w in zip(data, whole, strict=True)]
    found = [_like(np.asarray(v), value) for v, value in zip(found, values, strict=True)]
    if tiled:
        rows = zip(found, whole, strict=True)
        found = [v if w or v.ndim < 2 else v.reshape(-1, *v.shape[2:]) for v, w in rows]
    return treedef.unflatten(found)


def broadcast_one_to_all(tree: Any, is_source: bool | None = None) -> Any:
    """Returns the values of one process in all of them.

    Args:
        tree: A pytree of arrays and numbers, of the same structure, shapes and dtypes in every
            process; the values of all but one are not looked at.
        is_source: Whether the values are those of this process, true in exactly one. None: those
            of process 0.

    Returns:
        A pytree of NumPy arrays, bit by bit those of the source; random keys come back as such.

    Raises:
        RuntimeError: The processes differ in structure, shape or dtype, not exactly one is the
            source, or one did not come.
        TypeError: A leaf is no array.
        ValueError: A leaf is a global array: every process has it already.
    """
    subject = "broadcast_one_to_all"
    names, values, treedef = _flatten(subject, tree)
    _refuse(
        subject,
        [n for n, v in zip(names, values, strict=True) if not _is_host_value(v)],
        "cannot send {}: it is a global array, which every process has already",
        fix="to have all of its values, process_allgather(..., tiled=True)",
    )
    source = jax.process_index() == 0 if is_source is None else bool(is_source)
    _check_structure(subject, names, values)
    _check_source(subject, source)
    own = [np.asarray(_data(v)) for v in values]
    packed = _packed(own)
    if jax.process_count() > 1 and packed.size:
        # A sum with zeros: of bytes, it is exact for every dtype.
        packed = multihost_utils.broadcast_one_to_all(packed, source)
    found = [v[0] for v in _split(np.asarray(packed)[None], own)]
    return treedef.unflatten(map(_like, found, values))


def assert_equal_across_processes(tree: Any, message: str = "") -> None:
    """Checks that all processes hold the same values, bit by bit.

    Args:
        tree: A pytree of arrays and numbers. Of a global array those parts are compared of which
            several processes hold a copy.
        message: What they are; an error says it.

    Raises:
        RuntimeError: They do not: the first path that differs is named, with the processes that
            hold each value. All processes raise it.
        TypeError: A leaf is no array.
    """
    subject = "assert_equal_across_processes" + f" ({message})" * bool(message)
    names, values, _ = _flatten(subject, tree)
    _check_structure(subject, names, values)
    rows = [row for n, v in zip(names, values, strict=True) for row in _rows(n, v)]
    tables = _compared(subject, rows) or []
    for key in dict.fromkeys(key for table in tables for key in table):
        held = {i: table[key] for i, table in enumerate(tables) if key in table}
        if len({digest for digest, _ in held.values()}) == 1:
            continue
        texts = {text for _, text in held.values()}
        told_apart = len(texts) == len({*held.values()})
        shown = {
            i: text if told_apart else f"{text} of sha256 {digest[:8]}"
            for i, (digest, text) in held.items()
        }
        raise divergence(subject, f"finds different values of {key}", got=grouped(shown))


# What is compared


def _flatten(subject: str, tree: Any) -> tuple[list[str], list[Any], Any]:
    names, values, treedef = flatten(subject, tree)
    _refuse(
        subject,
        [n for n, v in zip(names, values, strict=True) if isinstance(v, _jax.core.Tracer)],
        "cannot take {}: it has no value yet",
        ArgumentError,
        expected="arrays outside of any transformation",
        got="a tracer",
    )
    return names, values, treedef


def _refuse(
    subject: str,
    names: Sequence[str],
    what: str,
    error: type[SpmdError] = OptionError,
    **more: str,
) -> None:
    """Raises an error of the leaves of these names, if there are some."""
    if failures := [Failure(what=what.format(n), error=error, **more) for n in names]:
        raise explain(subject, failures)


def _is_host_value(value: Any) -> bool:
    """Whether this process holds all of a value."""
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _shown_type(value: Any) -> str:
    # What a process holds keeps its 64 bits, whatever JAX makes of them.
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _check_structure(subject: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """Checks that the trees of all processes have the same leaves, by path, shape and dtype."""
    kinds = ["" if _is_host_value(v) else ", a global array" for v in values]
    rows = zip(names, values, kinds, strict=True)
    tables = _compared(subject, [(n, _shown_type(v) + kind, "") for n, v, kind in rows])
    if tables is None:
        return
    for name in dict.fromkeys(name for table in tables for name in table):
        held = {i: t[name][0] if name in t else "nothing" for i, t in enumerate(tables)}
        if len({*held.values()}) > 1:
            raise divergence(
                subject,
                f"finds something else at {name} in some processes",
                expected="the same structure, shapes and dtypes in every process",
                got=grouped(held),
            )
    raise divergence(
        subject,
        "finds the same leaves in another order",
        expected="trees of the same structure in every process",
    )


def _check_source(subject: str, source: bool) -> None:
    sources = [i for i, s in enumerate(exchange(subject, b"1" if source else b"")) if s]
    if len(sources) != 1:
        raise divergence(
            subject,
            "needs exactly one source",
            expected="is_source=True in one process, False in all others",
            got=f"True in processes {', '.join(map(str, sources))}" if sources else "False in all",
        )


def _compared(
    subject: str, rows: Sequence[tuple[str, str, str]]
) -> list[dict[str, tuple[str, str]]] | None:
    """Compares tables of all processes; None where they are equal, as a first exchange says."""
    if jax.process_count() == 1:
        return None
    told = json.dumps(rows).encode()
    digests = exchange(subject, hashlib.sha256(told).digest())
    if len({*digests}) == 1:
        return None
    found = exchange(subject, zlib.compress(told))
    return [{k: (d, shown) for k, d, shown in json.loads(zlib.decompress(f))} for f in found]


def _rows(name: str, value: Any) -> list[tuple[str, str, str]]:
    """Path, digest and what to show of a value, or of each part that this process holds of it."""
    if _is_host_value(value):
        return [_row(name, value)]
    parts = {_slices(s.index, value.shape): s.data for s in value.addressable_shards}
    return [_row(f"{name}{index}", part) for index, part in sorted(parts.items())]


def _slices(index: Sequence[slice], shape: Sequence[int]) -> str:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return f"[{', '.join(f'{a}:{b}' for a, b in bounds)}]"


_MOST_SHOWN = 8


def _row(name: str, value: Any) -> tuple[str, str, str]:
    array = np.asarray(_data(value))
    shown = _shown_type(value)
    if array.size <= _MOST_SHOWN:
        shown += f" {np.array2string(array, separator=', ')}"
    return name, hashlib.sha256(_bytes(array).data).hexdigest(), shown


# What is sent


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _data(value: Any) -> Any:
    """A value as what has bytes: random keys as their data."""
    return jax.random.key_data(value) if _is_key(value) else value


def _like(data: np.ndarray, value: Any) -> Any:
    """Data that came, as what the value is."""
    if not _is_key(value):
        return data
    return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=jax.random.key_impl(value))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _packed(values: Sequence[np.ndarray]) -> np.ndarray:
    """All values in one array of bytes: one collective, whatever the dtypes."""
    return np.concatenate([_bytes(v) for v in values]) if values else np.zeros(0, np.uint8)


def _split(packed: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``[processes, bytes]`` as one array ``[processes, ...]`` per value."""
    ends = np.cumsum([v.nbytes for v in values], dtype=int)
    return [
        np.ascontiguousarray(packed[:, end - v.nbytes : end])
        .view(v.dtype)
        .reshape(len(packed), *v.shape)
        for v, end in zip(values, ends, strict=True)
    ]


def _gathered(packed: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1 or not packed.size:
        return np.broadcast_to(packed, (jax.process_count(), packed.size))
    return np.asarray(multihost_utils.process_allgather(packed))
