"""What a compiled program does between devices, as records.

Example:
    found = inspection.collectives(compiled.as_text(), mesh.shape)
    inspection.totals(found)
"""

from spmd.inspection._hlo import (
    Computation as Computation,
    Instruction as Instruction,
    Module as Module,
    Shape as Shape,
    parse_module as parse_module,
)
from spmd.inspection._ledger import (
    KINDS as KINDS,
    Collective as Collective,
    Total as Total,
    collectives as collectives,
    totals as totals,
)
