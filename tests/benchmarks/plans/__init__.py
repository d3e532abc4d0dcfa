"""What the planner is measured by: programs, and the layouts that experts give them.

In the order of reading:

- `logical`: names of dimensions in a program, and the axes of a mesh that a layout gives them.
- `experts`: layouts from papers and documents, as such tables.
- `training`, `dense`, `decoder` with `attention` and `mixture`, `decoding`, `unet`, `libraries`
  (Flax and Equinox) and `tiny` (the demo): the programs.
- `cases`: the programs with sizes, their experts and budgets.
- `compiled`: what the compiler makes of an expert.
- `planned`: what the planner answers.
"""
