"""Reading of a header: each value is taken as what it has to be, or refused with its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from spmd.errors import show_value

_T = TypeVar("_T")

#: Of names and the like; flags and shown defaults are longer than identifiers.
_MOST_CHARACTERS = 1 << 16


class FormError(Exception):
    """A file is not what it has to be.

    Attributes:
        where: The place in the file, such as ``header.program.avals[3]``.
        expected: What had to stand there.
        got: What stands there.
    """

    def __init__(self, where: str, expected: str, got: str):
        super().__init__(where, expected, got)
        self.where = where
        self.expected = expected
        self.got = got


class Field:
    """A JSON value and its place in the header."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: str):
        self.value = value
        self.where = where

    def refuse(self, expected: str) -> FormError:
        """The error of a value that is not what it has to be."""
        return FormError(self.where, expected, show_value(self.value))

    def __getitem__(self, name: str) -> Field:
        if type(self.value) is not dict:
            raise self.refuse("an object")
        if name not in self.value:
            raise FormError(f"{self.where}.{name}", "a value", "none")
        return Field(self.value[name], f"{self.where}.{name}")

    def string(self) -> str:
        """A string of no unusual length."""
        if type(self.value) is not str or len(self.value) > _MOST_CHARACTERS:
            raise self.refuse("a string")
        return self.value

    def integer(self, low: int, high: int) -> int:
        """A whole number within bounds, both included."""
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.refuse(f"a whole number from {low} to {high}")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if type(self.value) is not bool:
            raise self.refuse("true or false")
        return self.value

    @property
    def is_none(self) -> bool:
        """Whether nothing stands here."""
        return self.value is None

    def items(self, most: int, exactly: int | None = None) -> list[Field]:
        """The elements of a list."""
        if type(self.value) is not list or len(self.value) > most:
            raise self.refuse(f"a list of at most {most} elements")
        if exactly is not None and len(self.value) != exactly:
            raise FormError(self.where, f"{exactly} elements", str(len(self.value)))
        return [Field(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def strings(self) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(f.string() for f in self.items(_MOST_CHARACTERS))

    def pairs(self) -> Iterator[tuple[str, Field]]:
        """Names and values of an object."""
        if type(self.value) is not dict:
            raise self.refuse("an object")
        for name in self.value:
            yield name, self[name]

    def only(self) -> tuple[str, Field]:
        """Name and value of an object that has one."""
        if type(self.value) is not dict or len(self.value) != 1:
            raise self.refuse("an object with one name")
        return next(self.pairs())

    def of(self, table: Sequence[_T]) -> _T:
        """The element of a table whose index stands here."""
        return table[self.integer(0, len(table) - 1)]

    def one_of(self, *choices: str) -> str:
        """One of some strings."""
        if self.value not in choices or type(self.value) is not str:
            raise self.refuse(" or ".join(map(repr, choices)))
        return self.value
