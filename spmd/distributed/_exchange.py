"""What every process tells all others, through the service that `jax.distributed` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
import hashlib
import json
import logging
import threading
import time
from typing import Any

import jax

from spmd import _jax
from spmd.distributed._watch import Watch
from spmd.errors import DivergenceError, Failure, SpmdError, explain

logger = logging.getLogger(__name__)

#: Seconds to wait for the slowest process, and seconds after which the log says so.
TIMEOUT = 300.0
_PATIENCE = 10.0

_lock = threading.Lock()
_counts: Counter[tuple[int, ...]] = Counter()


def exchange(
    subject: str, said: bytes, processes: Sequence[int] = (), timeout: float = TIMEOUT
) -> list[bytes]:
    """Tells something to some processes; returns what each of them has told, in their order.

    Each of `processes`, all if there are none, has to come here in the same order of calls, from
    the same function of the user's, the `subject`; each is waited for `timeout` seconds.
    """
    who = tuple(processes or range(jax.process_count()))
    if len(who) == 1:
        return [said]
    client = _jax.mesh.coordination_client()
    with _lock:
        number = _counts[who]
        _counts[who] += 1
        own = _key(who, number, jax.process_index())
        client.key_value_set_bytes(own, json.dumps(subject).encode() + b"\n" + said)
        found = [_get(client, subject, who, number, i, timeout) for i in who]
        if number:  # all who read this one have read the one before
            client.key_value_delete(_key(who, number - 1, jax.process_index()))
    heads, bodies = zip(*(f.split(b"\n", 1) for f in found), strict=True)
    if len({*heads}) > 1:
        raise divergence(
            subject,
            "was not called by all processes",
            got=grouped(dict(zip(who, map(json.loads, heads), strict=True))),
            fix="make the same calls in the same order in every process",
        )
    return [*bodies]


def _key(who: tuple[int, ...], number: int, process: int) -> str:
    group = hashlib.sha256(repr(who).encode()).hexdigest()[:16]
    return f"spmd/exchange/{group}/{number}/{process}"


def _get(
    client: Any, subject: str, who: tuple[int, ...], number: int, process: int, timeout: float
) -> bytes:
    """Waits for what a process tells; a slow one is named in the log now and then."""
    key, start, told = _key(who, number, process), time.monotonic(), 0.0
    while True:
        # Asked before: what a process has told before it ended is there.
        ended = Watch.here is not None and process in Watch.here.ended
        try:
            if ended:
                return client.key_value_try_get_bytes(key)
            return client.blocking_key_value_get_bytes(key, 1000)
        except jax.errors.JaxRuntimeError as error:
            waited = time.monotonic() - start
            if ended or waited >= timeout or "DEADLINE_EXCEEDED" not in str(error):
                reason = "it has ended" if ended else str(error).splitlines()[0][:200]
                raise divergence(
                    subject,
                    f"has waited for process {process} in vain",
                    expected=f"the same call in that process within {timeout:g} s",
                    got=reason,
                    fix="look at what that process did instead",
                ) from None
        if waited - told >= _PATIENCE:
            told = waited
            logger.warning("%s has waited %.0f s for process %d", subject, waited, process)


def divergence(subject: str, what: str, **more: str) -> SpmdError:
    """The error of processes that do not do, or do not hold, the same."""
    return explain(subject, [Failure(what=what, error=DivergenceError, **more)])


def grouped(values: Mapping[int, object]) -> str:
    """Says which processes have which value, those in the minority first."""
    by_value: dict[object, list[int]] = {}
    for process, value in values.items():
        by_value.setdefault(value, []).append(process)
    rows = sorted(by_value.items(), key=lambda row: (len(row[1]), row[1]))
    return "\n".join(
        f"{value} in process{'es' * (len(who) > 1)} {', '.join(map(str, who))}"
        for value, who in rows
    )
