"""A compiled program as the values of a header, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
import functools
import hashlib
import inspect
import json
from typing import Any

from spmd import _jax
from spmd._arguments import Parameters, Static
from spmd._call import PjitCall
from spmd._mesh import auto_mesh
from spmd._resolve import is_equivalent
from spmd._spec import UNSPECIFIED
from spmd.bundle import _codec
from spmd.bundle._codec import Devices, Field, FormError, Indices, index_in
from spmd.bundle._trim import untrim
from spmd.stages import Compiled, Origin, Stage, Types

# Writing


def encode_program(compiled: Compiled) -> dict[str, Any]:
    """What a bundle says of a program beside its code and its constants."""
    call, origin = compiled._call, compiled._signature
    parts = _jax.files.parts_of(compiled._executable)
    kept = zip(sorted(parts.kept_var_idx), parts.input_shardings, strict=True)
    avals, shardings, meshes = {}, {}, {compiled.mesh: 0}
    data = {
        "name": call.name,
        "kind": call.kind,
        "mesh_given": call.mesh is not None,
        "arguments": _encode_arguments(compiled, avals, shardings),
        "results": [
            [index_in(avals, a), index_in(shardings, s)]
            for a, s in zip(compiled._jaxpr.out_avals, compiled._out_shardings(), strict=True)
        ],
        "in_tree": _codec.encode_tree(origin.in_tree),
        "out_tree": _codec.encode_tree(origin.out_tree),
        "out_names": [*origin.out_names],
        "parameters": _encode_parameters(origin.params),
        "positions": [*origin.positions],
        "statics": [[where, _codec.encode_plain(s.value)] for where, s in origin.statics],
        "program_name": parts.name,
        "committed": bool(parts.committed),
        "kept": [[i, index_in(shardings, s)] for i, s in kept],
        "constants": [index_in(avals, _jax.core.abstractify(x)) for x in compiled._hoisted],
    }
    data["avals"] = [_codec.encode_aval(aval) for aval in avals]
    data["shardings"] = [_codec.encode_sharding(sharding, meshes) for sharding in shardings]
    return data | {"meshes": [_codec.encode_mesh(mesh) for mesh in meshes]}


def _encode_arguments(compiled: Compiled, avals: Indices, shardings: Indices) -> list[Any]:
    """Per flat argument: name, type, sharding, where it was if that is elsewhere, donated."""
    call = compiled._call
    rows = zip(
        call.arg_names,
        compiled._jaxpr.in_avals,
        compiled._shardings,
        compiled._placed,
        call.donated_invars,
        strict=True,
    )
    found = []
    for name, aval, sharding, placed, donated in rows:
        stays = placed is None or is_equivalent(placed, sharding, aval.ndim)
        given = None if stays else index_in(shardings, placed)
        types = index_in(avals, aval), index_in(shardings, sharding)
        found.append([name, *types, given, donated])
    return found


_POSITIONS = ("static_nums", "donate_nums")
_NAMES = ("static_names", "donate_names")


def _encode_parameters(params: Parameters) -> dict[str, Any]:
    return {
        "signature": _encode_signature(params.signature),
        "own": _encode_signature(params.own),
        "names": [*params.names],
        "variadic": params.variadic,
        **{n: [*getattr(params, n)] for n in (*_POSITIONS, *_NAMES)},
    }


def _encode_signature(signature: inspect.Signature | None) -> Any:
    """Names and kinds, and how defaults and annotations look: a call that fails shows them."""
    if signature is None:
        return None
    rows = [
        [p.name, p.kind.name, _encode_shown(p.default, repr), _encode_annotation(p.annotation)]
        for p in signature.parameters.values()
    ]
    return [*rows, _encode_annotation(signature.return_annotation)]


def _encode_annotation(annotation: Any) -> str | None:
    return _encode_shown(annotation, inspect.formatannotation)


def _encode_shown(value: Any, show: Callable[[Any], str]) -> str | None:
    return None if value is inspect.Parameter.empty else show(value)[:1000]


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program as the header has it, but for its code.

    Attributes:
        stage: Names, trees and types.
        shardings: Per flat argument.
        results: Sharding per result.
        kept: Which inputs, constants first, the code has.
        kept_shardings: Per input that it has.
        constants: Those that come before the arguments.
        constant_avals: Their types.
        name: What profiles call it.
        committed: Whether results are committed to their devices.
    """

    stage: Stage
    shardings: tuple[Any, ...]
    results: tuple[Any, ...]
    kept: tuple[int, ...]
    kept_shardings: tuple[Any, ...]
    constants: tuple[Any, ...]
    constant_avals: tuple[Any, ...]
    name: str
    committed: bool

    def seal(self, code: bytes | memoryview, kept: bytes | memoryview) -> str:
        """A digest of the code, in its two parts, and of the devices and types that it is for.

        The runtime takes another number of devices, or arrays of other sizes, to its word, and
        ends the process. A header that was not written with this code is refused before that.
        """
        inputs = self._inputs()
        rows = [(inputs[i], s) for i, s in zip(self.kept, self.kept_shardings, strict=True)]
        rows += zip(self.stage._jaxpr.out_avals, self.results, strict=True)
        shown = [f"{a.str_short()} {s.num_devices} {s.shard_shape(a.shape)}" for a, s in rows]
        text = json.dumps([self.stage.mesh.size, len(self.kept), shown])
        digest = hashlib.sha256(text.encode("ascii"))
        digest.update(code)
        digest.update(kept)
        return digest.hexdigest()

    def compiled(self, code: bytes, kept: bytes, devices: Devices) -> Compiled:
        """Gives the code to the runtime, which trusts it.

        `kept` is what was taken out of it, for those who read its HLO; empty if nothing was.
        """

        @functools.cache
        def whole() -> Any:
            return self._executable(untrim(code, kept), devices)

        parts = self.stage, self.shardings, self.constants, self._executable(code, devices)
        return Compiled(*parts, whole if kept else None)

    def _executable(self, code: bytes, devices: Devices) -> Any:
        return _jax.files.load_executable(
            code,
            devices.ordered,
            name=self.name,
            in_avals=self._inputs(),
            kept=self.kept,
            in_shardings=self.kept_shardings,
            out_avals=self.stage._jaxpr.out_avals,
            out_shardings=self.results,
            committed=self.committed,
        )

    def _inputs(self) -> list[Any]:
        return [*self.constant_avals, *self.stage._jaxpr.in_avals]


def decode_program(field: Field, devices: Devices, sections: Sequence[memoryview]) -> Program:
    """What `encode_program` was given, on the devices at hand; `sections` are its constants."""
    meshes = [_codec.decode_mesh(f, devices) for f in field["meshes"].items()]
    if not meshes or [*meshes[0].devices.flat] != [*devices.ordered]:
        raise FormError(field["meshes"].where, "the mesh of the program first", "another")
    types = auto_mesh(meshes[0]).abstract_mesh
    avals = [_codec.decode_aval(f, types) for f in field["avals"].items()]
    shardings = [_codec.decode_sharding(f, meshes, devices) for f in field["shardings"].items()]
    arguments = [_decode_argument(f, avals, shardings) for f in field["arguments"].items()]
    results = [f.row(2) for f in field["results"].items()]
    constants = [f.of(avals) for f in field["constants"].items()]
    if len(constants) != len(sections):
        raise FormError(field["constants"].where, f"{len(sections)}", f"{len(constants)}")
    kept, kept_shardings = _decode_kept(field["kept"], constants, arguments, shardings)
    pairs = zip(sections, constants, strict=True)
    return Program(
        stage=_decode_stage(field, meshes, arguments, [a.of(avals) for a, _ in results]),
        shardings=tuple(a.sharding for a in arguments),
        results=tuple(_codec.decode_fitting(s, a.of(avals), shardings) for a, s in results),
        kept=kept,
        kept_shardings=kept_shardings,
        constants=tuple(_codec.constant_of(d, a, field["constants"].where) for d, a in pairs),
        constant_avals=tuple(constants),
        name=field["program_name"].string(),
        committed=field["committed"].boolean(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    name: str
    aval: Any
    sharding: Any
    placed: Any
    donated: bool


def _decode_argument(field: Field, avals: Sequence[Any], shardings: Sequence[Any]) -> _Argument:
    name, index, sharding, placed, donated = field.row(5)
    text, aval = name.string(), index.of(avals)
    return _Argument(
        name=text,
        aval=aval,
        sharding=_codec.decode_fitting(sharding, aval, shardings),
        placed=None if placed.value is None else _codec.decode_fitting(placed, aval, shardings),
        donated=donated.boolean(),
    )


def _decode_kept(
    field: Field, constants: Sequence[Any], arguments: Sequence[_Argument], shardings: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    avals = [*constants, *(a.aval for a in arguments)]
    indices, found = [], []
    for row in field.items():
        index, sharding = row.row(2)
        indices.append(index.integer(0, len(avals) - 1))
        found.append(_codec.decode_fitting(sharding, avals[indices[-1]], shardings))
    if indices != sorted({*indices}) or indices[: len(constants)] != [*range(len(constants))]:
        raise field.refuse("indices in order, those of constants first")
    return tuple(indices), tuple(found)


def _decode_stage(
    field: Field, meshes: Sequence[Any], arguments: Sequence[_Argument], out_avals: list[Any]
) -> Stage:
    given = field["mesh_given"].boolean()
    call = PjitCall(
        name=field["name"].string(),
        kind=field["kind"].one_of("pjit", "pmap"),
        mesh=meshes[0] if given else None,
        in_axis_resources=(UNSPECIFIED,) * len(arguments),
        out_axis_resources=(UNSPECIFIED,) * len(out_avals),
        donated_invars=tuple(a.donated for a in arguments),
        in_positional_semantics=("global",) * len(arguments),
        arg_names=tuple(a.name for a in arguments),
        given=("",) * len(arguments),
    )
    # What was not moved was where the program wants it: its mesh is known from there.
    placed = tuple(a.placed if a.placed is not None or given else a.sharding for a in arguments)
    types = Types(in_avals=[a.aval for a in arguments], out_avals=out_avals)
    return Stage(types, call, placed, _decode_origin(field, len(arguments), len(out_avals)))


def _decode_origin(field: Field, in_count: int, out_count: int) -> Origin:
    params = _decode_parameters(field["parameters"])
    in_tree, out_tree = _codec.decode_tree(field["in_tree"]), _codec.decode_tree(field["out_tree"])
    positions = [f.integer(0, _codec.MOST) for f in field["positions"].items()]
    for tree, count, name in ((in_tree, in_count, "in_tree"), (out_tree, out_count, "out_tree")):
        if tree.num_leaves != count:
            raise FormError(field[name].where, f"{count} leaves", f"{tree.num_leaves}")
    _check_call(field["in_tree"], in_tree, len(positions))
    return Origin(
        params=params,
        positions=tuple(positions),
        statics=tuple(_decode_static(f) for f in field["statics"].items()),
        in_tree=in_tree,
        out_tree=out_tree,
        out_names=field["out_names"].strings(),
        consts=(),
    )


def _check_call(field: Field, tree: Any, count: int) -> None:
    """Sees that a tree is that of `(args, kwargs)`."""
    kinds = [None if (d := t.node_data()) is None else d[0] for t in (tree, *tree.children())]
    if kinds != [tuple, tuple, dict] or len(tree.children()[0].children()) != count:
        raise FormError(field.where, f"a tree of {count} arguments and keyword arguments", "other")


def _decode_static(field: Field) -> tuple[Any, Static]:
    where, value = field.row(2)
    name = where.string() if type(where.value) is str else where.integer(0, _codec.MOST)
    plain = _codec.decode_plain(value)
    return name, Static(plain, type(plain))


def _decode_parameters(field: Field) -> Parameters:
    variadic = field["variadic"]
    more: dict[str, Any] = {
        n: tuple(f.integer(-_codec.MOST, _codec.MOST) for f in field[n].items()) for n in _POSITIONS
    }
    more |= {n: field[n].strings() for n in _NAMES}
    return Parameters(
        signature=_decode_signature(field["signature"]),
        own=_decode_signature(field["own"]),
        names=field["names"].strings(),
        variadic=None if variadic.value is None else variadic.string(),
        **more,
    )


def _decode_signature(field: Field) -> inspect.Signature | None:
    if field.value is None:
        return None
    try:
        *rows, returned = field.items()
        found = [_decode_parameter(row) for row in rows]
        return inspect.Signature(found, return_annotation=_shown(returned))
    except ValueError as error:
        raise FormError(field.where, "parameters of a function", str(error)[:200]) from None


def _decode_parameter(field: Field) -> inspect.Parameter:
    name, kind, default, annotation = field.row(4)
    if not name.string().isidentifier():
        raise name.refuse("the name of a parameter")
    kinds = inspect._ParameterKind
    place = kinds[kind.one_of(*(one.name for one in kinds))]
    return inspect.Parameter(
        name.string(), place, default=_shown(default), annotation=_shown(annotation)
    )


def _shown(field: Field) -> Any:
    return inspect.Parameter.empty if field.value is None else _Shown(field.string())


class _Shown:
    """Stands for a default or an annotation, which only messages show."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text
