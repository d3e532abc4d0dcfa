"""Which layout of a program's arrays takes the least time, and what the compiler says of it.

In the order of reading:

- `api`: `spmd.plan`, from a function and hardware to a plan.
- `asked`: what a user wants of a plan, read and checked.
- `calls`: a call of `pjit` with AUTO among its specs, or with ``plan=``.
- `graph`: dimensions that operations tie to each other, and the operations between them.
- `layout`: a plan, as an order of such classes for each mesh axis; where it puts an array's axes.
- `pins`: a layout written into a lowered module.
- `estimate`: a cost from classes alone, in milliseconds.
- `search`: the layouts that are worth a look.
- `verify`: the program that is planned, and what the compiler makes of a layout.
- `choose`: all of it, from a program and meshes to the layouts that were compiled.
- `recorded`: the record of a plan.
- `plans`: what a plan can do, once it is made.
- `cache`: plans on disk.
"""

from spmd.inspection.records.plan import Plan as Plan
from spmd.planner.api import Progress as Progress, plan as plan
from spmd.planner.calls import plan_of_call as plan_of_call

__all__ = ["Plan", "Progress", "plan", "plan_of_call"]
