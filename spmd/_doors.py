"""What objects of the core open of a feature when they are called: no other import points up."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd.inspection import Report as Report, Why as Why

#: By name, the feature that has it.
DOORS = {
    "oom_failure": "spmd.inspection",
    "plan_function": "spmd.planner",
    "plan_of_call": "spmd.planner",
    "Plan": "spmd.inspection",
    "preview": "spmd.inspection",
    "report": "spmd.inspection",
    "save": "spmd.bundle",
    "why": "spmd.inspection",
}


def opened(name: str) -> Any:
    """A function of a feature, which is imported with its first use."""
    return getattr(importlib.import_module(DOORS[name]), name)
