"""Reshards for which the partitioner gives every device the whole array.

XLA says so nowhere but in a warning that its C++ writes to file descriptor 2 while it compiles. So
a report catches what is written there meanwhile, takes these warnings out, and passes all else on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import itertools
import math
import operator
import os
import re
import select
import tempfile
import threading
import time
from typing import Any, NamedTuple
import weakref

from jax.sharding import AbstractMesh

from spmd import _jax
from spmd._recover import parse_op_sharding
from spmd.errors import RecoveryError
from spmd.inspection.findings.values import show_axes
from spmd.inspection.hlo.groups import counted, expand_replica_groups
from spmd.inspection.hlo.text import Module, frames_of, integers, parse_instruction, parse_shapes
from spmd.inspection.records.names import user_source
from spmd.inspection.records.report import Shape, Source

_Axes = tuple[tuple[str, ...], ...]
"""The mesh axes that split each dimension, major to minor."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialization:
    """A value that every device gets whole, because it is split anew in one go.

    Attributes:
        source: the user's line that makes the value; None where the warning names none, as for an
            argument.
        op_name: its name-stack path; for an argument, the argument's path.
        shape: of all of it. Where a split is uneven, padding is part of it; where `given` cannot
            be read, it is the part of one device.
        given: how it is split; where that is no PartitionSpec on the mesh, as XLA writes it.
        wanted: how it is to be split, in the same way.
        route: shardings to constrain it to in between, in order, so that each step is a cheap
            exchange; none where none is known.
        nbytes: bytes of the whole value, which each device holds for a while.
        sites: places in the program of which all of this holds.
    """

    source: Source | None
    op_name: str
    shape: Shape
    given: str
    wanted: str
    route: tuple[str, ...]
    nbytes: int
    sites: int = 1


# Catching

#: All that is read of a warning; what lacks a part of it is none, and passed on.
_PARTS = (
    r"\[SPMD\] Involuntary full rematerialization\. .*? "
    r"from sharding (?P<given>\{.*?\}) to (?P<wanted>\{.*?\}) efficiently "
    r"for HLO operation (?P<operation>%?[\w.\-]+ = (?P<shape>[a-z]\w*\[[\d,]*\])\S* .*)"
)
_WARNING = re.compile(
    rb"(?:[IWEF]\d{4} [\d:.]+ +\d+ [\w./\-]+:\d+\] )?" + _PARTS.encode() + rb"\n?"
)

#: Seconds between two times that what was written is passed on.
_INTERVAL = 0.05

#: Seconds that a write of another thread has to end in once the descriptor leads elsewhere.
_GRACE = 0.01

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    """Takes the partitioner's warnings out of what is written to file descriptor 2.

    The list holds them when the context is left. Everything else is passed on to where the
    descriptor leads: byte for byte, in order, and while it is written up to the last whole line.
    Only what another thread writes at the moment when the context is left may change places with
    what it writes next. Where another thread catches already, or there is no such descriptor,
    nothing is caught.
    """
    lines: list[str] = []
    if not _one_at_a_time.acquire(blocking=False):
        yield lines
        return
    try:
        with contextlib.ExitStack() as stack:
            # A closed descriptor 2 would be the number of the next file that is opened, so the
            # copy comes first.
            with contextlib.suppress(OSError):
                real = os.dup(2)
                stack.callback(os.close, real)
                # A file and no pipe: who writes never waits for us, whatever locks they hold.
                file, rest = _opened_twice(stack)
                dismiss = stack.enter_context(_last_words(rest))
                passing = _Passing(file, rest, real, lines)
                stack.enter_context(_redirected(passing, file, real, dismiss))
            yield lines
    finally:
        _one_at_a_time.release()


def _opened_twice(stack: contextlib.ExitStack) -> tuple[int, int]:
    """Two descriptors of a new file without a name; each has a place in it of its own."""
    file, path = tempfile.mkstemp()
    stack.callback(os.close, file)
    try:
        rest = os.open(path, os.O_RDONLY)
    finally:
        os.unlink(path)
    stack.callback(os.close, rest)
    return file, rest


#: Waits for a line, which comes where all went well. If the end comes first, this process is no
#: more: it writes out what is left of the file. What a process is given by its parent, such as the
#: socket of `spmd.cli.supervised`, has lower numbers than 9, and a shell knows no higher ones.
_GUARD = "read -r _ || cat <&9 >&2"


@contextlib.contextmanager
def _last_words(rest: int) -> Iterator[Callable[[], object]]:
    """If this process is aborted, another one writes what was not passed on yet.

    No handler of a signal could: the compiler aborts while other threads hold Python's locks. The
    other process shares the place of `rest` in its file, and so knows what is left. What is yielded
    tells it that all is well; its end takes a while, so it is told early.
    """
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, rest, 9)]
    guard = None
    try:
        with contextlib.suppress(OSError):  # no shell, or no processes allowed
            guard = os.posix_spawn(
                "/bin/sh", ["sh", "-c", _GUARD], os.environ, file_actions=actions
            )
        # Both ends stay open here, so there is always one who could read this.
        yield lambda: os.write(write, b"\n")
    finally:
        if guard is not None:
            os.write(write, b"\n")  # once more: it may not have been told
            with contextlib.suppress(OSError):  # others may have waited for it
                os.waitpid(guard, 0)
        os.close(read)
        os.close(write)


@contextlib.contextmanager
def _redirected(
    passing: _Passing, file: int, real: int, dismiss: Callable[[], object]
) -> Iterator[None]:
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(_INTERVAL):
            passing.on()

    thread = threading.Thread(target=repeat, name="spmd-stderr", daemon=True)
    thread.start()
    try:
        os.dup2(file, 2)
        yield
    finally:
        try:
            done.set()
            thread.join()
            # What is there goes first, so that next to nothing is left when others write past us.
            passing.on()
        finally:
            os.dup2(real, 2)
            dismiss()
        # A write that began before may still be under way, and a file does not say so.
        passing.on()
        time.sleep(_GRACE)
        passing.on(to_the_end=True)


class _Passing:
    """What was written to a file and is not yet passed on to the descriptor `real`.

    The place of `rest` in the file is kept where that begins, and `lines` gets the warnings.
    """

    def __init__(self, file: int, rest: int, real: int, lines: list[str]):
        self._file, self._at, self._real, self._lines = file, rest, real, lines
        self._place, self._rest = 0, b""

    def on(self, to_the_end: bool = False) -> None:
        """Passes on what is whole lines, or all there is; keeps the warnings."""
        while more := os.pread(self._file, 1 << 20, self._place):
            self._place += len(more)
            text = self._rest + more
            # A warning has no line end inside; the lines of a progress bar end without a feed.
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._sort(text[:end])
            self._rest = text[end:]
            # From here on another process writes it, should this one end.
            os.lseek(self._at, self._place - len(self._rest), os.SEEK_SET)
        if to_the_end:
            self._sort(self._rest)

    def _sort(self, text: bytes) -> None:
        place = 0
        for found in _WARNING.finditer(text):
            _write(self._real, text[place : found.start()])
            self._lines.append(found[0].decode("utf-8", "replace"))
            place = found.end()
        _write(self._real, text[place:])


def _write(descriptor: int, data: bytes) -> None:
    """Writes all of it; a program is compiled whether or not anyone reads what it says."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
        except OSError:
            return


# A program is compiled once, and reported on as often as one likes.
_lines_of: weakref.WeakKeyDictionary[Any, tuple[str, ...]] = weakref.WeakKeyDictionary()


def compile_and_catch(lowered: Any, *, by_lines: bool = True) -> Any:
    """Compiles, and remembers what the partitioner warns of for `warnings_of`.

    Args:
        lowered: the program.
        by_lines: whether JAX's persistent cache tells programs apart by their source lines. If so,
            the lines of a report are those of its program; else what is compiled is there for all
            who compile it.
    """
    key = _jax.lowering.lines_in_cache_key() if by_lines else contextlib.nullcontext()
    with caught() as lines, key:
        compiled = lowered.compile()
    if lines:
        _lines_of.setdefault(_jax.lowering.executable_of(compiled), tuple(lines))
    return compiled


def warnings_of(compiled: Any) -> tuple[str, ...]:
    """The partitioner's warnings, if it was a report that compiled the program."""
    return _lines_of.get(_jax.lowering.executable_of(compiled), ())


# Reading


def rematerializations(
    lines: Iterable[str], module: Module, axis_sizes: Mapping[str, int]
) -> tuple[Rematerialization, ...]:
    """Reads the partitioner's warnings, with the table of frames of the program that came of it.

    Each line of the user's and each pair of shardings has a record; a text of another form has
    none. The axes of the mesh are in its order, and empty without one.
    """
    found: dict[tuple[Any, ...], Rematerialization] = {}
    for line in lines:
        if one := _read(line, module, axis_sizes):
            name = "" if one.source else one.op_name
            key = (one.source, name, one.shape, one.given, one.wanted)
            sites = found[key].sites + 1 if key in found else 1
            found[key] = dataclasses.replace(found.get(key, one), sites=sites)
    return tuple(found.values())


def _read(line: str, module: Module, axis_sizes: Mapping[str, int]) -> Rematerialization | None:
    parts = re.search(_PARTS, line)
    operation = parse_instruction(f"  {parts['operation']}") if parts else None
    if parts is None or operation is None or not (shapes := parse_shapes(parts["shape"])):
        return None
    given, wanted = _tiling(parts["given"]), _tiling(parts["wanted"])
    axes = [_axes(one, axis_sizes) if one else None for one in (given, wanted)]
    shape = _whole(shapes[0], given)
    return Rematerialization(
        source=user_source(frames_of(operation, module)),
        op_name=operation.op_name,
        shape=shape,
        given=parts["given"] if axes[0] is None else show_axes(axes[0]),
        wanted=parts["wanted"] if axes[1] is None else show_axes(axes[1]),
        route=_route(*axes),
        nbytes=shape.nbytes,
    )


def _whole(shard: Shape, given: _Tiling | None) -> Shape:
    """The shape of all of a value: a warning has that of its part on one device."""
    if given is None or len(given.tiles) != len(shard.dims):
        return shard
    dims = tuple(n * parts for n, parts in zip(shard.dims, given.tiles, strict=True))
    return Shape(dtype=shard.dtype, dims=dims)


# Shardings


class _Tiling(NamedTuple):
    """How a value is split.

    Attributes:
        tiles: into how many parts each dimension is.
        devices: all of them, tile by tile, as positions in the program's device assignment.
        plain: False where they do not simply hold parts and copies, as in a `shard_map`.
    """

    tiles: tuple[int, ...]
    devices: tuple[int, ...]
    plain: bool


_TILES = re.compile(r"\{devices=\[([\d,]+)\]((?:<=\[[\d,]+\])?)(?:T\(([\d,]+)\))?([\d,]*)(.*)\}$")
_MESH = re.compile(r"\{(mesh\[.*?\].*?),? \[([^\]]*)\](.*)\}$")
_GROUPS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def _tiling(text: str) -> _Tiling | None:
    """Reads a sharding as XLA prints it; None for one that does not split dimensions."""
    if found := _TILES.match(text):
        return _by_tiles(*found.groups())
    if found := _MESH.match(text):
        return _by_mesh(*found.groups())
    return None


def _by_tiles(sizes: str, iota: str, moved: str | None, listed: str, rest: str) -> _Tiling:
    tiles, devices = integers(sizes), integers(listed)
    if iota:
        devices = tuple(counted(integers(iota), integers(moved)).ravel().tolist())
    groups = _GROUPS.search(rest)
    kinds = groups[1].replace(" ", "").split(",") if groups else []
    last = len(kinds) or int("last_tile_dim_replicate" in rest)
    plain = {*kinds} <= {"replicated"}
    return _Tiling(tiles=tiles[: len(tiles) - last], devices=devices, plain=plain)


def _by_mesh(mesh: str, dimensions: str, rest: str) -> _Tiling:
    names = re.findall(r"\{([^}]*)\}", dimensions)
    tiles = tuple(len(expand_replica_groups(f"{mesh} {{{one}}}")[0]) for one in names)
    # The groups over all axes that split hold one device of each tile, in the order of the tiles.
    groups = expand_replica_groups(f"{mesh} {{{', '.join(filter(None, names))}}}")
    devices = tuple(itertools.chain.from_iterable(zip(*groups, strict=True)))
    plain = not re.search(r"\b(?:unreduced|manual)=\{.", rest)
    return _Tiling(tiles=tiles, devices=devices, plain=plain)


def _axes(one: _Tiling, axis_sizes: Mapping[str, int]) -> _Axes | None:
    """The mesh axes that split each dimension; None where no PartitionSpec says this."""
    if not one.plain or not axis_sizes:
        return None
    proto = _jax.core.OpSharding()
    proto.type = _jax.core.OpSharding.Type.OTHER
    copies = len(one.devices) // math.prod(one.tiles)
    proto.tile_assignment_dimensions = [*one.tiles, copies]
    proto.tile_assignment_devices = list(one.devices)
    proto.replicate_on_last_tile_dim = True
    mesh = AbstractMesh(tuple(axis_sizes.values()), tuple(axis_sizes))
    try:
        spec: Any = parse_op_sharding(proto, mesh)
    except RecoveryError:
        return None
    partitions = spec.partitions
    return (*partitions, *[()] * (len(one.tiles) - len(partitions)))


def _route(given: _Axes | None, wanted: _Axes | None) -> tuple[str, ...]:
    """The shardings that a value may take in between, each a cheap exchange from the one before.

    By the axes that both have: first those that go are gathered, next the others move to where they
    are to be, and last those that come split what is there. If there are none, those that come
    split first, so that only parts are gathered.
    """
    if given is None or wanted is None:
        return ()
    steps = [_restricted(given, wanted), _restricted(wanted, given)]
    if not any(steps[0]):
        steps = [tuple(map(operator.add, given, wanted))]
    return tuple(show_axes(one) for one in dict.fromkeys(steps) if one not in (given, wanted))


def _restricted(axes: _Axes, others: _Axes) -> _Axes:
    common = {*itertools.chain.from_iterable(others)}
    return tuple(tuple(name for name in names if name in common) for names in axes)
