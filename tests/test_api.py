"""What `pjit` takes and what it gives back, written from its description."""

import collections
from collections.abc import Mapping
import copy
import dataclasses
import functools
import inspect
import operator
import pickle
import re
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from oracle import assert_sharded, counted, put
import pytest

import spmd
from spmd import FROM_ARRAY, Mesh, NamedSharding, P, _jax, pjit, with_sharding_constraint

X = np.arange(64, dtype=np.float32).reshape(8, 8)


# The description's own example


def test_the_example_of_the_description():
    """The first example of the description runs as it stands."""
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    w = np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8)

    def layer(x, w):
        h = with_sharding_constraint(jnp.tanh(x @ w), P("data", "model"))
        return h.sum(axis=1)

    with Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")) as mesh:
        f = pjit(
            layer, in_axis_resources=(P("data"), P(None, "model")), out_axis_resources=P("data")
        )
        y = f(x, w)
        assert_sharded(y, np.tanh(x @ w).sum(axis=1), P("data"), mesh, rtol=1e-5)
        text = f.lower(x, w).as_text()
        assert '<@mesh, [{"data"}, {"model"}]>' in text
        assert "all-reduce" in f.lower(x, w).compile().as_text()


# Forms


def test_decorator_forms(mesh):
    """With and without arguments, above a def and around a function, it is the same thing."""

    @pjit
    def bare(x):
        return x + 1

    @pjit(in_axis_resources=P("data"))
    def with_options(x):
        return x + 1

    @functools.partial(pjit, in_axis_resources=P("data"), out_axis_resources=P("data"))
    def by_partial(x):
        return x + 1

    with mesh:
        for f in (bare, with_options, by_partial, pjit(lambda x: x + 1), pjit()(lambda x: x + 1)):
            np.testing.assert_array_equal(f(X), X + 1)


def test_founding_order_of_arguments(mesh):
    """Five options can be given by position, in the founding order."""
    f = pjit(lambda x, y, n: (x + y) * n, (P("data"), P("model")), P("data"), 2, 0)
    with mesh:
        x = put(X, mesh, P("data"))
        assert_sharded(f(x, X, 3), (X + X) * 3, P("data"), mesh)
        assert x.is_deleted()
    names = [*inspect.signature(pjit).parameters]
    assert names[:5] == [
        "fun",
        "in_axis_resources",
        "out_axis_resources",
        "static_argnums",
        "donate_argnums",
    ]


class Model:
    """A class whose methods are partitioned."""

    def __init__(self, by):
        self.by = by

    def scale(self, x):
        """Scales."""
        return x * self.by

    @functools.partial(pjit, static_argnums=0)
    def scale_static(self, x):
        """Scales."""
        return x * self.by

    def __call__(self, x):
        """Shifts."""
        return x + self.by


def test_functions_of_every_kind(in_mesh):
    """Partials, bound methods, callable objects and builtins can be partitioned."""
    cases = [
        (functools.partial(lambda a, x: a * x, 3), 3 * X),
        (functools.partial(lambda x, a: a * x, a=4), 4 * X),
        (functools.partial(functools.partial(lambda a, b, x: a * x + b, 2), 1), 2 * X + 1),
        (Model(5).scale, 5 * X),
        (Model(6), X + 6),
        (operator.neg, -X),
        (jnp.sin, np.sin(X)),
        (jax.jit(lambda x: x - 1), X - 1),
        (pjit(lambda x: x - 2), X - 2),
        (np.negative, None),
    ]
    for fun, want in cases[:-1]:
        f = pjit(fun, in_axis_resources=P("data"), out_axis_resources=P("data"))
        for _ in range(2):
            assert_sharded(f(X), want, P("data"), in_mesh, rtol=1e-6)


def test_functions_that_caches_cannot_hold(in_mesh):
    """An object without weak reference works, and is still what `__wrapped__` says."""

    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x * 3

    fun = Slotted()
    f = pjit(fun, in_axis_resources=P("data"))
    np.testing.assert_array_equal(f(X), 3 * X)
    assert counted(f, X)[1] == spmd.Counts()
    assert f.__wrapped__ is fun
    assert "Slotted" in repr(f)


def test_mutable_functions_are_refused():
    """An object without hash may change between calls: a program kept under it would be stale."""

    @dataclasses.dataclass
    class Scale:
        by: float

        def __call__(self, x):
            return x * self.by

    with pytest.raises(spmd.ArgumentError, match="cannot hash the function") as e:
        pjit(Scale(2.0))
    assert "got       a Scale without __hash__" in str(e.value)


def _plain(a, scale=1.0):
    return a * scale


@functools.wraps(_plain)
def _more_positions(a, *extra, scale=2.0):
    return a * scale + sum(extra)


@functools.wraps(_plain)
def _keywords_only(**kwargs):
    return _plain(**kwargs)


@functools.wraps(_plain)
def _other_keyword(*args, offset=0.0, **kwargs):
    return _plain(*args, **kwargs) + offset


@pytest.mark.parametrize(
    ("fun", "kwargs", "want"),
    [
        (_more_positions, {"scale": 5.0}, 5 * X),
        (_keywords_only, {"scale": 5.0}, 5 * X),
        (_other_keyword, {"offset": 1.0, "scale": 5.0}, 5 * X + 1),
    ],
)
def test_decorators_are_called_by_their_own_signature(fun, kwargs, want, in_mesh):
    """A decorator that takes other arguments than what it wraps gets them as they were passed."""
    f = pjit(fun)
    args = () if fun is _keywords_only else (X,)
    kwargs = {"a": X, **kwargs} if fun is _keywords_only else kwargs
    for _ in range(3):
        np.testing.assert_allclose(f(*args, **kwargs), want, rtol=1e-6)


def test_specs_reach_through_decorators(in_mesh):
    """Behind a decorator of ``*args, **kwargs`` a spec still follows its parameter's name."""

    @functools.wraps(np.add)
    def add(*args, **kwargs):
        return add.__wrapped__(*args, **kwargs)

    add.__wrapped__ = lambda x, y: x + y
    f = pjit(add, in_axis_resources=(P("data"), P("model")))
    lowered = f.lower(X, y=X)
    assert lowered.compile().in_specs == ((P("data"),), {"y": P("model")})


def test_positional_only_static(in_mesh):
    """A static positional-only parameter leaves its name free for ``**kwargs``."""

    def f(n, /, **kwargs):
        return kwargs["n"] * n

    np.testing.assert_array_equal(pjit(f, static_argnums=0)(2, n=X), 2 * X)


def test_no_mesh_under_transformations(mesh):
    """Where every spec is open the arrays bring the mesh, under a transformation too."""
    x = jax.device_put(X, NamedSharding(mesh._plain, P("data")))
    for f in (pjit(lambda v: v * 2, in_axis_resources=FROM_ARRAY), pjit(lambda v: v * 2)):
        assert spmd.current_mesh() is None
        for transformed in (f, jax.jit(f), jax.vmap(f)):
            np.testing.assert_array_equal(transformed(x), 2 * X)
        assert f(x).sharding.is_equivalent_to(x.sharding, x.ndim)
        for grad in (jax.grad, lambda g: jax.jit(jax.grad(g))):
            np.testing.assert_array_equal(grad(lambda v, f=f: f(v).sum())(x), np.full_like(X, 2))
    with pytest.raises(spmd.ShardingError, match="got       a host array"), mesh:
        jax.vmap(pjit(lambda v: v * 2, in_axis_resources=FROM_ARRAY))(X)


def test_from_array_of_an_array_on_one_device():
    """An array that is committed to one device needs no mesh either."""
    device = jax.devices()[3]
    f = pjit(lambda v: v * 2, in_axis_resources=FROM_ARRAY)
    for _ in range(2):
        y = f(jax.device_put(X, device))
        assert y.devices() == {device}
        np.testing.assert_array_equal(y, 2 * X)


def test_memory_kind_is_kept_and_checked(mesh):
    """A NamedSharding with a memory kind is batched and checked like the spec it holds."""
    pinned = NamedSharding(mesh._plain, P("data"), memory_kind="pinned_host")
    f = pjit(lambda v: v * 2, out_axis_resources=pinned)
    out = jax.vmap(f)(np.ones((2, 8), np.float32))
    assert out.sharding.memory_kind == "pinned_host"
    assert out.sharding.spec == P(None, "data")
    with pytest.raises(spmd.ShardingError, match="dimension 0 to be divisible by 4"):
        pjit(lambda v: v, in_axis_resources=pinned)(np.ones(6, np.float32))


def test_sharding_of_one_device(in_mesh):
    """`SingleDeviceSharding` is a spec on a mesh of its device: in, out and inside."""
    device = jax.devices()[2]
    single = jax.sharding.SingleDeviceSharding(device)

    def fun(x, y):
        return with_sharding_constraint(x + y["w"], single)

    f = pjit(fun, in_shardings=(single, {"w": single}), out_shardings=single)
    one = spmd.make_mesh({"data": 1}, devices=[device])
    with pytest.raises(spmd.MeshError, match="its sharding and the mesh have other devices"):
        f(X, {"w": X})
    with one:
        found = [f(X, {"w": X}) for _ in range(3)]
    inside = jax.vmap(pjit(fun, mesh=one), (0, None))(np.stack([X, X]), {"w": X})
    np.testing.assert_array_equal(inside, np.stack([2 * X] * 2))
    for out in found:
        np.testing.assert_array_equal(out, 2 * X)
        assert out.devices() == {device}


def test_sharding_needs_no_mesh():
    """Where a sharding says the devices, no mesh has to be active, and arrays lie as it says."""
    device = jax.devices()[2]
    single = jax.sharding.SingleDeviceSharding(device)
    f = pjit(lambda x: x * 2, in_shardings=single, out_shardings=single)
    for x in (X, jax.device_put(X, single), X):
        out = f(x)
        np.testing.assert_array_equal(out, 2 * X)
        assert out.devices() == {device}
    np.testing.assert_array_equal(jax.grad(lambda x: f(x).sum())(X), np.full_like(X, 2))
    np.testing.assert_array_equal(with_sharding_constraint(X, single), X)
    assert f.lower(X).compile().in_specs == ((P(),), {})


#: Tiles of a dimension each, the rest of the devices last; and the devices in that order.
TILINGS = {
    P("data"): ([4, 1, 2], range(8)),
    P(None, "model"): ([1, 2, 4], [0, 2, 4, 6, 1, 3, 5, 7]),
    P(("data", "model")): ([8, 1, 1], range(8)),
    P(): ([1, 1, 8], range(8)),
}


@pytest.mark.parametrize("spec", TILINGS, ids=str)
def test_sharding_that_names_no_axes(mesh, spec):
    """A sharding of tiles and devices is the spec that says the same."""
    tiles, order = TILINGS[spec]
    opaque = _jax.dispatch.tiled_sharding([*mesh.devices.flat], tiles, order, True, None)
    f = pjit(lambda x: x * 2, in_shardings=opaque, out_shardings=opaque, mesh=mesh)
    for _ in range(3):
        assert_sharded(f(X), 2 * X, spec, mesh)
    bad = np.zeros((6, 7), np.float32)
    if spec != P():
        with pytest.raises(spmd.ShardingError, match="to be divisible by"):
            f(bad)


@dataclasses.dataclass(frozen=True)
class Frozen(Mapping):
    """A mapping of another class than dict, as flax's FrozenDict."""

    data: dict

    def __getitem__(self, key):
        return self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


jax.tree_util.register_pytree_with_keys(
    Frozen,
    # The order of its children is not that of a dict's.
    lambda f: (
        [(jax.tree_util.DictKey(k), f.data[k]) for k in sorted(f.data, reverse=True)],
        tuple(sorted(f.data, reverse=True)),
    ),
    lambda keys, values: Frozen(dict(zip(keys, values, strict=True))),
)


@pytest.mark.parametrize("specs_in", [dict, Frozen])
@pytest.mark.parametrize("values_in", [dict, Frozen, collections.OrderedDict])
def test_mappings_of_other_classes_match(mesh, specs_in, values_in):
    """A dict of specs is for the keys of whatever mapping the argument or result is."""
    spec = specs_in({"a": P("data"), "b": specs_in({"c": P(), "d": P("model")})})
    value = values_in({"b": values_in({"d": X + 1, "c": [X + 2, X + 3]}), "a": X})
    f = pjit(lambda s: jax.tree.map(lambda x: x * 2, s), (spec,), spec, mesh=mesh)
    out = f(value)
    assert type(out) is values_in
    assert_sharded(out["a"], 2 * X, P("data"), mesh)
    assert_sharded(out["b"]["d"], 2 * (X + 1), P("model"), mesh)
    for i, x in enumerate(out["b"]["c"]):
        assert_sharded(x, 2 * (X + 2 + i), P(), mesh)
    with pytest.raises(spmd.ShardingError, match=r"no spec for 'e'"):
        f(values_in({"a": X, "b": X, "e": X}))
    with mesh:
        held = with_sharding_constraint(value, spec)
    assert_sharded(held["b"]["d"], X + 1, P("model"), mesh)


@pytest.mark.slow
def test_modules_are_attributes():
    """After `import spmd` each public module is an attribute, and a star does not import it."""
    code = """
import spmd
names = [n for n in dir(spmd) if type(getattr(spmd, n)).__name__ == "module"]
print(*names)
from spmd import *
print(*(n for n in names if n in globals()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    features = ["bundle", "colocated_python", "distributed", "host_callback"]
    modules = ["errors", "inspection", "launch", "op_sharding", "partition_spec", "primitives"]
    modules += ["sharding_spec", "stages", "testing"]
    names, starred = (line.split() for line in done.stdout.splitlines())
    assert names == sorted([*features, *modules])
    assert starred == features


@pytest.mark.slow
def test_star_import():
    """`from spmd import *` brings the public names, in a process that used none before."""
    code = "from spmd import *; print(pjit.__module__, P.__name__, FROM_ARRAY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["spmd._api", P.__name__, "FROM_ARRAY"]


def test_method_decorated_in_the_class(in_mesh):
    """A decorated method binds its instance, each instance being a program of its own."""
    one, two = Model(1), Model(2)
    for _ in range(2):
        np.testing.assert_array_equal(one.scale_static(X), X)
        np.testing.assert_array_equal(two.scale_static(X), 2 * X)
        np.testing.assert_array_equal(Model.scale_static(two, X), 2 * X)


def test_static_and_class_methods(in_mesh):
    """`staticmethod` and `classmethod` around a partitioned function work."""

    class Box:
        by = 3

        @staticmethod
        @pjit
        def double(x):
            return x * 2

        @classmethod
        def times(cls, x):
            return pjit(lambda x: x * cls.by)(x)

    np.testing.assert_array_equal(Box.double(X), X * 2)
    np.testing.assert_array_equal(Box().double(X), X * 2)
    np.testing.assert_array_equal(Box.times(X), X * 3)


def test_name_doc_signature_and_wrapped_are_kept():
    """The result looks like the function: name, doc, signature, module, attributes."""

    def fun(x: int, *, y: float = 2.0) -> int:
        """The user's own words."""

    fun.mark = "kept"
    f = pjit(fun)
    assert (f.__name__, f.__doc__, f.__module__) == ("fun", "The user's own words.", __name__)
    assert f.__qualname__ == fun.__qualname__
    assert f.__wrapped__ is fun
    assert f.mark == "kept"
    assert inspect.signature(f) == inspect.signature(fun)
    assert callable(f)
    assert "fun" in repr(f)
    assert inspect.signature(Model.scale_static) == inspect.signature(Model.scale)


def test_callables_without_names():
    """Objects that lack a name or a signature are wrapped all the same."""
    for fun in (functools.partial(lambda x: x), Model(1), operator.neg, max):
        assert callable(pjit(fun))
        assert repr(pjit(fun)).startswith("<")


# Tracebacks and source lines


def fails(x):
    """Raises while being traced."""
    return jnp.reshape(x, (3, 5))


def test_users_traceback_shows_no_file_of_ours(mesh):
    """An error in the user's function shows the user's frames only, at every way to call it."""
    f = pjit(fails, in_axis_resources=P("data"), mesh=mesh)
    ways = {
        "call": lambda: f(X),
        "trace": lambda: f.trace(X),
        "lower": lambda: f.lower(X),
        "eval_shape": lambda: f.eval_shape(X),
        "jit": lambda: jax.jit(f)(X),
        "grad": lambda: jax.grad(lambda x: f(x).sum())(X),
        "vmap": lambda: jax.vmap(f)(np.stack([X, X])),
        "nested": lambda: pjit(lambda x: f(x), mesh=mesh)(X),
    }
    for way, call in ways.items():
        with pytest.raises(TypeError) as e:
            call()
        files = [frame.filename for frame in traceback.extract_tb(e.value.__traceback__)]
        assert any(name.endswith("test_api.py") for name in files), way
        assert [n for n in files if re.search(r"[/\\]spmd[/\\][^/\\]+\.py$", n)] == [], way


def test_our_own_error_shows_no_file_of_ours(mesh):
    """A bad spec is reported from the user's line."""
    f = pjit(lambda x: x, in_axis_resources=P("date"), mesh=mesh)
    with pytest.raises(spmd.ShardingError) as e:
        f(X)
    files = [frame.filename for frame in traceback.extract_tb(e.value.__traceback__)]
    assert [n for n in files if re.search(r"[/\\]spmd[/\\][^/\\]+\.py$", n)] == []


def test_source_locations_are_the_users_lines(mesh):
    """Operations, constraints and nested calls carry the line that the user wrote."""
    inner = pjit(lambda x: jnp.sin(x))

    def fun(x):
        y = jnp.tanh(x)
        z = with_sharding_constraint(y, P("data"))
        return inner(z)

    start = inspect.getsourcelines(fun)[1]
    with mesh:
        text = pjit(fun, in_axis_resources=P("data")).lower(X).as_text(debug_info=True)
    assert f'test_api.py":{start + 1}:' in text
    assert f'test_api.py":{start + 2}:' in text
    assert f'test_api.py":{start + 3}:' in text
    assert not re.search(r"spmd/[a-z_]+\.py", text)


# Specs


def test_shardings_are_aliases(mesh):
    """`in_shardings` and `out_shardings` mean the same; both names at once is an error."""
    f = pjit(lambda x: x + 1, in_shardings=P("data"), out_shardings=P(None, "model"), mesh=mesh)
    assert_sharded(f(X), X + 1, P(None, "model"), mesh)
    for kind in ("in", "out"):
        both = {f"{kind}_axis_resources": P("data"), f"{kind}_shardings": P("data")}
        with pytest.raises(ValueError, match="two names of one option") as e:
            pjit(lambda x: x, **both)
        assert f"{kind}_axis_resources" in str(e.value)
        assert f"{kind}_shardings" in str(e.value)


def test_none_is_replicated(mesh):
    """None as a leaf means replicated, for inputs and outputs, also inside of a tree."""
    f = pjit(
        lambda x, y: {"a": x, "b": y},
        in_axis_resources=(None, P("data")),
        out_axis_resources={"a": None, "b": None},
        mesh=mesh,
    )
    out = f(X, X + 1)
    assert_sharded(out["a"], X, P(), mesh)
    assert_sharded(out["b"], X + 1, P(), mesh)
    compiled = f.lower(X, X).compile()
    assert compiled.in_specs == ((P(), P("data")), {})


def test_named_shardings_need_no_mesh(mesh):
    """Where every leaf is a NamedSharding no mesh has to be active."""
    s = NamedSharding(mesh, P("data"))
    f = pjit(lambda x, y: x + y, in_axis_resources=(s, s), out_axis_resources=s)
    assert spmd.current_mesh() is None
    for _ in range(2):
        assert_sharded(f(X, X), 2 * X, P("data"), mesh)
    assert f.lower(X, X).compile().out_specs == P("data")
    with mesh:
        assert_sharded(f(X, X), 2 * X, P("data"), mesh)


def test_from_array_takes_what_the_argument_has(mesh):
    """FROM_ARRAY needs no mesh, moves nothing, and follows each argument."""
    f = pjit(lambda x: x * 2, in_axis_resources=FROM_ARRAY, implicit_reshard="error")
    for spec in (P("data"), P(None, "model"), P(), P("model", "data")):
        for _ in range(2):
            np.testing.assert_array_equal(f(put(X, mesh, spec)), 2 * X)
        compiled = f.lower(put(X, mesh, spec)).compile()
        assert compiled.in_specs == ((spec,), {})


def test_from_array_in_a_tree(mesh):
    """FROM_ARRAY stands beside specs, per leaf."""
    f = pjit(
        lambda d: d["a"] + d["b"],
        in_axis_resources=({"a": FROM_ARRAY, "b": P("model")},),
        mesh=mesh,
    )
    d = {"a": put(X, mesh, P(None, "data")), "b": X}
    np.testing.assert_array_equal(f(d), 2 * X)
    compiled = f.lower(d).compile()
    assert compiled.in_specs == (({"a": P(None, "data"), "b": P("model")},), {})


def test_from_array_of_what_nobody_placed(mesh):
    """An uncommitted array under FROM_ARRAY is replicated, as it is without a spec."""
    f = pjit(lambda s: s["w"] * s["count"], in_axis_resources=FROM_ARRAY, mesh=mesh)
    state = {"w": put(X, mesh, P("data")), "count": jnp.ones((), np.float32) * 3}
    for _ in range(3):
        np.testing.assert_array_equal(f(state), 3 * X)
    compiled = f.lower(state).compile()
    assert compiled.in_specs == (({"count": P(), "w": P("data")},), {})


def test_from_array_is_a_singleton():
    """There is one FROM_ARRAY, also after pickling and copying, and it prints as its name."""
    for other in (
        pickle.loads(pickle.dumps(FROM_ARRAY)),
        copy.copy(FROM_ARRAY),
        copy.deepcopy(FROM_ARRAY),
    ):
        assert other is FROM_ARRAY
    assert repr(FROM_ARRAY) == "FROM_ARRAY"


def test_from_array_where_it_cannot_be(mesh):
    """In an output, a constraint, for a host array or a bare struct FROM_ARRAY is an error."""
    with pytest.raises(ValueError, match="FROM_ARRAY"):
        pjit(lambda x: x, out_axis_resources=FROM_ARRAY)
    with pytest.raises(ValueError, match="FROM_ARRAY"), mesh:
        with_sharding_constraint(X, FROM_ARRAY)
    f = pjit(lambda x: x, in_axis_resources=FROM_ARRAY, mesh=mesh)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for call in (lambda: f(X), lambda: f.lower(struct)):
        with pytest.raises(ValueError, match="cannot take the sharding of argument x"):
            call()
    other = spmd.make_mesh({"x": 8})
    with pytest.raises(ValueError, match="another mesh"):
        f(put(X, other, P("x")))
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("model")))
    assert f.lower(placed).compile().in_specs == ((P("model"),), {})


def test_what_typeof_says_is_lowered_as_a_struct(mesh):
    """The mesh of such a type has no devices: it places nothing."""
    f = pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for one in (jax.typeof(X), jax.typeof(put(X, mesh, P("model")))):
        assert f.lower(one).as_text() == f.lower(struct).as_text()


def test_left_out_specs(mesh):
    """Left out: committed arrays stay, the rest is replicated; outputs are the partitioner's."""
    f = pjit(lambda x, y: x @ y, mesh=mesh)
    x, y = put(X, mesh, P("data")), put(X, mesh, P(None, "model"))
    compiled = f.lower(x, y).compile()
    assert compiled.in_specs == ((P("data"), P(None, "model")), {})
    assert compiled.out_specs == P("data", "model")
    assert_sharded(f(x, y), X @ X, P("data", "model"), mesh)
    assert f.lower(X, jnp.asarray(X)).compile().in_specs == ((P(), P()), {})


def test_unconstrained_output(mesh):
    """``P.UNCONSTRAINED`` in an output leaves that dimension to the partitioner."""
    out = P("data", P.UNCONSTRAINED)
    x = put(X, mesh, P(None, "model"))
    f = pjit(
        lambda x: jnp.sin(x), in_axis_resources=P(None, "model"), out_axis_resources=out, mesh=mesh
    )
    for _ in range(2):
        assert_sharded(f(x), np.sin(X), P("data", "model"), mesh, rtol=1e-6)
    nested = jax.jit(lambda x: f(x) + 1)
    np.testing.assert_allclose(nested(x), np.sin(X) + 1, atol=1e-6)
    text = nested.lower(x).as_text()
    assert '[{"data"}, {?}]' in text
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), np.cos(X), rtol=1e-5)
    ys = jax.vmap(f)(np.stack([X, X + 1]))
    np.testing.assert_allclose(ys, np.sin(np.stack([X, X + 1])), rtol=1e-6)


def test_unconstrained_in_a_constraint(in_mesh):
    """``P.UNCONSTRAINED`` in a constraint keeps what an eager array has there."""
    x = put(X, in_mesh, P(None, "model"))
    y = with_sharding_constraint(x, P("data", P.UNCONSTRAINED))
    assert_sharded(y, X, P("data", "model"), in_mesh)
    f = pjit(lambda x: with_sharding_constraint(x * 2, P("data", P.UNCONSTRAINED)))
    np.testing.assert_array_equal(f(x), 2 * X)
    with pytest.raises(ValueError, match="UNCONSTRAINED"):
        pjit(lambda x: x, in_axis_resources=P(P.UNCONSTRAINED))


def test_prefix_trees(mesh):
    """A spec stands for the whole subtree below it; a list is a tuple at the top."""

    def fun(state, batch):
        return {"w": state["w"] + 1, "opt": (state["opt"][0], state["opt"][1])}, batch["x"]

    state = {"w": X, "opt": (X, {"m": X, "v": X})}
    batch = {"x": X, "y": [X, None, X]}
    f = pjit(
        fun,
        in_axis_resources=[{"w": P("model"), "opt": P("data")}, P(None, "data")],
        out_axis_resources=(
            {"w": P("model"), "opt": (None, {"m": P("data"), "v": P("model")})},
            P(),
        ),
        mesh=mesh,
    )
    compiled = f.lower(state, batch).compile()
    x, y = P(None, "data"), [None, None, None]  # what the function does not use has no spec
    moments = {"m": P("data"), "v": P("data")}
    state_specs = {"w": P("model"), "opt": (P("data"), moments)}
    assert compiled.in_specs == ((state_specs, {"x": x, "y": y}), {})
    out, x = f(state, batch)
    assert_sharded(out["w"], X + 1, P("model"), mesh)
    assert_sharded(out["opt"][1]["m"], X, P("data"), mesh)
    assert_sharded(out["opt"][1]["v"], X, P("model"), mesh)
    assert_sharded(x, X, P(), mesh)


def test_prefix_that_does_not_fit(mesh):
    """A tree that is no prefix names the place, and hints at the one-tuple."""
    f = pjit(lambda t: t[0], in_axis_resources=(P("data"), P("model")), mesh=mesh)
    with pytest.raises(ValueError, match=r"\(spec,\)") as e:
        f((X, X))
    assert "pytree prefix" in str(e.value)
    g = pjit(lambda d: d["a"], in_axis_resources=({"a": P(), "b": P()},), mesh=mesh)
    with pytest.raises(ValueError, match=r"in_axis_resources\[0\]"):
        g({"a": X, "c": X})
    h = pjit(lambda x: (x, x), out_axis_resources=(P(), P(), P()), mesh=mesh)
    with pytest.raises(ValueError, match="out_axis_resources"):
        h(X)


# Arguments


def test_keyword_arguments_follow_their_parameter(mesh):
    """By keyword or by position, an argument has the spec of its parameter."""

    def fun(x, y, *, z):
        return x - y * z

    for specs in (
        (P("data"), P(None, "model"), P("model")),
        {"x": P("data"), "y": P(None, "model"), "z": P("model")},
    ):
        f = pjit(fun, in_axis_resources=specs, mesh=mesh)
        by_position = f.lower(X, X, z=X).compile()
        by_name = f.lower(z=X, y=X, x=X).compile()
        mixed = f.lower(X, z=X, y=X).compile()
        for c in (by_position, by_name, mixed):
            assert c.in_specs == ((P("data"), P(None, "model")), {"z": P("model")})
        np.testing.assert_array_equal(f(z=X, x=X, y=X + 1), X - (X + 1) * X)
        np.testing.assert_array_equal(f(X, X + 1, z=X), X - (X + 1) * X)


def test_both_spellings_are_one_program(mesh):
    """Passing by keyword or by position does not compile twice."""
    f = pjit(lambda x, y: x + y, in_axis_resources=P("data"), mesh=mesh)
    calls = [lambda: f(X, X), lambda: f(X, y=X), lambda: f(y=X, x=X), lambda: f(x=X, y=X)]
    _, work = counted(lambda: [c() for c in calls])
    assert work == spmd.Counts(traces=1, lowerings=1, compiles=1)


def test_defaults_and_variadics(mesh):
    """Default values, ``*args`` and ``**kwargs`` are passed on."""

    def fun(x, scale=2.0, *rest, **named):
        return x * scale + sum(rest) + named.get("bias", 0.0)

    f = pjit(fun, mesh=mesh)
    np.testing.assert_array_equal(f(X), X * 2)
    np.testing.assert_array_equal(f(X, 3.0), X * 3)
    np.testing.assert_array_equal(f(X, 3.0, X, X), X * 5)
    np.testing.assert_array_equal(f(X, bias=X), X * 3)
    with pytest.raises(TypeError):
        pjit(lambda x: x, mesh=mesh)(X, X)


def test_specs_for_variadics(mesh):
    """A tuple of specs has one entry per argument of the call, ``*args`` included."""
    f = pjit(lambda *xs: xs[0] + xs[1], in_axis_resources=(P("data"), P("model")), mesh=mesh)
    compiled = f.lower(X, X).compile()
    assert compiled.in_specs == ((P("data"), P("model")), {})
    np.testing.assert_array_equal(f(X, X), 2 * X)


def test_static_arguments(mesh):
    """Static arguments are Python values, by position, by name, negative or default."""

    def fun(x, n, mode="add"):
        assert isinstance(n, int)
        return x + n if mode == "add" else x * n

    for options in (
        {"static_argnums": (1, 2)},
        {"static_argnames": ("n", "mode")},
        {"static_argnums": -2, "static_argnames": "mode"},
    ):
        f = pjit(fun, in_axis_resources=P("data"), mesh=mesh, **options)
        np.testing.assert_array_equal(f(X, 3), X + 3)
        np.testing.assert_array_equal(f(X, 3, "mul"), X * 3)
        np.testing.assert_array_equal(f(X, n=4, mode="mul"), X * 4)
        np.testing.assert_array_equal(f(n=5, x=X), X + 5)


def test_specs_skip_static_arguments(mesh):
    """A tuple of specs has one entry per argument that is not static."""
    f = pjit(
        lambda n, x, m, y: x * n + y * m,
        in_axis_resources=(P("data"), P("model")),
        static_argnums=(0, 2),
        mesh=mesh,
    )
    assert f.lower(2, X, 3, X).compile().in_specs == ((P("data"), P("model")), {})
    np.testing.assert_array_equal(f(2, X, 3, X), 5 * X)
    np.testing.assert_array_equal(f(2, X, m=3, y=X), 5 * X)


def test_donation_by_name(mesh):
    """`donate_argnames` and `donate_argnums` follow the parameter however it is passed."""
    for options in ({"donate_argnames": "s"}, {"donate_argnums": 1}, {"donate_argnums": -1}):
        f = pjit(
            lambda x, s: s + x,
            in_axis_resources=P("data"),
            out_axis_resources=P("data"),
            mesh=mesh,
            **options,
        )
        for call in (lambda s, f=f: f(X, s), lambda s, f=f: f(s=s, x=X)):
            s = put(X, mesh, P("data"))
            np.testing.assert_array_equal(call(s), 2 * X)
            assert s.is_deleted()


def test_donated_trees(mesh):
    """A donated argument gives away all of its leaves, and no other's."""
    f = pjit(
        lambda s, b: jax.tree.map(lambda x: x + b, s),
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
        mesh=mesh,
    )
    state = {"a": put(X, mesh, P("data")), "b": [put(X + 1, mesh, P("data"))]}
    b = put(X, mesh, P("data"))
    out = f(state, b)
    np.testing.assert_array_equal(out["b"][0], 2 * X + 1)
    assert [x.is_deleted() for x in jax.tree.leaves(state)] == [True, True]
    assert not b.is_deleted()


def test_arguments_of_every_type(mesh):
    """Numbers, NumPy scalars, empty and zero-dimensional arrays, keys and empty trees."""
    f = pjit(lambda t: t, mesh=mesh)
    tree = {
        "int": 3,
        "float": 2.5,
        "bool": True,
        "complex": 1j,
        "scalar": np.float32(4),
        "zero_d": np.array(5),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.ones(2, np.float16),
        "none": None,
        "nothing": (),
    }
    for _ in range(2):
        out = f(tree)
        assert jax.tree.structure(out) == jax.tree.structure(tree)
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(tree), strict=True):
            np.testing.assert_array_equal(a, b)
    key = jax.random.key(1)
    assert (jax.random.key_data(f(key)) == jax.random.key_data(key)).all()
    assert f({}) == {}


def test_function_without_arguments_or_results(mesh):
    """Nothing in and nothing out are programs too."""
    f = pjit(lambda: jnp.arange(8.0), out_axis_resources=P("data"), mesh=mesh)
    for _ in range(2):
        assert_sharded(f(), np.arange(8.0), P("data"), mesh)
    assert pjit(lambda x: None, mesh=mesh)(X) is None
    assert pjit(lambda x: (), mesh=mesh)(X) == ()


def test_same_array_twice_and_output_twice(mesh):
    """Repeated arguments and repeated or passed-through results come out each by itself."""
    f = pjit(lambda x, y: (x, x, y, x + y, 1.0), in_axis_resources=P("data"), mesh=mesh)
    x = put(X, mesh, P("data"))
    for _ in range(3):
        a, b, c, d, one = f(x, x)
        for v in (a, b, c):
            np.testing.assert_array_equal(v, X)
        np.testing.assert_array_equal(d, 2 * X)
        assert one == 1.0


# Other options


def test_mesh_at_call_time():
    """The mesh is the one that is active where the function is called, not decorated."""
    f = pjit(lambda x: x + 1, in_axis_resources=P("data"), out_axis_resources=P("data"))
    for shape in ({"data": 8}, {"data": 4, "model": 2}, {"data": 2}):
        with spmd.make_mesh(shape) as mesh:
            assert_sharded(f(X), X + 1, P("data"), mesh)
    with pytest.raises(RuntimeError, match="needs a mesh"):
        f(X)


def test_inline(mesh):
    """An inlined call without specs leaves its operations in the outer program."""
    f = pjit(lambda x: jnp.sin(x) * 2, inline=True, mesh=mesh)
    jaxpr = jax.make_jaxpr(lambda x: f(x) + 1)(X)
    assert "pjit" not in str(jaxpr)
    assert "sin" in str(jaxpr)
    np.testing.assert_allclose(f(X), np.sin(X) * 2, rtol=1e-6)
    kept = pjit(lambda x: x * 2, in_axis_resources=P("data"), inline=True, mesh=mesh)
    assert "P('data')" in str(jax.make_jaxpr(kept)(X))


def test_keep_unused(mesh):
    """An unused argument is dropped from the program, or kept where that is asked for."""
    for keep, count in ((False, 1), (True, 2)):
        f = pjit(lambda x, y: x + 1, in_axis_resources=P("data"), keep_unused=keep, mesh=mesh)
        compiled = f.lower(X, X).compile()
        shardings = compiled.runtime_executable().get_parameter_shardings()
        assert len(shardings) == count
        assert compiled.in_specs == ((P("data"), P("data") if keep else None), {})
        np.testing.assert_array_equal(f(X, X), X + 1)
        np.testing.assert_array_equal(compiled(X, X), X + 1)


def test_compiler_options(mesh):
    """Options reach the compiler: a known one works, an unknown one is refused."""
    f = pjit(lambda x: x + 1, mesh=mesh, compiler_options={"xla_embed_ir_in_executable": True})
    np.testing.assert_array_equal(f(X), X + 1)
    bad = pjit(lambda x: x + 1, mesh=mesh, compiler_options={"no_such_option": True})
    with pytest.raises(Exception, match="no_such_option"):
        bad(X)
    with pytest.raises(Exception, match="no_such_option"):
        f.lower(X).compile({"no_such_option": True})


def test_pjits_of_one_function_have_their_own_options(mesh):
    """Of two `pjit`s of one function that differ in one option, none runs the other's program."""

    def successor(x, y):
        return x + 1

    def names(f):
        return [eqn.primitive.name for eqn in jax.make_jaxpr(f)(X, X).eqns]

    split, free = functools.partial(pjit, successor, P("data"), mesh=mesh), {"mesh": mesh}
    plain, elsewhere = split(), put(X, mesh, P("model"))
    for x in (X, elsewhere):
        np.testing.assert_array_equal(plain(x, X), X + 1)
    with pytest.raises(Exception, match="no_such_option"):
        split(compiler_options={"no_such_option": True})(X, X)
    with pytest.raises(spmd.ShardingError, match="has to reshard argument x"):
        split(implicit_reshard="error")(elsewhere, X)
    for keep, unused in ((False, None), (True, P("data"))):
        compiled = split(keep_unused=keep).lower(X, X).compile()
        assert compiled.in_specs == ((P("data"), unused), {})
    assert names(pjit(successor, **free)) == ["pjit"]
    assert names(pjit(successor, inline=True, **free)) == ["add"]
    np.testing.assert_array_equal(plain(elsewhere, X), X + 1)


def test_mistakes_at_decoration():
    """What can be seen without arguments is refused without arguments."""
    with pytest.raises(TypeError, match="needs a function"):
        pjit(3)
    with pytest.raises(TypeError, match=r"write P\('data'\)"):
        pjit(lambda x: x, in_axis_resources="data")
    with pytest.raises(ValueError, match="has no argument 2"):
        pjit(lambda x: x, static_argnums=2)
    with pytest.raises(ValueError, match="has no argument -3"):
        pjit(lambda x: x, static_argnums=-3)
    with pytest.raises(ValueError, match="argument -1 from the end: the function has no signature"):
        pjit(max, donate_argnums=(0, -1))
    with pytest.raises(ValueError, match="has no argument 'z'"):
        pjit(lambda x: x, donate_argnames="z")
    with pytest.raises(ValueError, match="donate argument x and treat it as static"):
        pjit(lambda x: x, static_argnums=0, donate_argnums=0)
    with pytest.raises(TypeError, match="cannot use this mesh"):
        pjit(lambda x: x, mesh="data")
    with pytest.raises(ValueError, match="positional_semantics"):
        pjit(lambda x: x, positional_semantics="both")


def test_unhashable_static_argument(mesh):
    """A list as static argument is named, at the first and at repeated calls."""
    f = pjit(lambda x, n: x, static_argnums=1, mesh=mesh)
    f(X, 1)
    for _ in range(2):
        with pytest.raises(TypeError, match="cannot hash static argument n") as raised:
            f(X, [1])
        assert isinstance(raised.value, spmd.ArgumentError)
        assert isinstance(raised.value, ValueError)  # as jax.jit says it


def test_argument_that_is_no_array(mesh):
    """Every leaf that is no array is named by path, in one error."""
    f = pjit(lambda batch: batch["x"], mesh=mesh)
    with pytest.raises(TypeError) as e:
        f({"x": X, "y": "text", "z": object()})
    assert "batch['y']" in str(e.value)
    assert "batch['z']" in str(e.value)
    assert "batch['x']" not in str(e.value)
