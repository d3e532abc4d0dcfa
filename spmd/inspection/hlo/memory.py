"""What a compiled program keeps in a device's memory, and which lines ask for it.

The totals are the compiler's own. It does not say what they consist of, so the largest arrays are
found by walking the schedule: an array is alive from the instruction that makes it to the last one
that reads it, unless it lies in the memory of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import heapq
import itertools
import math
from typing import Any

from spmd.inspection.hlo.schedule import (
    ARGUMENT,
    ELSEWHERE,
    OUTPUT,
    TEMPORARY,
    Aliases,
    Array,
    Schedule,
    arrays_in,
    line_of,
    pairs_of,
    parse_aliases,
    value_at,
)
from spmd.inspection.hlo.text import Module, frames_of
from spmd.inspection.records.names import user_source
from spmd.inspection.records.report import Buffer, Memory

LARGEST = 20
"""How many arrays a report names."""

STRETCHES = 256
"""In how many equal parts of the program, at most, a report says what is alive."""


def memory_of(
    module: Module,
    analysis: Any,
    *,
    arg_names: Sequence[str] = (),
    largest: int | None = LARGEST,
    capacity: int | None = None,
) -> Memory | None:
    """Reads the compiler's memory plan of one device; None without an analysis.

    Arguments, outputs, the aliased part and code are the compiler's figures, and so are temporaries
    but on TPU. The peak is ``arguments + outputs - aliased + temporaries + code``.

    A TPU's compiler refuses a program by what it keeps in main memory, fragmentation included, and
    gives no such figure for a program that it accepts. Its ``temp_size_in_bytes`` counts what
    fragmentation leaves free twice: 17.15 GiB for a scanned program whose heap took 15.46, of which
    1.70 were free. Its ``peak_memory_in_bytes`` counts that once, but also arrays that lie in
    on-chip VMEM, and leaves code out. So neither is too small, and the smaller one is taken; nor is
    there more than the device has, since the program was accepted. ``docs/pods.md`` has how far
    this is from what the compiler refuses. On CPU and GPU ``peak_memory_in_bytes`` is something
    else, and is not read.

    Temporaries that live at the peak sum up to ``temporaries`` within 25 % for programs whose
    temporaries matter; what is missing is fragmentation, alignment and the sharing of memory that
    the compiler decided and does not print.

    `capacity` is what a device leaves to a program, if known. Parameters are called `arg_names`, or
    where their number differs as the module itself calls them. The `largest` arrays are named. One
    that the compiler gave no line has that of the first instruction that writes into it, else of
    the first that reads it. Constants and arrays outside of main memory are left out.
    """
    if analysis is None:
        return None
    sizes = {
        "arguments": int(analysis.argument_size_in_bytes),
        "outputs": int(analysis.output_size_in_bytes),
        "temporaries": int(analysis.temp_size_in_bytes),
        "code": int(analysis.generated_code_size_in_bytes),
    }
    aliased, schedule = int(analysis.alias_size_in_bytes), _planned(module)
    if schedule is not None and schedule.tiled:
        rest = sum(sizes.values()) - sizes["temporaries"] - aliased
        most = int(analysis.peak_memory_in_bytes) + sizes["code"]
        most = most if capacity is None else min(most, capacity)
        sizes["temporaries"] = min(sizes["temporaries"], max(most - rest, 0))
    peak = sum(sizes.values()) - aliased
    if schedule is None:
        return Memory(**sizes, aliased=aliased, peak=peak, buffers=(), live=())
    use = _in_use(schedule.arrays, schedule.now)
    # A program has more places than a picture has points. The most of each part keeps the peak.
    count = min(len(use), STRETCHES)
    edges = [i * len(use) // count for i in range(count + 1)]
    return Memory(
        **sizes,
        aliased=aliased,
        peak=peak,
        buffers=_largest(schedule, use, module, arg_names, largest),
        places=len(use),
        live=tuple(max(use[a:b]) for a, b in itertools.pairwise(edges)),
    )


def _planned(module: Module) -> Schedule | None:
    """The schedule of a module, with the home of each array; None for an empty module."""
    if module.entry not in module.computations:
        return None
    schedule = Schedule(module)
    _place_results(schedule, donations(module.header))
    _share_memory(schedule)
    if not schedule.tiled:
        _hide_in_outputs(schedule.arrays)
    return schedule


def _largest(
    schedule: Schedule,
    use: Sequence[int],
    module: Module,
    arg_names: Sequence[str],
    largest: int | None,
) -> tuple[Buffer, ...]:
    when = use.index(max(use))
    shown = [array for array in schedule.arrays if array.home != ELSEWHERE]
    names = arg_names if len(arg_names) == len(schedule.parameters) else ()
    count = len(shown) if largest is None else largest

    def at_peak(array: Array) -> bool:
        return array.home != TEMPORARY or array.birth <= when <= array.death

    return tuple(
        _buffer(array, module, names, at_peak=at_peak(array))
        for array in heapq.nlargest(count, shown, key=lambda a: (a.nbytes, at_peak(a)))
    )


# Who lies where

_TRIED = 1000
_SLOTS = 100


def _share_memory(schedule: Schedule) -> None:
    """Lets results take over the memory of operands that nothing reads later."""
    # Backwards, so that a chain of operations ends up in the memory of its last result.
    for one, operands, value in reversed(schedule.offers):
        for k, result in enumerate(arrays_in(value)):
            for i, operand in enumerate(operands):
                if not isinstance(operand, Array) or not _can_follow(result, operand):
                    continue
                if not schedule.tiled and operand.shape != result.shape:
                    continue  # XLA lays no array over one of another type there
                if schedule.may_overwrite(one, i, k):
                    if result.home == TEMPORARY:
                        operand.death -= 1
                    else:
                        operand.home, operand.since = ELSEWHERE, result.since
                        operand.lies_in = result if result.home == OUTPUT else result.lies_in
                    break


def _can_follow(result: Array, operand: Array) -> bool:
    if operand.home != TEMPORARY or operand.death != result.birth:
        return False
    return operand.nbytes == result.nbytes and (
        result.home == TEMPORARY or operand.birth > result.since
    )


def _hide_in_outputs(arrays: Sequence[Array]) -> None:
    """Moves temporaries into outputs that are not made yet, as XLA does on CPU and GPU."""
    start = {id(array): array.birth for array in arrays if array.home == OUTPUT}
    for array in arrays:
        if array.lies_in is not None:
            start[id(array.lies_in)] = min(start[id(array.lies_in)], array.birth)
    slots = [(array, [(start[id(array)], math.inf)]) for array in _first(arrays, OUTPUT, _SLOTS)]
    for one in _first(arrays, TEMPORARY, _TRIED) if slots else ():
        for output, taken in slots:
            free = all(one.death < start or end < one.birth for start, end in taken)
            if one.nbytes <= output.nbytes and free:
                taken.append((one.birth, one.death))
                one.home = ELSEWHERE
                break


def _first(arrays: Iterable[Array], home: str, count: int) -> list[Array]:
    """The largest arrays of a kind of memory."""
    own = (array for array in arrays if array.home == home)
    return heapq.nlargest(count, own, key=lambda array: array.nbytes)


def _in_use(arrays: Iterable[Array], length: int) -> list[int]:
    """Bytes of the temporaries that are alive at each place of the program."""
    change = [0] * (length + 2)
    for array in arrays:
        if array.home == TEMPORARY:
            change[array.birth] += array.nbytes
            change[array.death + 1] -= array.nbytes
    return list(itertools.accumulate(change))[:-1]


# Arguments and results


def donations(header: str) -> Aliases:
    """By path of an output, the parameter and the path in it where that output lies."""
    text = header.partition("input_output_alias={")[2]
    return parse_aliases(text.partition("entry_computation_layout")[0])


def _place_results(schedule: Schedule, donated: Aliases) -> None:
    for path, (number, inner) in donated.items():
        argument = value_at(schedule.parameters.get(number), inner)
        for result, given in pairs_of(value_at(schedule.result, path), argument):
            if result.home == TEMPORARY:
                result.home, result.since = ELSEWHERE, given.death
    for array in arrays_in(schedule.result):
        if array.home == TEMPORARY:
            array.home = OUTPUT


def _buffer(array: Array, module: Module, arg_names: Sequence[str], *, at_peak: bool) -> Buffer:
    one = array.made_by
    argument = array.home == ARGUMENT
    line = one if argument else line_of(array) or array.reader or one
    name = arg_names[int(one.operands)] if argument and arg_names else ""
    return Buffer(
        name=one.name,
        shape=array.shape,
        nbytes=array.nbytes,
        kind=array.home,
        source=user_source(frames_of(line, module)),
        op_name=name or line.op_name or one.op_name,
        at_peak=at_peak,
        first=array.birth,
        last=array.death,
    )
