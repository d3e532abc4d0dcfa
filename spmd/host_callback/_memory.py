"""Memory for large operands, used again where nobody holds it.

Fresh memory costs the kernel up to ten times as much as the copy into it.
"""

from __future__ import annotations

from collections.abc import Sequence
import ctypes
import math
import sys
from typing import Any

import numpy as np

from spmd.host_callback._threads import fork_safe_lock

#: Bytes from which on memory is used again, and how many are kept for that at most.
LARGE = 1 << 20
_KEPT = 128 << 20

_free: dict[int, list[np.ndarray]] = {}
_kept = 0
_lock = fork_safe_lock()
_counts_references = getattr(sys, "_is_gil_enabled", lambda: True)()


def empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns an array whose values are not set, as a view of memory that may be used again."""
    global _kept
    size = math.prod(shape, start=dtype.itemsize)
    with _lock:
        free = _free.get(size)
        raw = free.pop() if free else None
        _kept -= size if raw is not None else 0
    if raw is None:
        raw = np.empty(size, np.uint8)
    return raw.view(dtype).reshape(shape)


def recycle(values: list[np.ndarray]) -> None:
    """Takes back what :func:`empty` gave and nobody else holds; empties the list."""
    global _kept
    while values and _counts_references:
        # A view of any kind holds the memory that it is of, and so does an array of JAX.
        raw = values.pop().base
        if raw is None or raw.nbytes < LARGE or sys.getrefcount(raw) > _ALONE:
            continue
        with _lock:
            if _kept + raw.nbytes <= _KEPT:
                _free.setdefault(raw.nbytes, []).append(raw)
                _kept += raw.nbytes


def prefer_huge_pages(address: int, size: int) -> None:
    """Has the kernel hand out memory that is not touched yet in pieces of 2 MiB, as NumPy does.

    In pieces of 4 KiB it takes four times as long to write 64 MB there for the first time.
    """
    start = -(-address // _HUGE) * _HUGE
    if (length := (address + size - start) // _HUGE * _HUGE) > 0 and _madvise is not None:
        _madvise(start, length, _MADV_HUGEPAGE)  # a hint: it may be refused


_HUGE = 2 << 20
_MADV_HUGEPAGE = 14  # of Linux
_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _references_of_one() -> int:
    values = [np.empty(1, np.uint8).view()]
    raw = values.pop().base
    return sys.getrefcount(raw)


#: What `sys.getrefcount` says of memory that only :func:`recycle` holds.
_ALONE = _references_of_one()


def release() -> None:
    """Gives back what is kept."""
    global _kept
    with _lock:
        _free.clear()
        _kept = 0
