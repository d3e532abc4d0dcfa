"""A lowered program as a plan sees it, and a layout of it.

In the order of reading:

- `structure`: values, the operations between them, and classes of dimensions.
- `sums`: products that are added up, added to each other first.
- `graph`: all that of a lowered module.
- `alike`: layers that are written out one after the other, whose classes are one.
- `optimizer`: which values only the optimizer has.
- `layout`: an order of classes for each mesh axis; where it puts an array's axes.
"""
