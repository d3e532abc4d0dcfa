"""Noticing that another process of the run has ended, and ending this one then.

The connections on which the processes have met stay open. The kernel closes them when a process
ends, however it ends, and finds out by itself when a machine is gone; process 0 tells the others.
What a collective waits for would never come, and `jax.distributed` looks for 100 s.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
import contextlib
import json
import math
import os
import selectors
import socket
import sys
import sysconfig
import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd import _jax
from spmd.errors import DistributedError, Failure, explain

_FAILED = 1
_SOON = 0.01  # seconds
_LATE = 1.0
_LONG = 3600.0
_KILLED = "its connection has closed without a word: it was killed, or its machine is gone"


class Watch:
    """The connections of this process to the others of its run.

    Process 0 has one to each of the others, who have one to process 0. They are given by the number
    of the process at the other end. This process ends within `timeout` seconds when another is
    lost: half of them are to notice that a machine is gone, a third to end.

    Attributes:
        lost: What was said of the process that was lost, if one was.
        ended: The numbers of those that have ended as they should.
    """

    #: That of this process, once it is part of a run.
    here: Watch | None = None

    def __init__(
        self, process: int, processes: int, connections: Mapping[int, socket.socket], timeout: float
    ):
        self.process = process
        self.processes = processes
        self.lost: Failure | None = None
        self.ended: set[int] = set()
        self._connections = dict(connections)
        self._buffers = dict.fromkeys(connections, b"")
        self._grace = timeout / 3
        self._end_at = math.inf
        self._raised = ""
        self._told_lost = threading.Event()
        self._leaving = threading.Lock()
        self._left = False
        for connection in connections.values():
            _keep_alive(connection, timeout / 2)

    def start(self) -> None:
        """Starts to watch; when the interpreter ends, the others are told."""
        self._hook, sys.excepthook = sys.excepthook, self._remember
        atexit.register(self._exit)
        os.register_at_fork(after_in_child=self._after_fork)
        self._thread = threading.Thread(target=self._watch, name="spmd.distributed", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Ends what this process has started, and tells the others that it ends as it should."""
        if self._connections and not self._left:
            self._finish()
        with self._leaving:
            if not self._left:
                self._left = True
                self._tell({"ended": self.process})

    # What the others say

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            # After a loss until the others have ended, too: JAX needs process 0 longest.
            while selector.get_map() and (left := self._left_to_end()) is not None:
                for key, _ in selector.select(left):
                    if not self._heard(key.data):
                        selector.unregister(key.fileobj)
        if self.lost is not None:
            _end(f"this process ends, too; it was {_where()}")

    def _left_to_end(self) -> float | None:
        """Seconds to go on after a loss, None when they are over; without a loss, many."""
        left = min(self._end_at - time.monotonic(), _LONG)
        return left if left > 0 else None

    def _heard(self, process: int) -> bool:
        """Reads what a process says; returns whether it may say more."""
        data = b""
        with contextlib.suppress(OSError):
            data = self._connections[process].recv(1 << 16)
        if not data:
            if process not in self.ended:
                self._loses(process, _KILLED)
            return False
        *lines, self._buffers[process] = (self._buffers[process] + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return True

    def _take(self, told: dict[str, Any]) -> None:
        if "lost" in told:
            self._loses(told["lost"], told["why"])
        else:
            self.ended.add(told["ended"])
            if self.process == 0:
                self._tell(told)

    def _loses(self, process: int, why: str) -> None:
        """Says it, once, to the others as well, and ends this process a little later."""
        if self.lost is not None:
            return
        # Without process 0, which has the service, JAX aborts the others with a stack of C++.
        grace = self._grace if process and self.process != process else 0.0
        self._end_at = time.monotonic() + grace
        ends = f"this process ends within {grace:.0f} s" if grace else "this process ends now"
        self.lost = Failure(
            what=f"has lost process {process} of {self.processes}",
            got=why,
            fix=f"start all of them again, from the last checkpoint; {ends}",
            error=DistributedError,
        )
        if self.process == 0:
            self._tell({"lost": process, "why": why})
        _say(str(explain("This run", [self.lost])))
        self._told_lost.set()

    def _tell(self, what: dict[str, Any]) -> None:
        line = json.dumps(what).encode() + b"\n"
        for process, connection in self._connections.items():
            if process not in self.ended:
                with contextlib.suppress(OSError):  # it has gone
                    connection.sendall(line)

    # The end of this process

    def _remember(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._hook(kind, error, trace)
        self._raised = traceback.format_exception_only(error)[-1].strip()

    def _exit(self) -> None:
        """Runs before JAX's own handler, which waits for all other processes to end too."""
        if self.lost is not None or (self._raised and not self._left):
            self._told_lost.wait(_LATE)  # the loss of another one may be why it has raised
        if self.lost is not None:
            if self.process == 0:
                self._thread.join()
            _end("this process ends because of that")
        if self._raised and not self._left:
            self._tell({"lost": self.process, "why": f"it raised {self._raised[:500]}"})
            _end("")
        self.leave()

    def _finish(self) -> None:
        """Waits until the devices of this process have ended what was started on them.

        The others need it: a program whose result was read on one device may still run on another,
        and who is gone by then leaves its peers waiting in a collective. Where all others have
        ended, it may wait for them itself, and is given up after a while.
        """
        left, alone = _started(), 0.0
        while left := [array for array in left if not _is_ready(array)]:
            if alone > self._grace:
                _say("all other processes have ended, and a program that may wait for them is left")
                return
            time.sleep(_SOON)
            alone += _SOON * (len(self.ended) == self.processes - 1)

    def _after_fork(self) -> None:
        # A child that outlives this process would keep its connections open.
        self._left = True
        for connection in self._connections.values():
            connection.close()
        atexit.unregister(self._exit)
        sys.excepthook = self._hook


def _keep_alive(connection: socket.socket, seconds: float) -> None:
    """Has the kernel ask the other machine now and then, and close what gets no answer."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every, times = max(1, int(seconds / 4)), 3
    values = {"TCP_KEEPIDLE": every, "TCP_KEEPINTVL": every, "TCP_KEEPCNT": times}
    for name, value in values.items():
        if hasattr(socket, name):  # on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _started() -> list[Any]:
    """Arrays that are ready when the devices of this process have ended what was started on them.

    No client of JAX says that. A device starts a program of its own after those before it, and all
    of them start one of theirs after those of several; what other threads started has arrays.
    """
    found: list[Any] = []
    if not _jax.mesh.backends_started():
        return found
    with contextlib.suppress(Exception):  # such as that of a program that has failed
        found += jax.live_arrays()
        devices = jax.local_devices()
        for own in (*([one] for one in devices), devices):
            mesh = jax.sharding.Mesh(np.array(own), ("device",))
            whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            with jax.set_mesh(mesh):
                found.append(jax.jit(lambda: jnp.zeros(()), out_shardings=whole)())
    return found


def _is_ready(array: Any) -> bool:
    """Whether nothing computes an array any more; one that was deleted or has failed is ready."""
    with contextlib.suppress(Exception):
        return array.is_ready()
    return True


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed
        sys.stderr.write(f"spmd: {text}\n")
        sys.stderr.flush()


def _end(text: str) -> None:
    """Ends this process without waiting for anything."""
    if text:
        _say(text)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(_FAILED)


def _where() -> str:
    """The line of the user that the main thread is at."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, line in traceback.walk_stack(main) if main is not None else ():
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS):
            return f"at {name}:{line} in {frame.f_code.co_name}"
    return "at its end"


_NOT_THE_USERS = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")},
    os.path.dirname(os.path.dirname(__file__)),
    "<",
)
