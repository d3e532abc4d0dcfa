"""What a compiled program does between devices, as records.

>>> from spmd import inspection
>>> found = inspection.collectives(compiled.as_text(), mesh.shape)  # doctest: +SKIP
>>> inspection.totals(found)  # doctest: +SKIP
"""

from spmd.inspection._hlo import Computation as Computation
from spmd.inspection._hlo import Instruction as Instruction
from spmd.inspection._hlo import Module as Module
from spmd.inspection._hlo import Shape as Shape
from spmd.inspection._hlo import parse_module as parse_module
from spmd.inspection._ledger import KINDS as KINDS
from spmd.inspection._ledger import Collective as Collective
from spmd.inspection._ledger import Total as Total
from spmd.inspection._ledger import collectives as collectives
from spmd.inspection._ledger import totals as totals
