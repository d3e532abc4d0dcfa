"""What a compiled program does between devices, as records.

Example:
    found = inspection.collectives(compiled.as_text(), mesh.shape)
    inspection.totals(found, "kind", "axis")
"""

from spmd.inspection._bytes import parse_bytes as parse_bytes, show_bytes as show_bytes
from spmd.inspection._groups import expand_replica_groups as expand_replica_groups
from spmd.inspection._hlo import (
    Computation as Computation,
    Instruction as Instruction,
    Module as Module,
    parse_module as parse_module,
    parse_modules as parse_modules,
)
from spmd.inspection._ledger import collectives as collectives, wire_bytes as wire_bytes
from spmd.inspection._records import (
    DIRECTIONS as DIRECTIONS,
    KINDS as KINDS,
    Buffer as Buffer,
    Collective as Collective,
    Cost as Cost,
    Memory as Memory,
    Report as Report,
    Reshard as Reshard,
    Shape as Shape,
    Shapes as Shapes,
    Source as Source,
    Total as Total,
    totals as totals,
)
