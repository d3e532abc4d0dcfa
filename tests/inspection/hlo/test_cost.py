"""FLOPs and bytes of main memory, against hand counts, enumeration and the compiler's figures."""

import itertools
import math

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import programs
from programs import array
import pytest

from spmd.inspection import Cost
from spmd.inspection.hlo import cost as hlo_cost, text as hlo_text
from spmd.inspection.hlo.calls import visits

BACKENDS = ["cpu", "tpu"]


def _compiled(backend, f, *args):
    """A program for one device."""
    place = jax.sharding.SingleDeviceSharding(programs.target(backend).mesh.devices.flat[0])
    return jax.jit(f, in_shardings=place, out_shardings=place).lower(*args).compile()


def _cost_of(text):
    module = hlo_text.parse_module(text)
    return hlo_cost.cost_of(module, visits(module))


def _cost_on(backend, f, *args):
    return _cost_of(_compiled(backend, f, *args).as_text())


def _entry(*lines, more="", parameters=("f32[8,16]{1,0}",)):
    """The cost of an entry of these lines, whose parameters are %p0, %p1, and so on."""
    heads = [f"%p{i} = {kind} parameter({i})" for i, kind in enumerate(parameters)]
    inside = "".join(f"  {line}\n" for line in [*heads, *lines])
    return _cost_of(f"HloModule m\n\n{more}ENTRY %main () -> f32[] {{\n{inside}}}\n")


# Matrix products

M, K, N, B = 48, 80, 112, 3

PRODUCTS = {
    "product": ("mk,kn->mn", (M, K), (K, N), 2 * M * K * N),
    "both turned": ("km,nk->nm", (K, M), (N, K), 2 * M * K * N),
    "batch": ("bmk,bkn->bmn", (B, M, K), (B, K, N), 2 * B * M * K * N),
    "batch in the middle": ("mbk,nkb->bmn", (M, B, K), (N, K, B), 2 * B * M * K * N),
    "batch of a result in the middle": ("bmk,bkn->mbn", (B, M, K), (B, K, N), 2 * B * M * K * N),
    "two batches": ("bhmk,bhnk->bhmn", (B, 2, M, K), (B, 2, N, K), 2 * 2 * B * M * K * N),
    "attention": ("bmhk,bnhk->bhmn", (B, M, 5, K), (B, N, 5, K), 2 * 5 * B * M * K * N),
    "two contracted": ("mbk,bkn->mn", (M, B, K), (B, K, N), 2 * B * M * K * N),
    "three free": ("mbk,kn->nbm", (M, B, K), (K, N), 2 * B * M * K * N),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_count_two_for_each_term(backend, name):
    """An einsum takes twice the product of all its sizes, whatever the compiler makes of it."""
    spec, a, b, flops = PRODUCTS[name]
    compiled = _compiled(backend, lambda x, y: jnp.einsum(spec, x, y), array(*a), array(*b))
    cost = _cost_of(compiled.as_text())
    assert (cost.flops, cost.opaque_calls, cost.unknown_loops) == (flops, 0, 0)
    if backend == "cpu":
        assert compiled.cost_analysis()["flops"] == flops


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_products_of_any_type(dtype):
    """The type of the elements changes no count."""
    args = array(M, K, dtype=dtype), array(K, N, dtype=dtype)
    assert _cost_on("cpu", jnp.matmul, *args).flops == 2 * M * K * N


def test_complex_products_take_four_real_ones():
    """A complex multiplication with its addition is four multiplications and four additions."""
    args = array(M, K, dtype=jnp.complex64), array(K, N, dtype=jnp.complex64)
    assert _cost_on("cpu", jnp.matmul, *args).flops == 8 * M * K * N


def test_library_products_of_gpus():
    """A call of cuBLAS counts as the product that it is, and any other call as opaque."""
    operands = "%p0, %p1), custom_call_target="
    config = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    config += '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
    parameters = "f32[8,16]{1,0}", "f32[16,32]{1,0}"
    result = "(f32[8,32]{1,0}, s8[1024]{0})"
    gemm = f'%g = {result} custom-call({operands}"__cublas$gemm", {config}'
    cost = _entry(gemm, parameters=parameters)
    assert (cost.flops, cost.opaque_calls) == (2 * 8 * 16 * 32, 0)
    kernel = f'%g = {result} custom-call({operands}"my_kernel", metadata={{op_name="Sharding"}}'
    cost = _entry(kernel, parameters=parameters)
    assert (cost.flops, cost.opaque_calls) == (0, 1)
    assert cost.hbm_bytes == (8 * 16 + 16 * 32 + 8 * 32) * 4 + 1024
    marker = '%g = f32[8,16]{1,0} custom-call(%p0), custom_call_target="Sharding"'
    assert _entry(marker, parameters=parameters) == Cost.zeros()


# Convolutions


def _positions(size, kernel, stride, pad, spread, kernel_spread):
    """Outputs of one dimension, and the pairs of output and kernel position on an element."""
    wide = (size - 1) * spread + 1
    outputs = (wide + sum(pad) - (kernel - 1) * kernel_spread - 1) // stride + 1
    elements = np.zeros(wide + pad[0] + pad[1] + 10_000, bool)
    elements[np.arange(size) * spread + 5000] = True
    steps = [o * stride + k * kernel_spread - pad[0] for o in range(outputs) for k in range(kernel)]
    return outputs, sum(bool(elements[step + 5000]) for step in steps)


@st.composite
def _dimension(draw):
    """Sizes of one spatial dimension whose output is not empty."""
    values = {
        "size": draw(st.integers(1, 12)), "kernel": draw(st.integers(1, 6)),
        "stride": draw(st.integers(1, 4)), "spread": draw(st.integers(1, 4)),
        "kernel_spread": draw(st.integers(1, 3)),
    }  # fmt: skip
    pad = draw(st.tuples(st.integers(-3, 6), st.integers(-3, 6)))
    wide = (values["size"] - 1) * values["spread"] + 1
    # Negative padding cuts elements off: at most all but one.
    pad = max(pad[0], 1 - wide), pad[1]
    reach = (values["kernel"] - 1) * values["kernel_spread"] + 1
    return {**values, "pad": (pad[0], max(pad[1], reach - wide - pad[0], 1 - wide - pad[0]))}


@pytest.mark.slow
@given(st.lists(_dimension(), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_windows_agree_with_enumeration(dims):
    """Positions of a window that meet the input are counted as by listing them."""

    def joined(name):
        return "x".join(str(d[name]) for d in dims)

    keys = ("size", "kernel", "stride", "pad", "spread", "kernel_spread")
    counted = [_positions(*(d[key] for key in keys)) for d in dims]
    digits = "".join(map(str, range(len(dims))))
    sizes = ",".join(str(d["size"]) for d in dims)
    kernel = ",".join(str(d["kernel"]) for d in dims)
    outputs = ",".join(str(outputs) for outputs, _ in counted)
    pads = "x".join("{}_{}".format(*d["pad"]) for d in dims)
    window = f"size={joined('kernel')} stride={joined('stride')} pad={pads} "
    window += f"lhs_dilate={joined('spread')} rhs_dilate={joined('kernel_spread')}"
    cost = _entry(
        f"%c = f32[2,7,{outputs}]{{0}} convolution(%p0, %p1), window={{{window}}}, "
        f"dim_labels=bf{digits}_oi{digits}->bf{digits}",
        parameters=(f"f32[2,5,{sizes}]{{0}}", f"f32[7,5,{kernel}]{{0}}"),
    )
    assert cost.flops == 2 * 2 * 7 * 5 * math.prod(pairs for _, pairs in counted)


def test_windows_as_large_as_a_batch():
    """TPU's windows over a batch of 100,000 are counted without listing 10**10 positions."""
    n = 100_000
    cost = _entry(
        f"%c = f32[{n},8,16]{{2,1,0}} convolution(%p0, %p1), "
        f"window={{size={n} stride={n - 1} pad=0_0 lhs_dilate={n}}}, dim_labels=0bf_0io->0bf",
        parameters=(f"f32[{n},8,32]{{2,1,0}}", f"f32[{n},32,16]{{2,1,0}}"),
    )
    assert cost.flops == n * 2 * 8 * 32 * 16


# By name: batch, features in and out, sizes, kernel, and options.
CONVOLUTIONS = {
    "1d": (4, 6, 8, (20,), (5,), {}),
    "padded and strided": (4, 6, 8, (20,), (5,), {"window_strides": (2,), "padding": [(2, 3)]}),
    "dilated input": (4, 6, 8, (20,), (5,), {"lhs_dilation": (3,), "padding": [(2, 2)]}),
    "dilated kernel": (4, 6, 8, (20,), (5,), {"rhs_dilation": (2,), "padding": [(2, 2)]}),
    "2d": (4, 6, 8, (12, 9), (3, 4), {"window_strides": (2, 1), "padding": [(1, 1), (2, 0)]}),
    "cut": (4, 6, 8, (12, 9), (3, 4), {"padding": [(-1, 1), (2, -2)]}),
    "groups": (4, 6, 9, (20,), (3,), {"feature_group_count": 3, "padding": [(1, 1)]}),
    "depthwise": (4, 6, 12, (20,), (3,), {"feature_group_count": 6, "padding": [(1, 1)]}),
    "batch groups": (4, 6, 8, (20,), (3,), {"batch_group_count": 2, "padding": [(1, 1)]}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_jax(name):
    """Each output takes as many terms as kernel elements of its group lie on the input."""
    batch, features, out, sizes, kernel, options = CONVOLUTIONS[name]
    rank = len(sizes)
    options = {"window_strides": (1,) * rank, "padding": [(0, 0)] * rank, **options}
    each = zip(
        sizes, kernel, options["window_strides"], options["padding"],
        options.get("lhs_dilation", (1,) * rank), options.get("rhs_dilation", (1,) * rank),
        strict=True,
    )  # fmt: skip
    pairs = math.prod(_positions(*one)[1] for one in each)
    inputs = features // options.get("feature_group_count", 1)
    batches = batch // options.get("batch_group_count", 1)
    compiled = _compiled(
        "cpu",
        lambda x, w: lax.conv_general_dilated(x, w, **options),
        array(batch, features, *sizes),
        array(out, inputs, *kernel),
    )
    assert _cost_of(compiled.as_text()).flops == 2 * batches * out * inputs * pairs
    assert compiled.cost_analysis()["flops"] == 2 * batches * out * inputs * pairs


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_a_convolution(backend):
    """Forward and both backward convolutions meet the same pairs, so each takes as many FLOPs."""

    def f(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID")

    def all_three(x, w, g):
        out, back = jax.vjp(f, x, w)
        return out, *back(g)

    args = array(8, 16, 12, 12), array(32, 16, 3, 3), array(8, 32, 10, 10)
    one = 2 * 8 * 32 * 16 * (10 * 10 * 3 * 3)
    assert _cost_on(backend, all_three, *args).flops == 3 * one


# Loops and branches


def _layers(x, w):
    return lax.scan(lambda c, one: (jnp.tanh(c @ one), None), x, w)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_loops_multiply(backend):
    """A product in a scan counts once for each layer; its gradient takes two more."""
    x, w = array(M, K), array(7, K, K)
    assert _cost_on(backend, _layers, x, w).flops == 7 * 2 * M * K * K
    gradient = jax.grad(lambda x, w: _layers(x, w).sum(), argnums=(0, 1))
    assert _cost_on(backend, gradient, x, w).flops == 3 * 7 * 2 * M * K * K


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_branches_count(backend):
    """Of a conditional all branches count, since either may run."""

    def f(p, x):
        return lax.cond(p, lambda y: jnp.sin(y @ y), lambda y: jnp.sin(y @ y) @ y, x)

    assert _cost_on(backend, f, array(dtype=bool), array(K, K)).flops == 3 * 2 * K**3


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_loops_are_told_and_not_counted(backend):
    """Only the loop whose end the data decide is unknown, not the counted one inside it."""

    def f(x):
        def body(c):
            return lax.fori_loop(0, 3, lambda _, d: jnp.sin(d @ d), c)

        return lax.while_loop(lambda c: c[0, 0] < 1.0, body, jnp.sin(x @ x))

    cost = _cost_on(backend, f, array(K, K))
    assert (cost.flops, cost.unknown_loops) == (2 * K**3, 1)


def test_opaque_calls_are_told():
    """What LAPACK computes is not counted, and said not to be."""
    cost = _cost_on("cpu", jnp.linalg.cholesky, array(16, 16))
    assert (cost.flops, cost.opaque_calls) == (0, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_64_bits_are_moved_by_tpu(backend):
    """Complex arguments and results are read and written once; to split them is no work."""
    cost = _cost_on(backend, lambda x: x * 2, array(256, 128, dtype=jnp.complex64))
    assert cost == Cost(flops=0, hbm_bytes=2 * 256 * 128 * 8)


# Devices


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        ((P(), P()), 1),
        ((P("data"), P()), 4),
        ((P("data"), P(None, "model")), 8),
        ((P(None, "model"), P("model")), 2),
        ((P("model", "data"), P("data")), 8),
    ],
)
def test_flops_are_divided_among_the_devices(backend, specs, parts):
    """Each device has its part of a product, along rows, columns or terms."""
    on = programs.target(backend)
    f = on.jit(jnp.matmul, specs, None, array(64, 256), array(256, 512))
    assert _cost_of(f.compile().as_text()).flops * parts == 2 * 64 * 256 * 512


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_are_those_of_one_device(backend):
    """A chain of operations reads and writes the eighth that the device has."""
    on = programs.target(backend)
    both = P("data", "model")
    text = on.jit(lambda x: jnp.sin(x) * 2, both, both, array(512, 1024)).compile().as_text()
    assert _cost_of(text).hbm_bytes == 2 * 512 * 1024 * 4 // 8


# Main memory


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_reads_and_writes_once(backend):
    """Elementwise operations are one fusion: what lies between them never touches memory."""
    cost = _cost_on(backend, lambda x: jnp.tanh(jnp.sin(x) * 2 + 1), array(1024, 512))
    assert cost == Cost(flops=0, hbm_bytes=2 * 1024 * 512 * 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_reads_both_and_writes_one(backend):
    """Operands and result of a large product move once."""
    cost = _cost_on(backend, jnp.matmul, array(512, 1024), array(1024, 256))
    assert cost.hbm_bytes == (512 * 1024 + 1024 * 256 + 512 * 256) * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scan_reads_each_layer_once(backend):
    """Slicing the weights in a loop reads all of them once, not once for each layer."""
    layers, width = 16, 512
    weights = layers * width * width * 4
    cost = _cost_on(backend, _layers, array(8, width), array(layers, width, width))
    # Everything else is a state of 8 rows, and at most the slice is written and read again.
    state = 8 * width * 4
    assert weights <= cost.hbm_bytes <= 3 * weights + 10 * layers * state
    if backend == "tpu":
        assert cost.hbm_bytes <= weights + 10 * layers * state


def test_operands_are_read_once():
    """An operand that an instruction names twice moves once."""
    assert _entry("%a = f32[8,16]{1,0} add(%p0, %p0)").hbm_bytes == 2 * 8 * 16 * 4


def test_places_and_names_are_free():
    """Tuples, casts of places and constants move nothing."""
    lines = [
        "%c = f32[8,16]{1,0} constant({...})",
        "%t = (f32[8,16]{1,0}, f32[8,16]{1,0}) tuple(%p0, %c)",
        "%g = f32[8,16]{1,0} get-tuple-element(%t), index=1",
        "%b = f32[128]{0} bitcast(%g)",
        "%o = f32[128]{0} opt-barrier(%b)",
        "%k = token[] after-all()",
        "%d = f32[128]{0} add-dependency(%o, %k)",
        "%i = u32[] partition-id()",
    ]
    assert _entry(*lines) == Cost.zeros()


SLICE = "f32[1,16]{1,0}"
INDEX = "s32[]", "s32[]"


@pytest.mark.parametrize(
    ("line", "parameters", "nbytes"),
    [
        # Read and write the slice; for a dynamic one its two indices.
        (f"{SLICE} slice(%p0), slice={{[0:1], [0:16]}}", (), 2 * 64),
        (f"{SLICE} dynamic-slice(%p0, %p1, %p2)", INDEX, 2 * 64 + 8),
        (f"{SLICE[:-1]}:S(1)}} dynamic-slice(%p0, %p1, %p2)", INDEX, 64 + 8),
        # Write the update where it belongs, in place.
        ("f32[8,16]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p3)", (SLICE, *INDEX), 2 * 64 + 8),
        # Rows at indices, repeated or not.
        ("f32[3,16]{1,0} gather(%p0, %p1), slice_sizes={1,16}", ("s32[3]{0}",), 2 * 192 + 12),
        ("f32[30,16]{1,0} gather(%p0, %p1)", ("s32[30]{0}",), 8 * 64 + 30 * 64 + 120),
        # Read indices and updates, read and write what they are added to.
        (
            "f32[8,16]{1,0} scatter(%p0, %p1, %p2), to_apply=%add",
            ("s32[3]{0}", "f32[3,16]{1,0}"),
            12 + 3 * 192,
        ),
        # Copies to and from the memory on the chip move one way.
        ("f32[8,16]{1,0:T(8,128)S(1)} copy(%p0)", (), 512),
        (
            "(f32[8,16]{1,0:S(1)}, f32[8,16]{1,0}, u32[]{:S(2)}) copy-start(%p0)",
            (),
            512,
        ),
        # Of an asynchronous slice, only the slice moves.
        (
            "((f32[8,16]{1,0}), f32[2,16]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%p0)",
            (),
            128,
        ),
        ("((f32[8,16]{1,0}), f32[2,16]{1,0}, u32[]) slice-start(%p0)", (), 256),
        # Collectives: of an all-reduce the start gives the results, of a gather both.
        ("(f32[8,16], f32[4]) all-reduce-start(%p0, %p1), to_apply=%add", ("f32[4]",), 2 * 528),
        ("(f32[8,16], f32[32,16]) all-gather-start(%p0), dimensions={0}", (), 5 * 512),
        ("((f32[8,16]), f32[2,16]) reduce-scatter-start(%p0), dimensions={0}", (), 640),
        ("(f32[8,16], u32[], token[]) send(%p0, %p1), channel_id=1", ("token[]",), 512),
        # Ends are counted at their starts.
        ("f32[8,16]{1,0} copy-done(%p0)", (), 0),
        ("f32[8,16]{1,0} all-reduce-done(%p0)", (), 0),
    ],
)  # fmt: skip
def test_bytes_of_single_instructions(line, parameters, nbytes):
    """What one instruction reads of its operands and writes of its result."""
    cost = _entry(f"%r = {line}", parameters=("f32[8,16]{1,0}", *parameters))
    assert cost.hbm_bytes == nbytes


def _fusion(*lines, parameters, result):
    """The bytes of a fusion of these lines, the last of which is its root."""
    *others, root = [f"%p{i} = {k} parameter({i})" for i, k in enumerate(parameters)] + [*lines]
    inside = "".join(f"  {line}\n" for line in others) + f"  ROOT {root}\n"
    names = ", ".join(f"%p{i}" for i in range(len(parameters)))
    return _entry(
        f"%f = {result} fusion({names}), kind=kLoop, calls=%fused",
        more=f"%fused () -> {result} {{\n{inside}}}\n\n",
        parameters=parameters,
    ).hbm_bytes


BIG, BIG_BYTES, ROW = "f32[8,16]{1,0}", 512, "f32[1,16]{1,0}"
STEP = (
    "%g = BIG all-gather(%p0), channel_id=5, dimensions={0}, "
    'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
)


@pytest.mark.parametrize(
    ("lines", "parameters", "result", "nbytes"),
    [
        # All of a parameter, once, however often it is used.
        (["%a = BIG add(%p0, %p0)"], ["BIG"], "BIG", 2 * BIG_BYTES),
        # Two slices of it.
        (
            ["%a = ROW slice(%p0)", "%b = ROW slice(%p0)", "%c = ROW add(%a, %b)"],
            ["BIG"], "ROW", 3 * 64,
        ),
        # Never more than all of it.
        (
            ["%a = f32[6,16] slice(%p0)", "%b = f32[6,16] slice(%p0)",
             "%c = f32[6,16] add(%a, %b)"],
            ["BIG"], "f32[6,16]", BIG_BYTES + 384,
        ),
        # A slice of what is cast, turned or converted first.
        (["%a = f32[128]{0} bitcast(%p0)", "%b = f32[16] slice(%a)"], ["BIG"], "f32[16]", 2 * 64),
        (
            ["%a = bf16[8,16] convert(%p0)", "%b = bf16[1,16] slice(%a)"],
            ["BIG"], "bf16[1,16]", 64 + 32,
        ),
        # A slice and all of it.
        (["%a = ROW slice(%p0)", "%b = BIG add(%p0, %p0)", "%c = BIG add(%b, %a)"],
         ["BIG"], "BIG", 2 * BIG_BYTES),
        # An update in place: the slice is read and written, the rest stays.
        (["%a = BIG dynamic-update-slice(%p0, %p1)"], ["BIG", "ROW"], "BIG", 2 * 64),
        # Two of them, one inside the other, and a cast of the place.
        (
            ["%a = BIG dynamic-update-slice(%p0, %p1)", "%b = f32[128]{0} bitcast(%a)",
             "%u = f32[16]{0} bitcast(%p1)", "%c = f32[128]{0} dynamic-update-slice(%b, %u)",
             "%d = BIG bitcast(%c)"],
            ["BIG", "ROW"], "BIG", 3 * 64,
        ),
        # What is updated and then used is read as a whole, and what is new is written as a whole.
        (["%a = BIG dynamic-update-slice(%p0, %p1)", "%b = BIG negate(%a)"],
         ["BIG", "ROW"], "BIG", 2 * BIG_BYTES + 64),
        # Also where all of it is the result in another form: the root needs every element.
        (["%a = BIG dynamic-update-slice(%p0, %p1)", "%b = bf16[8,16]{1,0} convert(%a)"],
         ["BIG", "ROW"], "bf16[8,16]{1,0}", BIG_BYTES + 64 + 256),
        (["%z = BIG broadcast(%p1)", "%a = BIG dynamic-update-slice(%z, %p0)"],
         ["ROW", "f32[]"], "BIG", 64 + 4 + BIG_BYTES),
        (["%a = BIG copy(%p0)", "%b = BIG dynamic-update-slice(%a, %p1)"],
         ["BIG", "ROW"], "BIG", 2 * BIG_BYTES + 64),
        # Indices may be computed from the array that is updated.
        (["%i = s32[] reduce(%p0)", "%a = BIG dynamic-update-slice(%p0, %p1, %i)"],
         ["BIG", "ROW"], "BIG", BIG_BYTES + 2 * 64),
        # A scatter reads the rows that it adds to.
        (["%a = BIG scatter(%p0, %p1, %p2)"], ["BIG", "s32[1]", "ROW"], "BIG", 3 * 64 + 4),
        # Several results: one new, one in place, one passed on.
        (
            ["%a = BIG dynamic-update-slice(%p0, %p1)", "%b = ROW negate(%p1)",
             "%t = (BIG, ROW, BIG) tuple(%a, %b, %p2)"],
            ["BIG", "ROW", "BIG"], "(BIG, ROW, BIG)", 3 * 64,
        ),
        # Memory on the chip is no main memory, on either side.
        (["%a = f32[8,16]{1,0:S(1)} add(%p0, %p0)"], ["BIG"], "f32[8,16]{1,0:S(1)}", BIG_BYTES),
        (["%a = BIG add(%p0, %p0)"], ["f32[8,16]{1,0:S(1)}"], "BIG", BIG_BYTES),
        (["%a = BIG dynamic-update-slice(%p0, %p1)", "%b = f32[8,16]{1,0:S(1)} bitcast(%a)"],
         ["f32[8,16]{1,0:S(1)}", "ROW"], "f32[8,16]{1,0:S(1)}", 64),
        # A gather in steps moves what it moves once, where it starts: not beside other work, nor
        # where it is waited for.
        (
            [STEP, '%s = (ROW, BIG, u32[]) custom-call(%g), '
             'custom_call_target="AsyncCollectiveStart"'],
            ["ROW"], "(ROW, BIG, u32[])", 64 + BIG_BYTES,
        ),
        (
            [STEP, "%a = ROW add(%p2, %p2)", "%t = (ROW, ROW, BIG, BIG) tuple(%a, %p0, %p1, %g)"],
            ["ROW", "BIG", "ROW"], "(ROW, ROW, BIG, BIG)", 2 * 64,
        ),
        (
            [STEP, '%w = BIG custom-call(%p0, %p1, %g), custom_call_target="AsyncCollectiveDone"'],
            ["ROW", "BIG"], "BIG", 0,
        ),
        # One that is not in steps is this fusion's own.
        (["%g = BIG all-gather(%p0), channel_id=5"], ["ROW"], "BIG", 64 + BIG_BYTES),
    ],
)  # fmt: skip
def test_bytes_of_fusions(lines, parameters, result, nbytes):
    """Of a fusion, the used parts of its parameters and the new parts of its result move."""

    def full(text):
        return text.replace("BIG", BIG).replace("ROW", ROW)

    found = _fusion(*map(full, lines), parameters=[*map(full, parameters)], result=full(result))
    assert found == nbytes


def test_fusions_in_fusions():
    """A slice that an inner fusion takes is all that the outer one reads."""
    more = (
        "%inner () -> f32[1,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %s = f32[1,16]{1,0} slice(%q)\n}\n\n"
        "%outer () -> f32[1,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  %s = f32[1,16]{1,0} fusion(%q), kind=kLoop, calls=%inner\n"
        "  ROOT %n = f32[1,16]{1,0} negate(%s)\n}\n\n"
    )
    cost = _entry("%f = f32[1,16]{1,0} fusion(%p0), kind=kLoop, calls=%outer", more=more)
    assert cost.hbm_bytes == 2 * 64


TILED = (
    "%tiled (q: f32[8,16]) -> f32[8,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
    "  ROOT %c = f32[8,16]{1,0} copy(%q)\n}\n\n"
)
"""A fusion as those in which a tpu7x says that a value is tiled otherwise inside of another one."""


def test_a_slice_of_what_a_fusion_tiles_otherwise():
    """Of an array that an inner fusion only turns, the slice is read that is taken then."""
    more = TILED + (
        "%outer (p: f32[8,16]) -> f32[1,16] {\n  %p = f32[8,16]{1,0} parameter(0)\n"
        "  %t = f32[8,16]{1,0} fusion(%p), kind=kLoop, calls=%tiled\n"
        "  %s = f32[1,16]{1,0} slice(%t)\n  ROOT %n = f32[1,16]{1,0} negate(%s)\n}\n\n"
    )
    cost = _entry("%f = f32[1,16]{1,0} fusion(%p0), kind=kLoop, calls=%outer", more=more)
    assert cost.hbm_bytes == 2 * 64


@pytest.mark.parametrize(
    ("attribute", "nbytes"),
    [(", output_to_operand_aliasing={{}: (0, {})}", 64), ("", BIG_BYTES + BIG_BYTES)],
)
def test_an_update_of_what_a_fusion_tiles_otherwise(attribute, nbytes):
    """What is updated in its own place is not moved, and what was copied before is."""
    more = TILED + (
        "%outer (p: f32[8,16], u: f32[]) -> f32[8,16] {\n  %p = f32[8,16]{1,0} parameter(0)\n"
        f"  %t = f32[8,16]{{1,0}} fusion(%p), kind=kLoop{attribute}, calls=%tiled\n"
        "  %u = f32[] parameter(1)\n  %b = f32[1,16]{1,0} broadcast(%u)\n"
        "  ROOT %d = f32[8,16]{1,0} dynamic-update-slice(%t, %b)\n}\n\n"
    )
    line = "%f = f32[8,16]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%outer"
    cost = _entry(line, more=more, parameters=("f32[8,16]{1,0}", "f32[]"))
    assert cost.hbm_bytes == nbytes + 4


def test_asynchronous_computations_count_once():
    """What is started apart is counted inside, and not at its start or end again."""
    more = (
        "%apart (q: f32[8,16]) -> f32[8,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %n = f32[8,16]{1,0} negate(%q)\n}\n\n"
    )
    for start in ("async-start(%p0), calls=%apart", "call-start(%p0), to_apply=%apart"):
        cost = _entry(
            f"%s = ((f32[8,16]), f32[8,16], u32[]) {start}",
            "%u = ((f32[8,16]), f32[8,16], u32[]) async-update(%s), calls=%apart",
            "%d = f32[8,16]{1,0} async-done(%u), calls=%apart",
            more=more,
        )
        assert cost.hbm_bytes == 2 * BIG_BYTES


def test_fusions_that_never_end():
    """Texts whose fusions hold themselves, two by two or two thousand deep end in a number."""
    circle = (
        "%f0 () -> f32[8,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %s = f32[8,16]{1,0} fusion(%q), kind=kLoop, calls=%f0\n}\n\n"
    )
    call = "%f = f32[8,16]{1,0} fusion(%p0), kind=kLoop, calls=%f0"
    assert _entry(call, more=circle).hbm_bytes == 2 * BIG_BYTES
    for depth, calls in itertools.product((40, 2000), (1, 2)):
        levels = [
            f"%f{i} () -> f32[8,16] {{\n  %q = f32[8,16]{{1,0}} parameter(0)\n"
            + "".join(
                f"  %s{j} = f32[8,16]{{1,0}} fusion(%q), kind=kLoop, calls=%f{i + 1}\n"
                for j in range(calls)
            )
            + f"  ROOT %a = f32[8,16]{{1,0}} add(%s0, %s{calls - 1})\n}}\n\n"
            for i in range(depth)
        ]
        leaf = f"%f{depth} () -> f32[8,16] {{\n  ROOT %q = f32[8,16]{{1,0}} parameter(0)\n}}\n\n"
        assert _entry(call, more=leaf + "".join(levels)).hbm_bytes <= 2 * BIG_BYTES


def test_casts_without_end():
    """A thousand casts after each other are followed to the slice behind them."""
    lines = ["%a0 = BIG bitcast(%p0)", *[f"%a{i} = BIG bitcast(%a{i - 1})" for i in range(1, 2000)]]
    lines = [line.replace("BIG", BIG) for line in lines]
    last = f"%s = {ROW} slice(%a1999)"
    assert _fusion(*lines, last, parameters=[BIG], result=ROW) == 2 * 64


def test_memory_on_the_chip_is_no_main_memory():
    """On TPU, an argument that is kept on the chip between two products is read once."""

    def f(x, w):
        return jnp.tanh(x @ w) @ w

    cost = _cost_on("tpu", f, array(256, 256), array(256, 256))
    assert cost.hbm_bytes <= 3 * 256 * 256 * 4


def test_nothing_costs_nothing():
    """An empty text and an empty program have no cost."""
    assert _cost_of("") == Cost.zeros()
    assert _cost_of("HloModule empty\n") == Cost.zeros()
    assert _cost_on("cpu", lambda: ()) == Cost.zeros()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("f32[8,16]{1,0}", 512),
        ("f32[]", 4),
        ("f32[8,16]{1,0:T(8,128)}", 512),
        ("f32[8,16]{1,0:T(8,128)S(1)}", 0),
        ("f32[8,16]{1,0:T(8,128)(2,1)S(5)}", 0),
        ("(f32[2]{0:S(1)}, /*index=1*/bf16[4]{0}, (s8[3], pred[]))", 12),
        ("token[]", 0),
        ("f32[0,16]{1,0}", 0),
        ("s4[3]{0:E(4)}", 2),
        ("f32[<=8,16]{1,0}", 512),
    ],
)
def test_sizes_in_main_memory(text, nbytes):
    """Arrays in other memories count nothing, tuples the sum of theirs."""
    assert hlo_cost.hbm_size(text) == nbytes


def test_a_sharded_step_by_hand():
    """Data parallel on 4 x 2: the batch and its products divide by 4, the weights by 2."""
    on = programs.target("cpu")
    batch, width, hidden = 64, 128, 256

    def step(w, x):
        return jax.grad(lambda v: jnp.sum(jnp.sin(x @ v)))(w)

    ins, outs = (P(None, "model"), P("data")), P(None, "model")
    text = on.jit(step, ins, outs, array(width, hidden), array(batch, width)).compile().as_text()
    assert _cost_of(text).flops == 2 * 2 * (batch // 4) * width * (hidden // 2)
    assert NamedSharding(on.mesh, outs).shard_shape((width, hidden)) == (width, hidden // 2)
