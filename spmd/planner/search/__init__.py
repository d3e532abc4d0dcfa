"""The layouts that are worth a look.

In the order of reading:

- `experts`: what people do by hand, found in the structure of a program.
- `moves`: the layouts that are next to one, and those that say the same.
- `descent`: from several starts, the best move of each kind until none helps.
"""
