"""Abstract values, jaxprs, references and traces, and the lines and names of user code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import functools
import itertools
import pathlib
import sys
from typing import Any

import jax
from jax._src import (
    api_util,
    config,
    core,
    dispatch,
    dtypes,
    linear_util,
    mesh as mesh_lib,
    sharding_impls,
    source_info_util,
    stages,
    traceback_util,
    tree_util,
    util,
)
from jax._src.interpreters import ad, batching, partial_eval as pe
from jax._src.lib import xla_client
from jax._src.random import prng
from jax._src.state.types import AbstractRef
import numpy as np

from spmd._jax.versions import MERGED_JAXPR


def weakref_lru_cache(compute: Callable) -> Any:
    """Caches a function of a weakly held argument and hashable ones.

    The cache knows JAX's trace context, is cleared by `jax.clear_caches`, and computes an entry
    once however many threads ask for it.
    """

    @functools.wraps(compute)
    def computed(key: Any, *args: Any) -> Any:
        try:
            return compute(key, *args)
        except BaseException:
            # JAX keeps an entry without a result, and would compute it anew at every call.
            cached.evict_weakref(key)
            raise

    cached: Any = util.weakref_lru_cache(computed)
    return cached


#: Registers an object with `cache_clear` to be cleared by `jax.clear_caches`; JAX holds it weakly.
register_cache = util.register_cache
Primitive = core.Primitive
Array = xla_client.ArrayImpl
Tracer = core.Tracer
ShapedArray = core.ShapedArray
Zero = ad.Zero
jaxpr_as_fun = core.jaxpr_as_fun
positional_effects = core.positional_effects
trace_state_clean = core.trace_state_clean
pp_eqn_rules = core.pp_eqn_rules
custom_typechecks = core.custom_typechecks
UNSPECIFIED = sharding_impls.UNSPECIFIED
OpSharding = xla_client.OpSharding

#: The proto class hides its `named_sharding` field and reads as REPLICATED then; this one sees it.
HloSharding = xla_client.HloSharding


class Clearer:
    """Has a function called by `jax.clear_caches`, as long as this object is there."""

    def __init__(self, cache_clear: Callable[[], None], name: str):
        self.cache_clear = cache_clear
        register_cache(self, name)

    def cache_info(self) -> None:
        """Returns nothing: JAX asks it of each cache."""

    def cache_keys(self) -> list[Any]:
        """Returns no keys, likewise."""
        return []


def abstractify(x: Any) -> Any:
    """Returns the aval of an argument without its sharding, so that placement causes no retrace."""
    aval = core.shaped_abstractify(x)
    return _without_sharding(aval) if type(aval) is ShapedArray else aval


def aval_of(x: Any) -> Any:
    """Returns the aval of an array or a number; None of anything else."""
    try:
        return abstractify(x)
    except (TypeError, ValueError, OverflowError):
        return None


@functools.lru_cache(maxsize=4096)
def _without_sharding(aval: Any) -> Any:
    if isinstance(aval.dtype, np.dtype):  # NumPy's scalars of dates and bytes have avals as well
        dtypes.check_valid_dtype(aval.dtype)
    # Inside shard_map the aval says over which manual axes the value varies: that must stay.
    if aval.sharding.mesh.empty or aval.sharding.mesh._any_axis_manual:
        return aval
    return aval.update(sharding=None)


def is_ref(aval: Any) -> bool:
    """Whether an aval is that of a mutable reference."""
    return isinstance(aval, AbstractRef)


def ref_indices(jaxpr: Any) -> tuple[int, ...]:
    """Which inputs of a closed jaxpr are mutable references."""
    return tuple(i for i, a in enumerate(jaxpr.in_avals) if is_ref(a))


def short_aval(aval: Any) -> str:
    """Returns ``f32[30,512]``."""
    return f"{dtypes.short_dtype_name(aval.dtype)}[{','.join(map(str, aval.shape))}]"


def underlying(x: Any) -> Any:
    """Returns the value that eager `grad` or `vmap` works on; a staged tracer has none: itself."""
    while True:
        if isinstance(x, (ad.JVPTracer, ad.LinearizeTracer)):
            x = x.primal
        elif isinstance(x, batching.BatchTracer):
            x = x.val
        else:
            return x


def is_derived(x: Any) -> bool:
    """Whether an eager `grad`, `jvp` or the like works on a value."""
    derived = isinstance(x, (ad.JVPTracer, ad.LinearizeTracer))
    return derived and not isinstance(underlying(x), Tracer)


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the open jaxpr of a closed one; they are one object since JAX 0.11."""
    return jaxpr if MERGED_JAXPR else jaxpr.jaxpr


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Attaches the values of its constants to a jaxpr."""
    return jaxpr.with_consts(consts) if MERGED_JAXPR else core.ClosedJaxpr(jaxpr, consts)


def trace_to_jaxpr(fun: Callable, avals: Sequence[Any], debug_info: Any) -> Any:
    """Traces a function of flat arguments to a closed jaxpr."""
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, avals)
    return close_jaxpr(jaxpr, consts)


def trace_function(
    flat: Callable,
    fun: Callable,
    avals: Sequence[Any],
    arg_names: Sequence[str],
    out_names: Sequence[str],
    kind: str,
) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """Traces a user's function by its flat form.

    The names go into jaxprs, StableHLO locations and messages; those of the results are in their
    list after the trace. `kind` is what the user called, for the log.

    Returns the closed jaxpr; what it takes before its arguments, as no constant can be a tracer of
    an outer trace or a reference; which of its inputs are mutable references.
    """
    where = api_util.fun_sourceinfo(fun) or "<unknown>"
    info: Any = core.DebugInfo("pjit", where, tuple(arg_names), lambda: tuple(out_names))
    said = f"Finished tracing {{fun_name}} for {kind} in {{elapsed_time:.9f}} sec"
    with dispatch.log_elapsed_time(said, fun_name(fun), event=dispatch.JAXPR_TRACE_EVENT):
        jaxpr = trace_to_jaxpr(flat, avals, info)
    inner = inner_jaxpr(jaxpr)
    inner._debug_info = inner.debug_info._replace(result_paths=tuple(out_names))
    consts: Sequence[Any] = ()
    if any(isinstance(c, (Tracer, core.Ref)) for c in jaxpr.consts):
        jaxpr, consts = pe.separate_consts(jaxpr)
    return jaxpr, tuple(consts), ref_indices(jaxpr)


def unknown_debug_info(jaxpr: Any) -> Any:
    """The debug info of a jaxpr whose inputs were rearranged."""
    return inner_jaxpr(jaxpr).debug_info.with_unknown_names()


def fun_name(fun: Callable) -> str:
    """The name of a function as JAX shows it; looks through partials and methods."""
    return util.fun_name(fun, type(fun).__name__)


def current_source() -> str:
    """``file:line (function)`` of the user's frame that is running."""
    if found := source_info_util.summarize(source_info_util.current()):
        return found
    # JAX looks no further up than the trace that is running; `jit` of our function has no line.
    frame = sys._getframe(1)
    while frame and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def hide_own_frames() -> None:
    """Hides our files from users' tracebacks and from source locations of operations.

    The demo's model, in a folder of its own, is user code.
    """
    package = pathlib.Path(__file__).parent.parent
    for path in package.rglob("*.py"):
        if package / "demo" not in path.parents:
            traceback_util.register_exclusion(str(path))
            source_info_util.register_exclusion(str(path))


#: Whether a file is neither JAX's nor ours, by its name.
is_user_file = source_info_util.is_user_filename


def used_at() -> str:
    """``", used at file:line (function)"``, or nothing where JAX itself is the caller."""
    source = current_source()
    return f", used at {source}" if source else ""


api_boundary: Any = traceback_util.api_boundary

#: What is set in JAX, here and globally, that a trace depends on; hashable.
trace_context = config.trace_context


def trace_context_names() -> Sequence[str]:
    """What the entries of a context are called; nothing where JAX does not say."""
    try:
        return config.trace_context_names()
    except NotImplementedError:
        return ()


def trace_switches() -> tuple[bool, bool]:
    """Whether `jax_no_tracing` and `jax_explain_cache_misses` are set."""
    return config.no_tracing.value, config.explain_cache_misses.value


_salt = itertools.count()


def traced_anew() -> Any:
    """A context of which JAX finds nothing that was traced outside of it, and the other way."""
    # A part of the key of each trace. This pattern is in no name of a file.
    return config.hlo_source_file_canonicalization_regex(f"(?!){next(_salt)}")


def pp_equation(eqn: Any, context: Any, settings: Any, params: dict[str, Any]) -> Any:
    """Prints an equation with other parameters than it has."""
    shown = eqn.replace(params=params)
    names = [*(n for n in params if n != "jaxpr"), *(n for n in params if n == "jaxpr")]
    return core._pp_eqn(shown, context, settings, params=names)


def varying_aval(shape: Sequence[int], dtype: Any) -> Any:
    """The aval of a value that each device of an enclosing `shard_map` has by itself."""
    mesh = mesh_lib.get_abstract_mesh()
    if not mesh._any_axis_manual or not config._check_vma.value:
        return ShapedArray(tuple(shape), dtype)
    varying = core.ManualAxisType(varying=frozenset(mesh.manual_axes))
    whole = jax.NamedSharding(mesh, jax.P(*(None for _ in shape)))
    return ShapedArray(tuple(shape), dtype, sharding=whole, manual_axis_type=varying)


def varying_axes(aval: Any) -> tuple[frozenset[str], bool]:
    """Manual axes over which a traced value differs, and whether `shard_map` keeps account."""
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(kind, "varying", frozenset()), bool(config._check_vma.value)


def physical_shape(aval: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the array behind an aval; that of a PRNG key has a dimension more."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        aval = core.physical_aval(aval)
    return tuple(aval.shape), np.dtype(aval.dtype)


def typed_mesh(values: Sequence[Any]) -> Any:
    """The mesh that the types of values are split over, without its devices; else None."""
    types = [core.typeof(x) for x in values]
    meshes = [a.sharding.mesh for a in types if isinstance(a, ShapedArray)]
    return next((m for m in meshes if not m.empty), None)


def physical_value(x: Any) -> Any:
    """The array behind a PRNG key; anything else is itself."""
    if jax.dtypes.issubdtype(core.typeof(x).dtype, jax.dtypes.extended):
        return jax.random.key_data(x)
    return x


def has_effects(jaxpr: Any) -> bool:
    """Whether anything in an open jaxpr has an effect; a collective has one on its named axis."""
    return any(
        eqn.effects or any(has_effects(inner) for inner in core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def args_info(in_tree: Any, avals: Sequence[Any], donated: Sequence[bool]) -> Any:
    """The tree of argument descriptions that JAX's stages hold."""
    infos = [stages.ArgInfo(a, d) for a, d in zip(avals, donated, strict=True)]
    return in_tree.unflatten(infos)


def const_args(hoisted: Sequence[Any], executable: Any) -> Sequence[Any]:
    """The constants that the program takes as leading arguments, placed on its devices."""
    return executable.shard_const_args(hoisted)


def equations(jaxpr: Any) -> Iterator[tuple[str, str, bool]]:
    """Name, line and whether it has an effect, of each equation in a jaxpr and inside of those."""
    for eqn in getattr(jaxpr, "eqns", ()):
        yield eqn.primitive.name, source_info_util.summarize(eqn.source_info), bool(eqn.effects)
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def make_aval(
    shape: Sequence[int], dtype: Any, *, weak_type: bool, memory: str | None, sharding: Any
) -> Any:
    """The type of an array; `memory` is None for the usual one, `sharding` what its type says."""
    space = core.MemorySpace.Device if memory is None else core.MemorySpace[memory]
    return ShapedArray(
        tuple(shape), dtype, weak_type=weak_type, sharding=sharding, memory_space=space
    )


#: Names of the memory spaces that a type may say.
MEMORY_SPACES = tuple(core.MemorySpace.__members__)


def memory_space_of(aval: Any) -> str | None:
    """Name of the memory space that a type says; None for the usual one."""
    space = aval.memory_space
    return None if space is core.MemorySpace.Device else space.name


def key_dtypes() -> dict[str, Any]:
    """The dtypes of arrays of random keys, by the name of what makes the numbers."""
    return {name: prng.KeyTy(impl) for name, impl in prng.prngs.items()}


def registered_nodes() -> dict[type, Any]:
    """The types of pytree nodes that this process knows; `from_iter` builds one of its children."""
    return tree_util._registry
