"""The text of a compiled program: read without JAX, and summed up.

In the order of reading:

- `types`: arrays of a type, and their memory.
- `text`: modules, computations and instructions: the only file that knows the syntax.
- `places`: how files are named for people.
- `source`: the lines behind an instruction, and whose they are.
- `groups`: groups of devices, and the mesh axes that they vary over.
- `loops`: how often a loop runs.
- `calls`: which computations run, in which order, and how often.
- `near`: who uses a result, and who makes its data.
- `parts`: a combined collective, divided among the exchanges that it was combined from.
- `ledger`: the collectives with their bytes and lines.
- `cost`: floating-point operations, and bytes of main memory.
- `schedule`: which arrays are there at which time.
- `memory`: what the compiler planned, and the largest buffers.
- `oom`: what the compiler says of a program that does not fit.
"""
