"""The commands of ``spmd``, a file each.

In the order of reading:

- `main`: the parser, and the exit code of what a command did or raised.
- `options`: what commands are asked, read before JAX is imported, and how they answer.
- `supervised`: a command that compiles runs in a child process.
- `programs`: a function of the user's with its arguments and mesh, for those that compile it.
- `report`: every collective of a function, and limits on them.
- `why`: which annotations the sharding of a value comes from.
- `fits`: whether a function fits the memory of its devices.
- `plan`: mesh, shardings and constraints for a function, chosen by predicted time.
- `sweep`: time, bytes and memory as the mesh grows.
- `calibrate`: what this machine can do, measured.
- `diff`: in what two reports differ.
- `show`: which device holds which part of an array.
- `bundle`: what a saved program holds.
- `launch`: a program in several processes.
- `demo`: a small transformer, trained on virtual devices.
"""
