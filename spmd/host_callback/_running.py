"""How host functions are called, and what is made of their results; calls that are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import pathlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from spmd import _jax
from spmd.errors import SpmdError
from spmd.host_callback._ffi import Buffer
from spmd.host_callback._receiver import Item, receiver
from spmd.host_callback._records import HostCall, Shard, described
from spmd.host_callback._registry import Entry, Site, carrier, mesh_coordinates

_HERE = str(pathlib.Path(__file__).parent)


class ResultError(SpmdError, TypeError):
    """A host function returned something else than its `result_shape` says."""

    __module__ = "spmd.host_callback"


#: What open :func:`record` contexts are told of each call; one that returns False skips a tap.
observers: list[Callable[..., bool]] = []


def run(call: HostCall, values: Sequence[np.ndarray], device: Any, shard: Shard | None) -> Any:
    """Calls the host function with the values of the leaves of its argument."""
    arg = jtu.tree_unflatten(call.in_tree, values)
    arguments: dict[str, Any] = {"device": device} if call.with_device else {}
    if call.per_shard:
        arguments["shard"] = shard
    wanted = [observe(call, values, device, shard) for observe in [*observers]]
    if call.out_tree is not None:
        return call.func(arg, **arguments)
    return call.func(arg, described(call.transforms), **arguments) if all(wanted) else None


def _tree_of(call: HostCall, indices: Sequence[Any]) -> Any:
    """Returns the indices in the tree of the argument, or as they are if it only takes arrays."""
    try:
        return jtu.tree_unflatten(call.in_tree, indices)
    except Exception:  # a class of the user's may look at its leaves
        return [*indices]


def call_results(call: HostCall, value: Any) -> list[np.ndarray]:
    """Returns the leaves of what a host function returned, as the device takes them.

    Raises a :class:`ResultError` where they are not what `result_shape` says.
    """
    leaves, tree = jtu.tree_flatten(value)
    if not leaves and not call.results:
        return []
    if tree != call.out_tree:
        text = _mismatch(call, f"a tree {tree}", f"a tree {call.out_tree}")
        raise ResultError(text + _shape_hint(call, leaves))
    found = []
    names = [f"result{jtu.keystr(path)}" for path, _ in jtu.tree_flatten_with_path(value)[0]]
    for name, leaf, (shape, dtype) in zip(names, leaves, call.results, strict=True):
        array = np.asarray(leaf)
        if array.dtype != dtype and array.dtype.kind in "biufc":
            array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        if array.shape != shape or array.dtype != dtype:
            got, expected = (_show(a.dtype, a.shape) for a in (array, np.empty(shape, dtype)))
            raise ResultError(_mismatch(call, f"{name} = {got}", f"{name} = {expected}"))
        found.append(np.ascontiguousarray(array).reshape(shape).astype(carrier(dtype), copy=False))
    return found


def _show(dtype: Any, shape: tuple[int, ...]) -> str:
    if dtype.kind in "OSUMm":  # strings, objects and times, which JAX has no name for
        return f"{dtype}[{','.join(map(str, shape))}]"
    return _jax.core.short_aval(jax.ShapeDtypeStruct(shape, dtype))


def _mismatch(call: HostCall, got: str, expected: str) -> str:
    return (
        f"{_jax.host.CALL_FAILED}{call.name}` got another result than its result_shape says.\n"
        f"  expected  {expected}\n  got       {got}"
    )


def _shape_hint(call: HostCall, leaves: Sequence[Any]) -> str:
    """What to write instead of no `result_shape`, or of a tuple that was meant as a shape."""
    if not call.results:
        return (
            "\n  fix       say what it returns: call(f, x, result_shape=...), in the same tree, "
            "with jax.ShapeDtypeStruct(shape, dtype) for each array"
        )
    numbers = all(not shape and np.dtype(d).kind == "i" for shape, d in call.results)
    ndim = len(call.results)
    flat = call.out_tree == jtu.tree_structure((0,) * ndim)
    if not (numbers and flat and len(leaves) == 1 and np.ndim(leaves[0]) == ndim):
        return ""
    return (
        "\n  fix       a tuple of numbers is a tuple of scalar results; for one array pass "
        "jax.ShapeDtypeStruct(shape, dtype)"
    )


def error_text(call: HostCall, error: BaseException) -> str:
    """What a program is told whose host function failed."""
    if isinstance(error, ResultError):
        return str(error)
    stack = "".join(traceback.format_exception(error))
    try:
        text = str(error)
    except Exception:  # its own method fails
        text = "<its text cannot be made>"
    return f"{_jax.host.CALL_FAILED}{call.name}` raised {type(error).__name__}: {text}\n{stack}"


def without_own_frames(error: BaseException) -> BaseException:
    """Returns an exception of a host function as that one raised it."""
    stack = error.__traceback__
    while stack and stack.tb_frame.f_code.co_filename.startswith(_HERE):
        stack = stack.tb_next
    return error.with_traceback(stack)


def run_here(call: HostCall, args: Sequence[Any], axes: dict[str, int]) -> Sequence[Any]:
    """Runs the host function of an eager call in this thread; it raises what that one raises.

    The arguments lie on one set of devices, and a tap returns them.
    """
    devices = _jax.dispatch.device_order(args[0].sharding) if args else [_jax.mesh.default_device()]
    if call.per_shard:
        here = [i for i, d in enumerate(devices) if d.process_index == jax.process_index()]
        values = [_run_shard(call, args, devices[i], mesh_coordinates(axes, i)) for i in here]
    else:
        operands = [np.array(_jax.core.physical_value(x)) for x in args]
        values = [run(call, operands, devices[call.device_index], None)]
    return args if call.out_tree is None else _placed(call, values)


def _run_shard(call: HostCall, args: Sequence[Any], device: Any, place: dict[str, int]) -> Any:
    shards = [
        next(s for s in _jax.core.physical_value(x).addressable_shards if s.device == device)
        for x in args
    ]
    indices = [
        tuple(slice(*i.indices(n)[:2]) for i, n in zip(s.index, x.shape, strict=False))
        for s, x in zip(shards, args, strict=True)
    ]
    shard = Shard(device=device, coordinates=place, index=_tree_of(call, indices))
    return run(call, [np.array(s.data) for s in shards], device, shard)


def _placed(call: HostCall, values: Sequence[Any]) -> list[Any]:
    """The results of one call, or those of all shards, stacked."""
    columns = zip(*[call_results(call, v) for v in values], strict=True)
    return [
        jnp.asarray((np.stack(c) if call.per_shard else c[0]).astype(d))
        for c, (_, d) in zip(columns, call.results, strict=True)
    ]


@dataclass(eq=False, repr=False)
class Tap(Item):
    """A host function that nobody waits for.

    Attributes:
        site: How its program is split; None for a program on one device.
        partition: The number of the device in the program.
        buffers: The operands in the memory of the device.
    """

    entry: Entry
    device: Any
    site: Site | None
    partition: int
    buffers: Sequence[Buffer]

    def __post_init__(self) -> None:
        if self.urgent:
            return
        if self.site is None:
            self.size = self.entry.size
        else:
            sizes = zip(self.buffers, self.entry.carriers, strict=True)
            self.size = sum(b.size(d) for b, d in sizes)

    def read(self) -> list[np.ndarray]:
        """Copies the operands, without the padding of uneven shards."""
        buffers, self.buffers = self.buffers, ()
        values = [b.copy(d) for b, d in zip(buffers, self.entry.carriers, strict=True)]
        trims = None if self.site is None else self.site.part(self.partition).trims
        if trims is None:
            return values
        return [v if t is None else v[t].copy() for v, t in zip(values, trims, strict=True)]

    def call(self, operands: Sequence[np.ndarray]) -> Any:
        """Calls the host function with operands as they came from the device."""
        entry, values = self.entry, operands
        if entry.carriers != entry.dtypes:
            values = [v.astype(d, copy=False) for v, d in zip(operands, entry.dtypes, strict=True)]
        shard = self._shard(values) if entry.call.per_shard else None
        return run(entry.call, values, self.device, shard)

    def _shard(self, values: Sequence[np.ndarray]) -> Shard:
        call, site = self.entry.call, self.site
        if site is None:  # one device holds all
            coordinates = mesh_coordinates(dict(call.axes), 0)
            indices = [tuple(slice(0, n) for n in v.shape) for v in values]
        else:
            part = site.part(self.partition)
            coordinates, indices = dict(part.coordinates), part.indices
        has_global_array = site is None or site.mode == "shards"
        index = _tree_of(call, indices) if has_global_array else None
        return Shard(device=self.device, coordinates=coordinates, index=index)

    def run(self) -> None:
        """Calls the host function."""
        call = self.entry.call
        try:
            self.call(self.operands)
        except BaseException as error:  # a host function may well call sys.exit
            receiver.failed(without_own_frames(error), f"{call.kind} of `{call.name}`")


class Call(Tap):
    """A host function whose results a device waits for; its operands stay where they are so long.

    Attributes:
        finish: What is done with its results, or with the text of an error.
    """

    urgent = True
    finish: Callable[[Any, str | None], None]

    def run(self) -> None:
        """Calls the host function, and passes on what it returns."""
        call = self.entry.call
        try:
            self.operands = self.read()
            results = call_results(call, self.call(self.operands))
        except BaseException as error:  # as above
            receiver.failed(without_own_frames(error), f"call of `{call.name}`")
            self.finish(None, error_text(call, error))
        else:
            self.finish(results, None)
