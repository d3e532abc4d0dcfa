"""Compiled programs in files: written by `Compiled.save`, read by `spmd.load`.

A bundle is loaded without a trace, a lowering or a compile. It holds compiled code, which runs with
all rights of the process: load none that you do not trust. See `docs/bundle.md`.

In the order of reading:

- `_api`: the way into a file and back, and what cannot go it.
- `_format`: the bytes of a file.
- `_fingerprint`: what a program was compiled for, and how this process differs from it.
- `_program`: a compiled program as values of a header.
- `_codec`: JSON for what a program is made of, each read as what it has to be.
- `_trim`: code without what is read and never used.
- `_contents`: what a bundle holds, read from its header alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.bundle._api import load as load, save as save
    from spmd.bundle._contents import Contents as Contents, Value as Value, contents as contents

# The command line imports this package before JAX may start.
_PLACES: dict[str, str] = dict.fromkeys(("load", "save"), "_api")
_PLACES |= dict.fromkeys(("Contents", "Value", "contents"), "_contents")


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'spmd.bundle' has no attribute {name!r}")
    module = importlib.import_module(f"spmd.bundle.{_PLACES[name]}")
    return globals().setdefault(name, getattr(module, name))
