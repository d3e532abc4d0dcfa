"""A call of `pjit` whose places a plan says: AUTO among its specs, or ``plan=``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any
import weakref

from spmd import _jax, stages
from spmd._binding import Binding, bind_open
from spmd._spec import AUTO, UNSPECIFIED, ParsedPartitionSpec
from spmd.errors import Failure, PlanError, explain
from spmd.inspection.records.plan import Placed, Plan
from spmd.planner.api import Wish, plan_program, versions
from spmd.planner.asked import hardware
from spmd.planner.code.inside import called
from spmd.planner.plans import other_mesh, pinner, stale, subject_of
from spmd.planner.verify import Program, open_leaves, spec_of_entries
from spmd.planner.written import fixed_of


def plan_of_call(binding: Binding, fun: Callable, options: Any, signature: Any) -> tuple[Any, Plan]:
    """The call with the places and pins of its plan, and the plan.

    Args:
        binding: of the call, whose places may be AUTO.
        fun: that is called; nothing holds it afterwards.
        options: of `pjit`.
        signature: of the call.
    """
    call, subject = binding.call, options.subject
    if any(isinstance(one, _jax.core.Tracer) for one in binding.consts):
        raise explain(subject, [_closes_over()])
    traced = _traced(binding, options, signature)
    if options.plan is not None:
        plan = options.plan
        _check(plan, traced)
    else:
        semantics = call.in_positional_semantics[len(binding.consts) :]
        again = functools.partial(bind_open, options=options, signature=signature,
                                  semantics=semantics, mesh=call.mesh)  # fmt: skip
        held = weakref.ref(fun)

        def trace(_: Any) -> stages.Traced:
            # Its caches give the trace that is there, where they are not left out of account.
            own = held()
            return traced if own is None else _traced(again(own), options, signature)

        plan = _chosen(Program(trace=trace, called=called(fun)), traced, binding, options)
    count = len(call.in_axis_resources) - len(plan.arguments)
    ins = (*call.in_axis_resources[:count], *_given(call.in_axis_resources[count:], plan.arguments))
    call = dataclasses.replace(
        call,
        in_axis_resources=ins,
        out_axis_resources=_given(call.out_axis_resources, plan.results),
        pins=pinner(plan, call.mesh),
    )
    return call, plan


def _given(resources: Sequence[Any], placed: Sequence[Placed]) -> tuple[Any, ...]:
    """What the user says of values, and of all others what the plan says."""
    return tuple(
        ParsedPartitionSpec.from_user_input(spec_of_entries(one.spec), "plan")
        if given is AUTO or given is UNSPECIFIED
        else given
        for given, one in zip(resources, placed, strict=True)
    )


def _traced(binding: Any, options: Any, signature: Any) -> stages.Traced:
    """The trace of a call whose specs are open."""
    call = binding.call
    origin = stages.Origin(
        params=options.params,
        positions=signature.positions,
        statics=signature.statics,
        in_tree=signature.tree,
        out_tree=binding.out_tree,
        out_names=binding.out_names,
        consts=binding.consts,
        changed=binding.changed,
    )
    open_call = dataclasses.replace(
        call,
        in_axis_resources=(UNSPECIFIED,) * len(call.in_axis_resources),
        out_axis_resources=(UNSPECIFIED,) * len(call.out_axis_resources),
    )
    placed = (None,) * len(call.in_axis_resources)
    return stages.Traced(binding.jaxpr, open_call, placed, origin)


def _check(plan: Plan, traced: stages.Traced) -> None:
    failures = [found] if (found := other_mesh(plan, traced._call.mesh)) else []
    if not failures:
        ins, outs = open_leaves(traced)
        failures = stale(plan, [*ins, *outs], versions())
    if failures:
        raise explain(subject_of(plan), failures)


def _chosen(program: Program, traced: stages.Traced, binding: Binding, options: Any) -> Plan:
    call, subject = binding.call, options.subject
    names = [one.name for side in open_leaves(traced) for one in side]
    given = (*call.in_axis_resources[len(binding.consts) :], *call.out_axis_resources)
    on = hardware(None, call.mesh, (), None, None, subject=subject)
    wish = Wish(fixed=dict(fixed_of(names, given)))
    return plan_program(program, on, wish, name=options.name, subject=subject)


def _closes_over() -> Failure:
    return Failure(
        what="cannot be planned: it closes over values of an outer trace",
        expected="a function of its arguments alone",
        fix="pass what it closes over as an argument",
        error=PlanError,
    )
