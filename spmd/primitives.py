"""The primitives of `spmd`, for code that interprets jaxprs."""

from spmd._constraint import sharding_constraint_p as sharding_constraint_p
from spmd._pjit import pjit_p as pjit_p
