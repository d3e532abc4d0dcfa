"""A lowered program under Shardy's passes: what is split, why, and what it will exchange.

In the order of reading:

- `passes`: the operations of a module, and what their attributes say.
- `calls`: the functions of a module in the places of their calls, as XLA has them.
- `places`: which device has which part, and which sends its own to which.
- `ragged`: products in groups, for which Shardy has no rule and XLA one.
- `tables`: lookups in many tables at once, where XLA makes tables whole.
- `operands`: where products take their operands, and make their results.
- `reshards`: the steps in which XLA places a value otherwise.
- `pipeline`: Shardy's passes on a copy of a module.
- `flow`: where values go, through loops and branches, and how often loops run.
- `propagation`: values, operations and steps, as plain data.
- `flops`: what one call computes, of the whole program and of a device.
- `products`: the products of a program, and how often each runs.
- `conflicts`: the way of an axis from its annotation to a value, and what it did not get past.
- `why`: the answer to `why`, and the origins that a report holds.
- `targets`: what the compiler of a backend makes of exchanges.
- `exchanges`: the collectives that the shardings ask for.
"""
