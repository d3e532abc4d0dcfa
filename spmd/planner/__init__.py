"""Which layout of a program's arrays takes the least time, and what the compiler says of it.

In the order of reading:

- `api`: `spmd.plan`, from a function and hardware to a plan.
- `asked`: what a user wants of a plan, read and checked.
- `calls`: a call of `pjit` with AUTO among its specs, or with ``plan=``.
- `structure`: a program as a plan sees it: values, operations, and classes of dimensions.
- `sums`: products that are added up, added to each other first.
- `graph`: that of a lowered module.
- `alike`: layers that are written out one after the other, whose classes are one.
- `optimizer`: which values only the optimizer has.
- `layout`: a plan, as an order of classes for each mesh axis; where it puts an array's axes.
- `pins`: a layout written into a lowered module.
- `machine`: what the devices of a mesh can do, in seconds.
- `demand`: what operations ask of the links under a layout.
- `lives`: which values are in memory at the same time.
- `fusion`: which work becomes a part of which product, and what moves through memory apart.
- `reads`: what products read of main memory, and what takes a pass between them.
- `prefetch`: the argument that is in vector memory first, and what finds no room beside it.
- `product`: a product on a device, and what becomes of the exchanges around it.
- `saying`: what a layout says of some classes, so that equal ones need one look.
- `estimate`: what a layout costs, from all of these, in under a millisecond.
- `experts`: what people do by hand, found in the structure of a program.
- `moves`: the layouts that are next to one, and those that say the same.
- `search`: the layouts that are worth a look.
- `verify`: the program that is planned, lowered with places and pins.
- `written`: the specs that a user gave to the function that is planned.
- `choose`: all of it, from a program and meshes to the layouts that were compiled.
- `prices`: what other places of an argument would cost.
- `inside`: what a person pastes, worked out when it is first asked for.
- `deviations`: bytes that the compiler sends otherwise than predicted, with causes.
- `recorded`: the record of a plan.
- `plans`: what a plan can do, once it is made.
- `cache`: plans on disk.
- `marks`: values of user code that are found again in a lowered module.
- `source`: expressions in user code, and functions that mark them.
- `outcome`: what a program does, as far as two are compared.
- `folded`: specs of a tree as Python text.
- `code`: what a person pastes.
- `fewest`: the smallest set that does what a larger one does.
- `constraints`: those in user code with which its program is the plan's.
"""

from spmd.inspection.records.plan import Plan as Plan
from spmd.planner.api import Progress as Progress, plan as plan
from spmd.planner.calls import plan_of_call as plan_of_call

__all__ = ["Plan", "Progress", "plan", "plan_of_call"]
