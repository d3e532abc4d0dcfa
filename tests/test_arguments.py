"""Arguments: specs, donation and static options follow the parameter, however it is passed."""

import functools
import inspect

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import pjit
from spmd._spec import UNSPECIFIED

X = np.arange(32, dtype=np.float32).reshape(8, 4)
A, B, C, D = P("data"), P("model"), P(("data", "model")), P(None, "model")


def said(f, *args, **kwargs):
    """What a call says of each argument, by the name that the user calls it."""
    call = f.trace(*args, **kwargs)._call
    specs = [r if r is UNSPECIFIED else r.user_spec for r in call.in_axis_resources]
    return dict(zip(call.arg_names, specs, strict=True))


def donated(f, *args, **kwargs):
    """The names of the donated arguments of a call."""
    call = f.trace(*args, **kwargs)._call
    return [n for n, d in zip(call.arg_names, call.donated_invars, strict=True) if d]


def traces():
    """How often anything was traced so far."""
    return spmd.counts().traces


def three(a, b, c):
    """A function whose arguments do not commute."""
    return a + 10 * b + 100 * c


def defaults(a, b=2.0, c=3.0):
    """A function with defaults."""
    return a + 10 * b + 100 * c


# Specs


@pytest.mark.parametrize(
    ("args", "names"),
    [(3, ""), (2, "c"), (1, "bc"), (1, "cb"), (0, "cab")],
    ids=str,
)
def test_specs_follow_parameters(in_mesh, args, names):
    """A keyword argument takes the spec of its parameter, in any order of keywords."""
    f = pjit(three, (A, None, D))
    kwargs = dict.fromkeys(names, X)
    assert said(f, *[X] * args, **kwargs) == {"a": A, "b": None, "c": D}


def test_specs_of_a_dict_follow_parameters(in_mesh):
    """A dict by name does the same; who is not in it is left out."""
    f = pjit(three, {"c": D, "a": A})
    for call in (said(f, X, X, X), said(f, X, c=X, b=X)):
        assert call == {"a": A, "b": UNSPECIFIED, "c": D}


def test_defaults_left_out(in_mesh):
    """An argument that is left out takes its entry with it."""
    f = pjit(defaults, (A, B, D))
    assert said(f, X) == {"a": A}
    assert said(f, X, c=X) == {"a": A, "c": D}
    np.testing.assert_array_equal(pjit(defaults, (A, None, D))(X, c=X), X + 20 + 100 * X)


def test_keyword_only(in_mesh):
    """Keyword-only parameters have their entries in the order of the signature."""

    def fun(a, *, b, c=1):
        return a - b * c

    f = pjit(fun, (A, B, D))
    assert said(f, X, c=X, b=X) == {"a": A, "b": B, "c": D}
    assert said(f, X, b=X) == {"a": A, "b": B}
    np.testing.assert_array_equal(f(b=X, a=2 * X), X)


def test_variadic(in_mesh):
    """*args takes one entry per value, before those of keyword-only parameters."""

    def fun(a, *more, k):
        return a

    f = pjit(fun, (A, B, C, D))
    assert said(f, X, X, X, k=X) == {"a": A, "more[0]": B, "more[1]": C, "k": D}
    assert said(pjit(fun, (A, D)), X, k=X) == {"a": A, "k": D}


def test_variadic_after_a_default(in_mesh):
    """A default that is left out keeps its place before keyword-only parameters."""

    def fun(a, b=1, *more, k):
        return a

    f = pjit(fun, (A, B, D))
    assert said(f, X, k=X) == {"a": A, "k": D}
    assert said(f, X, X, k=X) == {"a": A, "b": B, "k": D}


def test_keywords_without_parameter(in_mesh):
    """What **kwargs takes gets its entry by name, from a dict; one spec for all holds too."""

    def fun(a, **more):
        return a + more["z"]

    assert said(pjit(fun, {"a": A, "z": D}), X, z=X) == {"a": A, "z": D}
    assert said(pjit(fun, A), X, z=X) == {"a": A, "z": A}
    with pytest.raises(ValueError, match=r"what \*\*kwargs takes has no position"):
        pjit(fun, (A, D))(X, z=X)


def test_static_arguments_have_no_entry(in_mesh):
    """Entries are those of the arguments that are not static, wherever these stand."""

    def fun(a, n, b):
        return a * n + b

    for options in ({"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -2}):
        f = pjit(fun, (A, D), **options)
        assert said(f, X, 2, X) == {"a": A, "b": D}
        assert said(f, X, b=X, n=2) == {"a": A, "b": D}
        np.testing.assert_array_equal(f(n=3, b=X, a=X), 4 * X)


@pytest.mark.parametrize("specs", [(A, B), {"a": A, "b": B}, A], ids=["tuple", "dict", "one"])
def test_too_few_entries(in_mesh, specs):
    """A tuple that is too short is an error, a dict leaves open, one spec is for all."""
    f = pjit(three, specs)
    if isinstance(specs, tuple) and not isinstance(specs, P):
        with pytest.raises(spmd.ShardingError, match="in_axis_resources has 2 entries"):
            f(X, X, c=X)
    else:
        assert set(said(f, X, X, c=X)) == {"a", "b", "c"}


# Donation


@pytest.mark.parametrize(
    "option",
    [
        {"donate_argnums": 1},
        {"donate_argnums": (-2,)},
        {"donate_argnames": "b"},
        {"donate_argnames": ["b"]},
    ],
    ids=str,
)
def test_donation_follows_parameters(in_mesh, option):
    """An argument is donated by position or name, however it is passed."""
    f = pjit(three, **option)
    assert donated(f, X, X, X) == ["b"]
    assert donated(f, X, c=X, b={"x": X}["x"]) == ["b"]


def test_donation_of_a_tree(in_mesh):
    """Every leaf of a donated argument is donated, and no other."""
    f = pjit(lambda s, x: s, donate_argnames="s")
    assert donated(f, x=[X], s={"w": X, "m": [X, X]}) == ["s['m'][0]", "s['m'][1]", "s['w']"]


def test_donation_counts_arguments_and_no_leaves(in_mesh):
    """A position is that among the arguments, whatever trees and static ones come before."""
    f = pjit(lambda tree, n, x, y: x * n + y, static_argnums=1, donate_argnums=3)
    assert donated(f, [X, X, X], 2, X, X) == ["y"]


def test_donation_of_variadic_arguments(in_mesh):
    """Positions behind the parameters are those of *args, names of **kwargs' too."""
    f = pjit(lambda *xs, **more: xs, donate_argnums=1, donate_argnames="z")
    assert donated(f, X, X, X, y=X, z=X) == ["xs[1]", "z"]


def test_donated_buffers_are_gone(mesh):
    """A donated argument that is passed by keyword is gone after the call, others are not."""
    f = pjit(three, A, donate_argnums=1)
    with mesh:
        a, b, c = (jax.device_put(X, jax.NamedSharding(mesh, A)) for _ in range(3))
        f(a, c=c, b=b)
    assert [v.is_deleted() for v in (a, b, c)] == [False, True, False]


# Static arguments


@pytest.mark.parametrize(
    "option",
    [
        {"static_argnums": 1, "static_argnames": "inverse"},
        {"static_argnames": ("n", "inverse")},
        {"static_argnums": (-1,), "static_argnames": ["inverse"]},
    ],
    ids=str,
)
def test_static_by_number_and_name(in_mesh, option):
    """A static argument reaches the function as it is, by position and by keyword."""

    def power(x, n, *, inverse=False):
        assert isinstance(n, int)
        return x**-n if inverse else x**n

    f = pjit(power, **option)
    before = traces()
    for _ in range(2):
        np.testing.assert_array_equal(f(X, 2), X**2)
        np.testing.assert_array_equal(f(X, n=2), X**2)
        np.testing.assert_array_equal(f(n=2, x=X), X**2)
    assert traces() - before == 1
    np.testing.assert_allclose(f(X + 1, 1, inverse=True), 1 / (X + 1), rtol=1e-6)
    assert traces() - before == 2


def test_static_values_are_told_apart_by_type(in_mesh):
    """1, 1.0 and True are equal and hash alike, and are different programs, on every call."""
    f = pjit(lambda x, n: x + len(type(n).__name__), static_argnums=1)
    for _ in range(3):
        for n in (1, 1.0, True):
            np.testing.assert_array_equal(f(X, n), X + len(type(n).__name__))


def test_static_arguments_of_any_hashable_kind(in_mesh):
    """Strings, tuples, None and functions are static values like any other."""
    f = pjit(lambda x, g, name: g(x) + len(name or ""), static_argnames=("g", "name"))
    np.testing.assert_allclose(f(X, jnp.sin, "ab"), np.sin(X) + 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(f(X, name=None, g=jnp.cos), np.cos(X), rtol=1e-5, atol=1e-6)


def test_equal_static_values_are_one_program(in_mesh):
    """What compares equal traces once, though it is another object."""
    f = pjit(lambda x, n: x * n[0], static_argnums=1)
    before = traces()
    for _ in range(3):
        f(X, (2, "ab"[:1]))
    assert traces() - before == 1


def test_static_keyword_of_kwargs(in_mesh):
    """A name that only **kwargs takes can be static."""
    f = pjit(lambda x, **more: x * len(more["mode"]), static_argnames="mode")
    np.testing.assert_array_equal(f(X, mode="abc"), 3 * X)


def test_static_self(in_mesh):
    """A method decorated in its class works with a static `self`; instances are told apart."""

    class Model:
        def __init__(self, n):
            self.n = n

        @functools.partial(pjit, in_axis_resources=(A,), static_argnums=0)
        def run(self, x):
            return x * self.n

    two, three_ = Model(2), Model(3)
    for _ in range(2):
        np.testing.assert_array_equal(two.run(X), 2 * X)
        np.testing.assert_array_equal(three_.run(x=X), 3 * X)


# Kinds of functions


def test_partial(in_mesh):
    """Arguments of a partial have no entry; keywords that it sets may be set again."""
    f = pjit(functools.partial(three, X), (A, D))
    assert said(f, X, c=X) == {"b": A, "c": D}
    np.testing.assert_array_equal(f(c=2 * X, b=X), X + 10 * X + 200 * X)
    g = pjit(functools.partial(defaults, c=5.0), (A, None))
    np.testing.assert_array_equal(g(X, X), X + 10 * X + 500)
    np.testing.assert_array_equal(pjit(functools.partial(three, c=5.0))(X, X, c=X), 111 * X)
    assert pjit(functools.partial(three, X)).trace(X, X).name == "three"


class Scale:
    """An object with a method, and itself callable."""

    def __init__(self, factor):
        self.factor = factor

    def method(self, x, y):
        """Scales."""
        return self.factor * x + y

    def __call__(self, x):
        """Scales."""
        return self.factor * x


def test_bound_method(in_mesh):
    """A bound method has the parameters behind `self`; equal bound methods trace once."""
    scale = Scale(3.0)
    f = pjit(scale.method, (A, D))
    assert said(f, X, y=X) == {"x": A, "y": D}
    before = traces()
    np.testing.assert_array_equal(f(X, y=X), 4 * X)
    np.testing.assert_array_equal(pjit(scale.method, (A, D))(X, X), 4 * X)
    assert traces() - before == 0  # said() traced it
    np.testing.assert_array_equal(pjit(Scale(5.0).method, (A, D))(X, X), 6 * X)


def test_callable_object(in_mesh):
    """A callable object is a function and is named after its class."""
    f = pjit(Scale(2.0), A)
    np.testing.assert_array_equal(f(x=X), 2 * X)
    assert f.trace(X).name == "Scale"


def test_wrapped_function(in_mesh):
    """The signature of a decorated function is that of what it wraps."""

    @functools.wraps(three)
    def wrapper(*args, **kwargs):
        return three(*args, **kwargs)

    assert said(pjit(wrapper, (A, B, D)), X, c=X, b=X) == {"a": A, "b": B, "c": D}


def test_positional_only(in_mesh):
    """Positional-only parameters stay so."""

    def fun(a, /, b):
        return a - b

    assert said(pjit(fun, (A, D)), X, b=X) == {"a": A, "b": D}
    with pytest.raises(TypeError, match=r"positional.only"):
        pjit(fun)(a=X, b=X)


def test_function_without_signature(in_mesh):
    """A function that Python knows no signature of takes arguments by position."""

    class NoSignature:
        __signature__ = "none"

        def __call__(self, x, y):
            return x - y

    f = pjit(NoSignature(), (A, D))
    assert list(said(f, X, X).values()) == [A, D]
    np.testing.assert_array_equal(f(3 * X, X), 2 * X)


def test_defaults_without_hash(in_mesh):
    """A default may be a list, a dict or an array."""

    def fun(x, y=X[0], options={}, *, names=[]):  # noqa: B006 defaults without a hash are the point
        return x + y[None] + len(options) + len(names)

    f = pjit(fun, {"x": A}, static_argnames=())
    np.testing.assert_array_equal(f(X), X + X[0])
    np.testing.assert_array_equal(f(x=X, y=X[1]), X + X[1])


@pytest.mark.parametrize("name", ["self", "fun", "line", "args", "kwargs", "options", "cache_miss"])
@pytest.mark.parametrize("static", [False, True])
def test_any_name_can_be_passed_by_keyword(in_mesh, name, static):
    """No parameter name of a user collides with one of ours, at any stop of the line."""
    fun = eval(f"lambda {name}, n: {name} * n")
    f = pjit(fun, static_argnames="n" if static else ())
    kwargs = {name: X, "n": 2 if static else np.float32(2)}
    np.testing.assert_array_equal(f(**kwargs), 2 * X)
    assert f.trace(**kwargs).out_info.shape == X.shape
    assert f.eval_shape(**kwargs).shape == X.shape
    np.testing.assert_array_equal(f.lower(**kwargs).compile()(**kwargs), 2 * X)


def test_signature_is_kept():
    """Name, doc, signature and the function itself are those of the user's function."""
    f = pjit(defaults)
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("defaults", defaults.__doc__, defaults)
    assert inspect.signature(f) == inspect.signature(defaults)
    assert f.__module__ == defaults.__module__


def test_decorator_forms(in_mesh):
    """Without a function, pjit is a decorator; bare and with options."""

    @pjit
    def bare(x):
        return x + 1

    @pjit(in_axis_resources=A, static_argnums=1)
    def with_options(x, n):
        return x + n

    np.testing.assert_array_equal(bare(X), X + 1)
    np.testing.assert_array_equal(with_options(X, 2), X + 2)
    assert said(with_options, X, 2) == {"x": A}


# Any way to pass arguments is one call

PARAMETERS = ("a", "b", "c", "d")
calls = st.tuples(st.integers(0, 3), st.permutations(PARAMETERS))


def affine(a, b, n, c, *, d):
    """Four arrays, none of which can be taken for another, and a static number."""
    return a + 2 * b + 4 * c + 8 * d + n


AFFINE = {"in_axis_resources": (A, None, D, B), "donate_argnames": "b", "static_argnums": 2}


@pytest.mark.slow
@given(st.lists(calls, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_any_split_is_one_call(splits):
    """Any split into positional and keyword arguments is one trace with one result."""
    values = {"a": X, "b": X + 1, "c": X + 2, "d": X + 3}
    order = ["a", "b", "n", "c"]

    def fresh(a, b, n, c, *, d):
        return affine(a, b, n, c, d=d)

    f = pjit(fresh, **AFFINE)
    mesh = spmd.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    before = spmd.counts()
    with mesh:
        for positional, keywords in splits:
            given_values = values | {"n": 5}
            args = [given_values[p] for p in order[:positional]]
            left = [k for k in (*keywords, "n") if k not in order[:positional]]
            kwargs = {k: given_values[k] for k in left}
            np.testing.assert_array_equal(f(*args, **kwargs), affine(n=5, **values))
            assert said(f, *args, **kwargs) == {"a": A, "b": None, "c": D, "d": B}
            assert donated(f, *args, **kwargs) == ["b"]
    done = spmd.counts() - before
    assert (done.traces, done.compiles) == (1, 1)
