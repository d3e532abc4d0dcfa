"""The commands of ``spmd``, which `spmd.__main__` starts.

In the order of reading:

- `options`: what commands are asked, read before JAX is imported.
- `supervised`: a command that compiles runs in a child process.
- `report`: `report`, `diff`, `sweep`, `fits` and `why`.
- `show`: which device holds which part of an array.
- `bundle`: `bundle`.
- `launch`: `launch`.
"""
