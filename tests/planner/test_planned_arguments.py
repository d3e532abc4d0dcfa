"""What functions are called with: by keyword, static, keys of random numbers, what is unused."""

import warnings

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import AUTO, P, pjit
from spmd.inspection import CHIPS
from spmd.planner.cost.estimate import Estimator

#: A plan without a compile, which says nothing on the way.
QUICK = {"top": 0, "progress": False, "cache": False}
X, W = np.ones((64, 32), np.float32), np.ones((32, 8), np.float32)


def places(found):
    """The specs of all arguments and results, by name."""
    return {one.name: one.spec for one in (*found.arguments, *found.results)}


def pasted(found, **names):
    """The function that the code of a plan makes."""
    own = dict(names)
    exec(found.code(), own)
    return own["step"]


# By keyword


def by_keyword(x, *rest, w, mesh=None, **more):
    """A product of arguments of all kinds, one of which is called as the code calls something."""
    return (x + rest[0]) @ w + more["bias"] * (0 if mesh is None else mesh)


@pytest.mark.slow
def test_code_has_specs_of_arguments_by_keyword(mesh):
    """They had those of other arguments, or none."""
    specs = {"x": P("data"), "rest[0]": AUTO, "w": P("model"), "mesh": P(), "bias": P("data")}
    args, kwargs = (X, X), {"w": W, "mesh": np.float32(2), "bias": np.ones((64, 8), np.float32)}
    found = pjit(by_keyword, in_axis_resources=specs, mesh=mesh).plan(*args, **kwargs)
    assert (places(found)["x"], places(found)["w"]) == ((("data",), ()), (("model",), ()))
    code = pasted(found, by_keyword=by_keyword)
    (ins, by_name) = code.lower(*args, **kwargs).compile().in_specs
    assert (ins[0], by_name["w"], by_name["bias"]) == (P("data"), P("model"), P("data"))
    np.testing.assert_allclose(code(*args, **kwargs), by_keyword(*args, **kwargs))


@pytest.mark.slow
def test_code_does_not_tell_two_arguments_of_one_name_apart(mesh):
    """No dict has an entry for each: the code is refused, and gives none the other's place."""

    def product(x, /, **more):
        return x @ more["x"]

    found = pjit(product, in_axis_resources=AUTO, mesh=mesh).plan(X, x=W)
    first, second = found.arguments
    assert (first.spec, second.spec) == ((("data", "model"), ()), ((), ()))
    with pytest.raises(spmd.ShardingError, match="cannot match in_axis_resources"):
        pasted(found, product=product).lower(X, x=W)


@pytest.mark.parametrize("spec", [P(), AUTO])
def test_arguments_by_keyword_are_no_options(spec, mesh):
    """Of a method of the function all of them are the function's."""

    def scaled(x, *, memory, top):
        return x * memory + top

    found = pjit(scaled, in_axis_resources=spec, mesh=mesh).plan(X, memory=5000.0, top=X)
    assert [one.name for one in found.arguments] == ["x", "memory", "top"]
    assert found.budget is None


# Static


@jax.tree_util.register_pytree_node_class
class Linear:
    """A module whose weight is an array, and which has a hash."""

    def __init__(self, weight):
        self.weight = weight

    def tree_flatten(self):
        """As JAX takes it apart."""
        return (self.weight,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        """And makes it anew."""
        return cls(*children)

    def __call__(self, x):
        """A product."""
        return x @ self.weight


@pytest.mark.slow
def test_a_static_argument_keeps_its_arrays(mesh):
    """They are values of the program, and no shapes."""

    def called(module, x):
        return module(x)

    functions = (
        (called, {"static_argnums": 0}),
        (called, {"static_argnames": "module"}),
        (jax.jit(called, static_argnums=0), {}),
    )
    for function, options in functions:
        found = spmd.plan(function, Linear(W), X, mesh=mesh, **options, **QUICK)
        assert [one.name for one in found.arguments] == ["x"]
    assert pjit(called, P(), static_argnums=0, mesh=mesh).plan(Linear(W), X).results
    with pytest.raises(spmd.StaticArgumentError, match="cannot hash static argument module"):
        spmd.plan(called, W, X, mesh=mesh, static_argnums=0, **QUICK)


@pytest.mark.slow
def test_prices_know_the_exchanges_that_lie_between(mesh):
    """A target network is the other one every few steps: who splits one of its weights exchanges.

    The estimate alone takes it to be the time of 140 nanoseconds; one message takes more.
    """

    def step(params, target, x, count):
        def loss(params):
            found, wanted = (jnp.tanh(x @ one["up"]) @ one["down"] for one in (params, target))
            return jnp.mean((found - wanted) ** 2)

        gradients = jax.grad(loss)(params)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        return params, jax.lax.cond(count % 4 == 0, lambda: params, lambda: target)

    weights = {"up": np.ones((64, 512), np.float32), "down": np.ones((512, 64), np.float32)}
    x = np.ones((256, 64), np.float32)
    found = spmd.plan(step, weights, weights, x, np.int32(0), mesh=mesh, **QUICK)
    prices = {one.name: one.prices for one in found.arguments}
    for name in ("target['up']", "target['down']"):
        assert len(prices[name]) == 4
        assert all(price.seconds > CHIPS["v5e"].hop for price in prices[name])
    assert [*prices["target['up']"]] == sorted(prices["target['up']"], key=lambda one: one.seconds)


# Keys of random numbers


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_are_split_by_their_own_dimensions_alone(implementation, mesh):
    """In the program they have one more, which was split; and they have as many bytes as that."""
    keys = jax.random.split(jax.random.key(0, impl=implementation), 64)
    found = spmd.plan(jax.vmap(jax.random.split), keys, mesh=mesh, **(QUICK | {"top": 1}))
    assert all(spec[1:] in ((), ((),)) for spec in places(found).values())
    (own,) = found.arguments
    split = 8 if own.spec[0] == ("data", "model") else 1
    assert own.nbytes_on(found.axes) == jax.random.key_data(keys).nbytes / split
    assert all(len(price.spec) == 1 for price in own.prices)
    one = spmd.plan(jax.random.split, keys[0], mesh=mesh, **(QUICK | {"top": 1}))
    assert one.arguments[0].spec == ()
    got = pjit(jax.vmap(jax.random.split), plan=found, mesh=mesh)(keys)
    wanted = jax.vmap(jax.random.split)(keys)
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(wanted))


# What is not used, or changed


def test_an_argument_that_is_not_used_lies_where_it_was_fixed(mesh):
    """The program does not have it, and its call has."""

    def doubled(state, x):
        return x * 2

    found = spmd.plan(doubled, X, X, mesh=mesh, fixed={"state": P("data")}, **QUICK)
    assert places(found)["state"] == (("data",), ())
    step = pjit(doubled, (P("data"), AUTO), mesh=mesh, implicit_reshard="error")
    np.testing.assert_array_equal(step(*step.plan(X, X).place(X, X)), 2 * X)


@pytest.mark.slow
def test_what_a_function_changes_and_gives_back_is_planned(mesh):
    """`flax.nnx.merge` shares the variables of a state; their new values are among the results."""
    graph, state = nnx.split(nnx.BatchNorm(32, rngs=nnx.Rngs(0)))

    def step(state, x):
        norm = nnx.merge(graph, state)
        y = norm(x)
        return nnx.state(norm), y

    assert spmd.plan(step, state, X, mesh=mesh, **QUICK).results
    with pytest.raises(spmd.PlanError, match="changes of state"):
        spmd.plan(lambda state, x: step(state, x)[1], state, X, mesh=mesh, **QUICK)


def test_what_costs_no_time_takes_little_memory(mesh):
    """A value that is only given back is split where nothing speaks against it."""
    large, x = (jax.ShapeDtypeStruct((n, n), jnp.float32) for n in (2**14, 4096))
    options = {**QUICK, "top": 1, "donate_argnums": 0}
    found = spmd.plan(lambda a, x: (a, jnp.tanh(x @ x)), large, x, mesh=mesh, **options)
    assert found.arguments[0].nbytes_on(found.axes) == 4 * 2**28 / 8


# Options


WRONG = [
    ({"never": [("x:0", ["data"])]}, "cannot read never"),
    ({"never": [5]}, "cannot read never"),
    ({"axes": None}, "cannot use these axes"),
    ({"mesh": {0: 8}}, "cannot use these axes"),
    ({"fixed": {"": P()}}, "has no argument or result ''"),
    ({"fixed": 5}, "cannot read fixed"),
    ({"never": [("row:0", "data")]}, r"has no dimension 'row:0' to split \(did you mean 'row:1'"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[said for _, said in WRONG])
def test_options_that_cannot_be_read(wrong, said, mesh):
    """Each has a sentence."""
    where = {"topology": "cpu:8"} if "axes" in wrong else {"mesh": mesh}
    for function in (lambda x, row: x + row, pjit(lambda x, row: x + row, (P("data"), AUTO))):
        with pytest.raises(spmd.SpmdError, match=said):
            spmd.plan(function, X, X[:1], **{**where, **QUICK, **wrong})


@pytest.mark.slow
def test_what_is_fixed_counts_before_the_specs_beside_auto(mesh):
    """Also for all that is below its path."""

    def product(state, x):
        return x @ state["w"] + state["v"][None]

    state, v = {"w": W, "v": np.ones(8, np.float32)}, "state['v']"
    function = pjit(product, ({"w": AUTO, "v": P("data")}, AUTO), mesh=mesh)
    for fixed, spec in (({}, ("data",)), ({"state": P("model")}, ("model",)), ({v: P()}, ())):
        found = spmd.plan(function, state, X, fixed=fixed, **QUICK)
        assert places(found)[v] == (spec,)
    assert not spmd.plan(function, state, X, fixed={"state": AUTO}, **QUICK).arguments[0].is_fixed


def test_a_sharding_that_is_fixed_is_of_the_same_mesh(mesh):
    """Its axes would have other sizes; AUTO fixes nothing."""
    other = jax.make_mesh((2, 4), ("data", "model"))
    for spec, fits in ((P("data"), False), (P(), True)):
        options = {"mesh": mesh, "fixed": {"x": NamedSharding(other, spec)}, **QUICK}
        if fits:
            assert spmd.plan(lambda x: x * 2, X, **options).arguments[0].is_fixed
            continue
        with pytest.raises(spmd.MeshError, match="a sharding of another mesh"):
            spmd.plan(lambda x: x * 2, X, **options)
    found = spmd.plan(lambda x: x * 2, X, mesh=mesh, fixed={"x": AUTO}, **QUICK)
    assert not found.arguments[0].is_fixed


def test_a_plan_is_compared_with_plans_and_places_arrays(mesh):
    """Of anything else a sentence says what it wants."""
    found = spmd.plan(lambda x: x * 2, X, mesh=mesh, **QUICK)
    for other in (None, "plan.json"):
        with pytest.raises(spmd.ArgumentError, match="cannot be compared"):
            found.diff(other)
    for struct in (jax.ShapeDtypeStruct(X.shape, X.dtype), jax.typeof(X)):
        with pytest.raises(spmd.ArgumentError, match="cannot place argument x: it is no array"):
            found.place(struct)


def test_a_plan_without_constraints_is_of_its_program_too(mesh):
    """It was taken for any program of such arguments."""
    found = spmd.plan(lambda x: x * 2, X, mesh=mesh, **QUICK)
    assert not found.pins
    with pytest.raises(spmd.PlanError, match="is of another program"):
        pjit(lambda x: (x @ x.T) @ x, plan=found, mesh=mesh)(X)
    np.testing.assert_array_equal(pjit(lambda x: x * 2, plan=found, mesh=mesh)(X), 2 * X)


def test_arrays_of_numpy_are_what_jax_makes_of_them(mesh):
    """Without a warning of their 64 bits; of a text it has no dtype."""
    with warnings.catch_warnings(action="error"):
        found = spmd.plan(lambda x: x @ x.T, X.astype(np.float64), mesh=mesh, **QUICK)
    assert found.arguments[0].dtype == "f32"
    with pytest.raises(spmd.ArgumentError, match="JAX has no dtype for it"):
        spmd.plan(lambda x, s: x, X, np.array(["a"]), mesh=mesh, **QUICK)


@pytest.mark.slow
def test_an_interrupt_of_the_first_search_gives_the_best_so_far(mesh, monkeypatch):
    """Of what was seen until then."""
    seen, estimated = [], Estimator._estimate

    def estimate(self, layout, said):
        found = estimated(self, layout, said)
        seen.append(found.seconds)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Estimator, "_estimate", estimate)
    options = {**QUICK, "top": 1}
    found = spmd.plan(lambda x, w: jnp.tanh(x @ w) @ w.T, X, W, mesh=mesh, seeds=False, **options)
    assert found.predicted == min(seen[:19])
    assert not found.complete
    seen.clear()
    with pytest.raises(spmd.PlanMemoryError, match="the search was ended early"):
        spmd.plan(lambda x, w: jnp.tanh(x @ w) @ w.T, X, W, mesh=mesh, memory=10, **options)
