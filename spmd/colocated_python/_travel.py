"""Functions that travel to other processes: written by cloudpickle, devices by their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import functools
import inspect
import io
import pickle
import threading
import types
from typing import Any

import jax

from spmd._pickled import check_version, find_device
from spmd.errors import ArgumentError, Failure, explain

try:
    import cloudpickle
except ModuleNotFoundError:  # it is needed where something travels, and only there
    cloudpickle: Any = None

_VERSION = 1
_SUBJECT = "A pickled colocated function"


_here = threading.local()


@contextlib.contextmanager
def _travelling(what: Any) -> Iterator[list[Any]]:
    """Gives all that this thread is writing or reading; a function may refer to itself."""
    stack = _here.__dict__.setdefault("stack", [])
    stack.append(what)
    try:
        yield stack
    finally:
        stack.pop()


def pack(subject: str, owner: Any, parts: Mapping[str, Any]) -> tuple[int, bytes]:
    """Writes the parts of something, by name, for another process; returns version and form.

    The parts may refer to their owner. An error names the part that cannot be pickled.
    """
    if cloudpickle is None:
        failure = Failure(
            what="cannot travel to another process: cloudpickle is not installed",
            fix="pip install cloudpickle",
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    with _travelling(owner) as stack:
        try:
            return _VERSION, _dumps(dict(parts), stack)
        except ArgumentError:  # of something inside that travels likewise
            raise
        except Exception as error:
            raise explain(subject, [_not_picklable(parts, stack, error)]) from error


def unpack(owner: Any, version: int, form: bytes) -> dict[str, Any]:
    """Reads what :func:`pack` has written, perhaps in another process, for what is its owner here.

    It raises where another version has written it, or a device is missing here.
    """
    check_version(_SUBJECT, version, _VERSION)
    with _travelling(owner) as stack:

        class Reader(pickle.Unpickler):
            def persistent_load(self, pid: int) -> Any:
                return stack[pid]

        return Reader(io.BytesIO(form)).load()


def _dumps(value: Any, stack: list[Any]) -> bytes:
    file = io.BytesIO()

    class Writer(cloudpickle.Pickler):
        def persistent_id(self, thing: Any) -> int | None:
            return next((i for i, x in enumerate(stack) if x is thing), None)

        def reducer_override(self, thing: Any) -> Any:
            if isinstance(thing, jax.Device):
                return find_device, (_SUBJECT, thing.platform, thing.id)
            return super().reducer_override(thing)

    Writer(file).dump(value)
    return file.getvalue()


# What cannot be pickled


def _not_picklable(parts: Mapping[str, Any], stack: list[Any], error: Exception) -> Failure:
    """Finds the smallest thing that cannot be pickled."""
    where, rest, culprit = "", "", None
    seen: set[int] = set()
    rows: Any = [(f"{name}...", "", thing) for name, thing in parts.items()]
    while rows is not None:
        below, rows = rows, None
        for name, further, thing in below:
            if id(thing) in seen:
                continue
            seen.add(id(thing))
            found = _failure_of(thing, stack)
            if found is not None:
                where, rest = (name, further) if name else (where, rest + further)
                culprit, error, rows = thing, found, _inside(thing)
                break
    return Failure(
        what="cannot travel to another process",
        given=where.replace("...", rest),
        expected="what cloudpickle can write",
        got=f"{type(culprit).__name__}: {str(error).splitlines()[0]}",
        fix="make it where the function runs: inside of the function, or in the constructor of a "
        "colocated class",
        error=ArgumentError,
    )


def _failure_of(thing: Any, stack: list[Any]) -> Exception | None:
    try:
        _dumps(thing, stack)
    except Exception as error:
        return error
    return None


def _inside(thing: Any) -> Iterator[tuple[str, str, Any]]:
    """What something refers to: where that is if it has a name of its own, what is added, it."""
    if isinstance(thing, types.FunctionType):
        yield from _inside_function(thing)
    elif isinstance(thing, types.MethodType | functools.partial):
        is_method = isinstance(thing, types.MethodType)
        for name in ("__self__", "__func__") if is_method else ("func", "args", "keywords"):
            yield "", f".{name}", getattr(thing, name)
    elif isinstance(thing, Mapping):
        yield from (("", f"[{key!r}]", value) for key, value in thing.items())
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from (("", f"[{i}]", value) for i, value in enumerate(thing))
    else:
        attributes = [*getattr(thing, "__dict__", {}).items()]
        yield from (("", f".{name}", value) for name, value in attributes)


def _inside_function(fun: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    used = f"which `{fun.__name__}` uses"
    for name, cell in zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            yield f"`{name}...`, {used}", "", cell.cell_contents
    for name in _names_in(fun.__code__):
        if name in fun.__globals__:
            yield f"`{name}...`, {used}", "", fun.__globals__[name]
    for name, parameter in inspect.signature(fun).parameters.items():
        yield f"the default `{name}...` of `{fun.__name__}`", "", parameter.default


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
