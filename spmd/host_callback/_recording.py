"""What host functions were called with, collected for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu
import numpy as np

from spmd.host_callback import _running
from spmd.host_callback._api import barrier_wait
from spmd.host_callback._receiver import receiver
from spmd.host_callback._records import HostCall, Shard, described


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One call of a host function.

    Attributes:
        name: The name of the function; of a metric or a progress bar its own.
        kind: The function that it was handed to: ``"id_tap"``, ``"id_print"``, ``"call"``,
            ``"metrics_tap"`` or ``"progress"``.
        value: The argument in its tree, with NumPy arrays that nobody else writes to.
        transforms: As a tap is told them; empty for a call.
        device: The device that it came from.
        shard: Under `per_shard` where the values are from, else None.
    """

    __module__ = "spmd.host_callback"

    name: str
    kind: str
    value: Any
    transforms: tuple[Any, ...]
    device: Any
    shard: Shard | None


@contextlib.contextmanager
def record(run: bool = True) -> Iterator[list[Recorded]]:
    """Collects the calls of host functions, for tests.

    As a context manager::

        with record() as taps:
            step(state)
        assert [t.name for t in taps] == ["log_loss"]

    It waits at both ends: what was started before is not collected, and what is started inside is
    there afterwards. The calls of one device are in order.

    Args:
        run: Whether functions of taps and prints run, too. Those of `call` always do: the program
            needs their results.

    Yields:
        A list, which grows.

    Raises:
        CallbackException: At the end, if host functions raised; not where the body raises itself.
    """
    found: list[Recorded] = []

    def observe(call: HostCall, values: Sequence[np.ndarray], device: Any, shard: Any) -> bool:
        found.append(_recorded(call, values, device, shard))
        return run

    receiver.wait("record")
    _running.observers.append(observe)
    try:
        yield found
        barrier_wait("record")
    finally:
        receiver.wait("record")
        _running.observers.remove(observe)


def _recorded(
    call: HostCall, values: Sequence[np.ndarray], device: Any, shard: Shard | None
) -> Recorded:
    # The function may write into what it gets.
    copies = [np.array(v) for v in values]
    for copy in copies:
        copy.flags.writeable = False
    return Recorded(
        name=call.name,
        kind=call.kind,
        value=jtu.tree_unflatten(call.in_tree, copies),
        transforms=described(call.transforms),
        device=device,
        shard=shard,
    )
