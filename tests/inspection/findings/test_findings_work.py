"""Work that devices along a mesh axis repeat is told once, with its cause; split work is not."""

import functools

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

import spmd
from spmd import P, pjit, with_sharding_constraint as constrain
from spmd.inspection import parse_module, topology
from spmd.inspection.findings.rules import _repeated
from spmd.inspection.hlo.calls import visits

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
N, ROWS = 1024, 4096


def f32(*shape):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def product(*sizes):
    """FLOPs of a product of matrices with these sizes of dimensions."""
    return 2 * int(np.prod(sizes))


@functools.cache
def line_of(marker):
    """The line of this file that ends in ``# here: marker``."""
    with open(__file__, encoding="utf-8") as file:
        return next(n for n, text in enumerate(file, 1) if text.endswith(f"# here: {marker}\n"))


def reported(fun, specs, *args, mesh=MESH):
    """The report of a function with these specs."""
    return spmd.report(pjit(fun, in_axis_resources=specs, mesh=mesh), *args)


def repeats(report):
    """Kinds and FLOPs of what a report says is repeated."""
    return [(one.kind, one.flops) for one in report.findings if one.flops]


W, X = f32(N, N), f32(ROWS, N)


def two(w1, w2, x, split=("data",)):
    """Two products; a constraint decides over which axes the second is split."""
    h = constrain(jnp.tanh(x @ w1), P("data"))
    return constrain(h @ w2, P(*split))  # here: second


TWO = (P(None, "model"), None, P("data")), f32(N, ROWS), f32(ROWS, N), X


def test_an_axis_that_splits_one_product_only():
    """The axis, the FLOPs, the line and a constraint; which does what it says."""
    specs, *args = TWO
    report = reported(two, specs, *args)
    (one,) = [one for one in report.findings if one.kind == "duplicated-work"]
    first, second = product(ROWS, N, ROWS) // 8, product(ROWS, ROWS, N) // 4
    assert report.cost.flops == first + second
    assert one.subject == "the 2 devices along 'model' compute the same products"
    assert (one.flops, one.nbytes, one.measure) == (second // 2, 0, "")
    assert one.source.line == line_of("second")
    assert one.facts == (
        "4.3 GFLOP of the 12.9 GFLOP that each device computes in one call would be saved if "
        f"'model' split them, most of it at test_findings_work.py:{line_of('second')}",
    )
    assert one.fix == (
        "with_sharding_constraint(value, P('data', 'model')) on that line, or 'model' in the spec "
        "of an argument that it is made of"
    )
    assert "4.3 GFLOP repeated;" in str(report)
    assert "4.3 GFLOP" in report.to_html()
    assert spmd.inspection.Report.from_json(report.to_json()).findings == report.findings
    fixed = reported(functools.partial(two, split=("data", "model")), specs, *args)
    assert repeats(fixed) == []
    assert fixed.cost.flops == report.cost.flops - one.flops


def test_a_product_that_the_compiler_gathers_for():
    """Half of a sum on each device: the annotations would do, and the compiler gathers instead."""
    report = reported(lambda x, w: x @ w, (P("data", "model"), None), X, W)
    whole = product(ROWS, N, N)
    repeated = report.cost.flops - whole // 8
    assert repeats(report) == ([("duplicated-work", repeated)] if repeated else [])


def test_values_of_repeated_work():
    """A product that no axis splits makes a value that is whole: one finding, with its bytes."""
    report = reported(lambda w, x: constrain(x, P()) @ w, (None, P("data", "model")), W, X)
    (one,) = [one for one in report.findings if one.kind != "replicated-argument"]
    assert one.subject == "the 8 devices along 'data' and 'model' compute the same products"
    assert (one.flops, one.nbytes) == (product(ROWS, N, N) * 7 // 8, ROWS * N * 4)
    assert one.facts[1] == "f32[4096,1024] of dot_general is whole on every device"


def mlp(ws, x):
    """The loss of two layers."""
    return (jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2).mean()  # here: mlp


GRADIENT = 5 * product(ROWS, N, N)
"""FLOPs of the gradient by both weights: two products forward, three backward."""


def test_an_unused_axis_has_its_work():
    """Where an axis splits nothing at all, that is the cause, and the work is told there."""
    report = reported(jax.grad(mlp), (None, P("data")), [W, W], X)
    assert repeats(report) == [("unused-axis", GRADIENT // 8)]
    assert report.findings[0].facts == (
        "the 2 devices along it all do the same work",
        "5.4 GFLOP of the 10.7 GFLOP that each device computes in one call would be saved if "
        f"'model' split them, most of it at test_findings_work.py:{line_of('mlp')}",
    )


def test_one_cause_is_one_finding():
    """Of a batch that is not split the work, residuals, axis and argument are consequences."""
    specs = [P(None, "model"), P("model")], None
    (one,) = reported(jax.grad(mlp), specs, [W, W], X).findings
    assert (one.kind, one.flops) == ("unsharded-batch", GRADIENT // 2 - GRADIENT // 8)
    assert one.facts[1].startswith("16.1 GFLOP of the 21.5 GFLOP that each device computes")
    assert reported(jax.grad(mlp), (specs[0], P("data")), [W, W], X).findings == ()


def test_causes_come_first():
    """Of two causes each has its own work; arguments, which may be meant so, come last."""
    report = reported(jax.grad(mlp), None, [W, W], X)
    assert [one.kind for one in report.findings] == [
        "unsharded-batch",
        "unused-axis",
        "replicated-argument",
    ]
    assert repeats(report) == [
        ("unsharded-batch", GRADIENT * 3 // 4),
        ("unused-axis", GRADIENT // 2),
    ]


def test_products_of_one_line_that_are_split_alike():
    """Of five products on one line, the fix is for the one that all devices compute."""
    cube = Mesh(MESH.devices.reshape(2, 2, 2), ("x", "y", "z"))
    rows, columns = P("x"), P(None, ("x", "y"))

    def step(w, x, end):
        def loss(w):
            h = functools.partial(constrain, axis_resources=columns)
            return (end(h(jnp.tanh(constrain(x @ w, rows))) @ w) ** 2).mean()  # here: all

        return jax.grad(loss)(w)

    def with_end(end):
        return reported(functools.partial(step, end=end), (None, rows), W, X, mesh=cube)

    whole = product(ROWS, N, N) * 7 // 8
    report = with_end(lambda y: y)
    assert repeats(report)[0] == ("duplicated-work", whole)
    assert report.findings[0].source.line == line_of("all")
    spec = "P(('x', 'z'), 'y')"
    assert report.findings[0].fix.startswith(f"with_sharding_constraint(value, {spec}) on that")
    split = with_end(lambda y: constrain(y, eval(spec)))
    assert whole not in [flops for _, flops in repeats(split)]
    assert split.cost.flops < report.cost.flops - whole // 2


@pytest.mark.slow
def test_work_in_a_loop():
    """What a loop repeats counts as often as the loop runs, in both passes."""

    def layers(ws, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()

    ws = f32(5, N, N)
    report = reported(jax.grad(layers), (None, P("data")), ws, X)
    assert repeats(report) == [("unused-axis", 5 * 3 * product(ROWS, N, N) // 8)]
    assert repeats(reported(jax.grad(layers), (P(None, None, "model"), P("data")), ws, X)) == []


def test_a_loop_that_ends_when_the_data_say():
    """Nothing is said of work that runs nobody knows how often."""

    def until(w, x):
        return jax.lax.while_loop(lambda h: h.sum() < 1, lambda h: jnp.tanh(h @ w), x)

    assert repeats(reported(until, (None, P("data")), W, X)) == []


def test_convolutions():
    """An unused axis is found to repeat half of a convolution, but for its borders."""

    def conv(kernel, x):
        return jax.lax.conv(x, kernel, (1, 1), "SAME")

    kernel, images = f32(128, 64, 3, 3), f32(64, 64, 32, 32)
    report = reported(conv, (None, P("data")), kernel, images)
    assert repeats(report) == [("unused-axis", report.cost.flops // 2)]
    assert repeats(reported(conv, (None, P(("data", "model"))), kernel, images)) == []


def test_little_work_is_not_told():
    """Below 0.1 GFLOP per call, or a twentieth of what the device computes, nothing is said."""
    specs, *_ = TWO
    assert repeats(reported(two, specs, f32(64, 256), f32(256, 64), f32(512, 64))) == []
    large, small = f32(N, 8 * ROWS), f32(8 * ROWS, 32)
    report = reported(two, specs, large, small, X)
    repeated = product(ROWS, 8 * ROWS, 32) // 8
    assert 10**8 < repeated < report.cost.flops / 20
    assert repeats(report) == []


def test_work_in_shard_map_is_meant():
    """What every device computes in a manual region is not called repeated."""
    mapped = jax.shard_map(
        lambda x, w: x @ w,
        mesh=MESH,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    report = reported(mapped, (P("data"), None), X, W)
    assert report.cost.flops == product(ROWS, N, N) // 4
    assert repeats(report) == []


def test_axes_of_size_one():
    """An axis of one device repeats nothing."""
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))
    assert repeats(reported(jax.grad(mlp), (None, P("data")), [W, W], X, mesh=mesh)) == []


# Gradients that are made transposed


@pytest.mark.parametrize(
    ("equation", "weight", "rows"),
    [
        ("bd,dhk->bhk", (N, 8, 64), (ROWS, N)),
        ("bhk,hkd->bd", (8, 64, N), (ROWS, 8, 64)),
        ("bd,df->bf", (N, 512), (ROWS, N)),
        ("bd,fd->bf", (512, N), (ROWS, N)),
    ],
)
def test_gradients_made_transposed(equation, weight, rows):
    """The gradient of a weight that is whole is whole as well, whichever way it is made."""

    def loss(w, x):
        return (jnp.einsum(equation, x, w) ** 2).mean()

    both = P(("data", "model"))
    findings = reported(jax.grad(loss), (None, both), f32(*weight), f32(*rows)).findings
    assert [one.kind for one in findings] == ["replicated-argument"]


def test_a_table_used_twice():
    """A weight that the forward pass turns over is no value that is kept for the backward pass."""

    def loss(w, x):
        return (jnp.tanh((x @ w) @ w.T) ** 2).mean()

    findings = reported(jax.grad(loss), (None, P(("data", "model"))), f32(N, 512), X).findings
    assert [one.kind for one in findings] == ["replicated-argument"]


def test_values_that_only_look_transposed():
    """A value with the sizes of a weight the other way round, and not made of it, is told."""

    def outer(w, a, b):
        return jnp.linalg.norm(jnp.sin(jnp.outer(a, b)) @ w @ a)

    report = reported(outer, None, f32(512, 2048), f32(2048), f32(512))
    assert any(one.kind == "replicated-value" for one in report.findings)


# Loops that the compiler makes of a product

TEXT = """HloModule loops, entry_computation_layout={{(f32[8])->f32[8]}}

%body (p: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %p = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %kept = f32[8] get-tuple-element(%p), index=1
  %sum = f32[8] get-tuple-element(%p), index=2
  %zero = f32[] constant(0)
  %zeros = f32[8] broadcast(%zero), dimensions={{}}
  %moved = f32[8] {opcode}({operand}), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  %more = f32[8] add(%sum, %moved)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8], f32[8]) tuple(%next, %kept, %more)
}}

%cond (q: (s32[], f32[8], f32[8])) -> pred[] {{
  %q = (s32[], f32[8], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(6)
  ROOT %less = pred[] compare(%j, %end), direction=LT
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %start = s32[] constant(0)
  %none = f32[] constant(0)
  %nones = f32[8] broadcast(%none), dimensions={{}}
  %first = (s32[], f32[8], f32[8]) tuple(%start, {carried}, %x)
  %loop = (s32[], f32[8], f32[8]) while(%first), condition=%cond, body=%body
  ROOT %result = f32[8] get-tuple-element(%loop), index=2
}}
"""


@pytest.mark.parametrize(
    ("opcode", "operand", "carried", "told"),
    [
        ("collective-permute", "%kept", "%x", True),
        ("collective-permute", "%zeros", "%x", False),
        ("collective-permute", "%kept", "%nones", False),
        ("all-reduce", "%zeros", "%x", True),
        ("collective-permute", "%sum", "%x", False),
    ],
)
def test_what_a_loop_sends_each_time(opcode, operand, carried, told):
    """What the loop is given is sent again each time; zeros are the compiler's."""
    module = parse_module(TEXT.format(opcode=opcode, operand=operand, carried=carried))
    names = [one.name for one in _repeated(module, visits(module), "body")]
    assert names == (["moved"] if told else [])


@needs_libtpu
@pytest.mark.slow
def test_products_that_are_loops():
    """The zeros of a sum on TPU are no finding; an axis that such loops leave out has its work."""
    mesh = topology("v5e:2x4", {"data": 2, "model": 4})
    ring = ("xla_tpu_decompose_einsum_reduce_scatter", "xla_tpu_decompose_all_gather_einsum")

    def layers(ws, x, split):
        def layer(h, w):
            return constrain(jnp.tanh(h @ w[0]) @ w[1], split), None

        return jax.lax.scan(layer, x, ws)[0]

    def kinds(split):
        ws = P(None, None, "model"), P(None, "model")
        fun = functools.partial(layers, split=split)
        arrays = [((6, N, 8 * N), (6, 8 * N, N)), (ROWS, N)]
        args = jax.tree.map(
            lambda dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16),
            arrays,
            is_leaf=lambda one: isinstance(one, tuple) and isinstance(one[0], int),
        )
        lowered = pjit(fun, (ws, split), split, mesh=mesh).lower(*args)
        report = spmd.report(lowered.compile(dict.fromkeys(ring, "true")))
        assert "collective-permute" in report.totals("kind")
        return [(one.kind, one.flops) for one in report.findings]

    assert kinds(P("data", "model")) == []
    assert kinds(P("model")) == [("unused-axis", 6 * 2 * product(ROWS, N, 8 * N) // 8)]
