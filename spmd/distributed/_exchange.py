"""What every process tells all others, through the service that `jax.distributed` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import threading

import jax

from spmd import _jax
from spmd.errors import DivergenceError, Failure, explain

#: Seconds to wait for the slowest process.
TIMEOUT = 300.0

_lock = threading.Lock()
_count = 0


def exchange(subject: str, said: bytes, timeout: float = TIMEOUT) -> list[bytes]:
    """Tells something to all processes; returns what each has told, by process number.

    Every process has to come here, in the same order of calls.

    Args:
        subject: The function that a user has called.
        said: What this process tells.
        timeout: Seconds to wait for each of the others.

    Raises:
        RuntimeError: A process did not come, or came from another function.
    """
    global _count
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [said]
    client = _jax.coordination_client()
    with _lock:
        number, _count = _count, _count + 1
        own = _key(number, me)
        client.key_value_set_bytes(own, json.dumps(subject).encode() + b"\n" + said)
        found = [_get(client, subject, number, i, timeout) for i in range(count)]
        if number:  # all who read this one have read the one before
            client.key_value_delete(_key(number - 1, me))
    heads, bodies = zip(*(f.split(b"\n", 1) for f in found), strict=True)
    _check_subjects(subject, [json.loads(head) for head in heads])
    return [*bodies]


def _key(number: int, process: int) -> str:
    return f"spmd/exchange/{number}/{process}"


def _get(client: object, subject: str, number: int, process: int, timeout: float) -> bytes:
    get = client.blocking_key_value_get_bytes  # type: ignore[attr-defined] - of C++
    try:
        return get(_key(number, process), int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
    failure = Failure(
        what=f"waited for process {process} in vain",
        expected=f"every process to make this call within {timeout:g} s",
        got=reason[:200],
        fix="look at the output of that process: it may have ended, or be somewhere else",
        error=DivergenceError,
    )
    raise explain(subject, [failure])


def _check_subjects(subject: str, subjects: Sequence[str]) -> None:
    if len({*subjects}) == 1:
        return
    failure = Failure(
        what="was not called by all processes",
        got="\n".join(f"process {i}: {s}" for i, s in enumerate(subjects)),
        fix="make the same calls in the same order in every process",
        error=DivergenceError,
    )
    raise explain(subject, [failure])


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
