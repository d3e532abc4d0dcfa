"""A host function that keeps what it is told."""

from typing import Any, NamedTuple

from spmd import host_callback as hcb


class Seen(NamedTuple):
    """One call of a host function."""

    arg: Any
    transforms: Any
    device: Any
    shard: Any


class Log:
    """Keeps the calls that it gets, in order; each log is a host function of its own."""

    def __init__(self):
        self._seen = []

    def __call__(self, arg, transforms=(), *, device=None, shard=None):
        self._seen.append(Seen(arg, transforms, device, shard))

    def take(self):
        """Waits, and returns the calls since the last time."""
        hcb.barrier_wait()
        seen, self._seen = self._seen, []
        return seen

    def tap(self, arg, **options):
        """Taps a value into this log, with the device."""
        return hcb.id_tap(self, arg, tap_with_device=True, **options)

    def shards(self, arg, **options):
        """Taps every shard of a value into this log."""
        return self.tap(arg, per_shard=True, **options)
