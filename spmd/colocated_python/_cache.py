"""A host function per kind of arguments, found by the identity of shardings, else by equality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import threading
from typing import Any
import weakref

from spmd import _api
from spmd.colocated_python._calls import Function
from spmd.colocated_python._specs import Leaf, Specs


class Functions:
    """The functions of one wrapped function.

    To compare shardings is slow and to compare their identities is not. Of each function only the
    latest identities are known; it holds those shardings, so no other has their place in memory.
    """

    def __init__(self) -> None:
        self._fast: dict[Any, Function] = {}
        self._by_specs: dict[Specs, Function] = {}
        self._lock = threading.Lock()
        with _lock:
            _all.add(self)

    def __len__(self) -> int:
        return len(self._by_specs)

    def find(self, key: Any) -> Function | None:
        """Returns the function of a key that :func:`fast_key` made, or None."""
        return self._fast.get(key)

    def get(
        self, key: Any, tree: Any, leaves: Sequence[Any], make: Callable[[Specs], Function]
    ) -> Function:
        """Returns the function for arguments, which is made for the first of their kind."""
        specs = Specs(tree, tuple(Leaf(x.shape, x.dtype, x.sharding) for x in leaves))
        with self._lock:
            found = self._by_specs.get(specs)
            if found is None:
                found = self._by_specs[specs] = make(specs)
            # The old key goes first: while it is there, what it names is held.
            self._fast.pop(found.fast_key, None)
            found.held = tuple(leaf.sharding for leaf in specs.leaves)
            found.fast_key = key
            self._fast[key] = found
            return found

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._fast.clear()
            self._by_specs.clear()


def fast_key(tree: Any, leaves: Sequence[Any]) -> Any:
    """A key by the identity of shardings."""
    return tree, tuple([(x.shape, x.dtype, id(x.sharding)) for x in leaves])


_lock = threading.Lock()
_all: weakref.WeakSet[Functions] = weakref.WeakSet()


def _clear() -> None:
    with _lock:
        every = [*_all]
    for functions in every:
        functions.clear()


_api.caches_of_features.append(_clear)
