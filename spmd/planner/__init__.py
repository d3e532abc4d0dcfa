"""Which layout of a program's arrays takes the least time, and what the compiler says of it.

In the order of reading:

- `api`: `spmd.plan`, from a function and hardware to a plan.
- `asked`: what a user wants of a plan, read and checked.
- `calls`: a call of `pjit` with AUTO among its specs, or with ``plan=``.
- `written`: the specs that a user gave to the function that is planned.
- `program`: what a plan sees of a program: operations, classes of dimensions, and a layout of them.
- `cost`: what a layout costs, from classes alone.
- `search`: the layouts that are worth a look.
- `pins`: a layout written into a lowered module.
- `verify`: the program that is planned, lowered with places and pins.
- `tiers`: from thousands of layouts to the few that were compiled.
- `choose`: all of it, from a program and meshes to an answer.
- `prices`: what other places of an argument would cost.
- `deviations`: bytes that the compiler sends otherwise than predicted, with causes.
- `recorded`: the record of a plan.
- `plans`: what a plan can do, once it is made.
- `code`: what a person pastes, with the fewest constraints.
- `cache`: plans on disk.
"""

from spmd.inspection.records.plan import Plan as Plan
from spmd.planner.api import Progress as Progress, plan as plan, plan_function as plan_function
from spmd.planner.calls import plan_of_call as plan_of_call

__all__ = ["Plan", "Progress", "plan", "plan_function", "plan_of_call"]
