"""Processes that Ray starts: an actor each, on the machines of a cluster or on this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import importlib
import logging
import os
import queue
import shlex
import subprocess
import sys
import threading
from typing import Any

from spmd.cli.options import CommandError
from spmd.launch import _local
from spmd.launch._local import Launch


def run(launch: Launch) -> int:
    """Runs a program in actors of Ray; each needs a CPU, or what the engine's options say.

    The interpreter and the program have to be at the same place on all machines. It returns 0, the
    exit code of the first process that failed, or 128 and the signal that ended it.
    """
    ray = _ray()
    options = _options(launch.engine_options)
    _connect(ray, options.pop("address", os.environ.get("RAY_ADDRESS")), launch, options)
    actor = ray.remote(**options)(Process)

    def ended() -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(ray.shutdown)
            actors = [actor.remote() for _ in range(launch.processes)]
            tasks = _Tasks(ray, actors)
            stack.callback(tasks.kill)
            address = ray.get(actors[0].address.remote())
            for i in range(launch.processes):
                tasks.start(i, launch, address)
            return _local.wait(tasks.codes, tasks.kill, launch.grace)

    with _local.stoppable():
        return _local.unless_stopped(ended, lambda _: None)  # they are killed in any case


def _ray() -> Any:
    """An optional package, which has types of its own where it is there."""
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise CommandError("--on ray needs Ray: pip install 'spmd[ray]'.") from None


def _options(words: str) -> dict[str, Any]:
    """Reads ``num_cpus=4 num_gpus=1 address=auto``."""
    found: dict[str, Any] = {"num_cpus": 1.0}
    for name, _, value in [word.partition("=") for word in shlex.split(words)]:
        if name not in ("num_cpus", "num_gpus", "address") or not value:
            raise CommandError(f"--engine-options {name!r} is none of ray's here: {_WRITE}")
        try:
            found[name] = value if name == "address" else float(value)
        except ValueError:
            text = f"--engine-options {name}={value} is no number: {_WRITE}"
            raise CommandError(text) from None
    return found


_WRITE = "write num_cpus=4, num_gpus=1 or address=HOST:PORT."


def _connect(ray: Any, address: str | None, launch: Launch, options: Mapping[str, Any]) -> None:
    more: dict[str, Any] = {}
    if address is None:  # a cluster of this machine alone, for this run
        cpus = int(launch.processes * options["num_cpus"])
        more = {"num_cpus": max(os.cpu_count() or 1, cpus), "include_dashboard": False}
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **more)


class Process:
    """An actor: one process of the run, and what it says."""

    def address(self) -> str:
        """Where the processes meet, if this is process 0."""
        # The machine's own address, also where all of them are on this one.
        return f"{_ray().util.get_node_ip_address()}:{_local.free_port()}"

    def run(self, command: tuple[str, ...], env: Mapping[str, str]) -> Iterator[Any]:
        """Runs the program; yields whether a line is of its errors, and the line; then its code."""
        words, own = _local.program(command, os.getpid()), {**os.environ, **env}
        with _local.started(words, own, own_session=False) as running:
            yield from _lines(running)
        yield running.returncode


def _lines(running: subprocess.Popen[bytes]) -> Iterator[tuple[bool, bytes]]:
    """The lines of both streams, as they come."""
    found: queue.SimpleQueue[tuple[bool, bytes] | None] = queue.SimpleQueue()

    def read(is_error: bool, stream: Any) -> None:
        for line in stream:
            found.put((is_error, line))
        found.put(None)

    for pair in ((False, running.stdout), (True, running.stderr)):
        threading.Thread(target=read, args=pair, daemon=True).start()
    for _ in range(2):
        while (line := found.get()) is not None:
            yield line


class _Tasks:
    """The processes of a run, as the end of a run looks at them."""

    def __init__(self, ray: Any, actors: list[Any]):
        self._ray = ray
        self._actors = actors
        self._codes: list[int | None] = [None] * len(actors)

    def start(self, process: int, launch: Launch, address: str) -> None:
        """Starts a process, and a thread that writes what it says."""
        env = {**_local.variables(launch, os.environ), **_local.numbers(launch, process, address)}
        method = self._actors[process].run.options(num_returns="streaming")
        said = method.remote(launch.command, env)
        thread = threading.Thread(target=self._follow, args=(process, said, launch), daemon=True)
        thread.start()

    def _follow(self, process: int, said: Any, launch: Launch) -> None:
        prefix = b"[%d] " % process if launch.prefix else b""
        code: int = 1
        with contextlib.suppress(Exception):  # the actor, or its machine, is gone
            for ref in said:
                told = self._ray.get(ref)
                if isinstance(told, int):
                    code = told
                else:
                    is_error, line = told
                    _local.write(sys.stderr if is_error else sys.stdout, prefix + line)
        self._codes[process] = code

    def codes(self) -> list[int | None]:
        """The exit code of each process that has ended."""
        return [*self._codes]

    def kill(self) -> None:
        """Ends all of them at once: with an actor the kernel ends its process."""
        for actor in self._actors:
            self._ray.kill(actor)
