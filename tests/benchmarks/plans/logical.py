"""Names for the dimensions of a program, and a table from them to the axes of a mesh.

So does MaxText: a program says what the dimensions of its weights and activations are, wherever
its authors constrain them, and a layout is a table (`base.yml`, `logical_axis_rules`). Without a
table the program is bare, which is how a planner gets it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any, TypeAlias

import jax

import spmd
from spmd import P, with_sharding_constraint

Axes: TypeAlias = str | tuple[str, ...]
Table: TypeAlias = Mapping[str, Axes]


@dataclasses.dataclass(frozen=True, slots=True)
class Dims:
    """The dimensions of an array: which table of a layout says where it lies, and their names."""

    table: str
    names: str


def dims(table: str, names: Any) -> Any:
    """A tree of them from one of names."""
    return jax.tree.map(lambda text: Dims(table, text), names)


def spec_of(leaf: Any, names: str, table: Table, sizes: Mapping[str, int]) -> P:
    """Where an array lies.

    Of two dimensions that want an axis the first one gets it, and a dimension that an axis does not
    divide stays whole: both as `flax.linen.logical_to_mesh_axes` and people do.
    """
    left = dict(sizes)
    entries: list[tuple[str, ...] | None] = []
    for size, name in zip(leaf.shape, names.split(), strict=True):
        wanted = table.get(name, ())
        axes = tuple(a for a in ((wanted,) if isinstance(wanted, str) else wanted) if a in left)
        while axes and size % math.prod(left[a] for a in axes):
            axes = axes[:-1]
        for axis in axes:
            del left[axis]
        entries.append(axes or None)
    return P(*entries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(weight: Any, forward: P, backward: P) -> Any:
    """A weight as it is used, whose gradient is scattered: a constraint alone would gather both."""
    return with_sharding_constraint(weight, forward)


_gathered.defvjp(
    lambda weight, forward, backward: (_gathered(weight, forward, backward), None),
    lambda forward, backward, _, gradient: (with_sharding_constraint(gradient, backward),),
)


class Bare:
    """Leaves everything as it is."""

    def activation(self, x: Any, names: str) -> Any:
        """An activation, whose dimensions are named in order, with a space between."""
        return x

    def used(self, weight: Any, names: str) -> Any:
        """A weight where it is used."""
        return weight

    def moments(self, tree: Any, names: Any) -> Any:
        """Gradients, as the state of the optimizer lies."""
        return tree

    def local(self, x: Any, names: str) -> P:
        """How a kernel that runs on each device gets an activation: rows of a batch, and heads."""
        mesh = spmd.current_mesh()
        table = {"batch": "data", "heads": "model", "kv_heads": "model"}
        return spec_of(x, names, table, mesh.shape if mesh else {})


BARE = Bare()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A layout that a person would write: tables from names to mesh axes.

    What a table does not name is whole on every device.

    Attributes:
        name: as the field calls it.
        source: paper or document.
        activations: of what is computed.
        weights: of parameters.
        state: of gradients and the optimizer's state; None for that of the weights.
        gathered: of weights where they are used; None leaves that to the compiler.
    """

    name: str
    source: str
    activations: Table
    weights: Table
    state: Table | None = None
    gathered: Table | None = None

    def table(self, name: str) -> Table:
        """That of a name: ``activations``, ``weights``, ``state`` or ``gathered``."""
        found = getattr(self, name)
        return self.weights if found is None else found

    @property
    def tables(self) -> list[Table]:
        """Of what is passed in and computed."""
        return [self.activations, self.weights, self.table("state")]

    def on(self, sizes: Mapping[str, int]) -> Kept:
        """For a mesh; axes that no table knows go with ``data``."""
        more = tuple(axis for axis in sizes if axis not in ("data", "model"))
        return Kept(self, dict(sizes), more)


@dataclasses.dataclass(frozen=True, slots=True)
class Kept(Bare):
    """Constrains as an expert says, on a mesh."""

    expert: Expert
    sizes: dict[str, int]
    more: tuple[str, ...] = ()

    def activation(self, x: Any, names: str) -> Any:
        """An activation where the expert wants it."""
        return with_sharding_constraint(x, self.spec(x, Dims("activations", names)))

    def used(self, weight: Any, names: str) -> Any:
        """A weight, gathered where the expert says so."""
        if self.expert.gathered is None:
            return weight
        forward, backward = (self.spec(weight, Dims(of, names)) for of in ("gathered", "state"))
        return _gathered(weight, forward, backward)

    def moments(self, tree: Any, names: Any) -> Any:
        """Gradients, as the state of the optimizer lies."""
        return jax.tree.map(with_sharding_constraint, tree, self.specs(tree, dims("state", names)))

    def local(self, x: Any, names: str) -> P:
        """How a kernel gets an activation."""
        return self.spec(x, Dims("activations", names))

    def specs(self, tree: Any, of: Any) -> Any:
        """A spec for each array of a tree, by its `Dims`."""
        return jax.tree.map(self.spec, tree, of)

    def spec(self, leaf: Any, of: Dims) -> P:
        """Where an array lies."""
        table = self.expert.table(of.table)
        if self.more:
            table = {name: self._with_more(axes) for name, axes in table.items()}
        return spec_of(leaf, of.names, table, self.sizes)

    def _with_more(self, axes: Axes) -> Axes:
        every = (axes,) if isinstance(axes, str) else axes
        return tuple(b for a in every for b in ((a, *self.more) if a == "data" else (a,)))
