"""Which layout of a program's arrays takes the least time, and what the compiler says of it.

No public name gives a plan yet: `docs/design/plan.md` says what is built. In the order of reading:

- `graph`: dimensions that operations tie to each other, and the operations between them.
- `layout`: a plan, as an order of such classes for each mesh axis; where it puts an array's axes.
- `pins`: a layout written into a lowered module.
- `estimate`: a cost from classes alone, in milliseconds.
- `search`: the layouts that are worth a look.
- `verify`: what the compiler makes of the best ones.
- `choose`: all of it, from a program and meshes to the layouts that were compiled.
- `marks`: values of user code that are found again in a lowered module.
- `source`: expressions in user code, and functions that mark them.
- `outcome`: what a program does, as far as two are compared.
- `folded`: specs of a tree as Python text.
- `code`: what a person pastes.
- `fewest`: the smallest set that does what a larger one does.
- `constraints`: those in user code with which its program is the plan's.
"""
