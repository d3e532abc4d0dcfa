"""spmd.plan: from a function and hardware to a plan that a compiler has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import itertools
import time
from typing import Any, cast

import jax

import spmd
from spmd import _jax, stages
from spmd._api import PjitFunction
from spmd._arguments import join_arguments, split_arguments
from spmd._mesh import current_mesh
from spmd._options import not_callable
from spmd.errors import ArgumentError, Failure, did_you_mean, explain
from spmd.inspection.compile.program import call_failure
from spmd.inspection.records.later import Later, known
from spmd.inspection.records.names import is_below
from spmd.inspection.records.plan import Inside, Plan
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.show.progress import planning, quiet, showing
from spmd.planner import asked, cache
from spmd.planner.asked import Hardware
from spmd.planner.choose import choose
from spmd.planner.code.inside import call_of, called, inside_of
from spmd.planner.plans import fingerprint
from spmd.planner.program.layout import Fixed, fixed_at
from spmd.planner.program.structure import Graph
from spmd.planner.recorded import nothing_fits, recorded
from spmd.planner.search.descent import Rules
from spmd.planner.tiers.choice import Progress
from spmd.planner.verify import Program, entries_of_parts, open_avals, open_leaves, structs
from spmd.planner.written import (
    given_specs,
    has_auto,
    has_specs,
    lowered_as_written,
    without_shardings,
    written_mesh,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of a plan, beside the hardware; as `plan` takes it."""

    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    never: Sequence[Any] = ()
    classes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    top: int = 3
    timeout: float | None = None
    seed: int = 0
    seeds: bool = True
    cache: bool = True
    progress: Callable[[Progress], None] | bool | None = None


def plan(
    f: Any,
    /,
    *args: Any,
    topology: Any = None,
    mesh: Any = None,
    axes: str | Sequence[str] = ("data", "model"),
    memory: int | float | str | None = None,
    chip: Any = None,
    fixed: Mapping[str, Any] | None = None,
    never: Sequence[Any] = (),
    classes: Mapping[str, Any] | None = None,
    top: int = 3,
    timeout: float | None = None,
    seed: int = 0,
    seeds: bool = True,
    cache: bool = True,
    progress: Callable[[Progress], None] | bool | None = None,
    **options: Any,
) -> Plan:
    """Chooses mesh, shardings and constraints for a function, and has the compiler look at them.

    The program is lowered once, and thousands of layouts are compared by a model of their time and
    memory. Of the best ones Shardy tells the exchanges, and the compiler of the hardware the rest:
    the answer is the fastest of those that were compiled and keep to the memory. Nothing runs.

    Args:
        f: a function: bare, of `spmd.pjit`, or of `jax.jit`. Its options are taken over, and its
            shardings are compared with what is found.
        *args: what it is called with: arrays or `jax.ShapeDtypeStruct`s, in any pytrees.
        topology: the name of described hardware, such as ``"v5e:4x4"``: all meshes over `axes` are
            compared. Or a mesh.
        mesh: a mesh, or sizes by axis name, to plan for; by default that of `f`, else the active
            one, else that of the shardings of a `jax.jit` or of the arguments. With the name of a
            topology, the shape of the mesh of its chips: so CPU devices get a plan that is compiled
            for the chips that they stand in for.
        axes: names of mesh axes, where a topology leaves the sizes to the planner.
        memory: of one device, such as ``"14GB"``; by default what the hardware has.
        chip: whose figures to use, as `report` takes it; by default those of the devices, and of a
            v5e where CPUs stand in.
        fixed: specs by path, such as ``{"batch": P("data"), "state['step']": P()}``. A path stands
            for all below it; the longer one counts, and each before what `f` says beside AUTO. AUTO
            fixes nothing, and a `NamedSharding` is read as its spec.
        never: pairs of a dimension and a mesh axis that must not split it: ``("tokens:1",
            "data")``, or with a name from `classes`.
        classes: names of dimensions, such as ``{"vocab": "state['embed']:0"}``. All that operations
            tie to it is one class; `print` uses the name.
        top: how many layouts are compiled, beside the best experts; for each that is over the
            memory as compiled another one, up to as many more. Above 1 the best of them is
            compiled with activations split by their width as well, and in up to five other ways,
            where there is a compiler for the hardware. So are up to two at most 3 % slower, of
            another mesh or with large arguments elsewhere; and where none of them fits, the
            smallest ones of as many meshes.
        timeout: seconds after which the best so far is the answer, compiled or not. As long again
            is looked for the fewest constraints, when `Plan.code` is first called.
        seed: of ties; one seed gives one answer.
        seeds: whether experts (data parallel, FSDP, Megatron, ...) and the specs of `f` are
            compared too, so that the answer is never worse.
        cache: whether plans with their code, and what compilers say of layouts, are kept on disk
            and found again by programs whose lines are the same.
        progress: called with a :class:`Progress` now and then. Or whether the standard error shows
            it: True for lines, False for nothing; None for a line that moves in a terminal.
        **options: of `pjit`: ``donate_argnums``, ``static_argnums`` and the like.

    Returns:
        A :class:`Plan`: ``print`` it, run it with ``pjit(f, plan=plan)``, paste ``plan.code()``.

    Raises:
        PlanMemoryError: Nothing fits the memory.
        PlanError: There is nothing to split, or the function changes its arguments in place.
        ArgumentError: A path, a dimension or an option is not known.
        MeshError: There is no mesh and no topology, no such topology, or a sharding in `fixed` is
            of another mesh.
        OptionError: A number or a size cannot be read.

    Example:
        >>> plan = spmd.plan(step, state, batch, topology="v5e:4x4", donate_argnums=0)
        >>> print(plan.code())
    """
    wish = Wish(
        fixed={} if fixed is None else fixed,
        never=() if never is None else never,
        classes={} if classes is None else classes,
        top=top,
        timeout=timeout,
        seed=seed,
        seeds=seeds,
        cache=cache,
        progress=progress,
    )
    given = {"topology": topology, "mesh": mesh, "axes": axes, "memory": memory, "chip": chip}
    return plan_function(f, args, {}, wish, options, **given)


def plan_function(
    f: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wish: Wish | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    topology: Any = None,
    mesh: Any = None,
    axes: Any = ("data", "model"),
    memory: Any = None,
    chip: Any = None,
) -> Plan:
    """What `plan` gives, of a function that takes keyword arguments as well.

    Args:
        f: the function, as `plan` takes it.
        args: what it is called with.
        kwargs: likewise, by name.
        wish: what is asked, beside the hardware.
        options: of `pjit`.
        topology: likewise and below, as `plan` takes it.
        mesh: of the plan.
        axes: of meshes.
        memory: of a device.
        chip: whose figures to use.
    """
    wish, options = wish or Wish(), options or {}
    function, own = _function_of(f)
    name = _name_of(function)
    subject = f"plan of `{name}`"
    if not callable(function):
        raise explain(subject, [not_callable(function, "spmd.plan(f, *args, topology=...)")])
    asked.check_options(subject, top=wish.top, timeout=wish.timeout, seed=wish.seed)
    asked.check_kinds(subject, axes=axes, never=wish.never, classes=wish.classes, fixed=wish.fixed)
    _check_names(options, subject)
    if failure := call_failure(function, args, kwargs, "plan"):
        raise explain(subject, [failure])
    if mesh is None and topology is None:
        mesh = _mesh_of(f, (args, kwargs))
    f = without_shardings(f, subject)
    function = _function_of(f)[0]
    on = asked.hardware(topology, mesh, axes, memory, chip, subject=subject)
    options = _merged(own, options)
    args, kwargs = _structs(function, options, args, kwargs, subject)
    given = given_specs(f, args, kwargs, on.meshes) if has_auto(f) else {}
    paths = [*map(str, wish.fixed)]  # what is said now counts, for all that is below a path
    given = {n: spec for n, spec in given.items() if not any(is_below(n, path) for path in paths)}
    wish = dataclasses.replace(
        wish, fixed={**given, **wish.fixed}, never=tuple(wish.never), seed=int(wish.seed)
    )
    program = Program(
        function=function, args=args, kwargs=kwargs, options=options, called=called(function)
    )
    written = []
    if wish.seeds and has_specs(f):
        written += lowered_as_written(f, args, kwargs, on.meshes, program.passed_over)
    return plan_program(program, on, wish, name=name, subject=subject, written=written)


def _structs(
    function: Any,
    options: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    subject: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as shapes, but for those that are static."""
    params = cast(PjitFunction, spmd.pjit(function, **options))._line.options.params
    split = split_arguments(params, tuple(args), kwargs, subject)
    found, by_name = join_arguments(split.positions, split.statics, structs(split.dynamic))
    return tuple(found), by_name


_VARIADIC = ("f", "args", "options")
_OPTIONS = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
    *("keep_unused", "inline", "compiler_options"),
)


def _check_names(options: Mapping[str, Any], subject: str) -> None:
    known = [*(n for n in inspect.signature(plan).parameters if n not in _VARIADIC), *_OPTIONS]
    failures = [
        Failure(
            what=f"has no option {name!r}{did_you_mean(name, known)}",
            expected=f"an option of plan, or one of {', '.join(_OPTIONS)}",
            fix="pass arguments of the function by position",
            error=ArgumentError,
        )
        for name in options
        if name not in _OPTIONS
    ]
    if failures:
        raise explain(subject, failures)


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Options, of which those that are given count: by number, by name, or by both."""
    what = {name.partition("_")[0] for name in given if name.endswith(("_argnums", "_argnames"))}
    return {k: v for k, v in own.items() if k.partition("_")[0] not in what} | {**given}


def _function_of(f: Any) -> tuple[Any, dict[str, Any]]:
    """The function that `pjit` gets, and what is known of its options."""
    if not isinstance(f, PjitFunction):
        return f, _jax.dispatch.options_of_jit(f)
    options = f._line.options
    return f.__wrapped__, {
        "static_argnums": options.params.static_nums,
        "static_argnames": options.params.static_names,
        "donate_argnums": options.params.donate_nums,
        "donate_argnames": options.params.donate_names,
        "keep_unused": options.keep_unused,
        "compiler_options": dict(options.compiler_options),
    }


def _name_of(function: Any) -> str:
    """Of a function, of that which a partial one calls, or of the class of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _mesh_of(f: Any, args: Sequence[Any]) -> Any:
    """The mesh of the function; without an active one, that which shardings name."""
    own = f._line.options.mesh if isinstance(f, PjitFunction) else None
    return written_mesh(f, args) if own is None and current_mesh() is None else own


def versions() -> dict[str, str]:
    """What a plan depends on."""
    jaxlib = _jax.versions.JAXLIB_VERSION
    return {"jax": jax.__version__, "jaxlib": jaxlib, "spmd": spmd.__version__}


def plan_program(
    program: Program,
    on: Hardware,
    wish: Wish,
    *,
    name: str,
    subject: str,
    written: Sequence[stages.Lowered] = (),
) -> Plan:
    """The plan of a program, from the disk or from a search."""
    on = dataclasses.replace(on, meshes=_from_first(program, on.meshes))
    traced = program.traced(on.meshes[0])
    ins, outs = open_leaves(traced)
    leaves = [*ins, *outs]
    names = [one.name for one in leaves]
    if not any(one.shape for one in leaves):
        raise explain(subject, [asked.nothing_to_split(names)])
    if changed := traced._signature.changed:
        raise explain(subject, [asked.changes_in_place(changed)])
    avals = open_avals(traced)
    specs, meshes = asked.fixed_specs(wish.fixed, leaves, avals, on.meshes, subject)
    for i in specs.keys() & range(len(ins)):
        program.fixed[i] = entries_of_parts(specs[i].partitions, avals[i].ndim)
    meshes = _from_first(program, meshes)
    named = {axis for spec in specs.values() for axis in spec.axes}
    named |= {axis for _, axis in asked.pairs_in(wish.never, subject)}
    named |= program.named_axes(meshes)
    on = dataclasses.replace(on, meshes=asked.different(meshes, named))
    lowered = program.lowered(meshes[0])
    module = module_of(lowered, subject=subject)
    key = ""  # of nothing that is kept
    if wish.cache:
        key = cache.key_of((
            [(one.as_text(), one._call.compiler_options) for one in (lowered, *written)],
            cache.places_in(module), call_of(program, meshes[0]), names,
            _identity(on), _identity_of_wish(wish),
        ))  # fmt: skip
        if kept := cache.find(key):
            with _telling(wish.progress, subject) as tell:
                tell(Progress(kept.tried, kept.chosen.predicted, "", kept=True))
            return _coded(kept, program, on, wish, key)
    graph = program.graph(meshes[0])
    labels = asked.class_names(graph, wish.classes, subject)
    axes = [*dict.fromkeys(axis for mesh in meshes for axis in mesh.shape)]
    keeps = _fixed(specs, graph, len(ins), program.kept(meshes[0]))
    never = asked.never_pairs(wish.never, graph, labels, axes, subject)
    asked.check_never(never, keeps, graph, subject)
    rules = Rules(
        budget=on.budget,
        never=never,
        fixed=keeps,
        deadline=None if wish.timeout is None else time.monotonic() + wish.timeout,
    )
    options = {"top": wish.top, "seeds": wish.seeds, "seed": wish.seed, "cached": wish.cache}
    with _telling(wish.progress, subject) as tell:
        found = choose(
            program, on.meshes, on.chip, rules=rules, written=written, tell=tell, **options
        )
    if not found.choices:
        raise explain(subject, [asked.no_links(on.meshes[0])])
    if refused := found.refused:
        raise explain(subject, [asked.no_program(refused)])
    plan = recorded(
        found,
        on,
        (ins, outs),
        fixed={names[i] for i in specs},
        keeps=keeps,
        labels=labels,
        source=program,
        name=name,
        versions=versions(),
        program=fingerprint(module),
        passed_over=dict(program.passed_over),
    )
    if not plan.chosen.fits(on.budget):
        raise explain(subject, [nothing_fits(plan, on, found.choices, keeps)])
    if key and plan.complete:
        cache.keep(key, plan)
    return _coded(plan, program, on, wish, key)


def _from_first(program: Program, meshes: Sequence[Any]) -> tuple[Any, ...]:
    """The meshes from the first one on that the function can be traced for; all, if there is none.

    What it raises is then that of the first mesh.
    """
    found = itertools.dropwhile(lambda mesh: len(meshes) > 1 and not program.is_for(mesh), meshes)
    return tuple(found) or tuple(meshes)


def _coded(plan: Plan, program: Program, on: Hardware, wish: Wish, key: str) -> Plan:
    """The plan, whose constraints in the user's source are worked out when they are asked for.

    They are kept with it then, but for those that a time limit may have ended.
    """
    if plan.inside is not None:
        return plan
    mesh = next(mesh for mesh in on.meshes if dict(mesh.shape) == dict(plan.axes))

    def work_out() -> Inside:
        with _telling_code(wish.progress, plan.name) as tell:
            found = inside_of(plan, program, mesh, timeout=wish.timeout, tell=tell)
        if key and plan.complete and wish.timeout is None:
            cache.keep(key, dataclasses.replace(plan, inside=known(found)))
        return found

    return dataclasses.replace(plan, inside=Later(work_out))


def _fixed(specs: Mapping[int, Any], graph: Graph, arguments: int, kept: Sequence[int]) -> Fixed:
    """Places of arguments and results that are fixed, by their tensors."""
    at = fixed_at(graph, arguments, kept)
    places = {at[i]: asked.places_of(spec) for i, spec in specs.items() if i in at}
    return Fixed.of(places)


def _identity(on: Hardware) -> tuple[Any, ...]:
    devices = [
        [(one.id, one.platform, one.device_kind) for one in mesh.devices.flat] for mesh in on.meshes
    ]
    return (on.topology, [dict(mesh.shape) for mesh in on.meshes], devices, on.chip, on.budget)


def _identity_of_wish(wish: Wish) -> tuple[Any, ...]:
    fixed = sorted((key, str(spec)) for key, spec in wish.fixed.items())
    return (fixed, [*map(str, wish.never)], sorted(map(str, wish.classes.items())),
            wish.top, wish.seed, wish.seeds)  # fmt: skip


@contextlib.contextmanager
def _telling(wish: Any, subject: str) -> Iterator[Callable[[Progress], Any]]:
    if callable(wish):
        yield wish
        return
    with quiet() if wish is False else planning(subject, lines=bool(wish)) as tell:
        yield tell


def _telling_code(wish: Any, name: str) -> contextlib.AbstractContextManager[Callable[[str], Any]]:
    """Who takes the progress of a search by a function is told nothing of the code."""
    if callable(wish) or wish is False:
        return quiet()
    return showing(f"working out the code of `{name}`", lines=bool(wish))
