"""Arrays and where they lie, how they move, and the C++ path of repeated calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any
import weakref

import jax
from jax._src import api, config, core, sharding_impls, tree_util, util, xla_bridge
from jax._src.interpreters import pxla
from jax._src.lib import _jax, xla_client
from jax._src.random import prng
from jax.experimental.layout import Layout
import numpy as np

from spmd._jax.core import Array, ShapedArray, api_boundary

_ONLY_ARRAYS = frozenset((Array,))
_flatten = tree_util.default_registry.flatten  # a frame less than `tree_leaves`


def arrays_of(tree: Any) -> list[Any]:
    """The arrays on devices among the leaves of a tree, those behind PRNG keys too."""
    leaves, _ = _flatten(tree, None)
    if _ONLY_ARRAYS.issuperset(map(type, leaves)):
        return leaves
    bare = [x._base_array if isinstance(x, prng.PRNGKeyArray) else x for x in leaves]
    return [x for x in bare if isinstance(x, Array)]


def buffer_of(x: Any) -> Any:
    """Returns the array that a mutable reference holds now; anything else is itself."""
    return x._refs._buf if isinstance(x, core.Ref) else x


def set_buffer(ref: Any, array: Any) -> None:
    """Lets a mutable reference hold another array of equal value."""
    ref._refs._buf = array


def placed_sharding(x: Any) -> Any:
    """Returns the sharding of a committed array or of a struct that has one, else None."""
    held = buffer_of(x)
    sharding = getattr(held, "sharding", None)
    if sharding is None or not getattr(held, "_committed", True):
        return None
    if isinstance(held, ShapedArray):  # `jax.typeof` of an array: its mesh has no devices
        return None
    if held is not x and sharding.num_devices == 1:
        # `jax.new_ref` commits to a device even what nobody placed there.
        return None
    return sharding


def placed_shardings(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns :func:`placed_sharding` of each value."""
    return tuple([placed_sharding(x) for x in values])


def own_layouts(values: Sequence[Any]) -> list[int]:
    """Which values have their elements in another order than programs read their arguments in."""
    return [i for i, x in enumerate(values) if _has_own_layout(x)]


def _has_own_layout(x: Any) -> bool:
    # Asking a deleted array crashes JAX 0.10.
    if not isinstance(x, Array) or x.is_deleted():
        return False
    try:
        layout = x._pjrt_layout
    except RuntimeError:
        return False  # a backend that knows no layouts
    return not _is_default_layout(layout, x.sharding, x.shape, x.dtype)


@functools.lru_cache(maxsize=4096)
def _is_default_layout(layout: Any, sharding: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    layout = Layout.from_pjrt_layout(layout)
    return pxla.is_default_layout(layout, sharding, ShapedArray(shape, dtype))


def reshard(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Copies arrays to other shardings over the same devices, without the host.

    `jax.device_put` alone copies to the host and back, except where the order of devices differs.
    """
    moved = list(arrays)
    pairs = enumerate(zip(arrays, shardings, strict=True))
    here = [i for i, (a, s) in pairs if a.sharding._device_assignment == s._device_assignment]
    if here:
        program = _resharder(tuple(shardings[i] for i in here))
        # What a user switched on or off for the call is not meant for this program.
        off = (config.disable_jit, config.debug_nans, config.debug_infs, config.no_tracing)
        with contextlib.ExitStack() as stack:
            for state in off:
                stack.enter_context(state(False))
            for i, new in zip(here, program([arrays[i] for i in here]), strict=True):
                moved[i] = new
    for i in set(range(len(moved))) - set(here):
        moved[i] = jax.device_put(arrays[i], shardings[i], may_alias=False)
    if moved and next(iter(shardings[0].device_set)).platform == "cpu":
        # Virtual devices share few threads: collectives of many pending programs can deadlock.
        jax.block_until_ready(moved)
    return moved


@functools.lru_cache(maxsize=1024)
def _resharder(shardings: tuple[Any, ...]) -> Any:
    def reshard(arrays: list[Any]) -> list[Any]:
        return arrays

    return jax.jit(reshard, out_shardings=list(shardings))


def placement_key(shardings: Sequence[Any], avals: Sequence[Any]) -> Any:
    """A key under which shardings that mean the same on these avals are equal."""
    return pxla.SemanticallyEqualShardings(tuple(shardings), tuple(avals))


def op_sharding(sharding: Any, ndim: int) -> Any:
    """The OpSharding that a compiler reads for this sharding."""
    return sharding._to_xla_hlo_sharding(ndim).to_proto()


def device_order(sharding: Any) -> list[Any]:
    """The devices of a sharding in the order in which programs number them."""
    return [*sharding._device_assignment]


def local_device_order(sharding: Any) -> list[Any]:
    """The devices of this process among them: in this order an array holds its parts."""
    return [d for d in device_order(sharding) if d.process_index == xla_bridge.process_index()]


def local_parts(x: Any) -> Sequence[Any]:
    """The arrays of one device each that this process has of an array."""
    return x._arrays


def device_list(sharding: Any) -> Any:
    """The devices of a sharding as one hashable object that JAX keeps; equal lists are equal."""
    return sharding._internal_device_list


def copier(devices: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns what copies arrays of one device each, ready or not, to these devices by one call.

    `jax.device_put` takes 30 µs per array; this takes 10.
    """
    single = [_single_device(d) for d in devices]
    lists = [s._internal_device_list for s in single]
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(single)
    copy = xla_client.batched_copy_array_to_devices_with_sharding
    return lambda arrays: copy(arrays, lists, single, semantics)


def assembler(shape: Sequence[int], dtype: Any, sharding: Any) -> Callable[[list[Any]], Any]:
    """Returns what makes an array of its local parts, one per device in the sharding's order.

    `jax.make_array_from_single_device_arrays` checks each time what is known here: 25 µs.
    """
    aval = ShapedArray(shape, np.dtype(dtype))
    return lambda parts: Array(aval, sharding, parts, committed=True, _skip_checks=True)


_single_device = functools.lru_cache(maxsize=1024)(jax.sharding.SingleDeviceSharding)
util.register_cache(_single_device, "shardings of one device")


def asynchronous_cpu() -> bool:
    """Whether programs of the CPU may run while their caller goes on.

    `jax.config` makes a dictionary of all its values for each look at one of its flags: 10 µs.
    """
    return bool(xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value)


def watch_starts(started: Callable[[], None]) -> Callable[[], None]:
    """Has `started` called for programs on several CPU devices, in the thread that starts them.

    That is before they start, or after it where JAX starts one again without Python: then it calls
    a hook, and what the process has set as such is called as well. What is returned sets that hook
    for a thread, until it sets `jax_debug_nans` or the like for itself, since JAX has one for them
    all. In other threads `started` may be called, too.
    """
    program: Any = pxla.ExecuteReplicated
    jax_execute, hook = program.__call__, api._post_hook_state

    def started_on(devices: Sequence[Any]) -> None:
        if len(devices) > 1 and devices[0].platform == "cpu":
            started()

    def execute(self: Any, *args: Any) -> Any:
        started_on(self._local_devices)
        return jax_execute(self, *args)

    def after(fun: Any, args: Any, kwargs: Any, out: Any) -> None:
        if (hook_of_all := hook.get_global()) is not None:
            hook_of_all(fun, args, kwargs, out)
        first = next((x for x in jax.tree.leaves(out) if isinstance(x, Array)), None)
        if first is not None:
            started_on(local_device_order(first.sharding))

    program.__call__ = execute
    return lambda: hook.set_local(after)


def without_axis(x: Any, axis: int) -> Any:
    """An array of one device without an axis of size 1: on the CPU in the same memory.

    There it waits until the array is there. The memory stays as long as one of the two does, and
    is not donated meanwhile.
    """
    (device,) = x.devices()
    if device.platform != "cpu" or x.dtype.name in _SUB_BYTE:
        return _squeeze(x, (axis,))
    view = np.squeeze(np.asarray(x), axis)
    aval = ShapedArray(view.shape, view.dtype, weak_type=x.weak_type)
    return pxla.batched_device_put(
        aval, sharding_impls.SingleDeviceSharding(device), [view], [device]
    )


_SUB_BYTE = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn")
_squeeze = jax.jit(jax.lax.squeeze, static_argnums=1)


def fast_path_data(executable: Any, consts: Sequence[Any], out_tree: Any, outs: Any) -> Any:
    """What the C++ dispatcher needs to run a MeshExecutable again; None if it must not."""
    call = executable.unsafe_call
    if (
        not isinstance(call, pxla.ExecuteReplicated)
        or call.ordered_effects
        or call.has_unordered_effects
        or call.mut
        or config.no_execution.value
        or config.debug_key_reuse.value
    ):
        return None
    outs, out_tree = pxla.reflatten_outputs_for_dispatch(out_tree, outs)
    if not all(isinstance(o, Array) for o in outs):
        return None
    return pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        out_tree,
        _physical(executable._in_shardings, executable.in_avals),
        [o.sharding for o in outs],
        [o.aval for o in outs],
        [o._committed for o in outs],
        [i in executable._kept_var_idx for i in range(len(executable._all_args_info.in_avals))],
        executable._dispatch_in_layouts,
        consts,
    )


def _physical(shardings: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Shardings of the arrays that back extended dtypes such as PRNG keys."""
    return [
        sharding_impls.physical_sharding(a, s)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
        else s
        for s, a in zip(shardings, avals, strict=True)
    ]


def tiling_of(sharding: Any) -> tuple[list[int], list[int], bool] | None:
    """Tiles, order of devices and replication in the last dimension of a GSPMDSharding.

    None for other shardings, and for those that say something else than tiles.
    """
    if not isinstance(sharding, sharding_impls.GSPMDSharding):
        return None
    hlo = sharding._hlo_sharding
    if not hlo.is_tiled() or hlo.subgroup_types():
        return None
    order = [*hlo.tile_assignment_devices()]
    return [*hlo.tile_assignment_dimensions()], order, hlo.replicate_on_last_tile_dim()


def tiled_sharding(
    devices: Sequence[Any], tiles: Sequence[int], order: Sequence[int], last: bool, memory: Any
) -> Any:
    """The GSPMDSharding of what :func:`tiling_of` gave, over these devices."""
    proto = xla_client.OpSharding()
    proto.type = xla_client.OpSharding.Type.OTHER
    proto.tile_assignment_dimensions = [*tiles]
    proto.tile_assignment_devices = [*order]
    proto.replicate_on_last_tile_dim = last
    return sharding_impls.GSPMDSharding(tuple(devices), proto, memory_kind=memory)


def options_of_jit(function: Any) -> dict[str, Any]:
    """What `jax.jit` was given for a function, as its keywords; nothing for another function.

    No public attribute of a jitted function tells which arguments are static or donated.
    """
    info = getattr(function, "_jit_info", None)
    if info is None:
        return {}
    found = {
        "static_argnums": info.static_argnums,
        "static_argnames": info.static_argnames,
        "donate_argnums": info.donate_argnums,
        "donate_argnames": info.donate_argnames,
        "keep_unused": info.keep_unused,
        "compiler_options": dict(info.compiler_options_kvs),
    }
    return {name: value for name, value in found.items() if value}


def shardings_of_jit(function: Any) -> tuple[Any, Any] | None:
    """The shardings that `jax.jit` was given for arguments and results; None where it has none.

    Both are trees, with None where nothing is said.
    """
    info = getattr(function, "_jit_info", None)
    if info is None:
        return None
    sides = [
        (info.in_shardings_treedef, info.in_shardings_leaves),
        (info.out_shardings_treedef, info.out_shardings_leaves),
    ]
    given = [
        [one if isinstance(one, jax.sharding.Sharding) else None for one in leaves]
        for _, leaves in sides
    ]
    if not any(one is not None for leaves in given for one in leaves):
        return None
    ins, outs = (tree.unflatten(own) for (tree, _), own in zip(sides, given, strict=True))
    return ins, outs


def make_dispatcher(
    fun: Callable | None,
    name: str,
    cache_miss: Callable,
    static_argnums: Sequence[int],
    static_argnames: Sequence[str],
    key: Any,
) -> Any:
    """Returns a callable that answers repeated calls in C++, or None where JAX has no such thing.

    It asks `cache_miss` about arguments of a new kind, which is called as `fun` is and returns
    results, fast-path data or None, and False. The cache is that of all dispatchers and holds `fun`
    weakly; without `fun` it is the dispatcher's own. Static arguments are part of the key by value.
    `key` tells two dispatchers of one function apart; profiles show `name`.
    """
    if not hasattr(_jax, "pjit"):
        return None
    failed = False

    @api_boundary
    def miss(*args: Any, **kwargs: Any) -> Any:
        nonlocal failed
        try:
            found = cache_miss(*args, **kwargs)
        except BaseException:
            failed = True
            raise
        if failed:  # C++ learns nothing of a signature that has failed, until it forgets it
            failed = False
            held()._clear_cache()
        return found

    shared = () if fun is None else (_dispatch_cache(),)
    dispatch = _jax.pjit(
        name,
        fun,
        miss,
        list(static_argnums),
        list(static_argnames),
        key,
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
        *shared,
    )
    if fun is not None:
        dispatch._fun = fun  # what JAX runs again, unjitted, when jax_debug_nans finds one
    held: Any = weakref.ref(dispatch)
    return dispatch


@functools.lru_cache(maxsize=1)
def _dispatch_cache() -> Any:
    return _jax.PjitFunctionCache(capacity=8192)


def clear_dispatch_cache() -> None:
    """Forgets what the C++ dispatchers learned, and how to move arrays."""
    _resharder.cache_clear()
    _dispatch_cache().clear()
