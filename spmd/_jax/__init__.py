"""The only folder that imports `jax._src` or `jaxlib`: every private name, with its reason.

It owns signatures, not only names: where two supported JAX releases spell a thing differently,
the difference ends here. A name is said with its file, such as `_jax.mesh.push_mesh`. In the order
of reading, which is that of the imports among them:

- `versions`: where releases differ.
- `core`: abstract values, jaxprs, references and traces, and the lines and names of user code.
- `mesh`: the contexts in which JAX holds a mesh, Explicit axes, devices that are described.
- `transform`: jaxprs under JAX's transformations.
- `rules`: how a primitive that calls a jaxpr registers its rules.
- `lowering`: from jaxprs to modules and executables.
- `dispatch`: arrays and where they lie, how they move, the C++ path of repeated calls.
- `host`: effects and calls of the host.
- `files`: executables as bytes.
"""

from spmd._jax import (
    core as core,
    dispatch as dispatch,
    files as files,
    host as host,
    lowering as lowering,
    mesh as mesh,
    rules as rules,
    transform as transform,
    versions as versions,
)

core.hide_own_frames()  # whichever part of the package is imported
