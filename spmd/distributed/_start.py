"""Starting the processes of a run: they come together first, and compare what they are.

`jax.distributed` connects, and then waits; a process that has the wrong number, or that runs
another JAX, makes all of them wait until the time is over. So before it is started, every process
says to process 0 what it is, on the same port, and process 0 answers all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
from dataclasses import asdict, dataclass
import importlib.metadata
import ipaddress
import json
import os
import platform
import socket
import time
from typing import Any

import jax

import spmd
from spmd import _jax
from spmd.distributed._exchange import grouped
from spmd.distributed._watch import Watch
from spmd.errors import DistributedError, Failure, OptionError, SpmdError, explain
from spmd.launch import ADDRESS, PROCESS, PROCESSES

_SUBJECT = "spmd.distributed.initialize"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """What a process says: its number, how many it believes there are, versions that must agree."""

    process: int
    processes: int
    versions: str


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    cluster_detection_method: str | None = None,
    timeout: float = 60.0,
    lost_timeout: float = 30.0,
) -> None:
    """Makes this process one of several that run the same program; call it before any other JAX.

    What is left out is taken from ``spmd launch``, or found as `jax.distributed` finds it: from
    SLURM, Open MPI, Kubernetes or Cloud TPU. All processes come together first and compare their
    numbers and versions; then `jax.distributed` is started.

    Args:
        coordinator_address: ``host:port`` of process 0, on a free port.
        num_processes: How many processes there are.
        process_id: The number of this one, from 0.
        local_device_ids: Which GPUs of the machine this process uses. None: all, or those that
            the environment gives it.
        cluster_detection_method: The environment to ask, as for `jax.distributed.initialize`.
        timeout: Seconds within which all processes have to come.
        lost_timeout: Seconds within which this process ends, with an error, when another one is
            killed, raises, or is on a machine that is gone.

    Raises:
        RuntimeError: It was called before or too late; process 0 cannot be reached, its port is in
            use, a process is missing, or processes disagree on their number or versions.
        ValueError: Nobody says how many processes there are, or the numbers make no sense.
    """
    _check_fresh()
    address, processes, process, devices = _resolve(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        cluster_detection_method,
        timeout,
    )
    host, port = _split(address)
    _check_numbers(processes, process, timeout, lost_timeout)
    hello = _Hello(process=process, processes=processes, versions=_versions())
    if process == 0:
        connections = _gather(host, port, hello, timeout)
    else:
        connections = {0: _report(host, port, hello, timeout)}
    Watch.here = Watch(process, processes, connections, lost_timeout)
    Watch.here.start()
    jax.distributed.initialize(
        _shown(host, port),
        processes,
        process,
        devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(timeout)),
        coordinator_bind_address=_shown(host, port) if _is_loopback(host) else None,
    )


def shutdown() -> None:
    """Leaves the run; waits until all processes do. At exit that happens by itself."""
    if Watch.here is not None:
        Watch.here.leave()
    jax.distributed.shutdown()


def _error(what: str, error: type[SpmdError] = DistributedError, **more: str) -> SpmdError:
    return explain(_SUBJECT, [Failure(what=what, error=error, **more)])


# Who and where


def _resolve(
    address: str | None,
    processes: int | None,
    process: int | None,
    devices: int | Sequence[int] | None,
    method: str | None,
    timeout: float,
) -> tuple[str, int, int, Sequence[int] | None]:
    """Fills what was not given, from ``spmd launch`` or from the cluster."""
    address = address or os.environ.get(ADDRESS)
    processes = _from_launch(PROCESSES) if processes is None else processes
    process = _from_launch(PROCESS) if process is None else process
    ids = [devices] if isinstance(devices, int) else devices
    if None in (address, processes, process):
        address, processes, process, ids = _jax.mesh.detected_cluster(
            address, processes, process, ids, method, max(1, int(timeout))
        )
    given = {"coordinator_address": address, "num_processes": processes, "process_id": process}
    if address is None or processes is None or process is None:
        raise _error(
            "cannot tell which processes there are",
            OptionError,
            expected=" and ".join(name for name, value in given.items() if value is None),
            got="no argument, and no environment that says it: spmd launch, SLURM, Open MPI, "
            "Kubernetes, Cloud TPU",
            fix="spmd launch -n 2 script.py, on one machine; else give the arguments",
        )
    return address, processes, process, ids


def _from_launch(name: str) -> int | None:
    value = os.environ.get(name)
    return None if value is None else int(value)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        what = "cannot read the address of process 0"
        raise _error(what, OptionError, expected="host:port", got=repr(address))
    return host.strip("[]"), int(port)


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    jaxlib = importlib.metadata.version("jaxlib")
    return f"spmd {spmd.__version__}, jax {jax.__version__}, jaxlib {jaxlib}, Python {python}"


def _check_fresh() -> None:
    if _jax.mesh.coordination_client() is not None:
        raise _error("was called before", fix="call it once")
    if _jax.mesh.backends_started():
        raise _error(
            "comes too late: JAX has started, for this process alone",
            expected="a call before anything that asks for devices or makes an array",
            fix="make it the first line of the program after the imports",
        )


def _check_numbers(processes: int, process: int, timeout: float, lost_timeout: float) -> None:
    rows = []
    if not 0 <= process < processes:
        numbers = f"process_id={process}, num_processes={processes}"
        rows.append(("these numbers", "a process_id from 0 up to num_processes - 1", numbers))
    for name, value in (("timeout", timeout), ("lost_timeout", lost_timeout)):
        if not value > 0:
            rows.append((f"this {name}", "seconds, more than 0", repr(value)))
    failures = [
        Failure(what=f"cannot use {what}", expected=expected, got=got, error=OptionError)
        for what, expected, got in rows
    ]
    if failures:
        raise explain(_SUBJECT, failures)


# Process 0

_BACKLOG = 1024


def _gather(host: str, port: int, own: _Hello, timeout: float) -> dict[int, socket.socket]:
    """Waits for what all others say of themselves, and answers all of them what is wrong, if it is.

    It returns the connections to them, if they come in time and agree.
    """
    deadline = time.monotonic() + timeout
    hellos, arrived = {0: own}, []
    wrong = None
    with _listen(host, port) as server:
        while len(hellos) < own.processes and wrong is None:
            found = _accept(server, deadline)
            if found is None:
                wrong = _missing(host, port, hellos, own.processes, timeout)
                break
            connection, hello = found
            wrong = _disagreement(hello, hellos, own)
            hellos[hello.process] = hello
            arrived.append((hello.process, connection))
    answer = json.dumps(wrong).encode() + b"\n"
    for _, connection in arrived:
        with contextlib.suppress(OSError):  # it has gone; that is noticed soon enough
            connection.sendall(answer)
    if wrong is None:
        return dict(arrived)
    for _, connection in arrived:
        with contextlib.suppress(OSError), connection:
            connection.recv(1)  # who closes first keeps the port for a while: not this side
    raise _error(**wrong)


def _listen(host: str, port: int) -> socket.socket:
    is_loopback = _is_loopback(host)
    both = not is_loopback and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (is_loopback and ":" in host) else socket.AF_INET
    place = (host if is_loopback else "", port)
    try:
        return socket.create_server(place, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise _error(
            f"cannot listen at {_shown(host, port)}",
            expected="a port of this machine that is free: here process 0 meets all others",
            got=os.strerror(error.errno) if error.errno else str(error),
            fix="choose another port in coordinator_address, the same in every process",
        ) from None


def _accept(server: socket.socket, deadline: float) -> tuple[socket.socket, _Hello] | None:
    """Returns the next process that says what it is, or None where none comes in time."""
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return None
        connection.settimeout(5)
        # Who says something else, as a port scanner or a process with stock JAX, is left alone.
        with contextlib.suppress(OSError, ValueError, TypeError):
            return connection, _Hello(**json.loads(_line(connection)))
        connection.close()
    return None


def _line(connection: socket.socket) -> bytes:
    """Reads a line, and nothing that comes after it."""
    found = bytearray()
    while not found.endswith(b"\n") and (byte := connection.recv(1)):
        found += byte
        if len(found) > _LONGEST:
            raise ValueError("no line")
    return bytes(found)


_LONGEST = 1 << 16


def _disagreement(hello: _Hello, others: dict[int, _Hello], own: _Hello) -> dict[str, Any] | None:
    if hello.processes != own.processes:
        counts = {0: own.processes, hello.process: hello.processes}
        return {
            "what": "finds that the processes disagree on how many they are",
            "got": grouped({i: f"num_processes={n}" for i, n in counts.items()}),
            "fix": "give every process the same num_processes",
        }
    if hello.process in others or not 0 <= hello.process < own.processes:
        return {
            "what": f"finds two processes with process_id={hello.process}",
            "expected": "a process_id of its own for each",
        }
    if hello.versions != own.versions:
        return {
            "what": "finds that the processes run different versions",
            "expected": "the same packages in every process: they compile the same program",
            "got": grouped({0: own.versions, hello.process: hello.versions}),
        }
    return None


def _missing(
    host: str, port: int, hellos: dict[int, _Hello], processes: int, timeout: float
) -> dict[str, Any]:
    gone = [str(i) for i in range(processes) if i not in hellos]
    shown = ", ".join(gone[:20]) + ", ..." * (len(gone) > 20)
    return {
        "what": f"waited in vain for process{'es' * (len(gone) > 1)} {shown} of {processes}",
        "expected": f"all of them at {_shown(host, port)} within {timeout:g} s",
        "fix": "see whether they run, reach this address and call spmd.distributed.initialize, or "
        "give a longer timeout",
    }


# All other processes


def _report(host: str, port: int, own: _Hello, timeout: float) -> socket.socket:
    """Says to process 0 what this process is; the connection to it, if it has answered well."""
    connection = _connect(host, port, timeout)
    try:
        connection.sendall(json.dumps(asdict(own)).encode() + b"\n")
        # Process 0 answers when all have come; it may have started to wait later.
        connection.settimeout(2 * timeout + 5)
        told = json.loads(_line(connection))
    except (OSError, ValueError):
        connection.close()
        raise _error(
            f"gets no answer from {_shown(host, port)}",
            expected="process 0 of this run, in spmd.distributed.initialize",
            fix="see whether process 0 has ended, uses jax.distributed.initialize instead, or "
            "something else listens at this port",
        ) from None
    if told is not None:
        connection.close()
        raise _error(**told)
    return connection


def _connect(host: str, port: int, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except socket.gaierror as error:
            raise _error(
                "cannot find process 0",
                expected="a name or number of its machine",
                got=f"{host!r}: {error.strerror}",
            ) from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise _error(
                    f"cannot reach process 0 at {_shown(host, port)}",
                    expected=f"it to listen there within {timeout:g} s",
                    got=os.strerror(error.errno) if error.errno else str(error),
                    fix="see whether process 0 runs, and whether its port is open to this machine",
                ) from None
        time.sleep(0.1)
