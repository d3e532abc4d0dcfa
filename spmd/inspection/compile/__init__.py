"""From a function, or any stage of it, to records: what needs JAX and a compiler.

In the order of reading:

- `program`: from a function to a compiled program, its mesh and its text.
- `libtpu`: what the TPU's compiler asks when it starts, and what it logs.
- `gpus`: what the GPU's compiler is told of a kind, and how JAX loads it.
- `topology`: hardware that is only described.
- `warned`: what the partitioner warns of while it compiles.
- `carrying`: arguments for other devices than those where they lie.
- `arguments`: how arguments lie, as records.
- `timed`: how long a program takes on its chips, or on others.
- `calibrate`: what the present machine can do, measured.
- `report`: the report, with the source text around its lines.
- `preview`: the collectives before the compile.
- `search`: the largest size, by few trials.
- `fits`: whether a program fits, and up to which size.
- `sweep`: the report on several meshes.
- `visualize`: from an array, a sharding or a spec to a picture.
"""
