"""Traced, Lowered and Compiled: stops on the way from a function to a running program.

Each holds the result of one more step of the same line that an eager call walks:
``pjit(f).trace(*args).lower().compile()(*args)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
from dataclasses import dataclass
import os
from typing import Any

import jax
from jax.experimental.layout import Format
import jax.tree_util as jtu

from spmd import _dispatch, _doors, _jax
from spmd._arguments import Parameters, split_arguments
from spmd._call import PjitCall
from spmd._counts import count
from spmd._doors import opened
from spmd._lower import lower, lower_for_export
from spmd._mesh import described_failure, show_mesh
from spmd._recover import parse_op_sharding
from spmd._resolve import (
    is_equivalent,
    mesh_of,
    place,
    placed_sharding,
    show_sharding,
    trimmed,
)
from spmd.errors import ArgumentError, Failure, RecoveryError, ShardingError, explain, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the stages of one call come from: what all of them have in common."""

    params: Parameters
    positions: tuple[int, ...]
    statics: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    out_names: tuple[str, ...]
    consts: tuple[Any, ...]
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """What stands for the jaxpr of a program that was loaded: the types of its values.

    Attributes:
        in_avals: Per flat input.
        out_avals: Per flat output.
    """

    in_avals: Sequence[Any]
    out_avals: Sequence[Any]


class Stage:
    """Names, trees and avals, which every stage knows; `jaxpr` may be :class:`Types`."""

    __slots__ = ("__weakref__", "_call", "_jaxpr", "_placed", "_signature")

    def __init__(self, jaxpr: Any, call: PjitCall, placed: tuple[Any, ...], sig: Origin):
        self._jaxpr = jaxpr
        self._call = call
        self._placed = placed
        self._signature = sig

    def __repr__(self) -> str:
        return f"<spmd.{type(self).__name__} of `{self._call.name}`>"

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._call.name

    @property
    def mesh(self) -> Any:
        """The mesh that the program is for."""
        mesh = self._call.mesh
        return mesh if mesh is not None else mesh_of(self._placed)

    @property
    def in_tree(self) -> Any:
        """Structure of ``(args, kwargs)``, static arguments left out."""
        return self._signature.in_tree

    @property
    def out_tree(self) -> Any:
        """Structure of the results."""
        return self._signature.out_tree

    @property
    def in_avals(self) -> Any:
        """Shapes and dtypes of the arguments, as a tree ``(args, kwargs)``."""
        skip = len(self._signature.consts)
        return jtu.tree_unflatten(self.in_tree, self._jaxpr.in_avals[skip:])

    @property
    def args_info(self) -> Any:
        """Shape, dtype and donation of each argument, as a tree ``(args, kwargs)``."""
        donated = self._call.donated_invars[len(self._signature.consts) :]
        return _jax.core.args_info(self.in_tree, jtu.tree_leaves(self.in_avals), donated)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Indices of the flat arguments whose buffers the program may reuse."""
        skip = len(self._signature.consts)
        return tuple(i for i, d in enumerate(self._call.donated_invars[skip:]) if d)

    @property
    def out_info(self) -> Any:
        """Shape, dtype and, once compiled, sharding of each result."""
        shardings = self._out_shardings()
        infos = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(self._jaxpr.out_avals, shardings, strict=True)
        ]
        return jtu.tree_unflatten(self.out_tree, infos)

    def _out_shardings(self) -> Sequence[Any]:
        return (None,) * len(self._jaxpr.out_avals)


class Traced(Stage):
    """A function traced to a jaxpr, with the specs of its inputs and outputs resolved."""

    __module__ = "spmd"
    __slots__ = ()

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the function's body."""
        return self._jaxpr

    @property
    def fun_name(self) -> str:
        """Name of the function, as JAX's stages call it."""
        return self.name

    @property
    def out_avals(self) -> Any:
        """Shape and dtype of each result, as JAX's abstract values."""
        return jtu.tree_unflatten(self.out_tree, self._jaxpr.out_avals)

    @property
    def effects(self) -> frozenset[Any]:
        """What the function does beside its results, as JAX knows it."""
        return frozenset(_jax.core.positional_effects(self._jaxpr))

    def lower(
        self,
        *,
        lowering_platforms: Sequence[str] | None = None,
        _private_parameters: Any = None,
    ) -> Any:
        """Lowers to StableHLO with sharding annotations.

        Args:
            lowering_platforms: Platforms to lower for, as ``("tpu",)``, instead of that of the
                devices; such a module is for `jax.export` and the like, and does not compile here.
            _private_parameters: JAX's own, from `jax.export.export`.

        Returns:
            A :class:`Lowered`; a ``jax.stages.Lowered`` for other platforms.

        Raises:
            RuntimeError: There is no mesh, or an argument lives on other devices.
        """
        jaxpr = _jax.transform.plain_jaxpr(self._jaxpr)
        mesh, shardings, _ = place(jaxpr, self._call, self._placed)
        if lowering_platforms is not None:
            lowering = lower_for_export(
                jaxpr, self._call, mesh, shardings, lowering_platforms, _private_parameters
            )
            return Lowered(self, lowering, shardings).jax_stage
        return Lowered(self, lower(jaxpr, self._call, mesh, shardings), shardings)


class Lowered(Stage):
    """A StableHLO module: what the partitioner is given."""

    __module__ = "spmd"
    __slots__ = ("_lowering", "_shardings")

    def __init__(self, traced: Traced, lowering: Any, shardings: tuple[Any, ...]):
        super().__init__(traced._jaxpr, traced._call, traced._placed, traced._signature)
        self._lowering = lowering
        self._shardings = shardings

    @property
    def jax_stage(self) -> jax.stages.Lowered:
        """The same lowering as JAX's own class, for tools that want that one."""
        return jax.stages.Lowered(self._lowering, self.args_info, self.out_tree)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Returns the module as text.

        Args:
            dialect: ``"stablehlo"`` (default) or ``"hlo"``.
            debug_info: Whether to print source locations.

        Raises:
            ValueError: The dialect is unknown.
        """
        _check_dialect(dialect)
        return self.jax_stage.as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Returns the module as an object: an MLIR module, or an XLA computation for ``"hlo"``."""
        _check_dialect(dialect)
        return self.jax_stage.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimate of FLOPs and bytes before partitioning."""
        return self.jax_stage.cost_analysis()

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles for the devices of the mesh.

        Args:
            compiler_options: Options for the compiler, on top of those of `pjit`.

        Raises:
            RuntimeError: The mesh is abstract: there is nothing to compile for.
            OutOfMemoryError: The compiler says that the program does not fit the devices.
        """
        if isinstance(self.mesh, jax.sharding.AbstractMesh):
            refuse(self._call.subject, [described_failure(self.mesh)])
        options = None if compiler_options is None else dict(compiler_options)
        if options is not None or not _jax.lowering.is_compiled(self._lowering):
            count("compiles")
        try:
            with _jax.lowering.stored_if_it_runs(self):
                executable = self._lowering.compile(options)
        except RuntimeError as error:
            if failure := opened("oom_failure")(error, given=show_mesh(self.mesh)):
                raise explain(self._call.subject, [failure]) from error
            raise
        return Compiled(self, self._shardings, self._lowering.const_args, executable)

    def preview(self) -> _doors.Report:
        """Predicts every collective by the passes of Shardy, in a fraction of a compile's time.

        Raises:
            ReportError: This jaxlib lacks the passes.
        """
        return opened("preview")(self)

    def why(self, name: str) -> _doors.Why:
        """Says which annotations the sharding of a value comes from, and by which operations.

        Args:
            name: the path of an argument or output, such as ``batch['x']`` or ``out['loss']``, the
                beginning of a path, or a line such as ``model.py:42``.

        Raises:
            ReportError: Nothing has that name, or this jaxlib lacks the passes of Shardy.
        """
        return opened("why")(self, name)


def _check_dialect(dialect: str | None) -> None:
    if dialect not in (None, "stablehlo", "hlo"):
        failure = Failure(
            what="cannot print this dialect",
            given=f"dialect={dialect!r}",
            expected="'stablehlo' or 'hlo'",
            error=ShardingError,
        )
        raise explain("Lowered", [failure])


class Compiled(Stage):
    """A program for the devices of a mesh; call it with arguments like those it was built for.

    Calls refuse another structure, shape, dtype or sharding: a compiled program has one.
    """

    __module__ = "spmd"
    __slots__ = (
        "_consts",
        "_described",
        "_dispatch",
        "_executable",
        "_hoisted",
        "_lowered",
        "_refs",
        "_shardings",
        "_whole",
    )

    def __init__(
        self,
        stage: Stage,
        shardings: tuple[Any, ...],
        hoisted: Sequence[Any],
        executable: Any,
        whole: Callable[[], Any] | None = None,
    ):
        super().__init__(stage._jaxpr, stage._call, stage._placed, stage._signature)
        self._shardings = shardings
        self._hoisted = hoisted
        self._lowered = stage if isinstance(stage, Lowered) else None  # a file has none
        self._executable = executable
        # One from a file may run without the HLO that only its readers need.
        self._whole = whole or (lambda: executable)
        self._described = described_failure(stage.mesh)
        self._refs = _jax.core.ref_indices(self._jaxpr)
        self._consts = _jax.core.const_args(hoisted, executable)
        self._dispatch = _dispatch.dispatcher(
            None, self.name, self._run, self._signature.params, "spmd.Compiled"
        )

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the program.

        Raises:
            TypeError: Another structure, shape or dtype than it was compiled for.
            ValueError: An argument is committed to another sharding.
        """
        return self._dispatch(*args, **kwargs)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the program: the same as calling the object."""
        return self(*args, **kwargs)

    def _run(self, /, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """Checks the arguments and runs; the C++ dispatcher repeats it for arguments like them."""
        flat = self._flatten(args, kwargs)
        values = (*self._signature.consts, *flat)
        if any(isinstance(x, _jax.core.Tracer) for x in flat):
            raise explain(self._call.subject, [_TRACED_CALL])
        if self._described:
            raise explain(self._call.subject, [self._described])
        self._check(flat)
        _dispatch.check_alive(values, self._call)
        if _dispatch.announce is not None:
            _dispatch.announce(values, self._call, None)
        repeatable = _dispatch.may_repeat(values) and not self._signature.consts
        repeatable = repeatable and self._signature.params.keeps_order(args, kwargs)
        places = [(values[i], self._shardings[i]) for i in self._refs]
        with _dispatch.references(places) if places else contextlib.nullcontext():
            outs = _dispatch.execute(self._executable, self._consts, values, self._call)
        data = None
        if repeatable and _dispatch.results_repeat(outs):
            data = _jax.dispatch.fast_path_data(self._executable, self._consts, self.out_tree, outs)
        return jtu.tree_unflatten(self.out_tree, outs), data, False

    def _flatten(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        subject = self._call.subject
        sig = self._signature
        split = split_arguments(sig.params, args, kwargs, subject)
        flat, tree = jtu.tree_flatten(split.dynamic)
        if split.statics != sig.statics:
            raise explain(subject, [_static_mismatch(sig, split.statics)])
        if tree != self.in_tree:
            failure = Failure(
                what="was compiled for another structure of arguments",
                expected=str(self.in_tree),
                got=str(tree),
                error=ArgumentError,
            )
            raise explain(subject, [failure])
        return flat

    def _check(self, flat: list[Any]) -> None:
        rows = zip(flat, self._taken_arguments(), strict=True)
        failures = [_argument_mismatch(value, *row) for value, row in rows]
        if failures := [f for f in failures if f]:
            raise explain(self._call.subject, failures)

    @property
    def jax_stage(self) -> jax.stages.Compiled:
        """The same program as JAX's own class, for tools that want that one."""
        hoisted = [*self._hoisted]
        return jax.stages.Compiled(self._whole(), hoisted, self.args_info, self.out_tree)

    def as_text(self) -> str:
        """Returns the partitioned and optimized HLO of one device."""
        return self._whole().as_text()

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimate of FLOPs and bytes per device."""
        return self._whole().cost_analysis()

    def memory_analysis(self) -> Any:
        """Returns the compiler's memory statistics, in bytes per device."""
        return self._executable.memory_analysis()

    def report(self) -> _doors.Report:
        """Reports every collective with its line, axes and bytes, the FLOPs, and the memory."""
        return opened("report")(self)

    def _taken_arguments(self) -> Iterable[tuple[str, Any, Any]]:
        """Name, aval and sharding of each argument of a call."""
        skip = len(self._signature.consts)
        names, avals = self._call.arg_names[skip:], self._jaxpr.in_avals[skip:]
        return zip(names, avals, self._shardings[skip:], strict=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file, which :func:`spmd.load` reads without compiling again.

        The file holds the compiled code: whoever loads it runs it. See `docs/bundle.md`.

        Args:
            path: The file to write; there is the old one or all of the new one, never a part.

        Raises:
            ValueError: The program cannot be in a file: it calls into this process, as taps do, or
                something that belongs to it has no written form; all such things are named.
            OSError: The file cannot be written.
        """
        opened("save")(self, path)

    def _moved_arguments(self) -> list[tuple[str, Any, Any, Any]]:
        """Name, aval, given and wanted sharding of each argument that a call would move first."""
        placed = self._placed[len(self._signature.consts) :]
        return [
            (name, aval, given, wanted)
            for (name, aval, wanted), given in zip(self._taken_arguments(), placed, strict=True)
            if given is not None and not is_equivalent(given, wanted, aval.ndim)
        ]

    def runtime_executable(self) -> Any:
        """Returns the runtime's own executable."""
        return self._whole().runtime_executable()

    @property
    def in_shardings(self) -> Any:
        """Sharding of each argument, as a tree ``(args, kwargs)``."""
        return jtu.tree_unflatten(self.in_tree, self._shardings[len(self._signature.consts) :])

    @property
    def out_shardings(self) -> Any:
        """Sharding of each result."""
        return jtu.tree_unflatten(self.out_tree, self._out_shardings())

    @property
    def in_specs(self) -> Any:
        """PartitionSpec of each argument, recovered from the executable, as ``(args, kwargs)``.

        An argument that the program does not use is not part of it: its spec is None.
        """
        protos = self._executable.runtime_executable().get_parameter_shardings()
        kept = [*_jax.files.kept_inputs(self._executable)]
        specs = _specs(protos, self.mesh, len(kept))
        return self._of_arguments(dict(zip(kept, specs, strict=True)), None)

    @property
    def out_specs(self) -> Any:
        """PartitionSpec of each result, recovered from the executable."""
        protos = self._executable.runtime_executable().get_output_shardings()
        count_all = len(self._jaxpr.out_avals)
        return jtu.tree_unflatten(self.out_tree, _specs(protos, self.mesh, count_all))

    def _out_shardings(self) -> Sequence[Any]:
        return self._executable._out_shardings

    @property
    def input_shardings(self) -> Any:
        """Sharding of each argument as JAX's stage says it: None of one that is not used."""
        kept = _jax.files.kept_inputs(self._executable)
        return self._of_arguments({i: sharding for i, (sharding, _) in kept.items()}, None)

    @property
    def output_shardings(self) -> Any:
        """Sharding of each result, by the name that it has in JAX's stage."""
        return self.out_shardings

    @property
    def input_formats(self) -> Any:
        """Layout and sharding of each argument; both are None of one that is not used."""
        kept = _jax.files.kept_inputs(self._executable)
        formats = {i: Format(layout, sharding) for i, (sharding, layout) in kept.items()}
        return self._of_arguments(formats, Format(None, None))

    @property
    def output_formats(self) -> Any:
        """Layout and sharding of each result."""
        pairs = zip(_jax.files.output_layouts(self._executable), self._out_shardings(), strict=True)
        return jtu.tree_unflatten(self.out_tree, [Format(*pair) for pair in pairs])

    def _of_arguments(self, known: Mapping[int, Any], unused: Any) -> Any:
        """A tree ``(args, kwargs)`` of what is known of the inputs, which begin with constants."""
        skip = len(self._hoisted) + len(self._signature.consts)
        found = [known.get(skip + i, unused) for i in range(self.in_tree.num_leaves)]
        return jtu.tree_unflatten(self.in_tree, found)


def _specs(protos: Any, mesh: Any, count_all: int) -> list[Any]:
    """Specs of an executable's values; on one device the compiler reports no shardings."""
    if protos is None:
        return [jax.sharding.PartitionSpec()] * count_all
    return [_spec_or_sharding(p, mesh) for p in protos]


def _spec_or_sharding(proto: Any, mesh: Any) -> Any:
    try:
        parsed: Any = parse_op_sharding(proto, mesh)
    except RecoveryError:
        return proto  # no PartitionSpec says it: what the compiler said
    return trimmed(parsed.to_partition_spec())  # as in JAX's own shardings


_TRACED_CALL = Failure(
    what="was compiled ahead of time and cannot be transformed",
    expected="arrays",
    got="values that are being traced by jit, grad or vmap",
    fix="call the pjit function instead of its compiled form",
    error=ArgumentError,
)


def _static_mismatch(sig: Origin, got: Sequence[Any]) -> Failure:
    def show(statics: Sequence[Any]) -> str:
        shown = (f"{sig.params.call_name(where)}={s.value!r}" for where, s in statics)
        return ", ".join(shown) or "none"

    return Failure(
        what="was compiled for other static arguments",
        expected=show(sig.statics),
        got=show(got),
        fix="compile it again for these values",
        error=ArgumentError,
    )


def _argument_mismatch(value: Any, name: str, aval: Any, sharding: Any) -> Failure | None:
    if (have := _jax.core.aval_of(value)) is None:
        return Failure(
            what=f"cannot take argument {name}: it is no array",
            got=type(value).__name__,
            expected=_jax.core.short_aval(aval),
            error=ArgumentError,
        )
    if (have.shape, have.dtype) != (aval.shape, aval.dtype):
        return Failure(
            what=f"was compiled for another argument {name}",
            expected=_jax.core.short_aval(aval),
            got=_jax.core.short_aval(have),
            error=ArgumentError,
        )
    placed = placed_sharding(value)
    if placed is None or is_equivalent(placed, sharding, aval.ndim):
        return None
    return Failure(
        what=f"was compiled for another sharding of argument {name}",
        expected=show_sharding(sharding),
        got=show_sharding(placed),
        fix="jax.device_put it to the expected sharding, or call the pjit function, which does",
    )
