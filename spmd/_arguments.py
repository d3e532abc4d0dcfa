"""The arguments of a call: bound to parameters, split into static and traced, named, and flat.

A keyword argument is moved to its parameter's position first, so that specs, donation and static
options follow the parameter however it was passed, and both spellings are one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
import functools
import inspect
import operator
from typing import Any

import jax.tree_util as jtu

from spmd._spec import UNSPECIFIED, SpecTree, broadcast_prefix
from spmd.errors import (
    ArgumentError,
    Failure,
    OptionError,
    StaticArgumentError,
    did_you_mean,
    explain,
    show_value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a function, and which are static or donated.

    Attributes:
        signature: What the function looks like, decorators looked through; None where Python
            knows none, as for some builtins.
        own: What the outermost decorator really takes, for binding.
        names: Parameters that can be passed by position, in order.
        variadic: Name of ``*args``, or None.
        static_nums: Positions of static arguments.
        static_names: Names of static arguments.
        donate_nums: Positions of donated arguments.
        donate_names: Names of donated arguments.
    """

    # Not compared: it belongs to the function, and its defaults may have no hash.
    signature: inspect.Signature | None = field(compare=False)
    own: inspect.Signature | None = field(compare=False)
    names: tuple[str, ...]
    variadic: str | None
    static_nums: tuple[int, ...]
    static_names: tuple[str, ...]
    donate_nums: tuple[int, ...]
    donate_names: tuple[str, ...]

    def bind(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Moves keyword arguments to the positions of their parameters, or raises a TypeError."""
        few = self.variadic is not None or len(args) <= len(self.names)
        if self.own is None or (not kwargs and few):
            return args, dict(kwargs)
        bound = self.own.bind(*args, **kwargs)
        return bound.args, bound.kwargs

    def keeps_order(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether binding leaves the arguments in the order in which the C++ dispatcher has them.

        That one takes positional arguments, then keyword arguments by name. A program that it may
        repeat must not expect another order.
        """
        if not kwargs:
            return True
        positional, by_name = self.bind(tuple(range(len(args))), {k: k for k in kwargs})
        bound = [t for i, t in enumerate(positional) if i not in self.static_nums]
        bound += [k for k in sorted(by_name) if k not in self.static_names]
        given: list[Any] = [i for i in range(len(args)) if i not in self.static_nums]
        given += [k for k in sorted(kwargs) if k not in self.static_names]
        return bound == given

    def call_name(self, where: int | str) -> str:
        """What the user calls the argument at a position, or of a name."""
        if isinstance(where, str):
            return where
        if where < len(self.names):
            return self.names[where]
        return f"{self.variadic or 'args'}[{where - len(self.names)}]"


def parse_parameters(
    fun: Callable,
    subject: str,
    static_argnums: Any,
    static_argnames: Any,
    donate_argnums: Any,
    donate_argnames: Any,
    static_option: str = "static_argnums",
) -> Parameters:
    """Reads the signature of `fun` and the options that name arguments.

    `static_option` is what a user calls `static_argnums`.
    """
    signature = _signature(fun)
    names = _names_of(signature, _KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
    by_position = {*_names_of(signature, _KINDS.POSITIONAL_ONLY)}
    variadic = next(iter(_names_of(signature, _KINDS.VAR_POSITIONAL)), None)
    known = (*names, *_names_of(signature, _KINDS.KEYWORD_ONLY))
    rows = (
        (static_option, static_argnums, "static_argnames", static_argnames),
        ("donate_argnums", donate_argnums, "donate_argnames", donate_argnames),
    )
    failures, resolved = [], []
    for nums_option, given_nums, names_option, given_names in rows:
        nums = _ints(subject, nums_option, given_nums)
        by_name = _strs(subject, names_option, given_names)
        if signature is None:
            failures.append(_unknown_end_failure(nums_option, nums))
        else:
            failures.append(_range_failure(nums_option, nums, names, variadic))
            failures.append(_name_failure(names_option, by_name, known, signature))
        resolved.append(_both_ways(nums, by_name, names, by_position))
    (static_nums, static_names), (donate_nums, donate_names) = resolved
    params = Parameters(
        signature=signature,
        own=_signature(fun, follow_wrapped=False) or signature,
        names=names,
        variadic=variadic,
        static_nums=static_nums,
        static_names=static_names,
        donate_nums=donate_nums,
        donate_names=donate_names,
    )
    if not any(failures):
        failures = [_overlap(params)]
    if failures := [f for f in failures if f]:
        raise explain(subject, failures)
    return params


def _signature(fun: Callable, *, follow_wrapped: bool = True) -> inspect.Signature | None:
    try:
        return inspect.signature(fun, follow_wrapped=follow_wrapped)
    except (ValueError, TypeError):
        return None


_KINDS = inspect.Parameter


def _names_of(signature: inspect.Signature | None, *kinds: Any) -> tuple[str, ...]:
    """The parameters of some kinds, in order."""
    params = signature.parameters.values() if signature else ()
    return tuple(p.name for p in params if p.kind in kinds)


def _ints(subject: str, option: str, value: Any) -> tuple[int, ...]:
    try:
        values = value if isinstance(value, Iterable) else (() if value is None else (value,))
        return tuple(operator.index(v) for v in values)
    except TypeError:
        failure = _option_type(option, value, "an int or a sequence of ints")
        raise explain(subject, [failure]) from None


def _strs(subject: str, option: str, value: Any) -> tuple[str, ...]:
    if value is None or isinstance(value, str):
        return (value,) if value is not None else ()
    if not isinstance(value, Iterable) or not all(isinstance(v, str) for v in value):
        failure = _option_type(option, value, "a str or a sequence of strs")
        raise explain(subject, [failure])
    return tuple(value)


def _option_type(option: str, value: Any, expected: str) -> Failure:
    return Failure(
        what=f"cannot read {option}",
        given=f"{option}={value!r}",
        expected=expected,
        got=type(value).__name__,
        error=ArgumentError,
    )


def _one_or_all(values: Sequence[Any]) -> str:
    return repr(values[0] if len(values) == 1 else tuple(values))


def _range_failure(
    option: str, nums: Sequence[int], names: Sequence[str], variadic: str | None
) -> Failure | None:
    n = len(names)
    bad = [i for i in nums if not -n <= i < n and not (variadic and i >= 0)]
    if not bad:
        return None
    return Failure(
        what=f"has no argument {', '.join(map(str, bad))}",
        given=f"{option}={_one_or_all(nums)}",
        expected=f"positions from {-n} to {n - 1}" if n else "no positions",
        got=f"{n} positional argument{'s' * (n != 1)}: {', '.join(names) or 'none'}",
        error=OptionError,
    )


def _unknown_end_failure(option: str, nums: Sequence[int]) -> Failure | None:
    from_end = [i for i in nums if i < 0]
    if not from_end:
        return None
    return Failure(
        what=f"cannot count argument {from_end[0]} from the end: the function has no signature",
        given=f"{option}={_one_or_all(nums)}",
        expected="positions from 0",
        error=OptionError,
    )


def _name_failure(
    option: str, given: Sequence[str], names: Sequence[str], signature: inspect.Signature
) -> Failure | None:
    bad = [g for g in given if g not in names]
    if not bad or _names_of(signature, _KINDS.VAR_KEYWORD):
        return None
    return Failure(
        what=f"has no argument {', '.join(map(repr, bad))}{did_you_mean(bad[0], names)}",
        given=f"{option}={_one_or_all(given)}",
        expected=f"names out of {', '.join(names) or 'none: it takes no arguments'}",
        error=OptionError,
    )


def _both_ways(
    nums: Sequence[int], by_name: Sequence[str], names: Sequence[str], unnamed: set[str]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Completes positions by names and names by positions, so either way of passing is known.

    What is `unnamed` cannot be passed by name: ``**kwargs`` may hold that name.
    """
    at = {i + len(names) if i < 0 else i for i in nums}
    at |= {names.index(n) for n in by_name if n in names and n not in unnamed}
    called = {*by_name, *(names[i] for i in at if 0 <= i < len(names) and names[i] not in unnamed)}
    return tuple(sorted(at)), tuple(sorted(called))


def _overlap(params: Parameters) -> Failure | None:
    nums = sorted({*params.static_nums} & {*params.donate_nums})
    called = sorted({*params.static_names} & {*params.donate_names})
    both = called or [params.names[i] if i < len(params.names) else str(i) for i in nums]
    if not both:
        return None
    return Failure(
        what=f"cannot both donate argument {', '.join(both)} and treat it as static",
        expected="an argument to be static (a Python value) or donated (a buffer), not both",
        fix="drop it from one of the two options",
        error=OptionError,
    )


# One call


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Traced and static arguments of one call.

    Attributes:
        dynamic: ``(args, kwargs)`` with the static ones taken out.
        positions: Original position of each entry of ``args``.
        statics: ``(position or name, value)`` pairs, hashable.
    """

    dynamic: tuple[tuple, dict[str, Any]]
    positions: tuple[int, ...]
    statics: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Static:
    """A static value; 1, 1.0 and True are different programs."""

    value: Any
    kind: type


def split_arguments(params: Parameters, args: tuple, kwargs: Mapping, subject: str) -> Split:
    """Binds the arguments of a call and takes the static ones out."""
    try:
        args, kwargs = params.bind(args, kwargs)
    except TypeError as e:
        raise explain(subject, [_unbindable(params, e, len(args))]) from None
    _check_positions(params, len(args), subject)
    if not params.static_nums and not params.static_names:
        return Split(dynamic=(args, kwargs), positions=tuple(range(len(args))), statics=())
    nums = set(params.static_nums)
    positions = tuple(i for i in range(len(args)) if i not in nums)
    statics = [(i, args[i]) for i in params.static_nums if i < len(args)]
    statics += [(n, kwargs[n]) for n in params.static_names if n in kwargs]
    found = [_hash_failure(params, where, v) for where, v in statics]
    if failures := [f for f in found if f]:
        raise explain(subject, failures)
    rest = {k: v for k, v in kwargs.items() if k not in params.static_names}
    return Split(
        dynamic=(tuple(args[i] for i in positions), rest),
        positions=positions,
        statics=tuple((where, Static(v, type(v))) for where, v in statics),
    )


def _unbindable(params: Parameters, error: TypeError, count: int) -> Failure:
    many = str(error).startswith("too many positional")
    return Failure(
        what="cannot be called like this",
        expected=f"arguments for the parameters {params.signature}"[:200],
        got=f"{error}: {count}" if many else str(error),
        error=ArgumentError,
    )


def _check_positions(params: Parameters, count: int, subject: str) -> None:
    if params.signature is not None and params.variadic is None:
        return
    for option in ("static", "donate"):
        nums = getattr(params, f"{option}_nums")
        if bad := [i for i in nums if i >= count]:
            failure = Failure(
                what=f"has no argument {', '.join(map(str, bad))}",
                given=f"{option}_argnums={_one_or_all(nums)}",
                got=f"a call with {count} positional argument{'s' * (count != 1)}",
                error=OptionError,
            )
            raise explain(subject, [failure])


def _hash_failure(params: Parameters, where: Any, value: Any) -> Failure | None:
    try:
        hash(value)
    except TypeError:
        return Failure(
            what=f"cannot hash static argument {params.call_name(where)}",
            expected="a value with __hash__ and __eq__: it is part of the key of the compile cache",
            got=show_value(value),
            fix="pass something hashable such as a tuple, or do not declare it static",
            error=StaticArgumentError,
        )
    return None


def join_arguments(split_positions: Sequence[int], statics: Any, dynamic: Any) -> tuple[list, dict]:
    """Undoes :func:`split_arguments`: puts static values back at their places."""
    args, kwargs = dynamic
    placed: dict[Any, Any] = dict(zip(split_positions, args, strict=True))
    kwargs = dict(kwargs)
    for where, static in statics:
        (kwargs if isinstance(where, str) else placed)[where] = static.value
    return [placed[i] for i in sorted(placed)], kwargs


def argument_names(params: Parameters, positions: Sequence[int], tree: Any) -> tuple[str, ...]:
    """How the user calls each leaf; see :func:`describe_leaves`."""
    return describe_leaves(params, positions, tree)[0]


@functools.lru_cache(maxsize=4096)
def describe_leaves(
    params: Parameters, positions: Sequence[int], tree: Any
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """How the user calls each leaf of ``(args, kwargs)``, as ``batch['x']``; whether it is donated.

    `positions` are the original ones of the positional arguments in `tree`.
    """
    dummy = jtu.tree_unflatten(tree, range(tree.num_leaves))
    names, donated = [], []
    for path, _ in jtu.tree_flatten_with_path(dummy)[0]:
        side, key, *rest = path
        where = positions[key.idx] if side.idx == 0 else str(key.key)
        names.append(params.call_name(where) + jtu.keystr(tuple(rest)))
        donated.append(where in params.donate_nums or where in params.donate_names)
    return tuple(names), tuple(donated)


# Specs of arguments


def argument_specs(
    specs: SpecTree, params: Parameters, positions: Sequence[int], tree: Any, subject: str
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Returns the spec of each leaf of ``(args, kwargs)``, and where it was given.

    The specs are one leaf for all, one entry per parameter, or a dict by parameter name;
    `positions` are as in :func:`describe_leaves`.
    """
    if specs.treedef.node_data() is None:  # one for all
        return specs.leaves * tree.num_leaves, specs.names * tree.num_leaves
    args, kwargs = tree.children()
    order = _spec_order(params)
    # What *args takes has its entries before those of the keyword-only parameters.
    extra = sum(p >= len(params.names) for p in positions)
    entries = {n: i if n in params.names else i + extra for i, n in enumerate(order)}
    called = [
        (params.call_name(p), i, t)
        for i, (p, t) in enumerate(zip(positions, args.children(), strict=True))
    ]
    named = zip(kwargs.node_data()[1], kwargs.children(), strict=True)
    # **kwargs may hold the name of what is passed by position alone.
    unnamed = {*_names_of(params.signature, _KINDS.POSITIONAL_ONLY)}
    called += [(str(n), None if n in unnamed else entries.get(n), t) for n, t in named]
    known = {*order, *(name for name, *_ in called)}
    # Entries beyond the parameters belong to nothing.
    most = max(len(order) + extra, len(called))
    is_tuple = specs.treedef.node_data()[0] is tuple
    too_many = is_tuple and len(specs.treedef.children()) > most
    failures = [_arity_failure(specs, called)] if too_many else []
    out: list[int] = []
    for name, index, sub in called:
        entry, key = _entry_for(specs, name, index, known)
        if entry is _MISSING:
            failures = [_arity_failure(specs, called)]
            break
        found = broadcast_prefix(entry, sub, specs.name + key, name)
        if isinstance(found, Failure):
            failures.append(found)
        else:
            out += found
    if failures:
        raise explain(subject, failures)
    leaves = (*specs.leaves, UNSPECIFIED)
    names = (*specs.names, specs.name)
    return tuple(leaves[i] for i in out), tuple(names[i] for i in out)


_MISSING = object()


def _spec_order(params: Parameters) -> list[str]:
    """Parameters that take a spec, in the order of the entries."""
    kinds = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
    return [n for n in _names_of(params.signature, *kinds) if n not in params.static_names]


def _entry_for(specs: SpecTree, name: str, index: int | None, known: set[str]) -> tuple[Any, str]:
    """The entry of `specs` for one argument, and how it is written after the option's name.

    `index` is its place among the entries, None for what ``**kwargs`` takes; a dict of entries may
    have the `known` names.
    """
    top = specs.indices()
    kind, _ = specs.treedef.node_data()
    if kind is tuple and index is not None and index < len(top):
        return top[index], f"[{index}]"
    if kind is dict and set(top) <= known:
        # A parameter without an entry is left out, as if the option had not been given.
        return (top[name], f"[{name!r}]") if name in top else (len(specs.leaves), "")
    return _MISSING, ""


def _arity_failure(specs: SpecTree, called: Sequence[Any]) -> Failure:
    kind = specs.treedef.node_data()[0]
    n, m = len(specs.treedef.children()), len(called)
    names = ", ".join(name for name, *_ in called) or "none"
    if kind is tuple:
        given = f"{specs.name} has {n} entr{'y' if n == 1 else 'ies'}"
        fix = "give one entry per argument that is not static, or one spec for all of them"
        if m == 1:
            fix = "write (spec,) around what is meant for the one argument"
        elif any(index is None for _, index, _ in called):
            fix = "give a dict of entries by name: what **kwargs takes has no position"
    else:
        given = f"{specs.name} is a {kind.__name__}, not a tuple of one entry per argument"
        fix = "write (spec,) around it" if m == 1 else "write one entry per argument: (spec, spec)"
        if kind is dict:
            keys = ", ".join(map(repr, specs.treedef.node_data()[1]))
            given = f"{specs.name} is a dict with keys {keys}"
            fix += ", or a dict of entries by name"
    return Failure(
        what=f"cannot match {specs.name} with the arguments: it is not a pytree prefix",
        given=given,
        expected=f"one entry per argument: {names}",
        got=f"{m} argument{'s' * (m != 1)}",
        fix=fix,
    )
