"""Records of programs: plain data that knows no JAX, no compiler and no renderer.

In the order of reading:

- `sizes`: bytes and counts as people write them.
- `shown`: what a record opens to be read or drawn: no other file does.
- `arrays`: arrays on a mesh, and source text, as a report shows them.
- `later`: parts of a report that are worked out when they are first asked for.
- `origins`: where shardings come from, and the answer of `why`.
- `report`: a report and what it holds: collectives, cost, memory, findings.
- `time`: how long a call takes, and what takes it.
- `names`: name stacks without what JAX adds to them, and lines and files as people name them.
- `sums`: totals over collectives, by kind, axis, line, module or direction.
- `codec`: a report as JSON, and back.
- `diff`: what differs between two reports, and how the rows of two programs are matched.
- `fit`: whether a program fits, and up to which size.
- `sweep`: one program on several meshes.
- `pictures`: which device holds which part of an array, or of each array of a tree.
- `plan`: where a program's arrays lie on a mesh, why, and what else was looked at.
- `plan_codec`: a plan as JSON, and back.
"""
