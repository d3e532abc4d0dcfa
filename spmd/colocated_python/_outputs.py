"""The results of a call: which programs make their arrays, and on which devices.

One program, the *gate*, waits for the host function, on one device. What is small goes into its
results and is copied to the other devices. What is large would be copied twice that way: a further
program on its own device waits for a flag of the gate, and takes the values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd import _jax
from spmd.colocated_python import _promises
from spmd.colocated_python._promises import Promise
from spmd.colocated_python._specs import Specs
from spmd.host_callback._registry import carrier

#: Bytes of a shard from which on it is worth a program of its own.
LARGE = 1 << 20

_FLAG = ((1,), np.dtype(np.uint8))


class _Value(NamedTuple):
    """What one or more devices hold of a leaf."""

    leaf: int
    device: Any
    shape: tuple[int, ...]
    dtype: Any

    def is_large(self) -> bool:
        return math.prod(self.shape) * self.dtype.itemsize >= LARGE


class Plan(NamedTuple):
    """How the arrays are made with the gate on one device.

    Attributes:
        gate: That device.
        programs: Per program the places of its values, the gate first.
        devices: Per program where it runs.
        copied: The results of the gate that are copied, by place, and to which devices.
        sources: Per leaf where its parts come from: a kind, and a place among that kind.
    """

    gate: Any
    programs: tuple[tuple[int, ...], ...]
    devices: tuple[Any, ...]
    copied: tuple[tuple[int, Any], ...]
    sources: tuple[tuple[tuple[str, int, int], ...], ...]


class Outputs:
    """What a call returns, once it is known.

    Attributes:
        specs: Tree and leaves.
        asynchronous: Whether all leaves are of a kind that programs can be given later.
        home: The device whose results need no copy, or None where this process has none.
    """

    def __init__(self, specs: Specs):
        self.specs = specs
        self._plans: dict[Any, Plan] = {}
        self._values: list[_Value] = []
        self._targets: list[list[tuple[Any, int]]] = []
        self.asynchronous = all(_is_plain(leaf.dtype) for leaf in specs.leaves)
        if self.asynchronous:
            self._targets = [self._targets_of(i) for i in range(len(specs.leaves))]
        self.home = next((d for t in self._targets for d, _ in t), None)

    def _targets_of(self, i: int) -> list[tuple[Any, int]]:
        leaf = self.specs.leaves[i]
        shape = leaf.sharding.shard_shape(leaf.shape)
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        places: dict[Any, int] = {}
        targets = []
        for device in _jax.local_device_order(leaf.sharding):
            part = str(indices[device])
            if part not in places:
                places[part] = len(self._values)
                self._values.append(_Value(i, device, shape, np.dtype(leaf.dtype)))
            targets.append((device, places[part]))
        return targets

    def take(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Returns the values of a result, in the memory where they lie."""
        parts = [{s.device: s.data for s in x.addressable_shards} for x in leaves]
        return [np.asarray(parts[v.leaf][v.device]) for v in self._values]

    def plan(self, gate: Any) -> Plan:
        """Returns how the arrays are made with the gate on this device."""
        found = self._plans.get(gate)
        if found is None:
            found = self._plans[gate] = self._make_plan(gate)
        return found

    def _make_plan(self, gate: Any) -> Plan:
        inside: dict[int, int] = {}
        own: dict[Any, dict[int, int]] = {}
        copied: list[tuple[int, Any]] = []

        def source(device: Any, place: int) -> tuple[str, int, int]:
            if device != gate and self._values[place].is_large():
                mine = own.setdefault(device, {})
                return "own", [*own].index(device), mine.setdefault(place, len(mine))
            at = inside.setdefault(place, len(inside))
            if device == gate:
                return "gate", 0, at
            copied.append((at, device))
            return "copy", 0, len(copied) - 1

        sources = tuple(tuple(source(d, k) for d, k in targets) for targets in self._targets)
        return Plan(
            gate=gate,
            programs=(tuple(inside), *(tuple(p) for p in own.values())),
            devices=(gate, *own),
            copied=tuple(copied),
            sources=sources,
        )

    def start(self, promise: Promise, plan: Plan) -> list[Any]:
        """Starts the programs; returns the arrays, which are there at once."""
        results = [self._shapes(p) for p in plan.programs]
        flags = plan.devices[1:]
        # XLA drops a call whose results are all empty.
        needs_flag = bool(flags) or all(0 in shape for shape, _ in results[0])
        first = results[0] + (_FLAG,) * needs_flag
        gate = _promises.start(promise, plan.gate, first)
        sources = [gate[at] for at, _ in plan.copied] + [gate[-1] for _ in flags]
        copies = _promises.copies(sources, [*(d for _, d in plan.copied), *flags])
        flags = copies[len(plan.copied) :]
        own = [
            _promises.start_after(promise, i, flag, results[i]) for i, flag in enumerate(flags, 1)
        ]
        made = {"gate": [gate], "copy": [copies], "own": own}
        return [
            self._assemble(leaf, [made[kind][i][at] for kind, i, at in parts])
            for leaf, parts in zip(self.specs.leaves, plan.sources, strict=True)
        ]

    def nothing(self) -> Any:
        """Returns arrays of which this process has no part."""
        return self.specs.tree.unflatten([self._assemble(x, []) for x in self.specs.leaves])

    def _shapes(self, places: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], Any], ...]:
        return tuple((self._values[k].shape, self._values[k].dtype) for k in places)

    @staticmethod
    def _assemble(leaf: Any, parts: list[Any]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(
            leaf.shape, leaf.sharding, parts, dtype=leaf.dtype
        )


def _is_plain(dtype: Any) -> bool:
    """Whether elements are whole bytes in the memory of a device."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    return carrier(dtype) == np.dtype(dtype)
