"""What a compiled program does between and on its devices, as records.

Example:
    report = inspection.report(step, state, batch)
    report.totals("kind", "axis")

The records, the parser and what reads files know no JAX. What compiles is imported with the first
use of its name, so that ``spmd diff`` starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from spmd.inspection.hlo.groups import expand_replica_groups as expand_replica_groups
from spmd.inspection.hlo.ledger import collectives as collectives, wire_bytes as wire_bytes
from spmd.inspection.hlo.oom import explain_oom as explain_oom, oom_failure as oom_failure
from spmd.inspection.hlo.text import (
    Computation as Computation,
    Instruction as Instruction,
    Module as Module,
    parse_module as parse_module,
    parse_modules as parse_modules,
)
from spmd.inspection.records.arrays import Argument as Argument, Excerpt as Excerpt, Split as Split
from spmd.inspection.records.diff import Diff as Diff, diff as diff
from spmd.inspection.records.fit import Fit as Fit
from spmd.inspection.records.origins import (
    Annotation as Annotation,
    Conflict as Conflict,
    Origin as Origin,
    Origins as Origins,
    Step as Step,
    ValueOrigins as ValueOrigins,
    Why as Why,
)
from spmd.inspection.records.pictures import (
    Picture as Picture,
    Pictures as Pictures,
    Shard as Shard,
)
from spmd.inspection.records.plan import (
    Candidate as Candidate,
    Deviation as Deviation,
    Placed as Placed,
    Plan as Plan,
)
from spmd.inspection.records.report import (
    DIRECTIONS as DIRECTIONS,
    KINDS as KINDS,
    Buffer as Buffer,
    Collective as Collective,
    Cost as Cost,
    Memory as Memory,
    Part as Part,
    Report as Report,
    Reshard as Reshard,
    Shape as Shape,
    Shapes as Shapes,
    Source as Source,
    Total as Total,
    Unread as Unread,
)
from spmd.inspection.records.sizes import parse_bytes as parse_bytes, show_bytes as show_bytes
from spmd.inspection.records.sums import totals as totals
from spmd.inspection.records.sweep import Sweep as Sweep, SweepRow as SweepRow
from spmd.inspection.records.time import (
    Event as Event,
    Exchange as Exchange,
    Exposed as Exposed,
    Time as Time,
)
from spmd.inspection.timing.chips import CHIPS as CHIPS, Chip as Chip

if TYPE_CHECKING:
    from spmd.inspection.compile.calibrate import calibrate as calibrate
    from spmd.inspection.compile.fits import fits as fits
    from spmd.inspection.compile.preview import preview as preview
    from spmd.inspection.compile.report import report as report
    from spmd.inspection.compile.sweep import sweep as sweep
    from spmd.inspection.compile.topology import (
        hbm_bytes as hbm_bytes,
        is_described as is_described,
        is_stand_in as is_stand_in,
        topology as topology,
    )
    from spmd.inspection.compile.visualize import visualize as visualize
    from spmd.inspection.shardy.why import why as why

_COMPILING = {
    **{
        name: f"compile.{name}"
        for name in ("calibrate", "fits", "preview", "report", "sweep", "visualize")
    },
    **dict.fromkeys(("topology", "hbm_bytes", "is_described", "is_stand_in"), "compile.topology"),
    "why": "shardy.why",
}


def __getattr__(name: str) -> Any:
    if name not in _COMPILING:
        raise AttributeError(f"module 'spmd.inspection' has no attribute {name!r}")
    module = importlib.import_module(f"spmd.inspection.{_COMPILING[name]}")
    return globals().setdefault(name, getattr(module, name))
