"""From an instruction to the line of Python that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
import functools
from pathlib import Path
import re
import sysconfig

from spmd.inspection.hlo.text import Instruction, Module, unescape
from spmd.inspection.records.report import Source

# What JAX before 0.10 and other front-ends write instead of a frame.
_FILE = re.compile(r'\bsource_file="((?:[^"\\]|\\.)*)"')
_LINE = re.compile(r"\bsource_line=(\d+)")


def frames_of(instruction: Instruction, module: Module) -> tuple[Source, ...]:
    """The Python frames of an instruction, innermost first.

    Args:
        instruction: a line of the module.
        module: the module, whose table of frames it refers to.

    Returns:
        The frames, those of libraries included; none where the compiler gave none. What takes apart
        or stacks the arrays of a loop has those of the loop: its own are of the first loop that JAX
        has traced in the process, in whatever program that was.
    """
    instruction = module.loop_of(instruction) or instruction
    number, frames = instruction.frame_id, {}
    while number in module.frames and number not in frames:
        frames[number], number = module.frames[number]
    return tuple(frames.values()) or _single_frame(instruction.attributes)


def _single_frame(attributes: str) -> tuple[Source, ...]:
    file, line = _FILE.search(attributes), _LINE.search(attributes)
    if not file or not line:
        return ()
    return (Source(file=unescape(file[1]), line=int(line[1]), column=0, function=""),)


def user_source(frames: Sequence[Source]) -> Source | None:
    """The innermost frame outside of libraries, or the innermost one if all are in libraries."""
    for frame in frames:
        if not is_library(frame.file):
            return frame
    return frames[0] if frames else None


def users_own(source: Source | None) -> Source | None:
    """A place, if it is the user's; None for one in a library."""
    return None if source is None or is_library(source.file) else source


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to `spmd` itself.

    The model of `spmd demo`, in a folder of its own, counts as a user's code.
    """
    path = Path(file)
    ours = Path(__file__).parent.parent.parent
    if ours in path.parents:
        return ours / "demo" not in path.parents
    # A module's text may come from another machine, whose folders are not ours.
    if file.startswith("<frozen ") or _ELSEWHERE.search(file):
        return True
    return any(folder in path.parents for folder in _library_folders())


_ELSEWHERE = re.compile(r"[\\/](?:site-packages|dist-packages|lib(?:64)?[\\/]python3\.\d+t?)[\\/]")


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})


def direction_of(op_name: str) -> str:
    """Which half of a gradient a name stack belongs to: ``forward``, ``backward`` or ``other``.

    JAX writes ``jvp(...)`` around what a gradient differentiates, ``transpose(jvp(...))`` around
    its backward pass; what a rematerialization computes again stands inside the latter. Where the
    compiler combined several exchanges and joined their names, one backward part makes all of it
    backward.
    """
    found = set(_TRANSFORM.findall(op_name))
    if "transpose" in found:
        return "backward"
    return "forward" if found else "other"


# Names of functions and scopes may end in these words; transformations stand by themselves.
_TRANSFORM = re.compile(r"(?:^|[/(:])(transpose|jvp)\(")
