"""Scalars by name from inside of a program: to a function, JSON lines, or a TensorBoard writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd.errors import ArgumentError, Failure, OptionError, explain, show_value
from spmd.host_callback._api import is_first_device, not_scalar, tap
from spmd.host_callback._pools import fork_safe_lock
from spmd.host_callback._records import ByIdentity

#: The key of the step in a line of JSON.
_STEP = "step"

_Number = bool | int | float


def metrics_tap(name: str, tree: Any, *, sink: Any, step: Any = None, device_index: int = 0) -> Any:
    """Writes a tree of scalars where metrics go, in program order, and returns it.

    Each scalar is called by `name` and its path, as in ``train/loss``. Under `vmap` it is written
    once per element, as ``train/loss/0``. Inside of `shard_map` and `pmap` the first device writes
    its own.

    Args:
        name: What all of the names begin with.
        tree: Pytree of scalars; it may be a single one, which is called `name`. Nothing is written
            for one without leaves.
        sink: One of three. A path, or a file open for text: gets one line of JSON per call,
            appended and flushed at once, such as ``{"step": 3, "train/loss": 0.5}``. An object
            with TensorBoard's method ``add_scalar(tag, value, step)``: is called per scalar. A
            function: is called as ``sink(metrics, step)``, `metrics` a dict of Python numbers by
            name. JSON has no number that is not finite: it is written as the string ``"NaN"``,
            ``"Infinity"`` or ``"-Infinity"``, which `float` takes (and ProtoJSON, too).
        step: An integer scalar; None where there is no such number.
        device_index: Which device of the mesh calls, where the program runs on several.

    Returns:
        `tree`.

    Raises:
        TypeError: A leaf of `tree` is no real scalar, `step` is no integer scalar, or `sink`
            takes no metrics.
        ValueError: Two leaves have one name, or the folder of a path does not exist.
    """
    tags, leaves, failures = _flatten(name, tree)
    write, wrong = _writer(sink)
    taken = [_STEP] if write in (_append_line, _write_line) else []
    failures += wrong
    failures += [
        Failure(what=f"would write {count} scalars as {tag}", fix="rename one", error=OptionError)
        for tag, count in Counter([*taken, *tags]).items()
        if count > 1
    ]
    if step is not None and (got := not_scalar(step, np.integer)):
        expected = "an integer scalar, or None"
        failures.append(
            Failure(what="cannot tell the step", expected=expected, got=got, error=ArgumentError)
        )
    if failures:
        raise explain(f"metrics_tap of `{name}`", failures)
    if not tags:
        return tree
    if isinstance(sink, (str, os.PathLike)):
        sink = os.path.abspath(os.fspath(sink))
    elif write is not _call:
        sink = ByIdentity(sink)
    func = _MetricsTap(str(name), tuple(tags), write, sink)
    axes = _jax.mesh.manual_axes()

    def send(arg: Any) -> None:
        tap("metrics_tap", func, arg, False, 0 if axes else device_index, False)

    arg = (dict(zip(tags, leaves, strict=True)), step)
    if axes:
        jax.lax.cond(is_first_device(axes), send, lambda arg: None, arg)
    else:
        send(arg)
    return tree


@dataclass(frozen=True, slots=True)
class _MetricsTap:
    """The host function; equal ones share a compiled program."""

    name: str
    tags: tuple[str, ...]
    write: Callable[[Any, dict[str, _Number], int | None], None]
    sink: Any

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, arg: Any, transforms: Any) -> None:
        del transforms
        values, step = arg
        metrics = dict(pair for tag in self.tags for pair in _elements(tag, values[tag]))
        self.write(self.sink, metrics, _one_step(step))


def _elements(tag: str, value: np.ndarray) -> Iterator[tuple[str, _Number]]:
    """The numbers that a value has under `vmap`, and their names."""
    is_whole = jnp.issubdtype(value.dtype, np.integer)
    kind = bool if value.dtype == np.bool_ else int if is_whole else float
    for index in np.ndindex(value.shape):
        yield "/".join([tag, *map(str, index)]), kind(value[index])


def _one_step(step: np.ndarray | None) -> int | None:
    if step is None:
        return None
    steps = np.unique(step)
    if len(steps) != 1:
        raise ValueError(f"the elements of a batch are at different steps: {steps.tolist()}")
    return int(steps[0])


# Sinks

_lock = fork_safe_lock()


def _call(sink: Any, metrics: dict[str, _Number], step: int | None) -> None:
    sink(metrics, step)


def _add_scalars(sink: Any, metrics: dict[str, _Number], step: int | None) -> None:
    for tag, value in metrics.items():
        sink.target.add_scalar(tag, value, step)


def _append_line(sink: Any, metrics: dict[str, _Number], step: int | None) -> None:
    # One write, so that lines stay whole whoever else appends, and whenever this process ends.
    with _lock, open(sink, "ab", buffering=0) as file:
        file.write(_line(metrics, step).encode())


def _write_line(sink: Any, metrics: dict[str, _Number], step: int | None) -> None:
    with _lock:
        sink.target.write(_line(metrics, step))
        if callable(getattr(sink.target, "flush", None)):
            sink.target.flush()


def _line(metrics: dict[str, _Number], step: int | None) -> str:
    shown = {} if step is None else {_STEP: step}
    shown |= {tag: _json_number(value) for tag, value in metrics.items()}
    return json.dumps(shown, allow_nan=False) + "\n"


def _json_number(value: _Number) -> Any:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _writer(sink: Any) -> tuple[Any, list[Failure]]:
    """How to write to a sink, and what is wrong with it."""
    if callable(getattr(sink, "add_scalar", None)):
        return _add_scalars, []
    if isinstance(sink, (str, os.PathLike)):
        no_folder = Failure(
            what="cannot write to sink: there is no such folder",
            given=f"sink={os.fspath(sink)!r}",
            error=OptionError,
        )
        return _append_line, [no_folder] * (not Path(sink).absolute().parent.is_dir())
    if callable(getattr(sink, "write", None)):
        return _write_line, []
    if not callable(sink):
        no_sink = Failure(
            what="cannot write to sink",
            expected="a path, an open file, an object with add_scalar, or a function",
            got=show_value(sink),
            error=ArgumentError,
        )
        return _call, [no_sink]
    try:
        hash(sink)
    except TypeError:
        no_hash = Failure(
            what="cannot tell this sink from others: it has no hash",
            got=show_value(sink),
            fix="pass a function, or an object with __hash__",
            error=ArgumentError,
        )
        return _call, [no_hash]
    return _call, []


# Names


def _flatten(name: str, tree: Any) -> tuple[list[str], list[Any], list[Failure]]:
    tags, leaves, failures = [], [], []
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        tag = "/".join([str(name), *(jtu.keystr((key,), simple=True) for key in path)])
        if got := not_scalar(leaf, np.floating, np.integer, np.bool_):
            failure = Failure(
                what=f"cannot write {tag}",
                expected="a real scalar",
                got=got,
                fix="reduce it, as with jnp.mean, or send it with id_tap",
                error=ArgumentError,
            )
            failures.append(failure)
        tags.append(tag)
        leaves.append(leaf)
    return tags, leaves, failures
