"""The results of a call: which programs make their arrays, and on which devices.

One program, the *gate*, waits for the host function, on one device. What is small goes into its
results and is copied to the other devices. What is large would be copied twice that way: a further
program on its own device waits for a flag of the gate, and takes the values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def is_large(self) -> bool:
        return self.nbytes() >= LARGE


class Plan:
    """How the arrays are made with the gate on one device.

    Attributes:
        gate: That device.
        programs: Per program the places of its values, the gate first.
        devices: Per program where it runs.
        small: Whether all that waits is the gate, with less than one large shard.
    """

    def __init__(
        self,
        gate: Any,
        programs: Sequence[tuple[int, ...]],
        devices: Sequence[Any],
        copied: Sequence[tuple[int, Any]],
        sources: Sequence[Sequence[tuple[str, int, int]]],
        *,
        small: bool,
    ):
        """Keeps what is copied of the gate's results, by place, and whence a leaf has its parts."""
        self.gate = gate
        self.programs = tuple(programs)
        self.devices = tuple(devices)
        self.small = small
        self._copied = tuple(place for place, _ in copied)
        self._copy_devices = [*(d for _, d in copied), *devices[1:]]
        self._sources = sources
        self._start: Callable[[Promise], list[Any]] | None = None

    def start(self, promise: Promise, values: Sequence[_Value], specs: Specs) -> list[Any]:
        """Starts the programs; returns the arrays, which are there at once."""
        if self._start is None:
            self._start = self._prepare(values, specs)
        return self._start(promise)

    def _prepare(self, values: Sequence[_Value], specs: Specs) -> Callable[[Promise], list[Any]]:
        """Makes everything that is the same for each call."""
        results = [tuple((values[k].shape, values[k].dtype) for k in p) for p in self.programs]
        # XLA drops a call whose results are all empty.
        needs_flag = len(results) > 1 or all(0 in shape for shape, _ in results[0])
        first = _promises.program(results[0] + (_FLAG,) * needs_flag, waits=False)
        others = [_promises.program(r, waits=True) for r in results[1:]]
        work, copy = _promises.work(self.gate), _jax.dispatch.copier(self._copy_devices)
        copied = self._copied + (len(results[0]),) * len(others)
        assemblers = [_jax.dispatch.assembler(x.shape, x.dtype, x.sharding) for x in specs.leaves]
        leaves = [*zip(assemblers, self._sources, strict=True)]
        number = _promises.number

        def start(promise: Promise) -> list[Any]:
            gate = first(number(promise, 0), work)
            copies = copy([gate[k] for k in copied]) if copied else []
            flags = copies[len(self._copied) :]
            own = [
                other(number(promise, i), flag)
                for i, (other, flag) in enumerate(zip(others, flags, strict=True), 1)
            ]
            made = {"gate": [gate], "copy": [copies], "own": own}
            return [
                assemble([made[kind][i][k] for kind, i, k in parts]) for assemble, parts in leaves
            ]

        return start


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
        for device in _jax.dispatch.local_device_order(leaf.sharding):
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
            programs=[tuple(inside), *(tuple(p) for p in own.values())],
            devices=[gate, *own],
            copied=copied,
            sources=sources,
            small=not own and sum(self._values[k].nbytes() for k in inside) < LARGE,
        )

    def start(self, promise: Promise, plan: Plan) -> list[Any]:
        """Starts the programs of a call; returns its arrays, which are there at once."""
        return plan.start(promise, self._values, self.specs)

    def nothing(self) -> Any:
        """Returns arrays of which this process has no part."""
        return self.specs.tree.unflatten(
            [_jax.dispatch.assembler(x.shape, x.dtype, x.sharding)([]) for x in self.specs.leaves]
        )


def _is_plain(dtype: Any) -> bool:
    """Whether elements are whole bytes in the memory of a device; those of strings are not."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return False
    if np.dtype(dtype).kind == "T":
        return False
    return carrier(dtype) == np.dtype(dtype)
