"""PjitCall: the frozen record that a `pjit` equation carries, and what transformations do to it.

A rule of the primitive is three moves: transform the jaxpr, transform the call, bind. Everything
that a transformation means for specs, donation and names is here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from jax.sharding import NamedSharding

from spmd._spec import BATCH, UNSPECIFIED, ParsedPartitionSpec, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PjitCall:
    """How one jaxpr is called over a mesh.

    Attributes:
        name: Name of the user's function.
        mesh: The plain JAX mesh, or None where only the arguments say one.
        in_axis_resources: Per flat input a ParsedPartitionSpec, ``UNSPECIFIED``, or a sharding
            that no spec can say.
        out_axis_resources: Likewise per flat output.
        donated_invars: Per flat input, whether its buffers may be reused.
        in_positional_semantics: Per flat input ``"global"`` or ``"local"``: what the caller
            passed. The equation itself is always global.
        arg_names: Per flat input, what the user calls it.
        given: Per flat input, the option that its spec came from.
        keep_unused: Whether unused inputs stay parameters of the program.
        inline: Whether an outer program takes the equations over instead of a call.
        implicit_reshard: ``"allow"``, ``"warn"``, ``"error"``, or None for the environment's.
        compiler_options: Pairs for the compiler of an eager call.
        kind: What the user called: ``"pjit"`` or ``"pmap"``.
        pins: What writes the constraints of a plan into the lowered module, or None.
    """

    name: str
    mesh: Any
    in_axis_resources: tuple[Any, ...]
    out_axis_resources: tuple[Any, ...]
    donated_invars: tuple[bool, ...]
    in_positional_semantics: tuple[str, ...]
    arg_names: tuple[str, ...]
    given: tuple[str, ...]
    keep_unused: bool = False
    inline: bool = False
    implicit_reshard: str | None = None
    compiler_options: tuple[tuple[str, Any], ...] = ()
    kind: str = "pjit"
    pins: Callable[[Any], None] | None = None
    # Computed once: the record is part of the key of every lookup.
    _hash: int | None = field(init=False, repr=False, compare=False, default=None)

    def __hash__(self) -> int:
        found = self._hash
        if found is None:
            parts = (self.name, self.mesh, self.in_axis_resources, self.out_axis_resources)
            found = hash((*parts, self.donated_invars))
            object.__setattr__(self, "_hash", found)
        return found

    @property
    def subject(self) -> str:
        """The first words of a message."""
        return f"{self.kind} of `{self.name}`"

    def keep(self, ins: Sequence[bool], outs: Sequence[bool]) -> PjitCall:
        """The call of a jaxpr of which only some inputs and outputs are left."""
        at_in = [i for i, kept in enumerate(ins) if kept]
        return self._select(at_in, [i for i, kept in enumerate(outs) if kept])

    def add_inputs(
        self, names: Sequence[str], *, leading: bool = False, resources: Sequence[Any] = ()
    ) -> PjitCall:
        """The call with further inputs, in `resources` or in whatever sharding they have."""
        new = {
            "in_axis_resources": tuple(resources) or (UNSPECIFIED,) * len(names),
            "donated_invars": (False,) * len(names),
            "in_positional_semantics": ("global",) * len(names),
            "arg_names": tuple(names),
            "given": ("",) * len(names),
        }
        pairs = {n: (getattr(self, n), new[n]) for n in _PER_INPUT}
        return replace(self, **{n: b + a if leading else a + b for n, (a, b) in pairs.items()})

    def add_outputs(self, count: int, *, leading: bool = False) -> PjitCall:
        """The call with further outputs whose sharding is the partitioner's choice."""
        more, outs = (UNSPECIFIED,) * count, self.out_axis_resources
        return replace(self, out_axis_resources=more + outs if leading else outs + more)

    def keep_alive(self, inputs: Iterable[int]) -> PjitCall:
        """The call that does not donate these inputs: someone still needs them."""
        needed = set(inputs)
        donated = tuple(d and i not in needed for i, d in enumerate(self.donated_invars))
        return self if donated == self.donated_invars else replace(self, donated_invars=donated)

    def batch(
        self, in_dims: Sequence[Any], out_dims: Sequence[Any], axes: tuple[Any, ...]
    ) -> PjitCall:
        """The call of a jaxpr with a new dimension on some values, split over mesh axes, if any."""
        return replace(
            self,
            in_axis_resources=_batch(self.in_axis_resources, in_dims, axes),
            out_axis_resources=_batch(self.out_axis_resources, out_dims, axes),
        )

    def jvp(self, nz_in: Sequence[bool], nz_out: Sequence[bool]) -> PjitCall:
        """The call of the JVP jaxpr: a tangent is placed and donated like its primal."""
        names = tuple(f"the tangent of {n}" for n in compress(self.arg_names, nz_in))
        per_input = {n: getattr(self, n) for n in _PER_INPUT}
        doubled = {n: v + tuple(compress(v, nz_in)) for n, v in per_input.items()}
        doubled["arg_names"] = self.arg_names + names
        outs = self.out_axis_resources
        return replace(self, out_axis_resources=outs + tuple(compress(outs, nz_out)), **doubled)

    def linear_map(self, nz_in: Sequence[bool], nz_out: Sequence[bool]) -> PjitCall:
        """The call of the linear map from tangents to tangents."""
        call = self.keep(nz_in, nz_out)
        return replace(call, arg_names=tuple(f"the tangent of {n}" for n in call.arg_names))

    def discharge(self, is_ref: Sequence[bool]) -> PjitCall:
        """The call whose outputs are followed by the last values of its references."""
        refs = tuple(compress(self.in_axis_resources, is_ref))
        return replace(self, out_axis_resources=self.out_axis_resources + refs)

    def series(self, order: int) -> PjitCall:
        """The call of values and their Taylor coefficients, each placed like its value."""
        ins, outs = len(self.in_axis_resources), len(self.out_axis_resources)
        at_in = [*range(ins), *(i for i in range(ins) for _ in range(order))]
        at_out = [*range(outs), *(i for i in range(outs) for _ in range(order))]
        rest = (False,) * (len(at_in) - ins)
        return replace(self._select(at_in, at_out), donated_invars=self.donated_invars + rest)

    def expand(self, ins: Sequence[int], outs: Sequence[int]) -> PjitCall:
        """The call whose values became several arrays each: of those no spec is known."""
        call = self._select(
            [i for i, n in enumerate(ins) for _ in range(n)],
            [i for i, n in enumerate(outs) for _ in range(n)],
        )
        many_in = [n for n in ins for _ in range(n)]
        many_out = [n for n in outs for _ in range(n)]
        return replace(
            call,
            in_axis_resources=_only_whole(call.in_axis_resources, many_in),
            out_axis_resources=_only_whole(call.out_axis_resources, many_out),
            donated_invars=tuple(
                d and n == 1 for d, n in zip(call.donated_invars, many_in, strict=True)
            ),
        )

    def _select(self, ins: Sequence[int], outs: Sequence[int]) -> PjitCall:
        """The call with these of its inputs and outputs, in this order."""
        return replace(
            self,
            out_axis_resources=tuple(self.out_axis_resources[i] for i in outs),
            **{n: tuple(getattr(self, n)[i] for i in ins) for n in _PER_INPUT},
        )

    def transpose(
        self, kept_in: Sequence[bool], nz_cts: Sequence[bool], ct_out: Sequence[bool]
    ) -> PjitCall:
        """The call of the transposed jaxpr: a cotangent is placed like its primal.

        An input of `kept_in` stays one (it is not linear, or a reference). A cotangent of an output
        becomes an input where `nz_cts` says that there is one, and that of an input an output by
        `ct_out`.
        """
        kept = self.keep(kept_in, ())
        cts = tuple(compress(self.out_axis_resources, nz_cts))
        names = tuple(f"cotangent {i} of {self.name}" for i, nz in enumerate(nz_cts) if nz)
        call = kept.add_inputs(names)
        return replace(
            call,
            in_axis_resources=kept.in_axis_resources + cts,
            out_axis_resources=tuple(compress(self.in_axis_resources, ct_out)),
            donated_invars=(False,) * len(call.donated_invars),
        )


_PER_INPUT = (
    "in_axis_resources",
    "donated_invars",
    "in_positional_semantics",
    "arg_names",
    "given",
)


def _only_whole(resources: Sequence[Any], parts: Sequence[int]) -> tuple[Any, ...]:
    pairs = zip(resources, parts, strict=True)
    return tuple(r if n == 1 else UNSPECIFIED for r, n in pairs)


def _batch(resources: Sequence[Any], dims: Sequence[Any], axes: tuple[Any, ...]) -> tuple:
    return tuple(batch_resource(r, d, axes) for r, d in zip(resources, dims, strict=True))


def batch_resource(resource: Any, dim: int | None, axes: tuple[Any, ...]) -> Any:
    """A resource with a new dimension `dim`, split over `axes`; None: no new dimension."""
    if dim is None:
        return resource
    if isinstance(resource, ParsedPartitionSpec):
        return resource.insert_axis_partitions(dim, axes or BATCH)
    if (spec := spec_of(resource)) is None:
        return UNSPECIFIED
    moved = spec.insert_axis_partitions(dim, axes).to_partition_spec()
    return NamedSharding(resource.mesh, moved, memory_kind=resource.memory_kind)
