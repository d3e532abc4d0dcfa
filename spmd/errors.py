"""The exceptions that `spmd` raises, and the one place where their text is laid out.

Inner layers collect what went wrong as :class:`Failure` records, which carry data and no prose
about the caller. The outermost layer turns all of them into one exception with :func:`explain`.
Every class subclasses the builtin that a caller already catches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
import difflib
from typing import Any

__all__ = [
    "ArgumentError",
    "BundleError",
    "DistributedError",
    "DivergenceError",
    "DonatedArrayError",
    "MeshError",
    "OptionError",
    "OutOfMemoryError",
    "RecoveryError",
    "ReportError",
    "ShardingError",
    "SpecTypeError",
    "SpmdError",
    "StaticArgumentError",
]


class SpmdError(Exception):
    """Base of every exception that `spmd` raises by itself."""

    __module__ = "spmd"

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if cls.__module__ == __name__:  # in messages a class has the name that users import
            cls.__module__ = "spmd"


class ShardingError(SpmdError, ValueError):
    """A PartitionSpec or sharding does not fit the value that it is given for."""


class RecoveryError(SpmdError, ValueError):
    """No PartitionSpec says what an OpSharding says."""


class MeshError(SpmdError, RuntimeError):
    """There is no mesh, or the meshes or devices at hand do not agree."""


class SpecTypeError(SpmdError, TypeError):
    """A leaf of a spec tree is not a spec."""


class ArgumentError(SpmdError, TypeError):
    """An argument of a call, or an option of `pjit`, is of the wrong kind."""


class StaticArgumentError(ArgumentError, ValueError):
    """A static argument has no hash; a ValueError as in JAX."""


class OptionError(SpmdError, ValueError):
    """An option of `pjit` names an argument that is not there, or contradicts another."""


class OutOfMemoryError(SpmdError, RuntimeError):
    """A program needs more memory than its devices have, as the compiler says."""


class PlanError(SpmdError, ValueError):
    """No plan is possible as it was asked for, or a plan is of another program, mesh or version."""


class PlanMemoryError(PlanError):
    """No layout of a program keeps to the memory of its devices."""


class ReportError(SpmdError, ValueError):
    """Something is no report, or nothing that this version can read, write or report on."""


class BundleError(SpmdError, ValueError):
    """A program cannot be in a file, or a file holds none that may be loaded here."""


class DonatedArrayError(SpmdError, RuntimeError):
    """An argument was donated to an earlier call, or deleted, and is gone."""


class DistributedError(SpmdError, RuntimeError):
    """The processes of a run did not come together, or one of them was lost."""


class DivergenceError(DistributedError):
    """Processes that have to do the same do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that is wrong: what failed, and what was given, expected and got.

    Attributes:
        what: The failure after the subject, e.g. ``"cannot split argument x"``.
        given: What the user wrote, as the user wrote it.
        expected: What would have been right.
        got: What was found instead.
        fix: What to write or do instead.
        error: The exception class to raise; the first failure decides.
    """

    what: str
    given: str = ""
    expected: str = ""
    got: str = ""
    fix: str = ""
    error: type[SpmdError] = ShardingError


#: A model has thousands of leaves; one mistake in a prefix concerns all of them.
_MOST_SHOWN = 20


def explain(subject: str, failures: Sequence[Failure]) -> SpmdError:
    """Returns the one exception that tells all `failures` of `subject`.

    Args:
        subject: The user's thing, e.g. ``"pjit of `step`"``.
        failures: At least one failure; the first decides the class. Twenty are told in full.
    """
    parts = [_layout(subject, f) for f in failures[:_MOST_SHOWN]]
    if more := len(failures) - len(parts):
        parts.append(f"{subject} has {more} more such failure{'s' * (more != 1)}.")
    return failures[0].error("\n".join(parts))


def refuse(subject: str, failures: Iterable[Failure | None]) -> None:
    """Raises :func:`explain` of the `failures` that are none of None, if there is any."""
    if found := [f for f in failures if f]:
        raise explain(subject, found)


def _layout(subject: str, failure: Failure) -> str:
    rows = [(n, getattr(failure, n)) for n in ("given", "expected", "got", "fix")]
    lines = [f"{subject} {failure.what}."]
    for name, text in rows:
        if text:
            lines.append(f"  {name:<8}  " + text.replace("\n", "\n" + " " * 12))
    return "\n".join(lines)


def show_value(value: object) -> str:
    """Returns the type and the beginning of the `repr` of something that was not expected."""
    kind = type(value).__name__
    try:
        return f"{kind}: {value!r}"[:100]
    except Exception:  # an object may raise whatever it is asked
        return kind


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Returns ``" (did you mean 'model'?)"`` for a near miss, else an empty string."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
