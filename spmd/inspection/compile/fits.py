"""Whether a program fits the memory of its devices, and the largest size that does.

The compiler plans all memory of a program ahead, so nothing has to run: what it planned, or its
refusal, is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.tree_util as jtu

from spmd import _api, _jax, _mesh
from spmd._arguments import argument_names, parse_parameters
from spmd._resolve import placed_sharding
from spmd.errors import ArgumentError, Failure, OptionError, did_you_mean, explain
from spmd.inspection.compile import program
from spmd.inspection.compile.carrying import carried, mesh_of_arguments
from spmd.inspection.compile.search import IndivisibleSizeError, search
from spmd.inspection.compile.timed import Asked, asked, time_of_program, with_model_flops
from spmd.inspection.compile.topology import given_mesh, limit_of, topology as describe
from spmd.inspection.hlo.calls import visits
from spmd.inspection.hlo.oom import OutOfMemory, out_of_memory
from spmd.inspection.hlo.text import parse_modules
from spmd.inspection.records.fit import Fit, Trial, show_vary, size_verdict_of, verdict_of
from spmd.inspection.records.names import is_below
from spmd.inspection.records.sizes import parse_bytes
from spmd.inspection.records.time import Time
from spmd.inspection.show.progress import quiet, showing


def fits(
    f: Any,
    /,
    *specs: Any,
    topology: Any = None,
    mesh: Any = None,
    budget: int | float | str | None = None,
    vary: Any = None,
    max_compiles: int = 24,
    tolerance: float = 0.0,
    progress: Callable[[int, Fit], None] | bool | None = None,
    chip: Any = None,
    model_flops: float | None = None,
    **kwargs: Any,
) -> Fit:
    """Says whether a function fits the memory of its devices, by how much, or up to which size.

    Nothing is run and nothing is allocated. What a program needs on each device is what its
    compiler planned: arguments, results that do not lie in donated arguments, temporaries and, on
    TPU, its code. A refusal of the TPU compiler is an answer, not an exception; any other error
    passes through.

    With `vary`, the largest size is found over compiles: sizes double until one does not fit, then
    the interval is halved, or cut where a straight line through what is known says. This takes for
    granted that every size below one that fits does, too. Sizes go in the steps that the shardings
    of the arguments and results allow.

    Args:
        f: a function of `spmd.pjit` or `jax.jit`; without `vary`, also a stage of one.
        *specs: what `f` is called with: arrays or `jax.ShapeDtypeStruct`s, in any pytrees. Those
            that lie on other devices are split over the axes of the same names.
        topology: the name of described hardware, such as ``"v5e:4x4"``, or a mesh.
        mesh: sizes by axis name, or a mesh. By default the axes are those of the current mesh, else
            of the arguments' own, of which the first grows or shrinks to the size of the topology.
        budget: memory of one device, such as ``"16GB"``; by default what the hardware has.
        vary: an argument's path and a dimension of it, ``("batch['x']", 0)``, or several such
            pairs that all get the same size.
        max_compiles: no more sizes are tried.
        tolerance: how far below the largest size the search may stop, as a part of the size: with
            0.01 the next one that is known not to fit is at most 1 % larger. Most compiles of an
            exact search are spent on the last percent.
        progress: called with each size and its answer. Or whether the standard error shows what is
            tried: True for a line each time, False for nothing; None for one that moves in a
            terminal, and nothing elsewhere.
        chip: whose figures the time of a call is to use, as `report` takes it.
        model_flops: of one call on all devices, for the MFU, as `report` takes it; not with `vary`,
            since each size has its own.
        **kwargs: keyword arguments of the call.

    Returns:
        The answer; ``print`` shows it with the largest arrays.

    Raises:
        ValueError: the budget is missing or unreadable, or `vary` names nothing that can vary.
        TypeError: `f` is nothing that can be compiled.
        RuntimeError: the topology or mesh does not exist or does not fit the function.

    Example:
        fit = spmd.fits(step, state, batch, topology="v5e:4x4", vary=("batch['x']", 0))
        print(fit.largest)
    """
    f, given, named = program.unbound(program.stage_of(f), specs, kwargs)
    subject = f"fits of `{_name(f)}`"
    on = _mesh_for(topology, mesh, (given, named), subject)
    question = _Question(
        f=f,
        mesh=on,
        budget=_read_budget(budget, subject),
        subject=subject,
        name=_name(f),
        wish=asked(chip, model_flops, subject=subject),
    )
    if vary is not None and model_flops is not None:
        failure = Failure(
            what="has no use for model_flops= where sizes vary: each has its own",
            given=f"model_flops={model_flops!r}, vary={vary!r}"[:200],
            fix="fits(f, *args, model_flops=...) at the size that was found",
            error=ArgumentError,
        )
        raise explain(subject, [failure])
    if on is not None and not isinstance(f, program.STAGES):
        question.limit(on.devices.flat[0])  # no compile can answer without one
    if vary is None:
        return question.judge(question.lower(given, named))
    options = {"max_trials": max_compiles, "tolerance": tolerance}
    is_quiet = callable(progress) or progress is False
    with quiet() if is_quiet else showing(subject, lines=bool(progress)) as say:
        seen = progress if callable(progress) else lambda size, fit: None
        return _largest(question, given, named, vary, options, seen, say)


# The question


def _name(f: Any) -> str:
    name = getattr(f, "name", None) or getattr(f, "__name__", None)
    if isinstance(f, (jax.stages.Lowered, jax.stages.Compiled)):
        name = "the program"
    return str(name or type(f).__name__)


def _read_budget(budget: Any, subject: str) -> int | None:
    try:
        return None if budget is None else parse_bytes(budget)
    except ValueError as e:
        failure = Failure(what="cannot read the budget", got=str(e), error=OptionError)
        raise explain(subject, [failure]) from None


def _mesh_for(topology: Any, mesh: Any, arguments: Any, subject: str) -> Any:
    """The mesh to compile for, or None for that of the function."""
    if isinstance(topology, str):
        return _described(topology, mesh, arguments)
    return given_mesh(topology, mesh, subject)


def _described(name: str, mesh: Any, arguments: Any) -> Any:
    if isinstance(mesh, Mapping):
        return describe(name, mesh)
    found, current = describe(name), mesh if mesh is not None else _mesh.current_mesh()
    current = mesh_of_arguments(arguments) if current is None else current
    if current is None:
        return found
    first, *others = current.shape.items()
    axes = {first[0]: found.size // math.prod(size for _, size in others), **dict(others)}
    return describe(name, axes) if math.prod(axes.values()) == found.size else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What is asked, up to the arguments.

    The mesh is None for that of the function, and the budget, in bytes, for what the devices have.
    `wish` says which chip the time is for.
    """

    f: Any
    mesh: Any
    budget: int | None
    subject: str
    name: str
    wish: Asked

    def lower(self, specs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Everything up to the compile."""
        specs, kwargs = carried(self.f, specs, kwargs, self.mesh, subject=self.subject)
        # Without another mesh arrays stay: not all that lowers takes their shapes.
        if self.mesh is not None:
            specs, kwargs = jtu.tree_map(_shape, (specs, kwargs))
        with program.entered(self.mesh):
            return program.lower(self.f, specs, kwargs, subject=self.subject, verb="fits")

    def judge(self, lowered: Any) -> Fit:
        """Compiles what was lowered, and says whether it fits."""
        stored = _jax.lowering.stored_if_it_runs(lowered)
        with program.entered(self.mesh), _jax.lowering.lines_in_cache_key(), stored:
            try:
                compiled = lowered.compile() if hasattr(lowered, "compile") else lowered
            except Exception as e:
                if (verdict := out_of_memory(e)) is None:
                    raise
            else:
                return self._planned(compiled, lowered)
        return self._refused(lowered, verdict)

    def limit(self, device: Any) -> int:
        """Bytes that the program may take on a device; an error where that is not known."""
        if self.budget is not None:
            return self.budget
        known = limit_of(device)
        if known is None:
            failure = Failure(
                what="needs a budget",
                expected="the memory of one device, which is not known",
                got=f"devices of kind {device.device_kind!r}",
                fix="budget='16GB', or topology='v5e:4x4', whose memory is known",
                error=OptionError,
            )
            raise explain(self.subject, [failure])
        return known

    def _planned(self, compiled: Any, lowered: Any) -> Fit:
        mesh, devices = program.mesh_of(compiled, self.mesh), program.devices_of(compiled)
        modules = parse_modules(program.text_of(compiled))
        memory = program.memory_plan(compiled, modules)
        if memory is None:
            failure = Failure(
                what="has no answer: the compiler tells nothing about memory",
                got=f"devices of kind {devices[0].device_kind!r}",
                error=OptionError,
            )
            raise explain(self.subject, [failure])
        budget, needed = self.limit(devices[0]), memory.peak
        plan = {
            "needed": needed,
            "memory": memory,
            "buffers": memory.buffers,
            "time": self._time(modules, mesh, devices, program.lowered_of(lowered)),
        }
        return self._fit(mesh, devices, fits=needed <= budget, budget=budget, **plan)

    def _time(
        self, modules: Sequence[Any], mesh: Any, devices: Sequence[Any], lowered: Any
    ) -> Time | None:
        pairs = [(module, visits(module)) for module in modules[-1:]]
        time = time_of_program(pairs, {} if mesh is None else mesh.shape, devices, self.wish)
        return time and with_model_flops(time, lowered, self.wish, devices)

    def _refused(self, lowered: Any, verdict: OutOfMemory) -> Fit:
        mesh = self.mesh if self.mesh is not None else getattr(lowered, "mesh", None)
        devices = [] if mesh is None else [*mesh.devices.flat]
        known = [] if verdict.available is None else [verdict.available]
        if self.budget is not None or not known:
            known.append(self.limit(devices[0]) if devices else self.budget or 0)
        plan = {"needed": verdict.needed, "memory": None, "buffers": verdict.buffers}
        return self._fit(mesh, devices, fits=False, budget=min(known), **plan)

    def _fit(self, mesh: Any, devices: Sequence[Any], **answer: Any) -> Fit:
        device = devices[0] if devices else None
        fit = Fit(
            **answer,
            verdict="",
            name=self.name,
            mesh={} if mesh is None else dict(mesh.shape),
            num_devices=len(devices),
            device_kind=device.device_kind if device else "",
            backend=device.platform if device else "tpu",
            stand_in=device is not None and device.platform == "cpu",
        )
        return dataclasses.replace(fit, verdict=verdict_of(fit))


def _shape(leaf: Any) -> Any:
    """An array as its shape, on its devices."""
    return program.shape_of(leaf, placed_sharding(leaf))


# The largest size


def _largest(
    question: _Question,
    specs: Sequence[Any],
    kwargs: Mapping[str, Any],
    vary: Any,
    options: Mapping[str, Any],
    progress: Callable[[int, Fit], None],
    say: Callable[[str], None],
) -> Fit:
    if failure := _bad_options(question.f, **options):
        raise explain(question.subject, [failure])
    call = _Call.of(question, specs, kwargs, vary)
    answers: dict[int, Fit] = {}

    def trial(size: int) -> Trial:
        say(f"compiling size {size:,}, after {len(answers)} others")
        fit = call.answer(size, first=not answers)
        answers[size] = fit
        progress(size, fit)
        return Trial(size, fit.needed, fit.fits)

    def budget() -> int | None:
        return next((fit.budget for fit in answers.values()), None)

    found = search(trial, start=call.size, budget=budget, **options)
    fit = dataclasses.replace(
        answers[found.largest or min(answers)],
        vary=call.vary,
        largest=found.largest,
        too_large=found.too_large,
        step=found.step,
        tried=found.tried,
    )
    return dataclasses.replace(fit, verdict=size_verdict_of(fit))


_DIVISIBLE = re.compile(r"divisible by (\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call whose arguments vary in size.

    Attributes:
        leaves: of the arguments.
        tree: of ``(args, kwargs)``.
        vary: paths and dimensions.
        places: the same, with the number of the leaf for its path.
    """

    question: _Question
    leaves: tuple[Any, ...]
    tree: Any
    vary: tuple[tuple[str, int], ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, question: _Question, specs: Sequence[Any], kwargs: Mapping[str, Any], vary: Any
    ) -> _Call:
        """Finds the leaves that vary; an error says what `vary` names and is not there."""
        pairs = _pairs(vary, question.subject)
        fun = getattr(question.f, "__wrapped__", question.f)
        params = parse_parameters(fun, question.subject, (), (), (), ())
        args, named = params.bind(tuple(specs), kwargs)
        leaves, tree = jtu.tree_flatten((args, named))
        names = argument_names(params, range(len(args)), tree)
        failures, places = [], []
        for path, dim in pairs:
            found = _place(path, dim, names, leaves)
            (failures if isinstance(found, Failure) else places).append(found)
        if failures:
            raise explain(question.subject, failures)
        shown = tuple((names[i], dim) for i, dim in places)
        return cls(
            question=question, leaves=tuple(leaves), tree=tree, vary=shown, places=tuple(places)
        )

    @property
    def size(self) -> int:
        """The size that the first of the arguments has now."""
        index, dim = self.places[0]
        return self.leaves[index].shape[dim]

    def answer(self, size: int, *, first: bool) -> Fit:
        """Compiles for one size, with a copy of the function whose programs go with it.

        An error is an `IndivisibleSizeError` where a sharding or the function takes multiples only.
        Where no size was lowered before (`first`), it need not be of the size.
        """
        question, lowered = dataclasses.replace(self.question, f=_copied(self.question.f)), None
        try:
            lowered = question.lower(*self._resized(size))
            return question.judge(lowered)
        except Exception as e:
            factor = self._factor(e, size, first=first) if lowered is None else None
            if factor is not None:
                raise IndivisibleSizeError(factor) from None
            e.add_note(f"This is from spmd.fits, which tried {size:,} for {show_vary(self.vary)}.")
            raise

    def _resized(self, size: int) -> tuple[Any, Any]:
        leaves = list(self.leaves)
        for index, dim in self.places:
            leaf = _shape(leaves[index])
            shape = (*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])
            leaves[index] = leaf.update(shape=shape)
        return jtu.tree_unflatten(self.tree, leaves)

    def _factor(self, error: Exception, size: int, *, first: bool) -> int | None:
        """What sizes should be a multiple of, where that may be what is wrong with this one."""
        said = [int(n) for n in _DIVISIBLE.findall(str(error))]
        if factor := next((n for n in said if n and size % n), None):
            return factor
        # A function may reshape its arguments: it took the size that it was given, so it will
        # take multiples of a divisor of that one.
        if first or not self.size or size % self.size == 0:
            return None
        step = math.gcd(size, self.size)
        rest = self.size // step
        return step * next(p for p in range(2, rest + 1) if rest % p == 0)


def _copied(f: Any) -> Any:
    """A pjit function with caches of its own, so that what is compiled for it is not kept."""
    if not isinstance(f, _api.PjitFunction):
        return f
    fun = f._line.fun

    def copy(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return _api.pjit_function(functools.wraps(fun)(copy), f._line.options)


def _pairs(vary: Any, subject: str) -> list[tuple[str, int]]:
    pairs = [vary] if _is_pair(vary) else vary
    if isinstance(pairs, (tuple, list)) and pairs and all(map(_is_pair, pairs)):
        return [(path, dim) for path, dim in pairs]
    failure = Failure(
        what="cannot read vary",
        given=f"vary={vary!r}"[:200],
        expected="an argument's path and a dimension, or a list of such pairs",
        fix="vary=(\"batch['x']\", 0)",
        error=ArgumentError,
    )
    raise explain(subject, [failure])


def _is_pair(given: Any) -> bool:
    match given:
        case (str(), int(dim)):
            return isinstance(given, (tuple, list)) and not isinstance(dim, bool)
    return False


def _place(
    path: str, dim: int, names: Sequence[str], leaves: Sequence[Any]
) -> tuple[int, int] | Failure:
    """The leaf that a path names, and the dimension counted from the first."""
    given, wanted = f"vary=({path!r}, {dim})", path.replace('"', "'")
    if wanted not in names:
        inside = [n for n in names if is_below(n, wanted)]
        missing = f"has no array {path}{did_you_mean(wanted, names)}"
        listed = inside or names
        more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
        shown = ", ".join(listed[:10]) + more or "there is none"
        return Failure(
            what=f"cannot vary {path}, which holds several arrays" if inside else missing,
            given=given,
            expected=f"the path of an array: {shown}",
            error=OptionError,
        )
    index = names.index(wanted)
    leaf, shape = leaves[index], getattr(leaves[index], "shape", None)
    rank = len(shape or ())
    if -rank <= dim < rank:
        return index, dim % rank
    some = f"a dimension from {-rank} to {rank - 1}"
    return Failure(
        what=f"has no dimension {dim} in {path}",
        given=given,
        expected=some if rank else "an array of rank 1 or more",
        got=f"a {type(leaf).__name__}" if shape is None else f"shape {tuple(shape)}",
        error=OptionError,
    )


def _bad_options(f: Any, max_trials: Any, tolerance: Any) -> Failure | None:
    if isinstance(f, program.STAGES):
        return Failure(
            what=f"cannot vary the size of a {type(f).__name__} stage",
            expected="a function, which is lowered for each size",
            fix="fits(function, *args, vary=...)",
            error=ArgumentError,
        )
    if not isinstance(max_trials, int) or max_trials < 1:
        return Failure(
            what="cannot compile so often",
            given=f"max_compiles={max_trials!r}",
            expected="a whole number of at least 1",
            error=OptionError,
        )
    if not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        return Failure(
            what="cannot stop there",
            given=f"tolerance={tolerance!r}",
            expected="a part of the size, from 0 to 1",
            error=OptionError,
        )
    return None
