"""Shardy's passes, as they are run on a copy of a program."""

from hypothesis import example, given, strategies as st
from jax.extend.mlir import ir
import programs
import pytest

from spmd.inspection.shardy import passes, pipeline, propagation

#: Calls, branches, a `shard_map` and constraints, and no loop.
LOOPLESS = (
    *("data_parallel_mlp", "moe_dispatch", "either_branch", "call_graph", "partly_manual"),
    *("sharded_vocabulary", "uneven_rows"),
)


@pytest.mark.parametrize("name", LOOPLESS)
def test_without_loops_a_second_round_changes_nothing(name):
    """Only a program with loops is propagated twice: in any other the first round says all."""
    lowered, _ = programs.PROGRAMS[name][0](programs.cpu_target())
    module = passes.module_of(lowered, subject="test")
    wanted = [one.replace(propagation._RECORDS, "") for one in propagation._PASSES]
    *before, propagate = wanted
    assert "propagate" in propagate
    once = pipeline.run(module, wanted, subject="test")
    twice = pipeline.run(module, [*before, propagate, propagate], subject="test")
    assert not any(one.name == passes.LOOP for one in passes.operations_in(once))
    assert str(once) == str(twice)


@pytest.mark.slow
@given(st.text(min_size=1))
@example('a"b')
@example("\\")
@example("é\n")
def test_names_as_mlir_writes_them(name):
    """What we write is what MLIR writes, and is read again."""
    with ir.Context():
        assert passes.quoted(name) == str(ir.StringAttr.get(name))
    assert passes.axes_in(passes.quoted(name)) == (name,)
