"""How long a step takes on hardware that need not be there.

In the order of reading:

- `chips`: what chips and links can do, each figure with its source.
- `torus`: how long an exchange takes on the links of a slice.
- `boxes`: how long one takes between servers whose devices a switch joins.
- `kernels`: what kernels written by hand compute, where their names tell.
- `clock`: a walk through a scheduled program, on a core and its links.
"""
