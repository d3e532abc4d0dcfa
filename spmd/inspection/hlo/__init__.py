"""The text of a compiled program: read without JAX, and summed up.

In the order of reading:

- `text`: modules, computations, instructions, their lines and types: no other knows the syntax.
- `layouts`: the main memory that the arrays of a type take.
- `groups`: groups of devices, and the mesh axes that they vary over.
- `loops`: how often a loop runs.
- `calls`: which computations run, in which order, and how often.
- `parts`: what is near a collective, and the exchanges that a combined one was combined from.
- `scatters`: all-reduces of whose result each device needs only its own part.
- `ledger`: the collectives with their bytes and lines.
- `cost`: floating-point operations, and bytes of main memory.
- `schedule`: which arrays are there at which time.
- `memory`: what the compiler planned, and the largest buffers.
- `oom`: what the compiler says of a program that does not fit.
"""
