"""Specs of a tree as Python text, folded to prefixes: one spec where all leaves below have it.

Dicts, tuples and lists are written as they are, and named tuples by their class. What has no
literal, such as a class of Flax or Equinox, is made of the value itself, by a function that the
text brings along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import json
import sys
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.tree_util as jtu

WIDTH = 88
"""Columns of a line, where what it holds can be broken."""

HELPER = '''\
def specs_like(value, specs):
    """A spec for each array of a value: that of the longest path that its own begins with."""

    def spec(path, _):
        name = jax.tree_util.keystr(path)
        return specs[max((key for key in specs if name.startswith(key)), key=len)]

    return jax.tree_util.tree_map_with_path(spec, value)
'''
"""What a text calls where it has no literal."""


class Part(NamedTuple):
    """A text inside of another one, what stands before it, and what it may be called."""

    label: str
    text: Text
    name: str = ""


class Many(NamedTuple):
    """A text with parts, which stand in a line or in one each."""

    begin: str
    parts: tuple[Part, ...]
    end: str


Text: TypeAlias = str | Many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Specs as Python text.

    Attributes:
        name: of what the specs are for; empty for several arguments, each of which has its own.
        body: the text, with its parts.
        imports: that it needs beside ``P``, a statement each.
        needs_helper: whether it calls `specs_like`, whose definition is `HELPER`.
    """

    name: str
    body: Text = dataclasses.field(repr=False)
    imports: tuple[str, ...] = ()
    needs_helper: bool = False

    @property
    def text(self) -> str:
        """An expression, over several lines where it is long."""
        return "\n".join(lines_of(self.body))


def folded(tree: Any, names: str | Sequence[str], keys: Sequence[str] = ()) -> Folded:
    """The text of specs, which is a prefix for a tree of this structure.

    Args:
        tree: a PartitionSpec in the place of each array.
        names: what a value of this structure is called, or each entry of a tuple of arguments;
            where the text has to look at the value it says this name.
        keys: by which arguments have their entries; by default they have them by position.
    """
    folder = _Folder()
    one = isinstance(names, str)
    return Folded(
        name=names if one else "",
        body=folder.fold(tree, names) if one else folder.arguments(tree, names, keys),
        imports=tuple(sorted(folder.imports)),
        needs_helper=folder.needs_helper,
    )


def spec_text(entries: Sequence[Any]) -> str:
    """A spec as a user writes it, without what says nothing at its end: ``P("data", None)``."""
    found = [*entries]
    while found and not found[-1]:
        found.pop()
    return f"P({', '.join(map(_entry_text, found))})"


def _entry_text(entry: Any) -> str:
    if entry is jax.P.UNCONSTRAINED:
        return "P.UNCONSTRAINED"
    if isinstance(entry, tuple) and len(entry) == 1:
        return literal(entry[0])
    return literal(entry or None)


def literal(value: Any) -> str:
    """A key, a name or a number as Python text, with double quotes."""
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return json.dumps(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


# Folding


class _NoNameError(Exception):
    """A value that has to be named cannot be."""


class _Folder:
    """Folds, and keeps what the text needs."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.needs_helper = False
        self._classes: dict[str, Any] = dict.fromkeys(("P", "jax", "spmd", "specs_like"))

    def arguments(self, tree: Sequence[Any], names: Sequence[str], keys: Sequence[str]) -> Text:
        """The specs of several arguments: an entry each, or one for all."""
        if (text := _uniform(tree)) is not None:
            return text
        begin, end = "{}" if keys else "()"
        labels = [f"{literal(key)}: " for key in keys] or [""] * len(names)
        rows = zip(labels, tree, names, strict=True)
        parts = tuple(Part(label, self.fold(one, name), name) for label, one, name in rows)
        return Many(begin, parts, end)

    def fold(self, node: Any, where: str | None) -> Text:
        """The specs of a tree; `where` is the expression of its value, None where none is known."""
        if (text := _uniform(node)) is not None:
            return text
        children = _children(node)
        if (ends := self._literal(node, children)) is not None:
            begin, labels, end = ends
            rows = zip(labels, children, strict=True)
            with contextlib.suppress(_NoNameError):  # a value further inside cannot be named
                parts = tuple(
                    Part(n, self.fold(c, _below(where, k)), _named(k)) for n, (k, c) in rows
                )
                return Many(begin, parts, end)
        if where is None:
            raise _NoNameError
        self.needs_helper = True
        specs = tuple(Part(f"{literal(path)}: ", text) for path, text in _by_path(node, ""))
        return Many(f"specs_like({where}, {{", specs, "})")

    def _literal(
        self, node: Any, children: Sequence[tuple[Any, Any]]
    ) -> tuple[str, list[str], str] | None:
        """How a container is written around its children, and what stands before each of them."""
        kind = type(node)
        if isinstance(node, Mapping):
            keys = [getattr(key, "key", None) for key, _ in children]
            if {*keys} == {*node} and all(map(_is_literal, keys)):
                return "{", [f"{literal(key)}: " for key in keys], "}"
        elif kind in (tuple, list):
            begin, end = "()" if kind is tuple else "[]"
            return begin, [""] * len(children), end
        elif isinstance(node, tuple) and self._imports(kind):
            fields = [getattr(key, "name", None) for key, _ in children]
            if fields == [*getattr(kind, "_fields", ())]:
                return f"{kind.__name__}(", [f"{name}=" for name in fields], ")"
        return None

    def _imports(self, kind: type) -> bool:
        """Imports a class, unless another one has its name."""
        source = _importable(kind)
        if not source or self._classes.setdefault(kind.__name__, kind) is not kind:
            return False
        self.imports.add(f"from {source} import {kind.__name__}")
        return True


def _is_spec(node: Any) -> bool:
    return isinstance(node, jax.P)


def _uniform(node: Any) -> str | None:
    """The spec of all leaves, if they have one; of no leaves, None, which stands for nothing."""
    texts = {spec_text(leaf) for leaf in jax.tree.leaves(node, is_leaf=_is_spec)}
    return None if len(texts) > 1 else next(iter(texts), "None")


def _children(node: Any) -> list[tuple[Any, Any]]:
    """The children of a node, each with its key."""
    paths, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda one: one is not node)
    return [(path[0], child) for path, child in paths]


def _by_path(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """The specs of a tree by the paths of its largest parts that have one."""
    if not jax.tree.leaves(node, is_leaf=_is_spec):
        return
    if (text := _uniform(node)) is not None:
        yield path, text
        return
    for key, child in _children(node):
        yield from _by_path(child, path + jtu.keystr((key,)))


def _below(where: str | None, key: Any) -> str | None:
    """The expression of a child's value."""
    if where is None or not isinstance(key, (jtu.DictKey, jtu.SequenceKey, jtu.GetAttrKey)):
        return None
    if isinstance(key, jtu.DictKey):
        return f"{where}[{literal(key.key)}]" if _is_literal(key.key) else None
    return where + jtu.keystr((key,))


def _named(key: Any) -> str:
    """What the value of a key may be called; empty for a number."""
    name = str(getattr(key, "key", getattr(key, "name", "")))
    return name if name.isidentifier() else ""


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_literal, key))
    return key is None or type(key) in (str, int, bool, bytes)


def _importable(kind: type) -> str:
    """The module, by its shortest name, from which a class can be imported; empty for none."""
    parts = kind.__module__.split(".")
    names = (".".join(parts[: n + 1]) for n in range(len(parts)))
    found = (name for name in names if _in(name, kind))
    return "" if parts == ["__main__"] else next(found, "")


def _in(module: str, kind: type) -> bool:
    return getattr(sys.modules.get(module), kind.__name__, None) is kind


# Lines


def flat(text: Text) -> str:
    """A text in one line."""
    if isinstance(text, str):
        return text
    inner = ", ".join(part.label + flat(part.text) for part in text.parts)
    # A tuple of one needs its comma.
    return text.begin + inner + "," * (text.begin == "(" and len(text.parts) == 1) + text.end


def lines_of(text: Text, indent: int = 0, taken: int = 0) -> list[str]:
    """A text in one line if it fits, else with a line for each part.

    The first line stands in one that is indented, of which other text takes some columns.
    """
    line = flat(text)
    if isinstance(text, str) or indent + taken + len(line) <= WIDTH:
        return [line]
    lines = [text.begin]
    for label, part, _ in text.parts:
        first, *more = lines_of(part, indent + 4, len(label) + 1)
        lines += [" " * (indent + 4) + label + first, *more]
        lines[-1] += ","
    return [*lines, " " * indent + text.end]


_SHORT = 40


class Names:
    """Names for what stands several times in texts, such as the specs of weights and of moments.

    Args:
        texts: in which it stands.
    """

    def __init__(self, texts: Sequence[Folded]):
        found: dict[Many, list[tuple[int, str]]] = {}
        for one in texts:
            _look(one.body, (int(one.name != ""), one.name or "argument"), found)
        taken: dict[str, int] = {}
        self._names: dict[Text, str] = {}
        for text in (one for one, places in found.items() if len(places) > 1):
            name = f"{min(found[text], key=lambda place: place[0])[1]}_specs"
            taken[name] = taken.get(name, 0) + 1
            self._names[text] = name if taken[name] == 1 else f"{name}_{taken[name]}"

    def definitions(self) -> Iterator[str]:
        """Statements that define the names, those first that others need."""
        for text in sorted(self._names, key=lambda one: len(flat(one))):
            first, *more = lines_of(self._inside(text), 0, len(self._names[text]) + 3)
            yield "\n".join([f"{self._names[text]} = {first}", *more])

    def body(self, text: Text) -> Text:
        """A text with names in it."""
        return self._names.get(text) or self._inside(text)

    def _inside(self, text: Text) -> Text:
        if isinstance(text, str):
            return text
        parts = tuple(part._replace(text=self.body(part.text)) for part in text.parts)
        return text._replace(parts=parts)


def _look(text: Text, place: tuple[int, str], found: dict[Many, list[tuple[int, str]]]) -> None:
    """Finds what stands where: how far inside, and what it is called there."""
    if isinstance(text, str) or len(flat(text)) < _SHORT:
        return
    found.setdefault(text, []).append(place)
    depth, name = place
    for part in text.parts if len(found[text]) == 1 else ():
        _look(part.text, (depth + 1, part.name or name), found)
