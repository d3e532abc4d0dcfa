"""Each kind of finding has a program that has it, and the same with what the finding says done."""

import functools
import gc

from hypothesis import given, settings, strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint as constrain
from spmd.inspection import Shape
from spmd.inspection.findings.values import LARGE, split_of, value_findings
from spmd.inspection.hlo.text import Computation
from spmd.inspection.records.report import FINDINGS
from spmd.inspection.shardy import pipeline
from spmd.inspection.shardy.propagation import propagate

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
KIB = 1 << 10
SIDE = 1024


def f32(*shape):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def line_of(marker):
    """The line of this file that ends in ``# here: marker``."""
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, text in enumerate(file, 1) if text.endswith(f"# here: {marker}\n"))


def found(fun, ins, *args, **options):
    """The findings on a function, by kind."""
    report = spmd.report(pjit(fun, in_axis_resources=ins, mesh=MESH, **options), *args)
    by_kind = {}
    for one in report.findings:
        assert one.kind in FINDINGS
        assert (one.nbytes > 0) == bool(one.measure)
        by_kind.setdefault(one.kind, []).append(one)
    return by_kind


W, X = f32(SIDE, SIDE), f32(4096, SIDE)


def loss(ws, x, spec=None):
    """Two layers; the values between them may be constrained."""
    h = jnp.tanh(x @ ws[0])  # here: first layer
    h = h if spec is None else constrain(h, spec)
    return (jnp.tanh(h @ ws[1]) ** 2).mean()


SPLIT = ([P(None, "model"), P("model")], P("data"))


def test_nothing_to_say():
    """A program whose arguments and values are all split has no finding."""
    assert found(jax.grad(loss), SPLIT, [W, W], X) == {}


def test_shardy_is_asked_when_the_findings_are(monkeypatch):
    """A report runs none of Shardy's passes before its findings are asked for, and then once."""
    runs = []
    run = pipeline.run
    monkeypatch.setattr(pipeline, "run", lambda *a, **k: (runs.append(True), run(*a, **k))[1])
    report = spmd.report(pjit(loss, in_axis_resources=None, mesh=MESH), [W, W], X)
    assert not runs
    assert "unused-axis" in {one.kind for one in report.findings}
    assert str(report)
    assert len(runs) == 1


def test_a_time_and_the_findings_share_a_run(monkeypatch):
    """The products for the MFU are those of the run of Shardy's passes that the findings have."""
    runs = []
    run = pipeline.run
    monkeypatch.setattr(pipeline, "run", lambda *a, **k: (runs.append(True), run(*a, **k))[1])
    report = spmd.report(pjit(loss, in_axis_resources=None, mesh=MESH), [W, W], X, chip="v5p")
    assert report.time.model_flops == 2 * 2 * 4096 * SIDE * SIDE
    assert report.findings
    assert len(runs) == 1


@pytest.mark.few(0)
@pytest.mark.parametrize("collects", [True, False])
def test_a_report_leaves_no_garbage(collects):
    """While a report is made nothing is collected; so nothing of it may need to be, afterwards."""
    lowered = pjit(jax.grad(loss), in_axis_resources=None, mesh=MESH).lower([W, W], X)
    gc.collect()
    (gc.enable if collects else gc.disable)()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert spmd.report(lowered).findings
        assert gc.isenabled() == collects
        gc.collect()
        kinds = {type(one).__module__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [kind for kind in kinds if kind.startswith("spmd.inspection")]


def test_findings_to_come_do_not_hold_the_text():
    """Until its findings are asked for, a report keeps nothing of the text that was read."""

    def read():
        return {id(one) for one in gc.get_objects() if isinstance(one, Computation)}

    before = read()
    report = spmd.report(pjit(loss, in_axis_resources=None, mesh=MESH), [W, W], X)
    assert read() <= before
    assert report.findings


def test_nothing_on_one_device():
    """On a mesh of one device nothing can be split."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    report = spmd.report(pjit(jax.grad(loss), in_axis_resources=None, mesh=mesh), [W, W], X)
    assert report.findings == ()


# Arguments


def test_moved_argument():
    """An argument that lies otherwise than the program takes it, with what a device receives."""
    x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(MESH, P("data")))
    ((one,),) = found(lambda x: x * 2, P(None, ("data", "model")), x).values()
    assert (one.kind, one.measure) == ("moved-argument", "wire")
    assert one.nbytes == 64 * 8 * 4 - 16 * 8 * 4
    assert one.subject == "x is moved before the program starts"
    assert one.facts == (
        "it lies as P('data') on mesh data=4, model=2",
        "the program takes P(None, ('data', 'model')) on mesh data=4, model=2",
    )
    assert one.fix == (
        "jax.device_put(x, NamedSharding(mesh, P(None, ('data', 'model')))) where it is made, or "
        "P('data') in in_axis_resources"
    )
    y = jax.device_put(x, NamedSharding(MESH, P(None, ("data", "model"))))
    assert found(lambda x: x * 2, P(None, ("data", "model")), y) == {}


def test_replicated_arguments():
    """Large leaves of one tree that are whole are one finding, with a spec that would do."""
    (one,) = found(jax.grad(loss), (None, P("data")), [W, W], X)["replicated-argument"]
    assert one.subject == "the 2 large leaves of ws are whole on every device"
    assert one.nbytes == 2 * SIDE * SIDE * 4
    assert one.facts == ("ws[0]: f32[1024,1024]", "ws[1]: f32[1024,1024]")
    assert one.fix.startswith("split all of ws as P('data');")


@pytest.mark.parametrize("rows", [LARGE // 4, LARGE // 4 - 1])
def test_small_arguments_may_be_whole(rows):
    """An argument of less than 1 MiB is no finding."""
    kinds = found(lambda x, y: x.sum() + y, (None, P(("data", "model"))), f32(rows), f32(8))
    assert ("replicated-argument" in kinds) == (rows * 4 >= LARGE)


def test_suggestion_needs_an_axis_that_divides():
    """The spec that is suggested is for a dimension that a mesh axis divides."""
    for shape, fix in [
        ((1023, 1026), "split x as P(None, 'model');"),
        ((1026, 1028), "split x as P(None, 'data');"),
        ((1023, 1025), "split x padded to a multiple of a mesh axis;"),
    ]:
        (one,) = found(lambda x: x.sum(), None, f32(*shape))["replicated-argument"]
        assert one.fix.startswith(fix)


def test_unused_donation():
    """A donated argument without a result like it is a finding, and one with a result is not."""
    kinds = found(jnp.sum, (P("data", "model"),), X, donate_argnums=0)
    (one,) = kinds["unused-donation"]
    assert one.subject == "a is donated, and its memory is not used again"
    assert (one.nbytes, one.measure) == (4096 * SIDE * 4 // 8, "memory")
    same = {"out_axis_resources": P("data", "model"), "donate_argnums": 0}
    assert found(lambda x: x * 2, (P("data", "model"),), X, **same) == {}


def test_unused_donation_of_one_of_several():
    """Of several donated arguments the one that is not used is named."""
    specs = P("data", "model")
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        kinds = found(
            lambda x, y: (x + 1, y.sum()),
            (specs, specs),
            X,
            W,
            donate_argnums=(0, 1),
            out_axis_resources=(specs, None),
        )
    assert [one.subject for one in kinds["unused-donation"]] == [
        "y is donated, and its memory is not used again"
    ]


# Values


def test_unsharded_batch():
    """Rows that no axis splits, though one is free and divides them."""
    (one,) = found(jax.grad(loss), ([P(None, "model"), P("model")], None), [W, W], X)[
        "unsharded-batch"
    ]
    assert one.subject == "the 4096 rows of x are on every device"
    assert one.fix == "P('data') for x in in_axis_resources"
    # The largest value with the rows is x itself: a quarter of it would do.
    assert one.nbytes == 4096 * SIDE * 4 * 3 // 4


def test_batch_of_several_arguments():
    """Labels belong to the batch of the inputs that they are compared with."""

    def fit(w, x, y):
        return ((x @ w - y) ** 2).mean()

    specs = (P(None, "model"), None, None)
    (one,) = found(jax.grad(fit), specs, f32(SIDE, 64), X, f32(4096, 64))["unsharded-batch"]
    assert one.subject == "the 4096 rows of x, y are on every device"
    split = (P(None, "model"), P("data"), P("data"))
    assert "unsharded-batch" not in found(jax.grad(fit), split, f32(SIDE, 64), X, f32(4096, 64))


def test_no_batch_without_a_free_axis():
    """Where every axis splits the values with these rows, or none divides them, nothing is said."""
    both = ([P(None, ("data", "model")), P(("data", "model"))], None)
    assert "unsharded-batch" not in found(jax.grad(loss), both, [W, W], X)
    odd = ([P(None, "model"), P("model")], None)
    assert "unsharded-batch" not in found(jax.grad(loss), odd, [W, W], f32(4095, SIDE))


def test_replicated_value():
    """A value that no annotation splits, at its line; one constraint splits it."""

    def big(x, spec):
        y = jnp.sin(jnp.outer(x, x))  # here: outer
        return jnp.linalg.norm((y if spec is None else constrain(y, spec)) @ x)

    kinds = found(lambda x: big(x, None), P(None), f32(SIDE))
    (one,) = kinds["replicated-value"]
    assert one.subject in (
        "f32[1024,1024] of multiply is whole on every device",
        "f32[1024,1024] of sine is whole on every device",
    )
    assert (one.source.line, one.nbytes) == (line_of("outer"), SIDE * SIDE * 4)
    assert one.facts == (
        f"no mesh axis reaches it; why('test_findings.py:{line_of('outer')}') shows where they "
        "stop",
    )
    split = found(lambda x: big(x, P("data", "model")), P(None), f32(SIDE))
    assert "replicated-value" not in split


def test_values_without_memory():
    """A value that the compiler computes where it is read takes no memory, and is no finding."""
    kinds = found(lambda x: (jnp.outer(x, x) + 1).sum(), P(None), f32(SIDE))
    report = spmd.report(jax.jit(lambda x: (jnp.outer(x, x) + 1).sum()), f32(SIDE))
    takes = any(one.shape.dims == (SIDE, SIDE) for one in report.memory.buffers)
    assert ("replicated-value" in kinds) == takes


def test_replicated_values_that_were_asked_for():
    """A constraint that says P() is an answer."""
    kinds = found(
        lambda x: constrain(jnp.sin(x), P()).sum(), (P("data", "model"),), f32(SIDE, SIDE)
    )
    assert "replicated-value" not in kinds


def test_replicated_residual():
    """What the backward pass needs and no axis splits, at its line in the forward pass."""
    # No axis divides the rows: else they are what is to be split, and that is another finding.
    odd, whole = f32(4095, SIDE), ([P(), P()], None)
    kinds = found(jax.grad(loss), whole, [W, W], odd)
    places = [(one.source.line, one.nbytes) for one in kinds["replicated-residual"]]
    assert (line_of("first layer"), 4095 * SIDE * 4) in places
    columns = [P(None, "data"), P("data", "model")], None
    assert "replicated-residual" not in found(jax.grad(loss), columns, [W, W], odd)


@pytest.mark.slow
def test_replicated_residuals_of_a_scan():
    """Residuals that a scan stacks are found as well."""

    def scanned(ws, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        return (jax.lax.scan(layer, x, ws)[0] ** 2).mean()

    ws, x = f32(4, 256, 256), f32(1023, 256)
    kinds = found(jax.grad(scanned), (None, None), ws, x)
    stacked = [one for one in kinds["replicated-residual"] if one.nbytes == 4 * 1023 * 256 * 4]
    assert stacked[0].fix.startswith("with_sharding_constraint(value, P(None, 'data')) in the body")
    assert "replicated-residual" not in found(
        jax.grad(scanned), (P(None, None, "model"), None), ws, x
    )


def test_values_in_shard_map_are_parts():
    """Inside of a shard_map a value is one device's part, and whole there."""

    def local(x):
        return jnp.sin(x) * 2

    both = P("data", "model")
    mapped = jax.shard_map(local, mesh=MESH, in_specs=both, out_specs=both)
    assert found(mapped, (both,), f32(4096, 2048)) == {}


def test_uneven_split():
    """5 rows over 4 devices: each holds 2, and on average a device needs 5/4."""
    row = 1 << 18

    def spread(x):
        return constrain(jnp.sin(x), P("data")).sum()  # here: uneven

    (one,) = found(spread, (P(None, "model"),), f32(5, row))["uneven-split"]
    assert one.subject == "5 elements are split over 4 devices"
    assert one.source.line == line_of("uneven")
    assert one.nbytes in (2 * row * 4 - 5 * row, (2 * row * 4 - 5 * row) // 2)
    assert one.facts[1] == "each device holds 2 and computes with them; 3 of all are padding"
    assert one.fix == "make the dimension 8, or split another one"
    assert "uneven-split" not in found(spread, (P(None, "model"),), f32(8, row))


# Loops


def looped(w, x, inside):
    """Five layers of one weight, computed again in the backward pass."""

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ (constrain(w, P()) if inside else w))  # here: in the loop

    w = w if inside else constrain(w, P())
    y, _ = jax.lax.scan(lambda h, _: (layer(h, w), None), x, None, length=5)  # here: the loop
    return (y**2).sum()


def test_collective_in_loop():
    """A weight that is gathered in each iteration, though it is the same each time."""
    specs, args = (P(None, "model"), P("data")), (f32(SIDE, SIDE), f32(512, SIDE))
    kinds = found(jax.grad(functools.partial(looped, inside=True)), specs, *args)
    (one,) = kinds["collective-in-loop"]
    assert one.subject == "a loop repeats an all-gather of the same values"
    assert one.source.line in (line_of("in the loop"), line_of("the loop"))
    assert one.facts == ("f32[1024,512] over model", "5 times in one call, where 1 would do")
    assert one.nbytes == 4 * SIDE * SIDE * 4 // 2
    fixed = found(jax.grad(functools.partial(looped, inside=False)), specs, *args)
    assert "collective-in-loop" not in fixed


def test_collectives_of_other_values_each_time():
    """A loop that gathers another layer in each iteration does what it has to."""

    def layers(ws, x):
        def layer(h, w):
            return jnp.tanh(h @ constrain(w, P())), None

        return jax.lax.scan(layer, x, ws)[0].sum()

    specs = (P(None, "data", "model"), P("data"))
    kinds = found(jax.grad(layers), specs, f32(5, SIDE, SIDE), f32(512, SIDE))
    assert "collective-in-loop" not in kinds


# The mesh


def test_unused_axis():
    """An axis that no argument, constraint, collective or shard_map names."""
    (one,) = found(lambda x: x * 2, P("data"), f32(8, 8))["unused-axis"]
    assert one.subject == "nothing is split over mesh axis 'model'"
    assert one.facts == ("the 2 devices along it all do the same work",)
    assert (one.nbytes, one.measure) == (0, "")
    assert "unused-axis" not in found(lambda x: x * 2, P("data", "model"), f32(8, 8))


def test_axis_that_only_a_constraint_uses():
    """A constraint inside, or a shard_map, is a use of an axis."""

    def inside(x):
        return constrain(x * 2, P(None, "model")).sum()

    assert "unused-axis" not in found(inside, P("data"), f32(8, 8))
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "model"),
        mesh=MESH,
        in_specs=P("data", "model"),
        out_specs=P("data"),
    )
    assert "unused-axis" not in found(mapped, P("data"), f32(8, 8))


# Stages and other compilers


def test_a_compiled_program_keeps_its_findings():
    """The report of a compiled program has the findings of the function's."""
    lowered = pjit(jax.grad(loss), in_axis_resources=(None, P("data")), mesh=MESH).lower([W, W], X)
    compiled = lowered.compile()
    report = compiled.report()
    assert report.findings == spmd.report(lowered).findings
    assert {one.kind for one in report.findings} == {"replicated-argument", "unused-axis"}


def test_findings_of_jit():
    """A function of `jax.jit` has the same findings; compiled, those that need no annotations."""
    place = functools.partial(NamedSharding, MESH)
    fun = jax.jit(jax.grad(loss), in_shardings=(place(P()), place(P("data"))))
    lowered = fun.lower([W, W], X)
    both = {one.kind for one in spmd.report(lowered, mesh=MESH).findings}
    assert both == {"replicated-argument", "unused-axis"}
    compiled = {one.kind for one in spmd.report(lowered.compile(), mesh=MESH).findings}
    assert compiled == {"replicated-argument"}


def test_lines_and_steps_are_not_needed():
    """Findings are the same whether or not all of the propagation is read."""
    lowered = pjit(jax.grad(loss), in_axis_resources=None, mesh=MESH).lower([W, W], X)
    module = lowered.compiler_ir()
    both = [propagate(module, subject="test", steps=steps) for steps in (True, False)]
    compiled = {
        Shape(dtype="f32", dims=dims) for dims in [(4096, SIDE), (SIDE, SIDE), (1024, SIDE)]
    }
    with_steps, without = ([*value_findings(found, compiled)] for found in both)
    assert with_steps == without != []


def test_effects():
    """A program with ordered effects carries tokens, which are no arrays."""

    def noisy(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    kinds = {one.kind for one in spmd.report(jax.jit(noisy), f32(SIDE, SIDE)).findings}
    assert kinds == set()
    mesh = MESH
    tapped = pjit(noisy, in_axis_resources=P("data"), mesh=mesh)
    with pytest.raises(Exception, match="ordered effects"):
        spmd.report(tapped, f32(SIDE, SIDE))


def test_callbacks():
    """A callback of JAX takes its operand to one device, and nothing else is said of it."""

    def called(x):
        return jax.pure_callback(lambda x: x, f32(SIDE, SIDE), x).sum()

    kinds = found(called, (P("data", "model"),), f32(SIDE, SIDE))
    assert {*kinds} <= {"full-rematerialization", "replicated-value"}
    for one in kinds.get("full-rematerialization", ()):
        assert "wanted as {maximal device=0}" in one.facts[1]
        assert "per_shard=True" in one.fix


def test_without_shardy():
    """Lowered for the older partitioner a program has a report, and what needs no annotations."""
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        kinds = found(lambda x: x.sum(), None, f32(SIDE, SIDE))
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert [*kinds] == ["replicated-argument"]


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    data=st.sampled_from([2, 3, 4]),
    model=st.sampled_from([1, 2, 5]),
)
@settings(max_examples=60, deadline=None)
def test_suggested_specs_divide(sizes, data, model):
    """Whatever spec is suggested, its axis divides its dimension, and one is where one does."""
    mesh = {"data": data, "model": model}
    text = split_of(sizes, mesh)
    divides = any(n % m == 0 for n in sizes for m in mesh.values() if m > 1)
    assert (text is not None) == divides
    if text is not None:
        entries = eval(text, {"P": lambda *entries: entries})
        assert sizes[len(entries) - 1] % mesh[entries[-1]] == 0
