"""Calls of `pjit` whose places a plan says: AUTO among specs, and ``plan=``."""

import dataclasses
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import AUTO, P, pjit

B, D, F = 64, 32, 128


def step(w, x):
    """A gradient step of a layer with a residual."""

    def loss(w):
        return jnp.mean((x + jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.fixture(scope="module")
def args():
    """Weights and rows."""
    key = np.random.default_rng(0)
    w = {"down": key.normal(size=(F, D)), "up": key.normal(size=(D, F))}
    return jax.tree.map(np.float32, w), np.float32(key.normal(size=(B, D)))


@pytest.fixture(scope="module")
def mesh():
    """Of eight devices."""
    return spmd.make_mesh({"data": 4, "model": 2})


@pytest.fixture(scope="module")
def plan(args, mesh):
    """Rows are split by data, as the user says."""
    fixed = {"x": P("data")}
    return spmd.plan(step, *args, mesh=mesh, fixed=fixed, top=1, cache=False, progress=False)


def specs(tree):
    """The specs of arrays, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.spec for path, leaf in leaves}


def by_name(plan):
    """Where a plan puts arguments and results."""
    return {one.name: one.spec for one in (*plan.arguments, *plan.results)}


@pytest.mark.slow
def test_a_plan_names_every_argument_and_result(plan):
    """In their order, with shapes; what the user fixed stays."""
    names = [one.name for one in plan.arguments]
    assert names == ["w['down']", "w['up']", "x"]
    assert [one.name for one in plan.results] == ["result['down']", "result['up']"]
    assert [one.shape for one in plan.arguments] == [(F, D), (D, F), (B, D)]
    assert [one.is_fixed for one in plan.arguments] == [False, False, True]
    assert by_name(plan)["x"] == (("data",), ())
    assert plan.axes == {"data": 4, "model": 2}


def test_a_planned_call_gives_what_the_function_gives(plan, args, mesh):
    """With the arrays of the host, or placed ahead; results lie where the plan says."""
    expected = step(*args)
    run = pjit(step, plan=plan)
    with mesh:
        for given in (args, plan.place(*args)):
            got = run(*given)
            for name in expected:
                np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)
        placed = plan.place(*args)
    wanted = by_name(plan)
    for found, prefix in ((specs(placed[0]), "w"), (specs(got), "result")):
        for path, spec in found.items():
            entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
            entries += [()] * (2 - len(entries))
            assert tuple(entries) == wanted[prefix + path]


def test_a_plan_brings_its_own_mesh(plan, args):
    """Without an active mesh its axes are laid over the devices that are here."""
    assert dict(plan.mesh.shape) == {"data": 4, "model": 2}
    got = pjit(step, plan=plan)(*args)
    assert dict(got["up"].sharding.mesh.shape) == {"data": 4, "model": 2}


def test_a_hit_runs_no_python(plan, args, mesh):
    """A second call neither traces nor lowers nor asks the planner."""
    run = pjit(step, plan=plan)
    with mesh:
        placed = plan.place(*args)
        run(*placed)
        before = spmd.counts()
        with jax.log_compiles(False):
            for _ in range(3):
                run(*placed)
        assert spmd.counts() == before


def test_pins_are_a_part_of_the_key(plan, args, mesh):
    """The same function with the same specs and no pins is another program."""
    assert plan.pins
    bare = dataclasses.replace(plan, pins=())
    with mesh:
        texts = [pjit(step, plan=one).lower(*args).as_text() for one in (plan, bare, plan)]
    assert texts[0] == texts[2] != texts[1]
    assert "sharding_constraint" in texts[0]
    assert "sharding_constraint" not in texts[1]


@pytest.mark.slow
def test_auto_beside_specs_keeps_them(args, mesh):
    """AUTO is a spec like any other: in a prefix, beside fixed ones, for arguments and results."""
    auto = pjit(
        step, in_axis_resources=(AUTO, P("data")), out_axis_resources={"down": AUTO, "up": P()}
    )
    with mesh:
        got = auto(*args)
        found = by_name(auto.plan(*args))
    assert found["x"] == (("data",), ())
    assert got["up"].sharding.spec == P()
    assert found["result['up']"] == ((), ())
    np.testing.assert_allclose(got["up"], step(*args)["up"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_auto_is_planned_once(args, mesh):
    """The plan that is asked for is the one that calls run with, and one search makes both."""
    auto = pjit(step, in_axis_resources=AUTO)
    with mesh:
        plan = auto.plan(*args)
        auto(*args)
        assert auto.plan(*args) is plan


def test_auto_needs_a_mesh(args):
    """Without one there is nothing to plan for, and the message says what will do."""
    with pytest.raises(spmd.MeshError, match="needs a mesh"):
        pjit(step, in_axis_resources=AUTO)(*args)


@pytest.mark.parametrize(
    ("outer", "name"),
    [
        (lambda f: jax.jit(f), "jax.jit"),
        (lambda f: jax.grad(lambda *a: f(*a)["up"].sum()), "jax.grad"),
        (lambda f: jax.vmap(f, in_axes=(None, 0)), "jax.vmap"),
        (lambda f: pjit(lambda *a: f(*a)), "jax.jit"),
    ],
    ids=["jit", "grad", "vmap", "pjit"],
)
def test_a_part_of_a_program_is_refused(args, mesh, plan, outer, name):
    """A plan is of a whole program: AUTO and plan= inside of another one are refused by name."""
    w, x = args
    x = x[None] if name == "jax.vmap" else x
    with mesh:
        for f in (pjit(step, in_axis_resources=AUTO), pjit(step, plan=plan)):
            with pytest.raises(spmd.PlanError, match=f"inside of {name}"):
                outer(f)(w, x)


def test_a_constraint_is_never_auto(mesh):
    """AUTO is for arguments and results."""
    with mesh, pytest.raises(spmd.SpmdError, match="cannot choose"):
        spmd.with_sharding_constraint(jnp.ones(8), AUTO)


def test_auto_is_one_object():
    """Copies and pickles of AUTO are AUTO, which is compared by identity."""
    assert pickle.loads(pickle.dumps(AUTO)) is AUTO
    assert repr(AUTO) == "AUTO"


def test_a_plan_of_another_program_is_refused(plan, args, mesh):
    """By name: what differs in arguments, in results, or inside."""
    w, x = args

    def other(w, x):
        return jax.tree.map(lambda p: p + (x @ w["up"] @ w["down"]).sum(), w)

    with mesh:
        with pytest.raises(spmd.PlanError, match="is of another program: x differs") as caught:
            pjit(step, plan=plan)(w, x[:32])
        assert "f32[64,32]" in str(caught.value)
        with pytest.raises(spmd.PlanError, match="its products, gathers or scatters") as caught:
            pjit(other, plan=plan)(w, x)
        assert "lowered for" not in str(caught.value)
        with pytest.raises(spmd.PlanError, match="result"):
            pjit(lambda w, x: x @ w["up"], plan=plan)(w, x)


def test_a_plan_of_another_mesh_or_version_is_refused(plan, args):
    """Both are named."""
    with spmd.make_mesh({"data": 8}), pytest.raises(spmd.PlanError, match="another mesh") as caught:
        pjit(step, plan=plan)(*args)
    assert "data=4, model=2" in str(caught.value)
    old = dataclasses.replace(plan, versions={**plan.versions, "jax": "0.0.1"})
    with pytest.raises(spmd.PlanError, match="another version of jax"):
        pjit(step, plan=old)(*args)


def test_a_plan_and_specs_are_one_too_many(plan):
    """The plan says where everything lies."""
    with pytest.raises(spmd.OptionError, match="both a plan and in_axis_resources"):
        pjit(step, plan=plan, in_axis_resources=P())
    with pytest.raises(spmd.ArgumentError, match="cannot use this plan"):
        pjit(step, plan="plan.json")


def test_place_checks_what_it_is_given(plan, args, mesh):
    """Arrays of other shapes, or more of them, are no arguments of the plan."""
    w, x = args
    with mesh:
        with pytest.raises(spmd.ArgumentError, match="cannot place argument x"):
            plan.place(w, x[:8])
        with pytest.raises(spmd.ArgumentError, match="cannot place 4 arrays"):
            plan.place(w, x, x)
        assert plan.place(w)["up"].shape == (D, F)


@pytest.mark.slow
def test_donated_arguments_and_keywords_and_statics(mesh, args):
    """What pjit takes beside specs goes on working with AUTO."""
    w, x = args

    def scaled(w, x, power):
        return jax.tree.map(lambda p: p * x.sum() ** power, w)

    auto = pjit(scaled, in_axis_resources=(AUTO, AUTO), donate_argnums=0, static_argnums=2)
    with mesh:
        given = auto.plan(w, x, 2).place(w)
        got = auto(given, x=x, power=2)
    np.testing.assert_allclose(got["up"], w["up"] * x.sum() ** 2, rtol=1e-4)
    assert given["up"].is_deleted()


@pytest.mark.slow
def test_what_a_program_does_not_use(mesh):
    """An argument that nothing uses is not split, and operations that nothing needs are no pins."""

    def train(w, tokens, unused):
        def loss(w):
            scores = jax.nn.log_softmax(w["embed"][tokens] @ w["head"])
            return -jnp.mean(jnp.take_along_axis(scores, tokens[..., None], axis=-1))

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    random = np.random.default_rng(2)
    w = {"embed": random.normal(size=(48, D)), "head": random.normal(size=(D, 48))}
    w = jax.tree.map(np.float32, w)
    tokens = random.integers(0, 48, size=(16, 8), dtype=np.int32)
    auto = pjit(train, in_axis_resources=(AUTO, P("data"), AUTO))
    with mesh:
        found = auto.plan(w, tokens, np.ones((8, 8), np.float32))
        got = auto(w, tokens, np.ones((8, 8), np.float32))
    assert by_name(found)["unused"] == ((), ())
    assert by_name(found)["tokens"] == (("data",), ())
    expected = train(w, tokens, None)
    for name in expected:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_function_without_auto_is_planned_for_its_own_mesh(args, mesh):
    """`plan` of any function takes its arguments as a call does, and the mesh that it has."""
    w, x = args
    plain = pjit(step, mesh=mesh)
    assert [one.name for one in plain.plan(w, x=x).arguments] == ["w['down']", "w['up']", "x"]
    assert plain.plan(x=x, w=w).axes == {"data": 4, "model": 2}


@pytest.mark.slow
def test_the_code_of_auto_is_that_of_the_plan(args, mesh):
    """It is worked out from the function, as that of `spmd.plan` is, and not from its jaxpr."""
    fixed = {"x": P("data"), "w['up']": P(None, "model"), "w['down']": P("data")}
    found = spmd.plan(step, *args, mesh=mesh, fixed=fixed, cache=False, progress=False)
    specs = ({"up": P(None, "model"), "down": P("data")}, P("data"))
    auto = pjit(step, in_axis_resources=specs, out_axis_resources=AUTO)
    with mesh:
        own = auto.plan(*args)
    assert own.pins == found.pins
    assert found.constraints
    assert own.code() == found.code()
    assert [one.expression for one in own.constraints] == [
        one.expression for one in found.constraints
    ]


@pytest.mark.slow
def test_a_dropped_function_dies_with_its_plan(args, mesh):
    """Neither caches nor a plan that is kept hold a function with AUTO."""

    def scaled(w, x):
        return jax.tree.map(lambda p: p * x.sum(), w)

    auto = pjit(scaled, in_axis_resources=AUTO)
    with mesh:
        auto(*args)
        kept, dead = auto.plan(*args), weakref.ref(scaled)
    del scaled, auto
    gc.collect()
    assert dead() is None
    assert kept.name == "scaled"
