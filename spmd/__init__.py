"""SPMD partitioning for JAX: `pjit` over a device mesh, and an account of what it did.

The public names stand in `spmd/_public.py`. They are imported with the first that is used, so that
the command line can say how many devices there are before JAX is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd._public import *  # noqa: F403 - the names are listed there, once

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        from spmd import _public

        return [n for n in __dir__() if n not in _public._MODULES]
    # The core's own `from spmd import _x` asks here first, before it imports the file.
    if not name.startswith("_"):
        from spmd import _public

        if name in _public._FEATURES:
            module = importlib.import_module(_public._FEATURES[name])
            value = module if module.__name__ == f"spmd.{name}" else getattr(module, name)
            return globals().setdefault(name, value)
        if name in _public._MODULES:
            return importlib.import_module(f"spmd.{name}")
        for place in (vars(_public), globals()):
            if name in place:
                return globals().setdefault(name, place[name])
    raise AttributeError(f"module 'spmd' has no attribute {name!r}")


def __dir__() -> list[str]:
    from spmd import _public

    core = (n for n in vars(_public) if not n.startswith("_"))
    return ["__version__", *core, *_public._FEATURES, *_public._MODULES]
