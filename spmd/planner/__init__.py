"""Which layout of a program's arrays takes the least time, and what the compiler says of it.

In the order of reading:

- `api`: `spmd.plan`, from a function and hardware to a plan.
- `asked`: what a user wants of a plan, read and checked.
- `calls`: a call of `pjit` with AUTO among its specs, or with ``plan=``.
- `structure`: LISTED
"""

from spmd.inspection.records.plan import Plan as Plan
from spmd.planner.api import Progress as Progress, plan as plan
from spmd.planner.calls import plan_of_call as plan_of_call

__all__ = ["Plan", "Progress", "plan", "plan_of_call"]
