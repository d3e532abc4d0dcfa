"""What a person pastes for a plan: specs, and the fewest constraints inside.

In the order of reading:

- `inside`: all of it, worked out when it is first asked for.
- `folded`: specs of a tree as Python text.
- `text`: what is pasted.
- `constraints`: those in user code with which its program is the plan's.
- `marks`: values of user code that are found again in a lowered module.
- `source`: expressions in user code, and functions that mark them.
- `outcome`: what a program does, as far as two are compared.
- `fewest`: the smallest set that does what a larger one does.
"""
