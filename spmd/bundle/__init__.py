"""Compiled programs in files: written by `Compiled.save`, read by `spmd.load`.

A bundle is loaded without a trace, a lowering or a compile. It holds compiled code, which runs with
all rights of the process: load none that you do not trust. See `docs/bundle.md`.
"""

from spmd.bundle._api import load as load, save as save
from spmd.bundle._contents import Contents as Contents, Value as Value, contents as contents
