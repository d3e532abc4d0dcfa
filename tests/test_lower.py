"""What the partitioner is given: annotations in StableHLO, and the shape of the module."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, mesh_of
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def main_of(text):
    """The signature line of the module's entry function."""
    (line,) = [x for x in text.splitlines() if "func.func public @main" in x]
    return line


def test_module_in_full(mesh):
    """The whole module of a small function: mesh, inputs, outputs, constraint, donation."""

    def step(x, w):
        return with_sharding_constraint(x * w, P(None, "model")) + x

    f = pjit(
        step,
        in_axis_resources=(P("data"), None),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    text = f.lower(X, X).as_text()
    assert 'sdy.mesh @mesh = <["data"=4, "model"=2]>' in text
    assert "mhlo.num_partitions = 8" in text
    one, two = re.findall(r"%arg\d: tensor<8x8xf32> \{([^%]*)\}", main_of(text))
    assert 'sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>' in one
    assert "jax.buffer_donor = true" in one or "tf.aliasing_output = 0" in one
    assert "sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>" in two
    assert "donor" not in two
    result = main_of(text).split("->")[1]
    assert 'sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>' in result
    assert 'sdy.sharding_constraint %0 <@mesh, [{}, {"model"}]>' in text


SPECS = {
    "one axis": (P("data"), '[{"data"}, {}]'),
    "second dimension": (P(None, "model"), '[{}, {"model"}]'),
    "both": (P("data", "model"), '[{"data"}, {"model"}]'),
    "two axes on one dimension": (P(("model", "data")), '[{"model", "data"}, {}]'),
    "replicated": (None, "[{}, {}]"),
}


@pytest.mark.parametrize("case", SPECS)
def test_specs_of_inputs_and_outputs(mesh, case):
    """Each spec stands in the module as it was written, major axis first."""
    spec, shown = SPECS[case]
    f = pjit(lambda x: x + 1, in_axis_resources=spec, out_axis_resources=spec, mesh=mesh)
    arguments, result = main_of(f.lower(X).as_text()).split("->")
    assert f"<@mesh, {shown}>" in arguments
    assert f"<@mesh, {shown}>" in result


@pytest.mark.parametrize("case", SPECS)
def test_specs_of_constraints(in_mesh, case):
    """Each constraint stands in the module as it was written."""
    spec, shown = SPECS[case]
    f = pjit(lambda x: with_sharding_constraint(x + 1, spec))
    assert f"sdy.sharding_constraint %1 <@mesh, {shown}>" in f.lower(X).as_text()


def test_left_out_output_has_no_annotation(mesh):
    """An output without spec is the partitioner's choice: nothing is said of it."""
    text = pjit(lambda x: x + 1, in_axis_resources=P("data"), mesh=mesh).lower(X).as_text()
    assert "sdy.sharding" not in main_of(text).split("->")[1]


def test_unconstrained_dimensions(in_mesh):
    """``P.UNCONSTRAINED`` is an open dimension, and the others stay closed."""
    f = pjit(lambda x: with_sharding_constraint(x + 1, P("data", P.UNCONSTRAINED)))
    assert '<@mesh, [{"data"}, {?}]>' in f.lower(X).as_text()
    g = pjit(lambda x: x + 1, out_axis_resources=P(P.UNCONSTRAINED, "model"))
    assert '<@mesh, [{?}, {"model"}]>' in g.lower(X).as_text()


def test_permuted_device_order():
    """A mesh over permuted devices keeps their order in the module."""
    mesh = mesh_of({"x": 8}, (3, 1, 7, 5, 0, 2, 6, 4))
    f = pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=mesh)
    assert_sharded(f(X), X + 1, P("x"), mesh)
    assert_sharded(jax.jit(f)(X), X + 1, P("x"), mesh)


def test_names_of_arguments_and_results(mesh):
    """Arguments and results carry the user's paths into the module."""

    def fun(batch):
        return {"loss": batch["x"].sum()}

    f = pjit(fun, in_axis_resources=P("data"), mesh=mesh)
    text = f.lower({"x": X}).as_text(debug_info=True)
    assert "batch['x']" in text or "batch[\\'x\\']" in text
    assert "loss" in main_of(f.lower({"x": X}).as_text())
    assert "module @pjit_fun" in text


def test_nested_call_is_annotated(in_mesh):
    """A call inside of another program has its specs on its arguments and results."""
    inner = pjit(jnp.sin, in_axis_resources=P("data"), out_axis_resources=P(None, "model"))
    text = jax.jit(lambda x: inner(x) * 2).lower(X).as_text()
    assert '<@mesh, [{"data"}, {}]>' in text
    assert '<@mesh, [{}, {"model"}]>' in text
    assert "call @sin" in text


def test_nested_call_twice_is_one_function(in_mesh):
    """The same call twice is one function of the module, called twice."""

    def inner_function(x):
        return jnp.sin(x) * 2

    inner = pjit(inner_function, in_axis_resources=P("data"))
    for outer in (jax.jit, pjit):
        text = outer(lambda x: inner(inner(x)) + inner(x)).lower(X).as_text()
        assert len(re.findall(r"func\.func private @inner_function", text)) == 1
        assert len(re.findall(r"call @inner_function", text)) == 3


def test_nested_calls_that_differ_are_two_functions(in_mesh):
    """Other specs, shapes or constants make another function."""

    def inner_function(x):
        return jnp.sin(x) * 2

    one = pjit(inner_function, in_axis_resources=P("data"))
    two = pjit(inner_function, in_axis_resources=P("model"))
    text = jax.jit(lambda x: one(x) + two(x) + one(x[:4])[:1]).lower(X).as_text()
    assert len(re.findall(r"func\.func private @inner_function", text)) == 3
    want = np.sin(X) * 4 + (np.sin(X) * 2)[:1]
    got = jax.jit(lambda x: one(x) + two(x) + one(x[:4])[:1])(X)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_nested_calls_whose_results_differ_are_two_functions(in_mesh):
    """Calls that differ in the specs of their results alone keep each its own."""

    def inner_function(x):
        return jnp.sin(x) * 2

    one = pjit(inner_function, out_axis_resources=P("data"))
    two = pjit(inner_function, out_axis_resources=P(None, "model"))
    lowered = pjit(lambda x: (one(x), two(x), one(x))).lower(X)
    assert len(re.findall(r"func\.func private @inner_function", lowered.as_text())) == 2
    assert lowered.compile().out_specs == (P("data"), P(None, "model"), P("data"))


def test_jit_of_uncommitted_inputs_runs_on_the_whole_mesh(mesh):
    """`jax.jit` of a call runs on all devices of the mesh, even where no spec says anything."""
    for options in ({"in_axis_resources": P("data")}, {}):
        f = pjit(lambda x: x * 2, mesh=mesh, **options)
        for y in (jax.jit(f)(X), jax.jit(lambda x, f=f: f(x) + 1)(jnp.asarray(X))):
            assert y.sharding.device_set == set(mesh.devices.flat)
        np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)
        assert "mhlo.num_partitions = 8" in jax.jit(f).lower(X).as_text()


def test_jit_of_a_call_deep_inside_runs_on_the_whole_mesh(mesh):
    """A call in a loop in a branch of an outer `jax.jit` still decides the devices."""
    f = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)

    def outer(x):
        return jax.lax.cond(
            x.sum() > 0, lambda x: jax.lax.fori_loop(0, 2, lambda i, x: f(x), x), lambda x: x, x
        )

    y = jax.jit(outer)(X)
    np.testing.assert_array_equal(y, 4 * X)
    assert y.sharding.device_set == set(mesh.devices.flat)


def test_constraint_alone_in_jit_runs_on_the_whole_mesh(in_mesh):
    """A constraint of ours inside of a plain `jax.jit` decides the devices too."""
    y = jax.jit(lambda x: with_sharding_constraint(x * 2, P("data")))(X)
    assert_sharded(y, 2 * X, P("data"), in_mesh)


def test_gspmd_partitioner_too(mesh):
    """With Shardy switched off the same programs give the same values and shards."""
    f = pjit(
        lambda x: with_sharding_constraint(jnp.sin(x), P(None, "model")) * 2,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        mesh=mesh,
    )
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        with mesh:
            assert_sharded(f(X), np.sin(X) * 2, P("data"), mesh, rtol=1e-5, atol=1e-6)
            assert_sharded(jax.jit(f)(X), np.sin(X) * 2, P("data"), mesh, rtol=1e-5, atol=1e-6)
            assert "sdy" not in f.lower(X).as_text()
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_a_compile_that_fails_is_counted(mesh):
    """Counts say what the compiler was given, whether it took it or not."""
    f = spmd.pjit(lambda x: x, mesh=mesh, compiler_options={"xla_no_such_option": "1"})
    before = spmd.counts()
    with pytest.raises(Exception, match="xla_no_such_option"):
        f(np.float32(1))
    assert (spmd.counts() - before).compiles == 1
