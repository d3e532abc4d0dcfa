"""Traced, Lowered and Compiled: what they hold, what they say, and what they refuse."""

import sys

import jax
from jax.extend.core import jaxpr_as_fun
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, mesh_of, put
import pytest

import spmd
from spmd import NamedSharding, P, pjit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def step(state, batch, *, scale):
    """A small training step."""
    w = state["w"] - scale * batch["x"].mean()
    return {"w": w}, (w * batch["y"]).sum()


def step_on(mesh):
    """The step with specs, state donated."""
    return pjit(
        step,
        in_axis_resources={"state": P("model"), "batch": P("data")},
        out_axis_resources=(P("model"), None),
        donate_argnums=0,
        mesh=mesh,
    )


ARGS = ({"w": X}, {"x": X, "y": X + 1})


def struct(x, sharding=None):
    """The shape of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


# What the stages hold


def test_each_stage_does_one_step(mesh):
    """Tracing, lowering and compiling happen one at a time, and once."""
    spmd.clear_caches()  # another test may have traced the same step
    f = step_on(mesh)
    args = ({"w": X}, {"x": X, "y": X * 2})
    traced, work = counted(f.trace, *args, scale=0.1)
    assert work == spmd.Counts(traces=1)
    lowered, work = counted(traced.lower)
    assert work == spmd.Counts(lowerings=1)
    compiled, work = counted(lowered.compile)
    assert work == spmd.Counts(compiles=1)
    assert [type(s) for s in (traced, lowered, compiled)] == [
        spmd.Traced,
        spmd.Lowered,
        spmd.Compiled,
    ]
    _, work = counted(compiled, *args, scale=0.1)
    assert work == spmd.Counts()
    _, work = counted(f, *args, scale=0.1)
    assert (work.traces, work.lowerings) == (0, 0)


def test_trees_avals_and_names(mesh):
    """Every stage knows the trees, the avals, the donated arguments, name and mesh."""
    traced = step_on(mesh).trace(*ARGS, scale=0.1)
    lowered = traced.lower()
    f32 = np.dtype(np.float32)
    for stage in (traced, lowered, lowered.compile()):
        assert stage.in_tree == jax.tree.structure((ARGS, {"scale": 0.1}))
        assert stage.out_tree == jax.tree.structure(({"w": 0}, 0))
        avals = jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), stage.in_avals)
        x = ((8, 8), f32, False)
        assert avals == (({"w": x}, {"x": x, "y": x}), {"scale": ((), f32, True)})
        assert stage.donate_argnums == (0,)
        assert stage.name == "step"
        assert stage.mesh == mesh
        info = stage.out_info
        assert jax.tree.map(lambda i: (i.shape, i.dtype), info) == ({"w": x[:2]}, ((), f32))
        assert "step" in repr(stage)


def test_out_info_knows_the_sharding_once_compiled(mesh):
    """Shapes come with the trace, shardings with the executable."""
    f = pjit(lambda x: x + 1, in_axis_resources=P("data"), mesh=mesh)
    assert f.trace(X).out_info.sharding is None
    sharding = f.lower(X).compile().out_info.sharding
    assert sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_specs_recovered_from_the_executable(mesh):
    """`in_specs` and `out_specs` are what the program has, given or chosen."""
    compiled = step_on(mesh).lower(*ARGS, scale=0.1).compile()
    data = {"x": P("data"), "y": P("data")}
    assert compiled.in_specs == (({"w": P("model")}, data), {"scale": P()})
    assert compiled.out_specs == ({"w": P("model")}, P())
    chosen = pjit(lambda x: (x.T, x.sum()), in_axis_resources=P("data", "model"), mesh=mesh)
    assert chosen.lower(X).compile().out_specs == (P("model", "data"), P())
    wide = pjit(lambda x: x * 2, in_axis_resources=P(("model", "data")), mesh=mesh)
    assert wide.lower(X).compile().in_specs == ((P(("model", "data")),), {})
    ins = compiled.in_shardings[0][0]["w"]
    assert ins.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    assert jax.tree.leaves(compiled.out_shardings)[0].is_equivalent_to(ins, 2)


def test_specs_on_one_device():
    """On a mesh of one device everything is whole, and the specs say so."""
    mesh = mesh_of({"x": 1})
    f = pjit(lambda x: x + 1, in_axis_resources=P("x"), out_axis_resources=P("x"), mesh=mesh)
    compiled = f.lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X + 1)
    shapes = [
        NamedSharding(mesh, s).shard_shape((8, 8))
        for s in (compiled.in_specs[0][0], compiled.out_specs)
    ]
    assert shapes == [(8, 8), (8, 8)]


def test_lowering_of_structs(mesh):
    """Shapes alone are enough, with or without a sharding; no data is touched."""
    f = pjit(lambda x, y: x @ y, in_axis_resources=(P("data"), P(None, "model")), mesh=mesh)
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)
    assert f.eval_shape(huge, huge).shape == (1 << 20, 1 << 20)
    assert "tensor<1048576x1048576xbf16>" in f.lower(huge, huge).as_text()
    from_structs = f.lower(struct(X), struct(X)).compile()
    assert_sharded(from_structs(X, X), X @ X, P("data", "model"), mesh, rtol=1e-6)
    free = pjit(lambda x: x + 1, mesh=mesh)
    placed = struct(X, NamedSharding(mesh, P(None, "model")))
    assert free.lower(placed).compile().in_specs == ((P(None, "model"),), {})
    assert free.lower(struct(X)).compile().in_specs == ((P(),), {})


def test_compiled_for_structs_runs_on_arrays_of_any_origin(mesh):
    """Host arrays, uncommitted and rightly placed arrays are taken; the result is the same."""
    f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("model"), mesh=mesh)
    compiled = f.lower(struct(X)).compile()
    for x in (X, jnp.asarray(X), put(X, mesh, P("data")), put(X, mesh, P("data", None))):
        assert_sharded(compiled(x), X + 1, P("model"), mesh)


def test_a_compiled_program_takes_keywords_in_any_order(mesh):
    """Whichever call taught the fast path, each argument goes to the parameter of its name."""
    compiled = pjit(lambda b, a: b - a, P("data"), mesh=mesh).lower(X, X).compile()
    one, three = put(X, mesh, P("data")), put(3 * X, mesh, P("data"))
    for _ in range(3):
        for got in (compiled(b=one, a=three), compiled(a=three, b=one), compiled(one, a=three)):
            np.testing.assert_array_equal(got, -2 * X)
        np.testing.assert_array_equal(compiled(a=one, b=three), 2 * X)


def test_eval_shape(mesh):
    """`eval_shape` gives shapes and dtypes and compiles nothing."""
    out, work = counted(step_on(mesh).eval_shape, *ARGS, scale=0.1)
    assert jax.tree.map(lambda i: i.shape, out) == ({"w": (8, 8)}, ())
    assert (work.lowerings, work.compiles) == (0, 0)


# Text and analyses


def test_as_text_and_compiler_ir(mesh):
    """Each dialect as text and as an object; an unknown one is refused with the known ones."""
    lowered = pjit(lambda x: x + 1, in_axis_resources=P("data"), mesh=mesh).lower(X)
    assert "stablehlo.add" in lowered.as_text()
    assert lowered.as_text("stablehlo") == lowered.as_text()
    assert "ENTRY" in lowered.as_text("hlo") or "HloModule" in lowered.as_text("hlo")
    assert "stablehlo.add" in str(lowered.compiler_ir())
    assert "stablehlo.add" in str(lowered.compiler_ir("stablehlo"))
    assert "add" in lowered.compiler_ir("hlo").as_hlo_text()
    for call in (lowered.as_text, lowered.compiler_ir):
        with pytest.raises(ValueError) as e:
            call("french")
        assert "dialect='french'" in str(e.value)
        assert "'stablehlo' or 'hlo'" in str(e.value)
    assert "HloModule" in lowered.compile().as_text()
    assert "loc(" not in lowered.as_text()
    assert "test_stages.py" in lowered.as_text(debug_info=True)


def test_analyses(mesh):
    """Costs and memory come from the compiler; memory is counted per device."""
    f = pjit(lambda x: x @ x, in_axis_resources=P("data"), out_axis_resources=P("data"), mesh=mesh)
    x = np.ones((64, 64), np.float32)
    lowered = f.lower(x)
    np.testing.assert_allclose(lowered.cost_analysis()["flops"], 2 * 64**3, rtol=0.01)
    compiled = lowered.compile()
    assert 0 < compiled.cost_analysis()["flops"] < 2 * 64**3
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == 64 * 64 * 4 // 4
    assert memory.output_size_in_bytes == 64 * 64 * 4 // 4
    assert len(compiled.runtime_executable().local_devices()) == 8
    assert compiled.runtime_executable().hlo_modules()[0].to_string().startswith("HloModule")


def test_jax_stages(mesh):
    """JAX's own classes are there for tools that want them, and work."""
    lowered = step_on(mesh).lower(*ARGS, scale=0.1)
    stage = lowered.jax_stage
    assert isinstance(stage, jax.stages.Lowered)
    assert stage.as_text() == lowered.as_text()
    assert stage.out_tree == lowered.out_tree
    compiled = lowered.compile()
    inner = compiled.jax_stage
    assert isinstance(inner, jax.stages.Compiled)
    assert inner.as_text() == compiled.as_text()
    placed = (
        {"w": put(X, mesh, P("model"))},
        {k: put(v, mesh, P("data")) for k, v in ARGS[1].items()},
    )
    state, loss = inner(*placed, scale=0.5)
    want = step(*ARGS, scale=0.5)
    np.testing.assert_allclose(state["w"], want[0]["w"], rtol=1e-5)
    np.testing.assert_allclose(loss, want[1], rtol=1e-5)


#: Public names of JAX's stages that ours do not have, and why.
LEFT_OUT = {
    "lojax": "a form of JAX's own class; values of several arrays are split before our jaxpr",
    "physicalize": "takes a context of JAX's own lowering",
    "closure_convert": "of JAX 0.12, for hijax: rebuilds JAX's own class",
    "with_consts_as_arg": "of JAX 0.12, for hijax: returns JAX's own class",
}


@pytest.fixture(scope="module")
def both_stages():
    """The stages of one function, ours and those of `jax.jit`, by the name of the class."""
    on = mesh_of({"data": 4, "model": 2})
    ours, specs = spmd.P, ({"w": P("model")}, P("data"), P())

    def fun(state, x, unused, n):
        del unused
        return {"w": state["w"] * x.mean() * n}, (x @ x.T).astype(jnp.bfloat16)

    def placed(spec):
        return NamedSharding(jax.sharding.Mesh(on.devices, on.axis_names), spec)

    is_spec = lambda s: isinstance(s, P)  # noqa: E731 - one expression
    outs = (P("model"), P(None, "data"))
    ours = pjit(fun, specs, outs, donate_argnums=0, static_argnums=3, mesh=on)
    theirs = jax.jit(
        fun,
        in_shardings=jax.tree.map(placed, specs, is_leaf=is_spec),
        out_shardings=jax.tree.map(placed, outs, is_leaf=is_spec),
        donate_argnums=0,
        static_argnums=3,
    )
    return dict(
        zip(
            ("Traced", "Lowered", "Compiled"),
            zip(steps(ours), steps(theirs), strict=True),
            strict=True,
        )
    )


def steps(f):
    """Traced, lowered and compiled."""
    traced = f.trace({"w": X}, X, np.float32(2), 3)
    lowered = traced.lower()
    return traced, lowered, lowered.compile()


@pytest.mark.parametrize("name", ["Traced", "Lowered", "Compiled"])
def test_public_names_of_jax_stages(both_stages, name):
    """Whatever is public on a stage of JAX is there on ours, with what `jax.jit` says."""
    ours, theirs = both_stages[name]
    public = [n for n in dir(getattr(jax.stages, name)) if not n.startswith("_")]
    assert {n for n in public if not hasattr(ours, n)} <= LEFT_OUT.keys()
    plain = """args_info in_tree donate_argnums out_tree effects fun_name input_shardings
        output_shardings input_formats output_formats"""
    compared = [n for n in plain.split() if n in public]
    assert len(compared) > 3
    for n in compared:
        assert getattr(ours, n) == getattr(theirs, n), n
    for n in {"in_avals", "out_avals", "out_info"} & {*public}:  # JAX puts shardings in some
        got, want = (
            jax.tree.map(lambda a: (a.shape, a.dtype), getattr(s, n)) for s in (ours, theirs)
        )
        assert got == want, n


def test_placement_of_an_unused_argument(both_stages):
    """It has none, as in JAX: the program does not have it."""
    ours, _ = both_stages["Compiled"]
    assert ours.input_shardings[0][2] is None
    assert (ours.input_formats[0][2].layout, ours.input_formats[0][2].sharding) == (None, None)
    assert ours.in_shardings[0][2].spec == P()


def test_call_is_a_call(mesh):
    """`call` runs the program."""
    compiled = pjit(lambda x: x + 1, P("data"), P("data"), mesh=mesh).lower(X).compile()
    assert_sharded(compiled.call(X), X + 1, P("data"), mesh)


def test_empty_results_of_repeated_calls(mesh):
    """Each call of a compiled program gives a result without elements in the shards it says."""
    f = pjit(
        lambda x: x[:, :0], in_axis_resources=P("data"), out_axis_resources=P("data"), mesh=mesh
    )
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data")))
    compiled = f.lower(x).compile()
    for call in (f, compiled):
        shapes = [{s.data.shape for s in call(x).addressable_shards} for _ in range(3)]
        assert shapes == [{(8 // mesh.shape["data"], 0)}] * 3


def test_placement_beside_what_a_function_closes_over(mesh):
    """Constants that are inputs of the program are no arguments."""
    ref, large = jax.new_ref(put(X, mesh, P())), np.arange(64.0, dtype=np.float32).reshape(8, 8)

    def fun(x, y):
        ref[...] = ref[...] + x
        return x * jnp.asarray(large) + y["b"]

    f = pjit(fun, in_axis_resources=(P("data"), {"a": P(), "b": P("model")}), mesh=mesh)
    compiled = f.lower(X, {"a": X, "b": X}).compile()
    (x, y), keywords = compiled.input_shardings
    assert (x.spec, y["a"], y["b"].spec, keywords) == (P("data"), None, P("model"), {})
    assert compiled.input_formats[0][1]["b"].sharding == y["b"]


def test_jaxpr_of_a_trace(mesh):
    """The traced stage holds the jaxpr of the function's body."""
    traced = pjit(jnp.sin, in_axis_resources=P("data"), mesh=mesh).trace(X)
    assert "sin" in str(traced.jaxpr)
    np.testing.assert_allclose(jaxpr_as_fun(traced.jaxpr)(X)[0], np.sin(X), rtol=1e-6)


def test_stages_of_a_closure_and_of_constants(mesh):
    """Closed-over arrays travel with every stage."""
    c, placed = jnp.asarray(X), put(X, mesh, P("model"))
    f = pjit(lambda x: x * c + placed, in_axis_resources=P("data"), mesh=mesh)
    compiled = f.lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X * X + X)
    assert compiled.in_specs == ((P("data"),), {})


def test_donation_in_a_compiled_call(mesh):
    """A compiled call donates what the function donates, and refuses it afterwards."""
    f = pjit(
        lambda x: x + 1,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    compiled = f.lower(X).compile()
    x = put(X, mesh, P("data"))
    assert_sharded(compiled(x), X + 1, P("data"), mesh)
    assert x.is_deleted()
    with pytest.raises(spmd.DonatedArrayError, match="argument x"):
        compiled(x)


# What a compiled call refuses


def refused(call, error):
    """The text of the error that a call raises."""
    with pytest.raises(error) as e:
        call()
    return str(e.value)


@pytest.fixture
def compiled(mesh):
    """A program for one float matrix, split over `data`, and a static number."""

    def double(x, n):
        return x["a"] * n

    f = pjit(double, in_axis_resources=({"a": P("data")},), static_argnums=1, mesh=mesh)
    return f.lower({"a": X}, 2).compile()


def test_compiled_refuses_another_shape_or_dtype(compiled):
    """Shape and dtype: both are named, and which argument."""
    assert refused(lambda: compiled({"a": X[:4]}, 2), TypeError) == (
        "pjit of `double` was compiled for another argument x['a'].\n"
        "  expected  f32[8,8]\n"
        "  got       f32[4,8]"
    )
    assert refused(lambda: compiled({"a": X.astype(np.int32)}, 2), TypeError) == (
        "pjit of `double` was compiled for another argument x['a'].\n"
        "  expected  f32[8,8]\n"
        "  got       i32[8,8]"
    )


def test_compiled_refuses_another_sharding(compiled, mesh):
    """Sharding: both are named; a compiled call moves nothing."""
    x = put(X, mesh, P(None, "model"))
    assert refused(lambda: compiled({"a": x}, 2), ValueError) == (
        "pjit of `double` was compiled for another sharding of argument x['a'].\n"
        "  expected  P('data') on mesh data=4, model=2\n"
        "  got       P(None, 'model') on mesh data=4, model=2\n"
        "  fix       jax.device_put it to the expected sharding, "
        "or call the pjit function, which does"
    )
    permuted = put(X, mesh_of({"data": 4, "model": 2}, range(7, -1, -1)), P("data"))
    text = refused(lambda: compiled({"a": permuted}, 2), ValueError)
    assert "another sharding of argument x['a']" in text
    one = jax.device_put(X, jax.devices()[0])
    assert "device cpu:0" in refused(lambda: compiled({"a": one}, 2), ValueError)


def test_compiled_refuses_another_tree(compiled):
    """Structure: both are named."""
    text = refused(lambda: compiled({"b": X}, 2), TypeError)
    assert text == (
        "pjit of `double` was compiled for another structure of arguments.\n"
        "  expected  PyTreeDef((({'a': *},), {}))\n"
        "  got       PyTreeDef((({'b': *},), {}))"
    )


def test_compiled_refuses_other_statics(compiled):
    """Static arguments: both values are named."""
    text = refused(lambda: compiled({"a": X}, 3), TypeError)
    assert text == (
        "pjit of `double` was compiled for other static arguments.\n"
        "  expected  n=2\n"
        "  got       n=3\n"
        "  fix       compile it again for these values"
    )


@pytest.mark.parametrize(
    "transformed",
    [
        lambda compiled: jax.jit(lambda x: compiled({"a": x}, 2))(X),
        lambda compiled: jax.jit(compiled, static_argnums=1)({"a": X}, 2),
        lambda compiled: jax.checkpoint(compiled, static_argnums=1)({"a": X}, 2),
        lambda compiled: jax.vmap(compiled, in_axes=(0, None))({"a": X[None]}, 2),
    ],
    ids=["jit of a caller", "jit", "checkpoint", "vmap"],
)
def test_compiled_refuses_tracers(compiled, transformed):
    """A compiled program cannot be transformed, and says what to do instead."""
    text = refused(lambda: transformed(compiled), TypeError)
    assert "was compiled ahead of time and cannot be transformed" in text
    assert "call the pjit function instead" in text


def test_compiled_after_a_refusal_works(compiled):
    """A refused call leaves the program as it was."""
    refused(lambda: compiled({"a": X[:4]}, 2), TypeError)
    np.testing.assert_array_equal(compiled({"a": X}, 2), X * 2)
    np.testing.assert_array_equal(compiled(x={"a": X}, n=2), X * 2)


def test_compiled_names_every_bad_leaf(mesh):
    """Several bad leaves come in one error."""
    f = pjit(lambda t: t["a"] + t["b"], in_axis_resources=P("data"), mesh=mesh)
    text = refused(
        lambda: f.lower({"a": X, "b": X}).compile()({"a": X[:4], "b": X.astype(np.int32)}),
        TypeError,
    )
    assert "t['a']" in text
    assert "t['b']" in text


def test_compiled_in_another_context(mesh):
    """A program runs outside of the mesh that it was compiled under, and under another one."""
    with mesh:
        compiled = pjit(lambda x: x + 1, in_axis_resources=P("data")).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X + 1)
    with mesh_of({"x": 8}):
        np.testing.assert_array_equal(compiled(X), X + 1)


def test_compiling_again_is_not_counted(in_mesh):
    """The executable of a lowering is made once; with other options it is made again."""
    lowered = pjit(lambda v: v * 3, in_axis_resources=P("data")).lower(X)
    before = spmd.counts()
    lowered.compile(), lowered.compile()
    assert (spmd.counts() - before).compiles == 1
    lowered.compile({"xla_embed_ir_in_executable": True})
    assert (spmd.counts() - before).compiles == 2


def test_compiled_hit_runs_one_frame(in_mesh):
    """A repeated call of a compiled program leaves the checks to C++; another kind is refused."""
    compiled = pjit(lambda v: v * 3, in_axis_resources=P("data")).lower(X).compile()
    x = with_sharding_constraint(X, P("data"))
    compiled(x), compiled(x)
    frames = []
    sys.setprofile(lambda frame, event, _: event == "call" and frames.append(frame.f_code.co_name))
    try:
        y = compiled(x)
    finally:
        sys.setprofile(None)
    assert frames == ["__call__"]
    np.testing.assert_array_equal(y, 3 * X)
    for _ in range(2):
        with pytest.raises(spmd.ShardingError, match="another sharding of argument v"):
            compiled(with_sharding_constraint(X, P("model")))
    np.testing.assert_array_equal(compiled(x), 3 * X)


def test_compiled_refuses_a_number_that_is_too_large(in_mesh):
    """A number beyond the dtype of ints is told like any other argument that does not fit."""
    compiled = pjit(lambda n: n + 1).lower(1).compile()
    with pytest.raises(spmd.ArgumentError, match="cannot take argument n"):
        compiled(2**70)
