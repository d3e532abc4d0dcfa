"""The ledger against programs that were counted by hand, on CPU and for TPU."""

import math
from pathlib import Path
import re

import programs
from programs import AXES, PROGRAMS
import pytest

from spmd import inspection

FILE = Path(programs.__file__)


def _compiled(name, target):
    build, _, options = PROGRAMS[name]
    lowered, rows = build(target)
    return lowered.compile(options or None), rows


def _plain(shapes, exact):
    """Shapes without dimensions of 1 and in any order of dimensions, or numbers of elements."""
    parts = [re.fullmatch(r"(\w+)\[(.*)\]", str(shape)).groups() for shape in shapes]
    sizes = [(dtype, [int(n) for n in dims.split(",") if n]) for dtype, dims in parts]
    if exact:
        return sorted((dtype, sorted(n for n in dims if n > 1)) for dtype, dims in sizes)
    return sorted((dtype, math.prod(dims)) for dtype, dims in sizes)


def _counted(row, exact=True):
    dtypes = dict.fromkeys(shape.partition("[")[0] for shape in row.operands)
    return (
        row.kind, row.axes, _plain(row.operands, exact), _plain(row.results, exact),
        ", ".join(dtypes), row.n, row.way, row.combined, row.conditional,
        f"{row.payload} bytes", f"{row.wire} on the wire",
    )  # fmt: skip


def _found(one, exact=True):
    return (
        one.kind, one.mesh_axes, *(_plain(shapes, exact) for shapes in one.shapes),
        one.dtype, one.group_size, one.direction, one.combined, one.conditional,
        f"{one.payload_bytes} bytes", f"{one.wire_bytes} on the wire",
    )  # fmt: skip


def _place(source):
    """The marker of the line that a record names, or the line itself."""
    if source is None:
        return None
    assert Path(source.file) == FILE, f"{source} is a line of a library"
    line = FILE.read_text().splitlines()[source.line - 1]
    return line.partition("# here: ")[2] or line.strip()


def _row_of(one, rows, backend):
    """The first row that says what a record says; TPU also splits and joins dimensions."""
    for exact in (True,) if backend == "cpu" else (True, False):
        for index, row in enumerate(rows):
            is_async = False if backend == "cpu" else row.is_async
            if (
                _found(one, exact) == _counted(row, exact)
                and is_async in (None, one.is_async)
                and _place(one.source) in (row.at or (None,))
            ):
                return index
    wanted = "\n".join(f"{_counted(row)} at {row.at}" for row in rows)
    pytest.fail(f"{_found(one)} at {_place(one.source)}\nis none of\n{wanted}")


def _assert_ledger(found, rows, backend):
    """Each record belongs to one row, and the executions of its records sum up to the row's."""
    times = [[] for _ in rows]
    for one in found:
        index = _row_of(one, rows, backend)
        times[index].append(one.executions)
        _assert_parts(one, rows[index])
    for row, counts in zip(rows, times, strict=True):
        assert counts, f"missing: {row}"
        # Loops may be unrolled, so one exchange may stand in several places.
        assert (counts if None in counts else [sum(counts)]) == [row.times], row


def _assert_parts(one, row):
    """What was combined has a part for each operand: their bytes are all, their lines the row's."""
    assert len(one.parts) == (one.combined if one.combined > 1 else 0)
    for name in ("payload_bytes", "wire_bytes") if one.parts else ():
        assert sum(getattr(part, name) for part in one.parts) == getattr(one, name)
    for part in one.parts:
        assert part.payload_bytes == max(sum(s.nbytes for s in side) for side in part.shapes)
    assert {_place(part.source) for part in one.parts} == (set(row.at) if one.parts else set())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name, (_, backends, _) in PROGRAMS.items() for backend in backends],
)
def test_the_ledger_is_what_was_counted_by_hand(name, backend):
    """Kind, axes, shapes, bytes, group, executions, direction and line are those of the count."""
    compiled, rows = _compiled(name, programs.target(backend))
    _assert_ledger(inspection.collectives(compiled.as_text(), AXES), rows, backend)


PERMUTED = (7, 0, 3, 5, 1, 6, 2, 4)


@pytest.mark.parametrize(
    "name",
    ["parts_of_an_axis", "ring_permute", "swapped_axes", "data_parallel_mlp", "moe_dispatch"],
)
def test_the_order_of_devices_changes_nothing(name):
    """A mesh of the same devices in another order has the same ledger."""
    target = programs.cpu_target(PERMUTED)
    assert [d.id for d in target.mesh.devices.flat] == list(PERMUTED)
    compiled, rows = _compiled(name, target)
    _assert_ledger(inspection.collectives(compiled.as_text(), AXES), rows, "cpu")


def test_there_are_programs_enough():
    """No program dropped out of the list, and both backends have most of them."""
    assert len(PROGRAMS) >= 24
    assert all(len([n for n, p in PROGRAMS.items() if b in p[1]]) >= 22 for b in ("cpu", "tpu"))
