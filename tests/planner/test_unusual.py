"""What few programs have, and every planner has to take: each was found by somebody who tried."""

import dataclasses
import functools

from flax import nnx
from hardware import needs_libtpu
import jax
from jax.experimental import io_callback
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import AUTO, P, pjit
from spmd.errors import ArgumentError

#: A plan without a compile, which says nothing on the way.
QUICK = {"top": 0, "progress": False, "cache": False}
X, W = np.ones((16, 32), np.float32), np.ones((32, 8), np.float32)


def multiplied(x, w):
    """A product."""
    return x @ w


def runs_as_planned(function, *args, mesh, **options):
    """The plan of a function, of which a call gives what the function gives without it."""
    found = spmd.plan(function, *args, mesh=mesh, **QUICK, **options)
    own = {name: value for name, value in options.items() if name.startswith("static")}
    got = pjit(function, plan=found, mesh=mesh, **own)(*args)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), got, function(*args))
    return found


# Programs


def constant():
    """A product of nothing that is given."""
    return jnp.ones((64, 64)) @ jnp.ones((64, 64))


def ordered(x):
    """A product of what the host gives, one call after the other."""
    made = io_callback(lambda a: np.asarray(a) * 2, jax.typeof(x), x, ordered=True)
    return made @ W


def unordered(x):
    """The same in any order."""
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.typeof(x), x) @ W


def told(x):
    """A product, with a print on the way."""
    jax.debug.print("{}", x.sum())
    return x @ x.T


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (constant, ()),
        (lambda: jnp.zeros((64, 64)), ()),
        (lambda x: np.ones((8, 8), np.float32), (X,)),
        (ordered, (X,)),
        (unordered, (X,)),
        (told, (X,)),
        (lambda result, w: result @ w, (X, W)),
        (lambda x, n: x * n, (X, np.float32(3))),
    ],
    ids=["constant", "zeros", "unused", "ordered", "callback", "print", "result", "number"],
)
def test_a_planned_call_gives_what_the_function_gives(function, args, mesh):
    """Constants alone, calls of the host with and without an order, an argument named `result`."""
    runs_as_planned(function, *args, mesh=mesh)


@pytest.mark.parametrize("names", [("a.b", "a:b"), ("c,d", "{x}")])
def test_axes_may_have_any_names(names):
    """What a text of groups or a path has for itself is a part of them."""
    mesh = spmd.make_mesh({names[0]: 4, names[1]: 2})
    found = runs_as_planned(lambda x, w: jnp.tanh(x @ w) @ w.T, X, W, mesh=mesh)
    assert {axis for one in found.arguments for axes in one.spec for axis in axes} == {*names}


@pytest.mark.slow
@pytest.mark.parametrize("function", [told, unordered, ordered])
def test_calls_of_the_host_are_planned_for_chips(function):
    """Tokens, which order them, have no bytes."""
    assert spmd.plan(function, X, topology="v5e:2x2", **QUICK).axes


@pytest.mark.slow
def test_what_has_no_derivative(mesh):
    """Gradients of whole numbers have no elements to tell."""
    gradient = jax.grad(lambda d: d["x"].sum() * d["n"].sum().astype(jnp.float32), allow_int=True)
    found = spmd.plan(gradient, {"x": jnp.asarray(X), "n": jnp.arange(8)}, mesh=mesh, **QUICK)
    assert [one.name for one in found.results] == ["result['n']", "result['x']"]


def doubled(arrays):
    """Elementwise work, without a product."""
    return [one * 2 for one in arrays]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shapes",
    [[(8 * (i + 1), 16) for i in range(110)], [(64 * (i + 1), 32 * (i + 1)) for i in range(12)]],
    ids=["small", "unlike"],
)
def test_many_arrays_without_a_product_fit_in_their_share(shapes, mesh):
    """Each is too small for a class of its own, or there are more than an order of classes has.

    Whole, they are read and written in twice their bytes; the budget is a third of that.
    """
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    whole = 2 * sum(4 * a * b for a, b in shapes)
    found = spmd.plan(doubled, arrays, mesh=mesh, memory=whole // 3, **QUICK)
    assert whole / 8 <= found.memory <= whole / 3


def quantized(w, x):
    """Products of whole numbers, of eight bits and of four."""
    sums = (((1,), (0,)), ((), ()))
    y = jax.lax.dot_general(x, w["q"], sums, preferred_element_type=jnp.int32)
    y = (y.astype(jnp.float32) * w["s"][None]).astype(jnp.bfloat16)
    return (y @ w["d"].astype(jnp.bfloat16) @ w["i"].astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_fits_is_found_however_long_it_takes(seed, mesh):
    """Exchanges of so few bytes are all of the time, and what needs least makes most of them.

    The budget is what the layout needs that splits all arrays, whatever is drawn at random.
    """
    struct = jax.ShapeDtypeStruct
    w = {"q": struct((64, 256), jnp.int8), "s": struct((256,), jnp.float32),
         "d": struct((256, 64), jnp.float8_e4m3fn), "i": struct((64, 128), jnp.int4)}  # fmt: skip
    x = struct((32, 64), jnp.int8)
    both = P(("data", "model"))
    fixed = {"w['d']": P("model", "data"), "w['i']": both, "w['q']": P("data", "model"),
             "w['s']": P("model"), "x": both, "result": both}  # fmt: skip
    needed = spmd.plan(quantized, w, x, mesh=mesh, fixed=fixed, **QUICK).memory
    found = spmd.plan(quantized, w, x, mesh=mesh, memory=needed + 64, seed=seed, **QUICK)
    assert found.memory <= needed + 64


@pytest.mark.slow
def test_a_step_of_the_optimizer_alone_is_split_like_its_parameters(mesh):
    """Twenty layers are written out, none of whose arrays is a hundredth of all bytes."""
    layer = {"up": (64, 256), "down": (256, 64), "scale": (64,)}
    shapes = [{n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in layer.items()}] * 20

    def update(params, moments):
        moments = jax.tree.map(lambda p, m: 0.9 * m + 0.1 * p, params, moments)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    whole = 4 * 20 * 4 * (2 * 64 * 256 + 64)  # parameters and moments, before and after
    found = spmd.plan(update, shapes, shapes, mesh=mesh, memory=whole // 6, **QUICK)
    assert whole / 8 <= found.memory <= whole / 6


@pytest.mark.slow
def test_a_function_that_changes_its_arguments(mesh):
    """The program has no result for that: a step of a Flax module would learn nothing."""

    def step(model, x):
        loss, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        model.kernel[...] -= 0.1 * gradient.kernel[...]
        return loss

    model = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
    for function in (step, nnx.jit(step)):
        with pytest.raises(spmd.PlanError, match=r"changes of .*model\.kernel"):
            spmd.plan(function, model, X, mesh=mesh, **QUICK)
    auto = pjit(step, in_axis_resources=AUTO, out_axis_resources=AUTO, mesh=mesh)
    with pytest.raises(spmd.PlanError, match="changes its arguments in place"):
        auto(model, X)
    assert spmd.plan(lambda model, x: model(x), model, X, mesh=mesh, **QUICK).results


def test_what_is_changed_in_a_dict_is_the_users_own(mesh):
    """Dicts are taken apart and made anew, as for `jax.jit`: who changes one changes a copy."""

    def function(given):
        return given.pop("x") @ given["w"]

    assert spmd.plan(function, {"x": X, "w": W}, mesh=mesh, **QUICK).results


# Costs


@pytest.mark.slow
def test_a_jitted_function_costs_what_it_costs_bare(mesh):
    """Products in a function read its arguments from main memory, whoever calls it."""
    w = {"up": jnp.ones((512, 2048)), "down": jnp.ones((2048, 512))}

    def step(w, x):
        return (jnp.tanh(x @ w["up"]) @ w["down"]).mean()

    jitted = jax.jit(step)
    functions = step, jitted, lambda w, x: jitted(w, x)
    times = [
        spmd.plan(one, w, jnp.ones((1024, 512)), mesh=mesh, **QUICK).predicted for one in functions
    ]
    assert times[1:] == pytest.approx(times[:1] * 2)


@pytest.mark.slow
def test_an_axis_of_one_device_moves_nothing():
    """What is fixed to it costs what it costs where it is fixed to be whole."""
    mesh = spmd.make_mesh({"data": 1, "model": 8})
    args = jnp.ones((1024, 512)), jnp.ones((512, 2048))
    times = [
        spmd.plan(multiplied, *args, mesh=mesh, fixed={"w": spec}, **QUICK).predicted
        for spec in (P(), P("data"))
    ]
    assert times[1] == pytest.approx(times[0])


def adam(p, m, v, g):
    """An optimizer's step, which is memory alone."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


@pytest.mark.slow
def test_what_was_written_takes_its_memory(mesh):
    """Where CPU devices stand in, whole arrays take eight times as long as split ones, not 0 s."""
    written = pjit(adam, in_axis_resources=P(), out_axis_resources=P(), mesh=mesh)
    arrays = (jax.ShapeDtypeStruct((2048, 2048), jnp.float32),) * 4
    options = {**QUICK, "top": 1, "donate_argnums": (0, 1, 2)}
    found = spmd.plan(written, *arrays, mesh=mesh, **options)
    (own,) = (one for one in found.candidates if one.name == "as written")
    assert found.chosen.name == "found"
    assert own.predicted == pytest.approx(8 * found.predicted, rel=0.01)


@needs_libtpu
@pytest.mark.slow
def test_what_was_written_for_a_mesh_is_compiled_for_the_topology(mesh):
    """The function's own mesh of CPU devices does not count."""
    specs = {"in_axis_resources": (P("data"), None), "out_axis_resources": P("data")}
    arrays = (jax.ShapeDtypeStruct((512, 512), jnp.float32),) * 2
    options = {**QUICK, "top": 1, "topology": "v5e:2x4", "mesh": mesh}
    found = spmd.plan(pjit(multiplied, mesh=mesh, **specs), *arrays, **options)
    rows = [one for one in found.candidates if "as written" in (one.name, *one.same)]
    assert [one.verified for one in rows] == ["time"]


@pytest.mark.slow
def test_specs_that_fit_no_mesh_are_said(mesh):
    """A seed that is not there would be missed."""
    wrong = pjit(lambda x: x * 2, in_axis_resources=P("data", "model"), mesh=mesh)
    found = spmd.plan(wrong, jnp.ones(64), **QUICK)
    (why,) = found.passed_over.values()
    assert why.startswith("ShardingError")
    assert "passed over: its own specs, for which" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("top", [0, 1])
def test_branches_end_as_they_like(top, mesh):
    """XLA refuses a conditional whose branches have constraints at their ends that differ."""

    def branched(x, w, first):
        rows = x[:, 0].astype(int)
        return jax.lax.cond(first, lambda x: x @ w, lambda x: w[rows], x)

    x = jnp.ones((256, 256))
    fixed = {"x": P("model"), "w": P("data", "model"), "result": P()}
    options = {**QUICK, "top": top, "fixed": fixed}
    found = spmd.plan(branched, x, x, True, mesh=mesh, **options)
    assert not any(one.failure for one in found.candidates)
    np.testing.assert_allclose(pjit(branched, plan=found)(x, x, True), x @ x)


@pytest.mark.slow
def test_what_is_not_sent_takes_no_time(mesh):
    """Nothing is left of a sum whose parts are all of it: it was shown as -0.00 ns."""
    args = jnp.ones((512, 2048)), jnp.ones((2048, 512)), jnp.ones((1024, 512))
    found = spmd.plan(
        lambda up, down, x: (jnp.tanh(x @ up) @ down).mean(), *args, mesh=mesh, **QUICK
    )
    waits = [one.exchange for one in found.candidates]
    assert 0.0 in waits
    assert all(one == 0 or one > 1e-12 for one in waits)


# Options


@pytest.mark.parametrize("spec", [P(), None])
def test_an_operand_that_is_fixed_whole(spec, mesh):
    """It is not the same as one that is not fixed."""
    found = runs_as_planned(multiplied, X, W, mesh=mesh, fixed={"w": spec})
    assert found.arguments[1].spec == ((), ())
    assert found.arguments[1].is_fixed


def test_static_numbers_of_numpy(mesh):
    """They stay what they are, in tuples too."""
    runs_as_planned(lambda x, n: x * n.item(), X, np.int64(3), mesh=mesh, static_argnums=1)
    shape = np.int64(8), np.int64(64)
    runs_as_planned(lambda x, n: x.reshape(n), X, shape, mesh=mesh, static_argnums=1)


def test_options_of_jax_jit_are_taken_over(mesh):
    """Static arguments and donation, as those of `pjit` are."""
    function = jax.jit(lambda x, n: x.reshape(n) + 1, static_argnums=1, donate_argnums=0)
    code = spmd.plan(function, X, (8, 64), mesh=mesh, **QUICK).code()
    assert "static_argnums=1" in code
    assert "donate_argnums=0" in code


@pytest.mark.slow
def test_shardings_of_jax_jit_are_compared_and_bind_nothing(mesh):
    """They are a row as specs of `pjit` are, say the mesh, and are no constraints inside."""
    specs = P(("data", "model")), P()
    jitted = jax.jit(multiplied, in_shardings=tuple(NamedSharding(mesh, one) for one in specs))
    found = spmd.plan(jitted, X, W, **QUICK)
    bare = spmd.plan(multiplied, X, W, mesh=mesh, **QUICK)
    assert (found.axes, found.predicted) == (bare.axes, bare.predicted)
    step = pjit(jitted, plan=found)
    np.testing.assert_allclose(step(X, W), X @ W, rtol=1e-4)
    inputs, _ = step.lower(X, W).compile().input_shardings
    planned = [P(*(entry or None for entry in one.spec)) for one in found.arguments]
    pairs = zip(inputs, planned, strict=True)
    assert all(one.is_equivalent_to(NamedSharding(mesh, spec), 2) for one, spec in pairs)
    assert spmd.plan(jitted, X, W, topology="v5e:2x2", **QUICK).axes
    assert spmd.plan(multiplied, jax.device_put(X, inputs[0]), W, **QUICK).axes == found.axes
    whole = jax.jit(multiplied, in_shardings=NamedSharding(mesh, P()))
    options = {**QUICK, "top": 1}
    names = [one.name for one in spmd.plan(whole, X, W, **options).candidates]
    assert "as written" in names
    single = jax.jit(multiplied, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(spmd.PlanError, match="SingleDeviceSharding"):
        spmd.plan(single, X, W, mesh=mesh, **QUICK)


@pytest.mark.slow
def test_a_donation_that_is_given_counts_alone(mesh):
    """That of the function does not stand beside it."""
    function = pjit(multiplied, donate_argnums=0)
    code = spmd.plan(function, X, W, mesh=mesh, donate_argnums=1, **QUICK).code()
    assert "donate_argnums=1" in code


def test_specs_beside_auto_choose_the_mesh():
    """Two rows are not split over four devices: the mesh is one that they are split over."""
    specs = {"in_axis_resources": (P("data"), AUTO), "out_axis_resources": AUTO}
    found = spmd.plan(pjit(multiplied, **specs), X[:2], W, topology="v5e:2x2", **QUICK)
    assert found.axes == {"data": 2, "model": 2}


@pytest.mark.parametrize("wrong", [{"never": 5}, {"classes": ["x:0"]}, {"axes": 5}])
def test_options_of_a_wrong_kind(wrong, mesh):
    """Are named."""
    where = {"topology": "v5e:2x2"} if "axes" in wrong else {"mesh": mesh}
    with pytest.raises(ArgumentError, match=f"cannot read {next(iter(wrong))}"):
        spmd.plan(multiplied, X, W, **where, **QUICK, **wrong)


def test_numbers_of_numpy_are_numbers(mesh):
    """A seed, and bytes."""
    numbers = {"seed": np.int64(3), "memory": np.int64(10**9)}
    assert spmd.plan(multiplied, X, W, mesh=mesh, never=None, **numbers, **QUICK).axes


# Code


class Model:
    """A model that is called."""

    def __call__(self, x):
        """A product."""
        return x @ W

    def step(self, x):
        """The same."""
        return x @ W


def mesh_like(mesh):
    """Arguments may be called as the text calls something else."""
    return {"a": mesh["a"] @ mesh["b"], "b": mesh["b"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [functools.partial(multiplied, w=W), Model(), Model().step, lambda x: x @ W],
    ids=["partial", "object", "method", "lambda"],
)
def test_code_of_what_has_no_name(function, mesh):
    """The text calls it `fun`, and says what that is."""
    plan = spmd.plan(function, X, mesh=mesh, **QUICK)
    assert plan.name in ("multiplied", "Model", "step", "<lambda>")
    code = plan.code()
    assert "# fun: the function that was planned, " in code
    auto = pjit(function, in_axis_resources=AUTO, out_axis_resources=AUTO, mesh=mesh)
    assert "# fun: the function that was planned, " in auto.plan(X).code()
    space = {"fun": function}
    exec(code, space)
    np.testing.assert_allclose(space["step"](X), X @ W)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mesh", "P", "spmd", "class"])
def test_code_of_a_function_that_is_called_as_the_text_calls_something(name, mesh):
    """Or as nothing may be called."""

    def function(x):
        return x @ W

    function.__name__ = name
    space = {"fun": function}
    exec(spmd.plan(function, X, mesh=mesh, **QUICK).code(), space)
    np.testing.assert_allclose(space["step"](X), X @ W)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """What no literal stands for."""

    up: object
    down: object


def scaled(pair, times, x, *, power=1):
    """A pair and a number, of which two say how large they are."""
    return Pair(pair.up * times, pair.down**power), (x @ pair.up @ pair.down).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("static", "keywords", "shaped"),
    [
        ({"static_argnums": 1}, {}, "jax.jit(scaled, static_argnums=1).eval_shape(pair, 3, x)"),
        (
            {"static_argnames": ("times", "power")},
            {"power": 2},
            'jax.jit(scaled, static_argnums=1, static_argnames="power")'
            ".eval_shape(pair, 3, x, power=2)",
        ),
    ],
    ids=["position", "name"],
)
def test_code_that_asks_for_results_of_a_call_with_static_arguments(static, keywords, shaped, mesh):
    """Static arguments are no arrays, and say what the results are."""
    pair = Pair(W.T.copy(), W)
    x = np.ones((16, 8), np.float32)
    specs = Pair(P(None, "model"), P("data"))
    planned = pjit(
        scaled,
        in_axis_resources=(specs, AUTO),
        out_axis_resources=(specs, P()),
        mesh=mesh,
        **static,
    )
    code = planned.plan(pair, 3, x, **keywords).code()
    assert shaped in code
    space = {"scaled": scaled, "pair": pair, "x": x}
    exec(code, space)
    made, _ = space["step"](pair, 3, x, **keywords)
    np.testing.assert_allclose(made.up, pair.up * 3)
    assert made.up.sharding.spec == P(None, "model")
