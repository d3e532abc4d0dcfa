"""What users call: taps, prints, calls and the barrier; for tests, a record of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
from dataclasses import dataclass
import functools
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd._mesh import auto_mesh, current_mesh
from spmd.errors import ArgumentError, Failure, OptionError, did_you_mean, explain, show_value
from spmd.host_callback._pools import fork_safe_lock
from spmd.host_callback._primitive import METHODS, host_call_p, host_tap_p
from spmd.host_callback._receiver import CallbackException, receiver
from spmd.host_callback._records import ByIdentity, HostCall, Shard, described
from spmd.host_callback._running import observers


def id_tap(
    tap_func: Callable[..., Any],
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    per_shard: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls `tap_func` on the host with the value of `arg`, and returns `arg`.

    The device goes on while the host function runs. Taps of one program arrive in program order,
    whether or not anything depends on them.

    Args:
        tap_func: Called as ``tap_func(arg, transforms)``: `arg` in its tree, with NumPy arrays of
            its own; `transforms` a tuple of ``(name, params)``, one per transformation that was
            applied, such as ``("batch", {"batch_dims": (0, None)})``.
        arg: Pytree of arrays.
        result: What to return instead of `arg`; it is not sent to the host.
        tap_with_device: Whether `tap_func` is passed ``device=``, the device that it is called
            from.
        device_index: Which device of the mesh calls with the whole operand, where the program
            runs on several. Inside of `shard_map` and `pmap` all of them call, whatever it says.
        per_shard: Whether each device calls with the shard that it holds, without any collective;
            `tap_func` is passed ``shard=``, a :class:`Shard`.
        **kwargs: None; what the founding API took here is bound with `functools.partial`.

    Returns:
        `result` if it is given, else `arg`.

    Raises:
        TypeError: `tap_func` cannot be called so, or not hashed, a leaf of `arg` is no array, or
            there are more keywords.
        ValueError: `device_index` is out of range.
    """
    if kwargs:
        known = ("result", "tap_with_device", "device_index", "per_shard")
        hint = "".join(did_you_mean(n, known) for n in kwargs)
        func = _jax.core.fun_name(tap_func) if callable(tap_func) else "tap_func"
        bound = ", ".join(f"{k}=..." for k in kwargs)
        failure = Failure(
            what=f"does not take the keyword{'s' * (len(kwargs) != 1)} {', '.join(kwargs)}{hint}",
            expected=", ".join(known),
            fix=f"bind them: id_tap(functools.partial({func}, {bound}), arg)",
            error=ArgumentError,
        )
        raise explain("id_tap", [failure])
    out = tap("id_tap", tap_func, arg, tap_with_device, device_index, per_shard)
    return out if result is None else result


def id_print(
    arg: Any,
    *,
    result: Any = None,
    tap_with_device: bool = False,
    device_index: int = 0,
    output_stream: Any = None,
    threshold: int | None = None,
    per_shard: bool = False,
    **labels: Any,
) -> Any:
    """Prints the value of `arg` on the host, and returns `arg`.

    First the labels, sorted by name, with the transformations that were applied; then the value.

    Args:
        arg: Pytree of arrays.
        result: What to return instead of `arg`.
        tap_with_device: Whether the device is printed too.
        device_index: As in :func:`id_tap`.
        output_stream: Has a method `write`; the standard output by default.
        threshold: Arrays of more elements are summarized; see `numpy.array2string`.
        per_shard: Whether each device prints its shard, and where that lies.
        **labels: What else to print, as ``name: value``.

    Returns:
        `result` if it is given, else `arg`.

    Raises:
        TypeError: A leaf of `arg` is no array, or `output_stream` cannot be written to.
        ValueError: `device_index` is out of range.
    """
    if output_stream is not None and not callable(getattr(output_stream, "write", None)):
        failure = Failure(
            what="cannot print to output_stream",
            expected="an object with a method write, such as an open file",
            got=show_value(output_stream),
            error=ArgumentError,
        )
        raise explain("id_print", [failure])
    texts = tuple((name, str(value)) for name, value in sorted(labels.items()))
    printer = Printer(texts, ByIdentity(output_stream), threshold)
    out = tap("id_print", printer, arg, tap_with_device, device_index, per_shard)
    return out if result is None else result


def call(
    callback_func: Callable[..., Any],
    arg: Any,
    *,
    result_shape: Any = None,
    call_with_device: bool = False,
    device_index: int = 0,
    per_shard: bool = False,
    vmap_method: str | None = None,
) -> Any:
    """Calls `callback_func` on the host with the value of `arg`, and returns what it returns.

    The device waits for it. What it raises is raised where the results are waited for, and at
    :func:`barrier_wait`.

    Args:
        callback_func: Called as ``callback_func(arg)``, with NumPy arrays in the tree of `arg`.
        arg: Pytree of arrays.
        result_shape: Pytree of what is returned: examples, or anything with `shape` and `dtype`.
            None or ``()`` where nothing is.
        call_with_device: Whether `callback_func` is passed ``device=``.
        device_index: As in :func:`id_tap`; all devices get the whole result.
        per_shard: Whether each device calls with its own shard; `callback_func` is passed
            ``shard=``. `result_shape` is that of one shard. Inside of `shard_map` a device gets
            its own result; elsewhere the results of all devices of the mesh are stacked along a
            new leading dimension, ``[devices, *shape]``, split over all of them.
        vmap_method: How `vmap` treats the call: "sequential" calls once per element;
            "expand_dims" calls once with a leading dimension, of size 1 where an operand is not
            batched; "broadcast_all" repeats those. None: `vmap` raises.

    Returns:
        The results, in the tree of `result_shape`.

    Raises:
        TypeError: `callback_func` cannot be called so, or not hashed, or a leaf of `arg` or
            `result_shape` is no array; of `result_shape` it is a ValueError, too.
        ValueError: `device_index` is out of range, or `vmap_method` is unknown.
    """
    failures = [*_failures(callback_func, ("arg",), call_with_device, device_index, per_shard)]
    if vmap_method not in (None, *METHODS):
        failure = Failure(
            what=f"does not know this way to batch{did_you_mean(vmap_method, METHODS)}",
            given=f"vmap_method={vmap_method!r}",
            expected=", ".join(map(repr, METHODS)) + " or None",
            error=OptionError,
        )
        failures.append(failure)
    leaves, in_tree, more = _leaves(arg)
    results, out_tree, wrong = _result_avals(result_shape)
    if failures := failures + more + wrong:
        raise explain("call", failures)
    mesh, stack = _mesh(leaves), None
    if per_shard and not _jax.mesh.manual_axes():  # inside of `shard_map` each has its own
        stack = 1 if mesh is None else mesh.size
    record = HostCall(
        func=callback_func,
        in_tree=in_tree,
        kind="call",
        with_device=bool(call_with_device),
        device_index=int(device_index),
        per_shard=bool(per_shard),
        out_tree=out_tree,
        results=results,
        stack=stack,
        axes=mesh_axes(),
        vmap_method=vmap_method,
    )
    outs = host_call_p.bind(*leaves, call=record)
    if stack is not None and mesh is not None and mesh.size > 1:
        # The partitioner does not see that each device has its own, and would gather them.
        outs = _split_by_device(outs, mesh)
    return jtu.tree_unflatten(out_tree, outs)


def barrier_wait(logging_name: str | None = None) -> None:
    """Waits until the host functions of all programs that were started have run, on all devices.

    It may be called from several threads, and from a host function: there it waits for what other
    devices have handed over.

    Args:
        logging_name: Shown in the log.

    Raises:
        CallbackException: Host functions raised since the last time; the last error is its cause.
    """
    receiver.wait(logging_name or "")
    errors, last_error = receiver.take_errors()
    if last_error is None:
        return
    _jax.host.drop_failed_tokens()  # jax.effects_barrier would raise the same again
    error, text = last_error
    count = "one exception" if errors == 1 else f"{errors} exceptions"
    last = "It was" if errors == 1 else "The last one was"
    raise CallbackException(
        f"Host functions raised {count} since the last barrier_wait. {last}:\n{text}"
    ) from error


def stop_outfeed_receiver() -> None:
    """Waits for pending taps and stops the threads that run them; the next tap starts them again.

    Errors of taps stay for the next :func:`barrier_wait`.

    Raises:
        ValueError: A host function is what calls.
    """
    receiver.stop()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One call of a host function.

    Attributes:
        name: The name of the function; of a metric or a progress bar its own.
        kind: The function that it was handed to: ``"id_tap"``, ``"id_print"``, ``"call"``,
            ``"metrics_tap"`` or ``"progress"``.
        value: The argument in its tree, with NumPy arrays that nobody else writes to.
        transforms: As a tap is told them; empty for a call.
        device: The device that it came from.
        shard: Under `per_shard` where the values are from, else None.
    """

    __module__ = "spmd.host_callback"

    name: str
    kind: str
    value: Any
    transforms: tuple[Any, ...]
    device: Any
    shard: Shard | None


@contextlib.contextmanager
def record(run: bool = True) -> Iterator[list[Recorded]]:
    """Collects the calls of host functions, for tests.

    As a context manager::

        with record() as taps:
            step(state)
        assert [t.name for t in taps] == ["log_loss"]

    It waits at both ends: what was started before is not collected, and what is started inside is
    there afterwards. The calls of one device are in order.

    Args:
        run: Whether functions of taps and prints run, too. Those of `call` always do: the program
            needs their results.

    Yields:
        A list, which grows.

    Raises:
        CallbackException: At the end, if host functions raised; not where the body raises itself.
    """
    found: list[Recorded] = []

    def observe(call: HostCall, values: Sequence[np.ndarray], device: Any, shard: Any) -> bool:
        copies = [np.array(v) for v in values]  # the function may write into what it gets
        for copy in copies:
            copy.flags.writeable = False
        said = Recorded(
            name=call.name,
            kind=call.kind,
            value=jtu.tree_unflatten(call.in_tree, copies),
            transforms=described(call.transforms),
            device=device,
            shard=shard,
        )
        found.append(said)
        return run

    receiver.wait("record")
    observers.append(observe)
    try:
        yield found
        barrier_wait("record")
    finally:
        receiver.wait("record")
        observers.remove(observe)


def tap(
    kind: str, func: Any, arg: Any, with_device: bool, device_index: int, per_shard: bool
) -> Any:
    """Binds a tap, which errors call by its kind; returns `arg`."""
    failures = [*_failures(func, ("arg", "transforms"), with_device, device_index, per_shard)]
    leaves, in_tree, more = _leaves(arg)
    if failures := failures + more:
        raise explain(kind, failures)
    record = HostCall(
        func=func,
        in_tree=in_tree,
        kind=kind,
        with_device=bool(with_device),
        device_index=int(device_index),
        per_shard=bool(per_shard),
        axes=mesh_axes(),
    )
    return jtu.tree_unflatten(in_tree, host_tap_p.bind(*leaves, call=record))


def mesh_axes() -> tuple[tuple[str, int], ...]:
    """The axes of the active mesh, for the coordinates of shards."""
    mesh = current_mesh()
    return () if mesh is None else tuple(mesh.shape.items())


def is_first_device(axes: Iterable[str]) -> Any:
    """Whether a device of a `shard_map` is the first along all of its axes."""
    return functools.reduce(jnp.logical_and, (jax.lax.axis_index(a) == 0 for a in axes))


def _mesh(leaves: Sequence[Any]) -> Any:
    """The mesh that a call is made on, as far as anything says: the active one, or an operand's."""
    if (mesh := current_mesh()) is not None:
        return mesh
    shardings = [getattr(x, "sharding", None) for x in leaves if isinstance(x, _jax.core.Array)]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    return _jax.core.typed_mesh(leaves) if mesh is None else mesh


def _split_by_device(values: Sequence[Any], mesh: Any) -> Any:
    rows = PartitionSpec(mesh.axis_names)
    if _jax.mesh.explicit_axes():
        return jax.sharding.reshard(values, rows)
    return jax.lax.with_sharding_constraint(values, NamedSharding(auto_mesh(mesh), rows))


def _leaves(arg: Any) -> tuple[list[Any], Any, list[Failure]]:
    paths, tree = jtu.tree_flatten_with_path(arg)
    failures = [_leaf_failure("arg" + jtu.keystr(path), leaf) for path, leaf in paths]
    return [leaf for _, leaf in paths], tree, [f for f in failures if f]


def _leaf_failure(name: str, leaf: Any) -> Failure | None:
    try:
        _jax.core.abstractify(leaf)
    except OverflowError:
        return Failure(
            what=f"cannot send {name}: it is too large a number",
            expected="integers of 32 bits, or of 64 with jax_enable_x64",
            got=f"{leaf!r}"[:100],
            fix="send it as a float, or enable x64",
            error=ArgumentError,
        )
    except (TypeError, ValueError):
        return Failure(
            what=f"cannot send {name}: it is no array",
            expected="arrays and numbers",
            got=show_value(leaf),
            fix="give text as a label, id_print(x, what='loss'), or bind it by functools.partial"
            if isinstance(leaf, str)
            else "",
            error=ArgumentError,
        )
    return None


def not_scalar(leaf: Any, *kinds: Any) -> str:
    """What a leaf is that is no scalar of these kinds; empty if it is one."""
    try:
        aval = _jax.core.abstractify(leaf)
    except (TypeError, ValueError, OverflowError):
        return show_value(leaf)
    if not aval.shape and any(jnp.issubdtype(aval.dtype, kind) for kind in kinds):
        return ""
    return _jax.core.short_aval(aval)


def _result_avals(result_shape: Any) -> tuple[tuple[Any, ...], Any, list[Failure]]:
    paths, tree = jtu.tree_flatten_with_path(result_shape)
    results, failures = [], []
    for path, leaf in paths:
        try:
            aval = _jax.core.abstractify(leaf)
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(aval.dtype))
            results.append((tuple(aval.shape), dtype))
        except (TypeError, ValueError, OverflowError, AttributeError):
            failure = Failure(
                what=f"cannot read a shape from result_shape{jtu.keystr(path)}",
                expected="numbers, arrays, jax.ShapeDtypeStruct, or anything with shape and dtype",
                got=show_value(leaf),
                error=ResultShapeError,
            )
            failures.append(failure)
    return tuple(results), tree, failures


# The printed form of `id_print`

_lock = fork_safe_lock()
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Printer:
    """A tap that prints as :func:`id_print` says; equal ones share a compiled program."""

    labels: tuple[tuple[str, str], ...]
    output: ByIdentity  # of None: the standard output, as it is then
    threshold: int | None

    __name__ = "id_print"

    def __call__(self, arg: Any, transforms: Any, *, device: Any = None, shard: Any = None) -> None:
        """Prints the labels, sorted, and then the value."""
        shown: dict[str, Any] = dict(self.labels)
        if transforms:
            shown["transforms"] = [(n, params) if params else n for n, params in transforms]
        if device is not None:
            shown["device"] = device
        if shard is not None:
            shown |= {"coordinates": shard.coordinates, "index": shard.index}
            if isinstance(shard.index, tuple) and all(isinstance(s, slice) for s in shard.index):
                shown["index"] = f"[{','.join(f'{s.start}:{s.stop}' for s in shard.index)}]"
        text = self.text(arg) + "\n"
        if shown:
            text = " ".join(f"{k}: {v}" for k, v in sorted(shown.items())) + "\n" + text
        with _lock:
            stream = sys.stdout if self.output.target is None else self.output.target
            stream.write(text)

    def text(self, arg: Any, column: int = 0) -> str:
        """Returns the value, nested as it is; what is wider than a line is broken."""
        if isinstance(arg, (tuple, list)):
            ends = "()" if isinstance(arg, tuple) else "[]"
            return self._nested(ends, [("", e) for e in arg], column)
        if isinstance(arg, dict):
            pairs = sorted(arg.items(), key=lambda pair: str(pair[0]))
            return self._nested("{}", [(f"{k}=", v) for k, v in pairs], column)
        if isinstance(arg, np.ndarray):
            return np.array2string(arg, threshold=self.threshold)
        return str(arg)

    def _nested(self, ends: str, parts: list[tuple[str, Any]], column: int) -> str:
        start, end = ends
        line = " ".join([start, *(name + self.text(value) for name, value in parts), end])
        if column + len(line) <= _WIDTH:
            return line
        inner = column + 2
        texts = [name + self.text(value, inner + len(name)) for name, value in parts]
        return f"{start} " + ("\n" + " " * inner).join(texts) + f" {end}"


# Failures


class ResultShapeError(ArgumentError, ValueError):
    """A `result_shape` has a leaf without a shape; a ValueError as in the classic API."""

    __module__ = "spmd.host_callback"


def _failures(
    func: Any, names: Sequence[str], with_device: bool, device_index: Any, per_shard: bool
) -> Iterator[Failure]:
    """What is wrong with a host function that is called with these arguments, and with a device."""
    keywords = ["device"] * bool(with_device) + ["shard"] * bool(per_shard)
    if failure := _function_failure(func, names, keywords):
        yield failure
    if not isinstance(device_index, (int, np.integer)) or device_index < 0:
        yield Failure(
            what="has no such device",
            given=f"device_index={device_index!r}",
            expected="the number of a device of the mesh, from 0",
            error=OptionError,
        )


def _function_failure(func: Any, names: Sequence[str], keywords: Sequence[str]) -> Failure | None:
    if not callable(func):
        return Failure(
            what="has nothing to call",
            expected="a function of the host",
            got=show_value(func),
            error=ArgumentError,
        )
    try:
        hash(func)
    except TypeError:
        return Failure(
            what=f"cannot tell calls of `{_jax.core.fun_name(func)}` apart: it has no hash",
            got=show_value(func),
            fix="pass a function, a method, or an object with __hash__",
            error=ArgumentError,
        )
    try:
        signature = inspect.signature(func)
    except Exception:  # some functions in C do not say what they take, and some objects raise
        return None
    try:
        signature.bind(*names, **dict.fromkeys(keywords))
    except TypeError as error:
        taken = ", ".join([*names, *(f"{k}=..." for k in keywords)])
        name = _jax.core.fun_name(func)
        return Failure(
            what=f"cannot call `{name}` with {taken}: {error}",
            expected=f"a function that is called as {name}({taken})",
            got=f"{name}{signature}"[:200],
            error=ArgumentError,
        )
    return None
