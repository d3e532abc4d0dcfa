"""Pytrees by their structure. Classes are named, and looked up among what this process knows.

Nothing is imported and nothing is run but what a class itself has registered to build it.
"""

from __future__ import annotations

import sys
from typing import Any

import jax.tree_util as jtu

from spmd import _jax
from spmd.bundle._fields import Field, FormError
from spmd.bundle._values import NanError, NotPlainError, decode_plain, encode_plain

_DEEPEST = 100
_MOST = 1 << 24
_LEAF = "*"
#: Nodes with forms of their own here, which JAX registers too.
_BUILT_IN = (tuple, list, dict, type(None))


class UnwritableError(Exception):
    """A node of a tree has no written form; its arguments are a class and the reason."""


def encode_tree(tree: Any, depth: int = 0) -> Any:
    """A tree as JSON.

    Raises:
        UnwritableError: It holds a node that cannot be written.
    """
    if depth > _DEEPEST:
        raise UnwritableError("a tree", f"of more than {_DEEPEST} levels")
    if jtu.treedef_is_leaf(tree) and tree.num_leaves:
        return _LEAF
    kind, data = tree.node_data()
    children = [encode_tree(c, depth + 1) for c in tree.children()]
    if kind is type(None):
        return None
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind is dict:
        return {"dict": [_plain(kind, list(data)), children]}
    name = _name_of(kind)
    if kind not in _jax.core.registered_nodes():
        return {"namedtuple": [name, [*kind._fields], children]}
    return {"custom": [name, _plain(kind, data), children]}


def _plain(kind: type, data: Any) -> Any:
    try:
        return encode_plain(data)
    except NanError:
        raise
    except NotPlainError as error:
        reason = f"which holds a {type(error.args[0]).__qualname__} beside its leaves"
        raise UnwritableError(f"{kind.__module__}.{kind.__qualname__}", reason) from None


def _name_of(kind: type) -> list[str]:
    """Module and name of a class, if another process can find it by them."""
    if find_class(kind.__module__, kind.__qualname__) is not kind:
        shown = f"{kind.__module__}.{kind.__qualname__}"
        raise UnwritableError(shown, "which cannot be found by its name")
    return [kind.__module__, kind.__qualname__]


def find_class(module: str, qualname: str) -> type | None:
    """The class of this name among the registered ones, else among those of loaded modules."""
    here = _in_modules(module, qualname)
    found = [
        t
        for t in _jax.core.registered_nodes()
        if (t.__module__, t.__qualname__) == (module, qualname)
        and here in (None, t)
        and t not in _BUILT_IN
    ]
    if len(found) == 1:
        return found[0]
    is_plain = here is not None and issubclass(here, tuple) and hasattr(here, "_fields")
    return here if is_plain else None


def _in_modules(module: str, qualname: str) -> type | None:
    """A class in a module that is loaded already; `getattr` could run code of the module."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def decode_tree(field: Field, depth: int = 0) -> Any:
    """What :func:`encode_tree` was given.

    Raises:
        FormError: It wrote no such thing, or a class is not registered here or is another.
    """
    if depth > _DEEPEST:
        raise FormError(field.where, f"at most {_DEEPEST} levels", "more")
    if field.value == _LEAF:
        return _leaf
    if field.is_none:
        return _none
    kind, inner = field.only()
    if kind in ("tuple", "list"):
        return _build((tuple if kind == "tuple" else list, None), _children(inner, depth))
    if kind == "dict":
        keys, nodes = inner.items(2, exactly=2)
        return _build((dict, _decode_keys(keys, nodes)), _children(nodes, depth))
    if kind not in ("namedtuple", "custom"):
        raise field.refuse("a node of a tree")
    name, data, nodes = inner.items(3, exactly=3)
    cls, children = _decode_class(name), _children(nodes, depth)
    if kind == "namedtuple":
        return _build((cls, _decode_fields(cls, data, len(children))), children)
    plain = decode_plain(data)
    _check_custom(cls, plain, len(children), name.where)
    return _build((cls, plain), children)


_leaf = jtu.tree_structure(0)
_none = jtu.tree_structure(None)


def _build(node_data: Any, children: list[Any]) -> Any:
    return jtu.PyTreeDef.from_node_data_and_children(jtu.default_registry, node_data, children)


def _children(field: Field, depth: int) -> list[Any]:
    return [decode_tree(f, depth + 1) for f in field.items(_MOST)]


def _decode_keys(field: Field, nodes: Field) -> list[Any]:
    keys = decode_plain(field)
    try:
        distinct = len({*keys}) if type(keys) is list else -1
    except TypeError:  # no hash
        distinct = -1
    if distinct != len(nodes.items(_MOST)):
        raise field.refuse("one key for each node of a dict")
    return keys


def _decode_class(field: Field) -> type:
    module, qualname = (f.string() for f in field.items(2, exactly=2))
    found = find_class(module, qualname)
    if found is None:
        expected = f"the class {module}.{qualname}, imported and registered as a pytree node"
        raise FormError(field.where, expected, "no such class in this process")
    return found


def _decode_fields(cls: Any, field: Field, count: int) -> None:
    fields = field.strings()
    if cls in _jax.core.registered_nodes() or getattr(cls, "_fields", None) != fields:
        got = ", ".join(getattr(cls, "_fields", ())) or "none"
        raise FormError(field.where, f"the fields {', '.join(fields)} of {_show(cls)}", got)
    if count != len(fields):
        raise FormError(field.where, f"{count} fields", str(len(fields)))


def _check_custom(cls: type, data: Any, count: int, where: str) -> None:
    """Builds a node and takes it apart: JAX crashes on one with fewer children than it needs."""
    registered = _jax.core.registered_nodes()
    if cls not in registered:
        raise FormError(where, f"{_show(cls)}, registered as a pytree node", "not registered here")
    expected = f"{_show(cls)} with {count} children, as where it was written"
    try:
        node = registered[cls].from_iter(data, tuple(object() for _ in range(count)))
        found, again = jtu.default_registry.flatten_one_level(node)
        children, same = len([*found]), bool(again == data)
    except Exception as error:  # the class may raise whatever it likes
        raise FormError(where, expected, f"{type(error).__name__}: {error}"[:200]) from None
    if type(node) is not cls or children != count or not same:
        raise FormError(where, expected, f"{children} children, or other data beside them")


def _show(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
