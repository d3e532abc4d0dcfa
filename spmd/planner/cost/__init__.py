"""What a layout costs, from classes alone: so many can be compared.

In the order of reading:

- `machine`: what the devices of a mesh can do, in seconds.
- `demand`: what operations ask of the links under a layout.
- `stacks`: what a loop takes slices of, changes and stacks again, such as caches.
- `lives`: which values are in memory at the same time.
- `fusion`: which work becomes a part of which product, and what moves through memory apart.
- `reads`: what products read of main memory, and what takes a pass between them.
- `prefetch`: the argument that is in vector memory first, and what finds no room beside it.
- `product`: a product on a device, and what becomes of the exchanges around it.
- `parts`: the operations that may cost anything; those of one kind are one.
- `peaks`: the most memory that a device needs at a time.
- `saying`: what a layout says of some classes, so that equal ones need one look.
- `estimate`: all of these, in under a millisecond.
"""
