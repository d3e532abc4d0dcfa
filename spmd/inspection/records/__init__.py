"""Records of programs: plain data that knows no JAX, no compiler and no renderer.

In the order of reading:

- `sizes`: bytes and counts as people write them.
- `report`: a report and what it holds: collectives, cost, memory, findings.
- `arrays`: arrays on a mesh, and source text, as a report shows them.
- `origins`: where shardings come from.
- `sums`: totals over collectives, by kind, axis, line, module or direction.
- `diff`: what differs between two reports.
- `fit`: whether a program fits.
- `sweep`: one program on several meshes.
- `pictures`: which device holds which part of an array, or of each array of a tree.
- `codec`: a report as JSON, and back.
"""
