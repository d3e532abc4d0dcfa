"""From jaxprs to modules and executables, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import copy
import math
import os
from typing import Any

import jax
from jax._src import config, core, dispatch, effects, sharding_impls, util
from jax._src.interpreters import mlir, pxla
from jax._src.lib import utils, xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import func as func_dialect, hlo
import numpy as np

from spmd._jax.core import ShapedArray, inner_jaxpr
from spmd._jax.mesh import is_described
from spmd._jax.versions import CRASHES_ON_NESTED_TOKENS, MERGED_JAXPR


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices of a `jax.stages.Lowered`, which says them nowhere; none for an abstract mesh."""
    return tuple(lowered._lowering._device_list or ())


_sharding_sources: dict[Any, Callable[[Any], Sequence[Any]]] = {}


def declare_shardings(primitive: Any, shardings_of: Callable[[Any], Sequence[Any]]) -> None:
    """Tells JAX which shardings an equation of `primitive` holds.

    An outer `jax.jit` derives the devices of its program from the shardings inside of it, and
    looks only at its own primitives: without this, `jit(pjit(f))` would be built for one device.
    """
    _sharding_sources[primitive] = shardings_of


def _intermediate_shardings(jaxpr: Any) -> list[Any]:
    # JAX's function recurses through its module's global, so it finds us at every level.
    found = list(_jax_intermediate_shardings(jaxpr))
    for eqn in jaxpr.eqns:
        if shardings_of := _sharding_sources.get(eqn.primitive):
            source = dispatch.SourceInfo(eqn.source_info, eqn.primitive.name)
            found += [(s, source) for s in shardings_of(eqn)]
    return found


_jax_intermediate_shardings = dispatch.get_intermediate_shardings
dispatch.get_intermediate_shardings = _intermediate_shardings


def wrap_with_sharding(ctx: Any, value: Any, aval_in: Any, aval_out: Any, sharding: Any) -> Any:
    """Emits the operation that constrains a value, in the partitioner's own terms."""
    ndim = aval_in.ndim
    axis_ctx = ctx.module_context.axis_context
    if isinstance(axis_ctx, sharding_impls.SPMDAxisContext) and axis_ctx.manual_axes:
        sharding = mlir.add_manual_axes(axis_ctx, sharding, ndim)
    if jax.dtypes.issubdtype(aval_in.dtype, jax.dtypes.extended):
        physical: Any = core.physical_aval(aval_in)
        ndim = physical.ndim
    if not config.use_shardy_partitioner.value:
        dims = {i for i, p in enumerate(sharding.spec) if p is jax.P.UNCONSTRAINED}
        proto = sharding._to_xla_hlo_sharding(ndim).to_proto()
        return mlir.wrap_with_sharding_op(ctx, value, aval_out, proto, unspecified_dims=dims)
    sdy = sharding._to_sdy_sharding(ndim)
    return mlir.wrap_with_sharding_op(ctx, value, aval_out, sdy)


def free_in_branch(values: Sequence[Any]) -> Sequence[Any]:
    """Separates values of a branch of `cond` from their shardings.

    The results of all branches must be split alike, which the partitioner sees to only where no
    result is itself the value that a sharding is put on.
    """
    at: Any = ir.InsertionPoint.current
    if not values or at.block.owner.name != "stablehlo.case":
        return values
    return [*hlo.OptimizationBarrierOp(values).results]


def lower_call(
    ctx: Any,
    args: Sequence[Any],
    jaxpr: Any,
    name: str,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    key: Any,
) -> Sequence[Any]:
    """Emits a call of `jaxpr` as a function of the module, built once per `key`."""
    module = ctx.module_context
    built = module.cached_primitive_lowerings.get(key)
    if built is None:
        built = _build_function(ctx, jaxpr, name, in_shardings, out_shardings)
        module.cached_primitive_lowerings[key] = built
    func, ordered, const_args = built
    consts = [
        mlir.ir_constants(c, const_lowering=ctx.const_lowering, aval=a) for c, a in const_args
    ]
    tokens = [ctx.tokens_in.get(e) for e in ordered]
    operands, _ = mlir.ir_tree_registry.flatten((*ctx.dim_var_values, *tokens, *consts, *args))
    out_types = [mlir.aval_to_ir_types(module, a) for a in ctx.avals_out]
    types, _ = mlir.ir_tree_registry.flatten([mlir.token_type()] * len(ordered) + out_types)
    stack = ctx.name_stack.extend(util.wrap_name("pjit", name))
    with mlir.source_info_to_location(module, None, stack, ctx.traceback):
        symbol = ir.FlatSymbolRefAttr.get(func.name.value)
        call = func_dialect.CallOp(types, symbol, operands)
    results = list(call.results)
    if ordered:
        out_tokens = dict(zip(ordered, results[: len(ordered)], strict=True))
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet(out_tokens)))
    return free_in_branch(results[len(ordered) :])


def _build_function(
    ctx: Any, jaxpr: Any, name: str, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> tuple[Any, tuple[Any, ...], Sequence[Any]]:
    ordered = tuple(effects.ordered_effects.filter_in(jaxpr.effects))
    const_args = core.jaxpr_const_args(inner_jaxpr(jaxpr))
    more = {"out_avals": jaxpr.out_avals} if MERGED_JAXPR else {}
    func = mlir.lower_jaxpr_to_fun(
        ctx.module_context,
        name,
        jaxpr,
        ordered,
        num_const_args=len(const_args),
        in_avals=(*(a for _, a in const_args), *jaxpr.in_avals),
        arg_shardings=[*(None for _ in const_args), *in_shardings],
        result_shardings=list(out_shardings),
        # Shardings on the arguments of an inner function are lost on the way to HLO.
        use_sharding_annotations=False,
        **more,
    )
    return func, ordered, const_args


register_lowering = mlir.register_lowering


def partition_of(ctx: Any) -> tuple[int, dict[str, int], bool | None]:
    """How the program around an equation is split.

    Returns the number of devices, the axes of the mesh where an enclosing `shard_map` or the types
    of the operands say them, and whether the equation is in the program of one device already: None
    where it is so along some axes only.
    """
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.SPMDAxisContext) and context.manual_axes:
        whole = frozenset(context.mesh.axis_names) <= context.manual_axes
        if CRASHES_ON_NESTED_TOKENS and _nested_region(context.mesh.axis_names):
            whole = False
        # An axis that the user did not name, of a pmap, is no axis of a mesh.
        axes = {n: s for n, s in context.mesh.shape.items() if n != "_internal_pmap_axis_name"}
        return context.mesh.size, axes, whole or None
    count = getattr(context, "num_devices", None) or getattr(context, "size", 1)
    meshes = [getattr(context, "abstract_mesh", None)]
    meshes += [a.sharding.mesh for a in ctx.avals_in if isinstance(a, ShapedArray)]
    return count, next((dict(m.shape) for m in meshes if m is not None and not m.empty), {}), False


def _nested_region(names: Sequence[Any]) -> bool:
    """Whether several nested `shard_map` together are over all axes."""
    at: Any = ir.InsertionPoint.current
    region = at.block.owner
    return region.name == "sdy.manual_computation" and any(
        str(ir.StringAttr.get(str(n))) not in str(region.attributes["manual_axes"]) for n in names
    )


def runs_on_all_devices(names: Sequence[Any]) -> bool:
    """Whether every device of an enclosing `shard_map` over these axes runs what is lowered now.

    Inside of a branch or a loop each device may go its own way, and a nested `jit` may be called
    from one.
    """
    at: Any = ir.InsertionPoint.current
    if at.block.owner.name != "sdy.manual_computation":
        return False
    # A region over all axes is in no other one, of which only some devices may come here.
    return not _nested_region(names)


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms that the module of an equation is made for."""
    return tuple(ctx.module_context.platforms)


def mesh_devices(ctx: Any) -> list[Any]:
    """The devices of an enclosing `shard_map`; empty where there are none."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return [*mesh.devices.flat] if isinstance(mesh, jax.sharding.Mesh) else []


def custom_call(
    target: str, token: Any, operands: Sequence[Any], results: Sequence[Any], attributes: Any
) -> list[Any]:
    types = [mlir.token_type()] + [tensor_type(*r) for r in results]
    if isinstance(attributes, dict):
        attributes = {
            k: ir.StringAttr.get(v) if isinstance(v, str) else mlir.i64_attr(v)
            for k, v in attributes.items()
        }
    ranks = [len(ir.RankedTensorType(o.type).shape) for o in operands]
    call = mlir.custom_call(
        target,
        result_types=types,
        operands=[token, *operands],
        backend_config=attributes,
        has_side_effect=True,
        operand_layouts=[[], *(range(r - 1, -1, -1) for r in ranks)],
        result_layouts=[[], *(range(len(r[0]) - 1, -1, -1) for r in results)],
    )
    return [*call.results]


def tensor_type(shape: Sequence[int], dtype: Any) -> Any:
    return ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(np.dtype(dtype)))


def convert_elements(value: Any, dtype: Any) -> Any:
    """Emits a conversion of an MLIR value to another dtype."""
    shape = ir.RankedTensorType(value.type).shape
    return hlo.ConvertOp(tensor_type(shape, dtype), value).result


def shard_module(
    target: str,
    operands: Sequence[tuple[Sequence[int], Any]],
    results: Sequence[tuple[Sequence[int], Any]],
    attributes: dict[str, int | str],
) -> bytes:
    """Builds the program of one device that calls a handler with a token, partition and operands.

    Operands and results are given by shape and dtype on one device.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            token = mlir.token_type()
            types = [token, *(tensor_type(*o) for o in operands)]
            outs = [token, *(tensor_type(*r) for r in results)]
            func = func_dialect.FuncOp("main", ir.FunctionType.get(types, outs))
            with ir.InsertionPoint(func.add_entry_block()):
                first, *rest = func.arguments
                rest = [hlo.PartitionIdOp().result, *rest]
                func_dialect.ReturnOp(custom_call(target, first, rest, results, attributes))
        return mlir.module_to_bytecode(module)


def register_partitioner(name: str, partition: Callable, spread: Callable) -> None:
    """Registers what takes the place of custom calls to `name` when a program is split.

    `partition` gets the operand shapes, operand shardings, result shape, result sharding and text
    of a call, and returns a module, operand shardings and the result sharding. `spread` gets the
    operand shapes, operand shardings, result shape and text, and returns the sharding of the
    result.
    """
    xla_client.register_custom_call_partitioner(
        name,
        lambda sharding, shape, text: sharding,
        partition,
        spread,
        can_side_effecting_have_replicated_sharding=True,
    )


def lower_module(
    jaxpr: Any,
    name: str,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    donated: Sequence[bool],
    mesh: Any,
    *,
    keep_unused: bool,
    compiler_options: tuple[tuple[str, Any], ...] = (),
    platforms: tuple[str, ...] | None = None,
    parameters: Any = None,
) -> Any:
    """Lowers a closed jaxpr to a StableHLO module with shardings on its inputs and outputs.

    `platforms` and JAX's own `parameters` are those of an export.
    """
    if isinstance(mesh, jax.sharding.AbstractMesh):
        platforms = platforms or (jax.default_backend(),)
    return pxla.lower_sharding_computation(
        jaxpr,
        "pjit",
        name,
        tuple(in_shardings),
        tuple(out_shardings),
        (None,) * len(in_shardings),
        (None,) * len(out_shardings),
        tuple(donated),
        keep_unused=keep_unused,
        context_mesh=mesh,
        compiler_options_kvs=compiler_options,
        lowering_platforms=platforms,
        lowering_parameters=parameters or mlir.LoweringParameters(),
        pgle_profiler=None,
    )


def edited(lowering: Any, edit: Callable[[Any], None]) -> Any:
    """A lowering with a module of its own, after an edit: JAX may share the one that it has."""
    own = copy.copy(lowering)
    module = lowering.stablehlo()
    with module.context:
        own._hlo = ir.Module.parse(mlir.module_to_bytecode(module))
    edit(own._hlo)
    own._executable = None
    return own


def kept_arguments(lowering: Any) -> list[int]:
    """Which arguments of the jaxpr are arguments of the module: unused ones may be left out."""
    return sorted(lowering.compile_args["kept_var_idx"])


def compile_lowering(lowering: Any) -> tuple[Any, Sequence[Any], bool]:
    """Returns the executable, its leading constants on its devices, and if it was compiled now."""
    is_new = not is_compiled(lowering)
    executable = lowering.compile()
    return executable, executable.shard_const_args(lowering.const_args), is_new


def is_compiled(lowering: Any) -> bool:
    """Whether JAX keeps an executable with this lowering: compiling again costs nothing."""
    return lowering._executable is not None


def stored_if_it_runs(lowered: Any) -> Any:
    """A context in which JAX's persistent cache stores no program of devices that are described.

    It cannot read one again: it would warn of that at every start, and compile.
    """
    devices = lowered_devices(lowered) if hasattr(lowered, "_lowering") else ()
    if is_described(next(iter(devices), None)):
        return config.persistent_cache_min_compile_time_secs(math.inf)
    return contextlib.nullcontext()


def lines_in_cache_key() -> Any:
    """A context in which JAX's persistent cache gives no program of another version of the source.

    Else its key leaves lines and names out: a program comes with those that it was stored with.
    """
    return config.compilation_cache_include_metadata_in_key(True)


def may_have_other_lines() -> bool:
    """Whether programs may come from JAX's persistent cache with lines of another version."""
    return (
        config.enable_compilation_cache.value
        and bool(config.compilation_cache_dir.value)
        and not config.compilation_cache_include_metadata_in_key.value
    )


def executable_of(compiled: Any) -> Any:
    """What JAX keeps of a compiled program: one object, however often it is asked for."""
    return compiled._executable


def shardings_of(compiled: Any) -> tuple[list[Any], list[Any]]:
    """How what a program of `jax.jit` takes and gives lies on its devices, in order.

    What it does not use has None. The lists and not the trees that JAX makes of them: a program
    that writes to references gives their values besides what its function returns.
    """
    return [*compiled._input_shardings_flat()], [*compiled._executable._out_shardings]


# XLA reads the variable when it is loaded, where JAX sets it to 1 if there is none. Nothing tells
# which level it has: one that was set and taken back again since is not known here.
_LEVEL = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
_LEVELS = {"DEBUG": 0, "INFO": 0, "WARNING": 1, "ERROR": 2, "CRITICAL": 3}


def silenced() -> str:
    """The first letters of messages that XLA is not to write: W of warnings, E of errors.

    `TF_CPP_MIN_LOG_LEVEL` says so, or `jax_logging_level`.
    """
    own = int(_LEVEL) if _LEVEL.isdigit() else 0
    level = _LEVELS.get(jax.config.values["jax_logging_level"] or "", own)
    return "WE"[: max(0, level - 1)]


@contextlib.contextmanager
def warning_aloud() -> Iterator[None]:
    """XLA writes warnings within, also where they are silenced."""
    unwanted = silenced()
    if unwanted:
        utils.absl_set_min_log_level(1)
    try:
        yield
    finally:
        if unwanted:
            utils.absl_set_min_log_level(1 + len(unwanted))
