"""A lowered program under Shardy's passes: what is split, why, and what it will exchange.

In the order of reading:

- `passes`: the passes on a copy of a module, and what its attributes say.
- `rules`: sharding rules of operations.
- `trips`: how often a loop runs.
- `flow`: where values go, through calls, loops and branches.
- `propagation`: values, operations and steps, as plain data.
- `routes`: the way of one axis from its annotation to a value.
- `conflicts`: what an axis did not get past.
- `why`: the answer to `why`.
- `listing`: the origins that a report holds.
- `targets`: what the compiler of a backend makes of exchanges.
- `exchanges`: the collectives that the shardings ask for.
"""
