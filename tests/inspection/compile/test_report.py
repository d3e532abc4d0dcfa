"""From functions and stages to reports: what is accepted, what is refused, and what it costs."""

import functools
import gc
import itertools
import math
import warnings

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
import numpy as np
import pytest

import spmd
from spmd import P
from spmd.inspection import Cost, Report
from spmd.inspection.compile import report

AXES = {"data": 4, "model": 2}
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def _loss(x, w):
    return jnp.sum(jnp.tanh(x @ w))


def _pjit(**options):
    return spmd.pjit(_loss, in_axis_resources=(P("data"), None), **options)


def _place(mesh, *spec):
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    return NamedSharding(plain, P(*spec))


def _jit(mesh):
    return jax.jit(_loss, in_shardings=(_place(mesh, "data"), None))


def _is_right(found, name="_loss"):
    """The rows of x lie on data, so their sum crosses data; each device has 4 of 16 rows."""
    assert isinstance(found, Report)
    assert (found.name, dict(found.mesh), found.num_devices) == (name, AXES, 8)
    assert (found.backend, found.stand_in) == ("cpu", True)
    assert [(c.kind, c.mesh_axes, c.payload_bytes) for c in found.collectives] == [
        ("all-reduce", ("data",), 4)
    ]
    assert found.cost.flops == 2 * 4 * 8 * 4
    # Arguments: 4 rows of 8 floats and 8 of 4; the result is one float.
    assert (found.memory.arguments, found.memory.outputs) == (4 * 8 * 4 + 8 * 4 * 4, 4)
    return True


# Where the mesh comes from


def test_the_mesh_as_an_argument(mesh):
    """A mesh of spmd, of JAX, and one with Explicit axes compile the same program."""
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    assert all(_is_right(spmd.report(_pjit(), X, W, mesh=one)) for one in (mesh, plain, explicit))


def test_the_mesh_around(mesh):
    """The mesh that is entered or set is the one that a call would use."""
    plain = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
    with mesh:
        assert _is_right(spmd.report(_pjit(), X, W))
    with jax.set_mesh(plain):
        assert _is_right(spmd.report(_pjit(), X, W))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with plain:
            assert _is_right(spmd.report(_pjit(), X, W))
    with jax.set_mesh(
        jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    ):
        assert _is_right(spmd.report(_pjit(), X, W))


def test_the_functions_own_mesh(mesh):
    """A function that is bound to a mesh needs no other, and may be given the same again."""
    assert _is_right(spmd.report(_pjit(mesh=mesh), X, W))
    assert _is_right(spmd.report(_pjit(mesh=mesh), X, W, mesh=mesh))


def test_the_mesh_of_the_arguments(mesh):
    """Shardings of arguments or of the function tell `jax.jit` where to run."""
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=_place(mesh, "data"))
    assert _is_right(spmd.report(jax.jit(_loss), placed, W))
    assert _is_right(spmd.report(_jit(mesh), X, W))
    assert _is_right(spmd.report(_jit(mesh), X, W, mesh=mesh))


def test_the_axes_of_another_mesh_of_the_same_devices(mesh):
    """A program of `jax.jit` may be read with the names of another mesh over its devices."""
    other = spmd.make_mesh({"rows": 2, "columns": 2, "rest": 2}, devices=[*mesh.devices.flat])
    (found,) = spmd.report(_jit(mesh), X, W, mesh=other).collectives
    assert found.mesh_axes == ("rows", "columns")


def test_explicit_axes_of_jax():
    """A program whose shardings are types is read like any other."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, P("data")))
    found = spmd.report(jax.jit(lambda x: jnp.sum(x * 2)), x)
    assert (dict(found.mesh), found.total.sites) == (AXES, 1)


def test_one_device():
    """A program for one device has no mesh unless one was given, and no exchanges."""
    found = spmd.report(jax.jit(_loss), X, W)
    assert (dict(found.mesh), found.num_devices, found.collectives) == ({}, 1, ())
    assert found.cost.flops == 2 * 16 * 8 * 4
    found = spmd.report(_pjit(), X, W, mesh=spmd.make_mesh({"data": 1}))
    assert (dict(found.mesh), found.num_devices, found.collectives) == ({"data": 1}, 1, ())


@pytest.mark.usefixtures("in_mesh")
def test_a_mesh_around_a_program_for_one_device():
    """A mesh that the program does not run on is not its mesh."""
    found = spmd.report(jax.jit(_loss), X, W)
    assert (dict(found.mesh), found.num_devices) == ({}, 1)


# What is reported


def _stages(f):
    traced = f.trace(X, W)
    lowered = traced.lower()
    return traced, lowered, lowered.compile()


def test_stages(mesh):
    """What a function was traced, lowered or compiled to gives the report of the function."""
    stages = [*_stages(_pjit(mesh=mesh)), *_stages(_jit(mesh))]
    assert len({type(stage) for stage in stages}) == 6
    assert all(_is_right(spmd.report(stage)) for stage in stages)
    assert all(_is_right(spmd.report(stage, mesh=mesh)) for stage in stages)
    compiled = stages[2]
    assert compiled.report() == spmd.report(compiled)
    assert _is_right(spmd.report(compiled.jax_stage))
    assert compiled.report() is not None
    assert spmd.report(compiled.report()) == compiled.report()


def test_names(mesh):
    """A report names the function as Python does."""
    assert spmd.report(jax.jit(lambda x: x), X).name == "<lambda>"
    assert spmd.report(spmd.pjit(lambda x: x, mesh=mesh), X).name == "<lambda>"
    assert spmd.report(jax.jit(_loss), X, W).name == "_loss"


def test_public_names():
    """The function and the record are public names of spmd."""
    assert spmd.report is report.report
    assert spmd.Report is Report


def test_arguments_of_any_kind(mesh):
    """NumPy arrays, Python numbers, arrays, descriptions and keywords all describe arguments."""
    x, w = np.ones(X.shape, np.float32), jnp.ones(W.shape)
    assert _is_right(spmd.report(_pjit(mesh=mesh), x, w))
    assert _is_right(spmd.report(_pjit(mesh=mesh), X, w=W))
    scaled = spmd.pjit(lambda x, s: x * s, mesh=mesh)
    assert spmd.report(scaled, X, 2.0).num_devices == 8


def test_static_arguments():
    """Static arguments, by place or by name, are part of the program."""
    by_place = jax.jit(lambda x, n: x[:n] @ x[:n].T, static_argnums=1)
    by_name = jax.jit(lambda x, n: x[:n] @ x[:n].T, static_argnames="n")
    for n in (3, 5):
        assert spmd.report(by_place, X, n).cost.flops == 2 * n * n * 8
        assert spmd.report(by_name, X, n=n).cost.flops == 2 * n * n * 8


def test_arguments_with_the_names_of_those_of_report(mesh):
    """A parameter called f belongs to the function that is reported."""
    found = spmd.report(spmd.pjit(lambda x, f: jnp.sum(x @ f), mesh=mesh), X, f=W)
    assert found.memory.arguments == (16 * 8 + 8 * 4) * 4


class Model:
    def __init__(self, scale):
        self.scale = scale

    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, x):
        return x[: self.scale] * 2

    @functools.partial(spmd.pjit, static_argnums=0)
    def pjitted(self, x):
        return x[: self.scale] * 2


@pytest.mark.usefixtures("in_mesh")
def test_methods():
    """A method finds its object."""
    assert spmd.report(Model(3).jitted, X).memory.outputs == 3 * 8 * 4
    assert spmd.report(Model(5).pjitted, X).memory.outputs == 5 * 8 * 4


def test_partial_calls(mesh):
    """What a partial call knows already stands before and behind what is given."""
    assert _is_right(spmd.report(functools.partial(_pjit(mesh=mesh), X), W))
    assert _is_right(spmd.report(functools.partial(_pjit(mesh=mesh), w=W), X))
    nested = functools.partial(functools.partial(_pjit(mesh=mesh)), X)
    assert _is_right(spmd.report(functools.partial(nested, W)))
    assert spmd.report(functools.partial(Model(3).jitted, X)).memory.outputs == 3 * 8 * 4


def test_transformed_functions(mesh):
    """A gradient of a vmapped pjit function inside of `jax.jit` is reported with its exchanges."""
    inner = _pjit(mesh=mesh)
    w = np.ones(W.shape, np.float32)
    batch = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)

    def total(w, batch):
        return jnp.sum(jax.vmap(inner, in_axes=(0, None))(batch, w))

    found = spmd.report(jax.jit(jax.grad(total)), W, batch)
    # The gradient of w sums over the rows, which lie on data.
    backward = [c for c in found.collectives if c.direction == "backward"]
    assert [(c.kind, c.mesh_axes) for c in backward] == [("all-reduce", ("data",))]
    assert (dict(found.mesh), found.num_devices) == (AXES, 8)
    found = spmd.report(spmd.pjit(jax.vmap(lambda x: inner(x, w)), mesh=mesh), batch)
    assert [(c.kind, c.payload_bytes) for c in found.collectives] == [("all-reduce", 3 * 4)]


def test_donated_arguments(mesh):
    """Donated memory is told, and the arrays that described the arguments live on."""
    spec = P("data")
    step = spmd.pjit(lambda x: x * 2, spec, spec, donate_argnums=0, mesh=mesh)
    x = jax.device_put(np.ones(X.shape, np.float32), _place(mesh, "data"))
    found = spmd.report(step, x)
    assert found.memory.aliased == found.memory.outputs == 4 * 8 * 4
    assert not x.is_deleted()
    assert float(x.sum()) == 16 * 8


@pytest.mark.parametrize("kind", ["numpy", "jax", "placed"])
def test_values_that_are_closed_over(mesh, kind):
    """Constants of the function, wherever they lie, are no obstacle."""
    value = np.ones((16, 4), np.float32)
    if kind != "numpy":
        value = jnp.asarray(value) if kind == "jax" else jax.device_put(value, _place(mesh, "data"))
    rows = P("data")
    found = spmd.report(spmd.pjit(lambda x: x.T @ value, rows, P(), mesh=mesh), X)
    assert [(c.kind, c.mesh_axes, c.payload_bytes) for c in found.collectives] == [
        ("all-reduce", ("data",), 8 * 4 * 4)
    ]


def test_functions_with_effects(mesh):
    """Callbacks and prints are opaque calls, and are not made."""
    calls = []

    def seen(x):
        calls.append(x)
        return np.asarray(x)

    f = jax.jit(lambda x: jax.pure_callback(seen, X, x))
    assert spmd.report(f, X).cost.opaque_calls == 1

    def printed(x):
        jax.debug.callback(seen, x.sum())
        return x * 2

    found = spmd.report(spmd.pjit(printed, P("data"), mesh=mesh), X)
    assert found.cost.opaque_calls == 1
    assert found.collectives
    jax.effects_barrier()
    assert calls == []


def test_functions_without_anything(mesh):
    """Functions without results, arguments or work have empty reports."""
    for f in (jax.jit(lambda: ()), spmd.pjit(lambda: (), mesh=mesh)):
        found = spmd.report(f)
        assert (found.collectives, found.reshards, found.cost) == ((), (), Cost.zeros())
        assert str(found)
    found = spmd.report(spmd.pjit(lambda: jnp.ones((16, 8)), None, P("data"), mesh=mesh))
    assert (found.memory.arguments, found.memory.outputs) == (0, 4 * 8 * 4)
    found = spmd.report(spmd.pjit(lambda x, w: x * 2, P("data"), mesh=mesh), X, W)
    assert found.cost.flops == 0


def test_mapped_functions():
    """`jax.pmap` lowers as well, so it can be reported."""
    f = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    found = spmd.report(f, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert [(c.kind, c.payload_bytes) for c in found.collectives] == [("all-reduce", 16)]


# What it does not do


def test_nothing_runs_and_nothing_is_allocated(mesh):
    """Terabytes of arguments are reported without an array, a call or a traced value."""
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.float32)
    ran = []

    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return x * 2

    gc.collect()  # arrays of other tests may go meanwhile
    before = len(jax.live_arrays())
    specs = P("data", "model")
    found = spmd.report(spmd.pjit(f, specs, specs, mesh=mesh), huge)
    assert found.memory.arguments == found.memory.outputs == (1 << 40) * 4 // 8
    jax.effects_barrier()
    assert (len(jax.live_arrays()), ran) == (before, [])


def test_work_is_not_repeated(mesh):
    """A second report of a function compiles nothing, and neither does a call after it."""
    f = spmd.pjit(lambda x: jnp.cos(x).sum(), P("data"), mesh=mesh)
    start = spmd.counts()
    first = spmd.report(f, X)
    done = spmd.counts()
    assert done - start == spmd.Counts(traces=1, lowerings=1, compiles=1)
    assert spmd.report(f, X) == first
    f(np.ones(X.shape, np.float32))
    assert spmd.counts() == done


def test_the_mesh_is_left_again(mesh):
    """A report enters a mesh for itself alone, also where it fails."""
    spmd.report(_pjit(), X, W, mesh=mesh)
    with pytest.raises(TypeError):
        spmd.report(_pjit(), X, mesh=mesh)
    with pytest.raises(spmd.MeshError, match="there is none here"):
        spmd.report(_pjit(), X, W)


# What is refused


def _message(*args, **kwargs):
    with pytest.raises(spmd.SpmdError) as caught:
        spmd.report(*args, **kwargs)
    return type(caught.value), str(caught.value)


def _gone(x):
    return x


_JITTED = "report(jax.jit(f), *args), or report(spmd.pjit(f, in_axis_resources=...), *args)"
_CALLED = "report(f, *args): the function, and not what a call of it gives"


@pytest.mark.parametrize(
    ("thing", "got", "fix"),
    [
        (_gone, "_gone <class 'function'>", _JITTED),
        (lambda x: x, "<lambda> <class 'function'>", _JITTED),
        (print, "print <class 'builtin_function_or_method'>", _JITTED),
        (functools.partial(_gone), "<class 'functools.partial'>", _JITTED),
        ("pkg.module:function", "<class 'str'>", ""),
        (None, "<class 'NoneType'>", ""),
        (3, "<class 'int'>", ""),
        (np.ones(2), "<class 'numpy.ndarray'>", _CALLED),
        (({"w": jnp.ones(2)}, 3.0), "<class 'tuple'>", _CALLED),
        (jax, "jax <class 'module'>", ""),
    ],
)
def test_what_cannot_be_compiled(thing, got, fix):
    """Anything else is refused, with what to give instead of a function or of its result."""
    error, text = _message(thing, X)
    assert error is spmd.ArgumentError
    lines = [
        "report cannot compile this.",
        "  expected  a function of spmd.pjit or jax.jit, or a stage of one",
        f"  got       {got}",
        *[f"  fix       {fix}"] * bool(fix),
    ]
    assert text == "\n".join(lines)


@pytest.mark.parametrize("transform", [jax.vmap, jax.grad, jax.jacobian])
def test_transformed_functions_are_plain_functions(mesh, transform):
    """A transformation of a pjit function is not mistaken for the function inside."""
    error, text = _message(transform(_pjit(mesh=mesh)), X, W)
    assert error is spmd.ArgumentError
    assert "cannot compile this" in text


def test_wrappers_of_other_libraries():
    """What lowers to something else than a stage is refused before it is compiled."""

    class Wrapper:
        def __call__(self, x):
            return x

        def lower(self, x):
            return self

        def compile(self):
            raise AssertionError("never compiled")

    error, text = _message(Wrapper(), X)
    assert (error, "Wrapper" in text) == (spmd.ArgumentError, True)


@pytest.mark.parametrize("given", [{"args": (X,)}, {"kwargs": {"x": X}}])
def test_stages_take_no_arguments(mesh, given):
    """A stage or a report has its arguments, so others are refused."""
    stages = [*_stages(_pjit(mesh=mesh)), *_stages(_jit(mesh))]
    names = ["Traced", "Lowered", "Compiled"] * 2 + ["Report"]
    for stage, name in zip([*stages, stages[2].report()], names, strict=True):
        error, text = _message(stage, *given.get("args", ()), **given.get("kwargs", {}))
        assert error is spmd.ArgumentError
        assert text == (
            f"report takes no arguments for a {name}, which has them already.\n"
            f"  expected  report({name.lower()}), or report(function, *args)"
        )


@pytest.mark.parametrize(
    "mesh_like",
    ["data", {"data": 4}, 8, AbstractMesh((4, 2), ("data", "model")), P("data"), jax.devices],
)
def test_what_is_no_mesh(mesh_like):
    """Names, sizes and meshes without devices are no meshes."""
    error, text = _message(_pjit(), X, W, mesh=mesh_like)
    assert error is spmd.ArgumentError
    first, second, *_, last = text.splitlines()
    assert first == "report cannot use this mesh."
    assert second.startswith("  given     mesh=")
    assert last == f"  got       {type(mesh_like).__name__}"


def test_another_mesh_than_that_of_the_program(mesh):
    """A program for eight devices is not read with the axes of two, nor a function rebound."""
    two = spmd.make_mesh({"data": 2})
    error, text = _message(_pjit(mesh=mesh), X, W, mesh=two)
    assert error is spmd.MeshError
    assert text == (
        "report cannot compile for another mesh than the function's own.\n"
        "  given     mesh data=2\n"
        "  expected  mesh data=4, model=2, to which the function is bound"
    )
    calls = [(_jit(mesh), X, W), *((stage,) for stage in _stages(_jit(mesh)))]
    for call in calls:
        error, text = _message(*call, mesh=two)
        assert error is spmd.MeshError
        assert text.splitlines()[:3] == [
            "report cannot match the program with this mesh.",
            "  given     mesh data=2",
            "  got       a program for 8 devices cpu:0..7",
        ]
    error, text = _message(jax.jit(_loss), X, W, mesh=mesh)
    assert "a program for device cpu:0" in text


def test_errors_of_the_function_come_through(mesh):
    """What goes wrong in the user's function, or in its call, is told as without a report."""
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        spmd.report(_pjit(mesh=mesh), X)
    with pytest.raises(TypeError, match="contracting dimensions"):
        spmd.report(_pjit(mesh=mesh), X, X)
    with pytest.raises(spmd.ShardingError, match="cannot split argument x"):
        spmd.report(_pjit(mesh=mesh), jax.ShapeDtypeStruct((15, 8), jnp.float32), W)


# Arguments that move


def _held(sharding, shape):
    """By device, a mask of the elements that it has."""
    masks = {}
    for device, index in sharding.devices_indices_map(shape).items():
        masks[device] = np.zeros(shape, bool)
        masks[device][index] = True
    return masks


SPECS = [
    P(*parts)
    for parts in itertools.product(
        (None, "data", "model", ("data", "model"), ("model", "data")), repeat=2
    )
    if len(flat := [n for p in parts if p for n in ((p,) if isinstance(p, str) else p)])
    == len(set(flat))
]


@given(st.sampled_from(SPECS), st.sampled_from(SPECS), st.sampled_from([(8, 8), (16, 24)]))
@settings(max_examples=150, deadline=None)
def test_moved_bytes_agree_with_masks(given_spec, wanted_spec, shape):
    """The bytes of a move are the most elements that a device needs and lacks, one by one."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    given, wanted = NamedSharding(mesh, given_spec), NamedSharding(mesh, wanted_spec)
    held, needed = _held(given, shape), _held(wanted, shape)
    missing = max(int((needed[d] & ~held[d]).sum()) for d in needed)
    aval = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert report._moved_bytes(aval, given, wanted) == 4 * missing


def test_arguments_that_move_are_told(mesh):
    """An argument that lies elsewhere is named, with both shardings and its bytes."""
    tree = {"x": [jax.device_put(np.ones((16, 8), np.float32), _place(mesh, "model"))], "w": W}
    f = spmd.pjit(lambda batch: _loss(batch["x"][0], batch["w"]), ({"x": P("data"), "w": None},))
    (found,) = spmd.report(f, tree, mesh=mesh).reshards
    assert found.argument == "batch['x'][0]"
    assert found.given == "P('model') on mesh data=4, model=2"
    assert found.wanted == "P('data') on mesh data=4, model=2"
    # A device has 8 of the 16 rows; of the 4 rows that it needs, half of the devices have none.
    assert found.nbytes == 4 * 8 * 4


@pytest.mark.parametrize(
    ("make", "spec", "nbytes"),
    [
        (lambda put: put(np.ones((16, 8), np.float32)), P("model"), 0),  # as it lies
        (lambda put: put(jnp.ones((16, 8), jnp.bfloat16)), P("data"), 4 * 8 * 2),
        (lambda put: put(np.ones((16, 8), np.float32)), P(None, "model"), 8 * 4 * 4),
        (lambda put: put(np.ones((16, 8), np.float32)), P(), 8 * 8 * 4),
        (lambda put: put(jax.random.split(jax.random.key(0), 16)), P("data"), 4 * 8),
        (lambda put: put(np.ones((0, 8), np.float32)), P("data"), 0),
    ],
)
def test_bytes_of_moved_arguments(mesh, make, spec, nbytes):
    """Elements of every type move with their size, keys of random numbers included."""
    x = make(lambda x: jax.device_put(x, _place(mesh, "model")))
    found = spmd.report(spmd.pjit(lambda x: x, spec, spec, mesh=mesh), x).reshards
    assert sum(one.nbytes for one in found) == nbytes
    assert len(found) == (spec != P("model"))


def test_what_lies_right_or_nowhere_does_not_move(mesh):
    """Descriptions, NumPy arrays, uncommitted and rightly placed arrays are no moves."""
    f = spmd.pjit(lambda x: x * 2, P("data"), mesh=mesh)
    placed = jax.device_put(np.ones(X.shape, np.float32), _place(mesh, "data", None))
    for x in (X, np.ones(X.shape, np.float32), jnp.ones(X.shape), placed):
        assert spmd.report(f, x).reshards == ()
    described = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=_place(mesh))
    (found,) = spmd.report(f, described).reshards
    assert found.nbytes == 0  # every device has all of it, and keeps a part
    assert math.prod(X.shape) == 128


def test_another_order_of_the_same_devices():
    """Axes are positions in the program: a mesh of the same devices in another order is refused."""
    devices = np.array(jax.devices())
    own = jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b"))
    other = jax.sharding.Mesh(devices.reshape(2, 4).T, ("p", "q"))
    same = jax.sharding.Mesh(devices.reshape(2, 4), ("p", "q"))
    ins, outs = jax.NamedSharding(own, P("a", "b")), jax.NamedSharding(own, P("b"))
    f = jax.jit(lambda x: x.sum(0), in_shardings=ins, out_shardings=outs)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    (one,) = spmd.report(f, x, mesh=same).collectives
    assert one.mesh_axes == ("p",)
    with pytest.raises(spmd.MeshError, match="another order"):
        spmd.report(f, x, mesh=other)


def test_reports_in_a_terminal():
    """A report has a short `repr`, and can be hashed."""
    found = spmd.report(jax.jit(jnp.sin), jax.ShapeDtypeStruct((8,), jnp.float32))
    assert repr(found) == "<Report of sin on cpu: 0 collectives, 0 B on the wire>"
    assert len({found, spmd.Report.from_json(found.to_json())}) == 1


def test_a_compiler_of_another_age(monkeypatch):
    """Where jaxlib cannot read what a newer libtpu made, the error says what to install."""
    compiled = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", as_text)
    with pytest.raises(spmd.ReportError) as caught:
        spmd.report(compiled)
    assert str(caught.value) == (
        "report cannot read what the compiler made.\n"
        "  expected  a compiler of the same release as jaxlib\n"
        "  got       INTERNAL: RET_CHECK failure\n"
        f"  fix       pip install 'jax[tpu]=={jax.__version__}', which brings the libtpu that fits"
    )


def _two(w, x):
    return x @ w


CALLS = [
    (lambda f, a: spmd.report(f, a), "report", "report(_two, *args)"),
    (lambda f, a: spmd.preview(f, a), "preview", "preview(_two, *args)"),
    (lambda f, a: spmd.why(f, "out", a), "why", "why(_two, name, *args)"),
]


@pytest.mark.parametrize(("call", "subject", "fix"), CALLS, ids=lambda part: str(part)[:8])
@pytest.mark.parametrize("make", [jax.jit, spmd.pjit])
def test_arguments_in_one_tuple(call, subject, fix, make, in_mesh):
    """`report(f, (x, w))` is told to give the arguments one by one."""
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(spmd.ArgumentError) as caught:
        call(make(_two), (w, w))
    assert str(caught.value) == (
        f"{subject} cannot call `_two` with these arguments.\n"
        "  expected  arguments for its parameters (w, x)\n"
        "  got       one tuple of 2\n"
        f"  fix       {fix}: the arguments follow one by one"
    )


def test_type_errors_of_the_users_code_stay(in_mesh):
    """A TypeError that the function itself raises is not dressed up."""
    with pytest.raises(TypeError, match=r"^mine") as caught:
        spmd.report(jax.jit(_raises), np.ones(8, np.float32))
    assert not isinstance(caught.value, spmd.SpmdError)


def _raises(x):
    raise TypeError("mine")


def _mlp(w, v, x):
    return jnp.tanh(x @ w) @ v


@pytest.mark.parametrize("option", ["in_axis_resources", "in_shardings", "jax.jit"])
def test_findings_speak_of_what_was_called(mesh, option):
    """A batch that no axis splits is to be split by the option that the user has."""
    dims = (1024, 1024), (1024, 512), (4096, 1024)
    shapes = [jax.ShapeDtypeStruct(one, jnp.float32) for one in dims]
    specs = P(None, "model"), P("model"), P()
    if option == "jax.jit":
        f = jax.jit(_mlp, in_shardings=[spmd.NamedSharding(mesh, spec) for spec in specs])
        wanted = "P('data') for x in in_shardings of jax.jit, as NamedSharding(mesh, spec)"
    else:
        f, wanted = spmd.pjit(_mlp, **{option: specs}, mesh=mesh), f"P('data') for x in {option}"
    (one,) = [one for one in spmd.report(f, *shapes).findings if one.kind == "unsharded-batch"]
    assert one.fix == wanted


@pytest.mark.filterwarnings("ignore:.*mesh:DeprecationWarning")
def test_a_program_with_a_mesh_asks_for_no_other(mesh):
    """Where two contexts contradict each other, what has a mesh of its own has a report."""
    compiled = spmd.pjit(lambda x: x * 2, in_axis_resources=P("data"), mesh=mesh)
    compiled = compiled.lower(jax.ShapeDtypeStruct((8,), np.float32)).compile()
    other = jax.sharding.Mesh(np.array(jax.devices()), ("b",))
    with jax.set_mesh(jax.make_mesh((4,), ("a",))), other:
        assert spmd.report(compiled).mesh == {"data": 4, "model": 2}
