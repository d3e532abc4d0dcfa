"""What an equation says about its host function, and what a host function is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spmd import _jax
from spmd._pjit import Text


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class HostCall:
    """The frozen record that an equation carries: equal records share one compiled call.

    Attributes:
        in_tree: Tree of the argument of the host function.
        kind: How messages call it: ``"id_tap"``, ``"id_print"``, ``"call"``.
        device_index: Which device calls with the whole operand; if `per_shard`, each with its own.
        transforms: The transformations that were applied to a tap, outermost last.
        out_tree: Tree of the results of a `call`; None for a tap.
        results: Shape and dtype of each result of a `call`.
        stack: Under `per_shard`, how many devices stack their results; None where each has its own.
        axes: The axes of the mesh that is active around the call, ``(name, size)``.
        vmap_method: How `vmap` treats a `call`; None forbids it.
    """

    func: Callable[..., Any]
    in_tree: Any
    kind: str
    with_device: bool = False
    device_index: int = 0
    per_shard: bool = False
    transforms: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    out_tree: Any = None
    results: tuple[tuple[tuple[int, ...], Any], ...] = ()
    stack: int | None = None
    axes: tuple[tuple[str, int], ...] = ()
    vmap_method: str | None = None

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each result in a whole program."""
        stack = () if self.stack is None else (self.stack,)
        return [((*stack, *shape), dtype) for shape, dtype in self.results]

    def transformed(self, name: str, *params: Any) -> HostCall:
        """This call after one more transformation."""
        return replace(self, transforms=(*self.transforms, (name, params)))

    @property
    def name(self) -> str:
        """How the host function is called."""
        try:
            return _jax.core.fun_name(self.func)
        except Exception:  # an object may raise whatever it is asked
            return type(self.func).__name__

    def shown(self) -> dict[str, Any]:
        """What a jaxpr prints of it."""
        params: dict[str, Any] = {"func": Text(self.name)}
        if self.per_shard:
            params["per_shard"] = True
        elif self.device_index:
            params["device_index"] = self.device_index
        if self.transforms:
            names = [name if not p else f"{name}{p[0]}" for name, p in self.transforms]
            params["transforms"] = Text(" ".join(names))
        return params


_jax.host.hold_weakly(HostCall)


@dataclass(frozen=True, slots=True, eq=False)
class ByIdentity:
    """Something that is written to: another one is another one, even if the two are equal."""

    target: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.target is other.target

    def __hash__(self) -> int:
        return id(self.target)


def described(transforms: tuple[tuple[str, tuple[Any, ...]], ...]) -> tuple[Any, ...]:
    """Returns transformations as a tap is told them: pairs of a name and a dict of its own."""
    return tuple([(n, {"batch_dims": p[0]} if p else {}) for n, p in transforms])  # of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Where the values come from that a host function under `per_shard=True` is called with.

    Attributes:
        device: The device that holds them.
        coordinates: Its place in the mesh, ``{axis name: index}``; empty without a mesh.
        index: Slices into the global array, in a tree like that of the argument (a list where a
            class of that tree takes arrays only). None inside of `shard_map` and `pmap`, where
            there is no global array.
    """

    __module__ = "spmd.host_callback"

    device: Any
    coordinates: dict[str, int]
    index: Any
