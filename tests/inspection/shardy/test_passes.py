"""Shardy's passes, as they are run on a copy of a program."""

from collections import Counter

from hypothesis import example, given, strategies as st
import jax
from jax.extend.mlir import ir
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from spmd.inspection.shardy import calls, passes, pipeline, propagation

#: Calls, branches, loops, a `shard_map` and constraints.
VARIED = (
    *("data_parallel_mlp", "moe_dispatch", "either_branch", "call_graph", "partly_manual"),
    *("sharded_vocabulary", "uneven_rows", "fsdp_scan", "remat_scan", "nested_scans"),
)


@pytest.mark.parametrize("name", VARIED)
def test_a_second_round_changes_nothing(name):
    """One propagation says all, in loops too: there are no calls that it would not reach."""
    lowered, _ = programs.PROGRAMS[name][0](programs.cpu_target())
    module = passes.module_of(lowered, subject="test")
    wanted = [one.replace(propagation._RECORDS, "") for one in propagation._PASSES]
    *before, propagate = wanted
    assert "propagate" in propagate
    once = pipeline.run(module, wanted, subject="test")
    twice = pipeline.run(module, [*before, propagate, propagate], subject="test")
    assert str(once) == str(twice)


@jax.jit
def _inner(x):
    return jnp.sin(x)


@jax.jit
def _outer(x, y):
    x = jax.lax.fori_loop(0, 3, lambda _, x: _inner(x) + y, x)
    return _inner(x), y


def _calling(x):
    a, b = _outer(x, 2 * x)
    with jax.named_scope("again"):
        a, b = _outer(b, a)
    return a + b


def test_functions_stand_in_the_places_of_their_calls():
    """Also of calls within loops and other functions; the program computes what it did."""
    lowered = jax.jit(_calling).lower(jnp.float32(0.0))
    module = lowered.compiler_ir()
    assert {*passes.functions(module.operation)} > {"main"}
    with module.context:
        calls.inline(module.operation)
        assert module.operation.verify()
        found = [*passes.operations_in(module.operation)]
        sines = [one for one in found if one.name == "stablehlo.sine"]
        around = Counter(len([*passes.holders_of(one)]) for one in sines)
        scopes = Counter("again" in _name_stack(one) for one in sines)
    assert [*passes.functions(module.operation)] == ["main"]
    assert not any(one.name in calls.CALLS for one in found)
    assert around == {0: 2, 1: 2}  # two beside loops, and two in them
    assert scopes == {True: 2, False: 2}
    np.testing.assert_allclose(lowered.compile()(jnp.float32(0.3)), _computed(0.3), rtol=1e-5)


def _computed(x):
    def outer(x, y):
        for _ in range(3):
            x = np.sin(x) + y
        return np.sin(x), y

    a, b = outer(x, 2 * x)
    return sum(outer(b, a))


def _name_stack(operation):
    holders = (passes.op_name_of(one.location) for one in passes.holders_of(operation))
    return "/".join((*holders, passes.op_name_of(operation.location)))


@pytest.mark.parametrize(
    ("axis", "other", "expected"),
    [
        ("data", "data", True),
        ("data", "model", False),
        ("data", "data:(1)2", True),
        ("data:(1)2", "data:(2)2", False),
        ("data:(2)2", "data:(1)4", True),
        ("data:(2)4", "data:(1)4", True),
    ],
)
def test_parts_of_an_axis_that_have_devices_in_common_ways(axis, other, expected):
    """A value may be split over two parts only where these do not overlap."""
    assert passes.overlap(axis, other) == passes.overlap(other, axis) == expected


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
