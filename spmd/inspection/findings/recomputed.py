"""The finding on work that a compiler does twice, since not all values fit into the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
import re

from spmd.inspection.hlo.calls import Modules
from spmd.inspection.hlo.cost import products_of
from spmd.inspection.hlo.text import Computation, Instruction, Module, frames_of, parse_shapes
from spmd.inspection.records.names import users_own
from spmd.inspection.records.report import Finding, Source
from spmd.inspection.records.sizes import show_bytes

#: What XLA's rematerialization adds to the name of an instruction that it makes once more.
_AGAIN = re.compile(r".*\.remat[\d.]*")

#: Bytes of such values from which on they are worth a finding.
LARGE = 2**20


def recomputations(modules: Modules) -> Iterator[Finding]:
    """What is made again instead of kept; one finding for a program."""
    flops: Counter[Source | None] = Counter()
    nbytes = count = 0
    for module, visited in modules:
        for name, visit in visited.items():
            computation = module.computations[name]
            for one in () if visit.in_fusion else computation.instructions:
                if _is_made_again(one):
                    own = next(filter(None, map(users_own, frames_of(one, module))), None)
                    flops[own] += (visit.executions or 1) * _flops(one, computation, module)
                    nbytes += sum(shape.nbytes for shape in parse_shapes(one.type))
                    count += 1
    if nbytes < LARGE:
        return
    (most, _), *others = flops.most_common()
    values = "a value" if count == 1 else f"{count} values"
    yield Finding(
        kind="recomputed",
        subject=f"the compiler makes {values} again, since not everything fits into the memory",
        source=most,
        nbytes=0,
        measure="",
        flops=flops.total(),
        facts=(
            f"{show_bytes(nbytes)} are made twice instead of kept",
            *([f"on {len(flops)} lines; this one costs most"] if others else []),
        ),
        fix="need less memory: split more, take a smaller batch, donate the state, or say in a "
        "policy of jax.checkpoint what is cheap to make again",
    )


def _is_made_again(one: Instruction) -> bool:
    return ".remat" in one.name and one.opcode not in _PARTS and bool(_AGAIN.fullmatch(one.name))


_PARTS = ("bitcast", "get-tuple-element", "tuple")


def _flops(one: Instruction, computation: Computation, module: Module) -> int:
    """Of an instruction, and of the products that are fused in it."""
    inner = (module.computations[name] for name in one.callees().get("calls", ()))
    fused = (flops for body in inner for _, flops in products_of(body))
    return sum(fused) + sum(flops for its, flops in products_of(computation) if its is one)
