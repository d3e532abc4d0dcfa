"""FLOPs of a program as it was written: against executions on ones, and sums by hand."""

import functools

from hardware import needs_libtpu
import jax
from jax import lax
from jax.experimental import pallas
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.inspection.records.report import Shape
from spmd.inspection.shardy.flops import Work, device_work, kernel_work, model_work
from spmd.inspection.shardy.passes import module_of
from spmd.inspection.shardy.propagation import propagate
from spmd.inspection.timing.kernels import known_flops

N = 8
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
#: FLOPs of a product of two of these.
ONE = 2 * N**3


def array(*dims, dtype=jnp.float32):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(dims, dtype)


def work(f, *args):
    """What a function computes; on one device as much as in all."""
    lowered = (f if hasattr(f, "lower") else jax.jit(f)).lower(*args)
    module = module_of(lowered, subject="test")
    found = model_work(module)
    if "rematted" not in lowered.as_text(debug_info=True):
        assert device_work(propagate(module, subject="test", steps=False)) == found
    return found


def products(f, *args):
    """How many products of squares a function has."""
    found = work(f, *args)
    assert not found.loops
    assert not found.left_out
    assert found.flops % ONE == 0
    return found.flops // ONE


# One product

DOTS = {
    "matrices": (lambda x, y: x @ y, (5, 7), (7, 3)),
    "vectors": (jnp.dot, (7,), (7,)),
    "all with all": (lambda x, y: lax.dot_general(x, y, (((), ()), ((), ()))), (5,), (3,)),
    "batches": (functools.partial(jnp.einsum, "bij,bjk->bik"), (4, 5, 7), (4, 7, 3)),
    "two sums": (functools.partial(jnp.einsum, "iabj,jbak->ik"), (5, 2, 3, 7), (7, 3, 2, 3)),
    "mapped": (jax.vmap(lambda x, y: x @ y, (0, None)), (4, 5, 7), (7, 3)),
}


@pytest.mark.parametrize("name", DOTS)
def test_products_of_matrices(name):
    """A product of ones sums to its number of terms, each of which is two FLOPs."""
    f, left, right = DOTS[name]
    terms = float(jnp.sum(f(jnp.ones(left), jnp.ones(right))))
    assert work(f, array(*left), array(*right)) == Work(2 * int(terms))


CONVOLUTIONS = {
    "1d": ((4, 6, 20), (8, 6, 5), {}),
    "padded and strided": ((4, 6, 20), (8, 6, 5), {"window_strides": (2,), "padding": [(2, 3)]}),
    "dilated input": ((4, 6, 20), (8, 6, 5), {"lhs_dilation": (3,), "padding": [(2, 2)]}),
    "dilated kernel": ((4, 6, 20), (8, 6, 5), {"rhs_dilation": (2,), "padding": [(2, 2)]}),
    "2d": (
        (4, 6, 12, 9), (8, 6, 3, 4), {"window_strides": (2, 1), "padding": [(1, 1), (2, 0)]},
    ),
    "cut": ((4, 6, 12, 9), (8, 6, 3, 4), {"padding": [(-1, 1), (2, -2)]}),
    "groups": ((4, 6, 20), (9, 2, 3), {"feature_group_count": 3, "padding": [(1, 1)]}),
    "batch groups": ((4, 6, 20), (8, 6, 3), {"batch_group_count": 2, "padding": [(1, 1)]}),
    "last features": (
        (4, 12, 9, 6), (3, 4, 6, 8),
        {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    """A convolution of ones sums to the pairs of kernel and input: what is padded is no work."""
    inputs, kernel, options = CONVOLUTIONS[name]
    rank = len(inputs) - 2
    options = {"window_strides": (1,) * rank, "padding": [(0, 0)] * rank, **options}
    f = functools.partial(lax.conv_general_dilated, **options)
    terms = float(jnp.sum(f(jnp.ones(inputs), jnp.ones(kernel))))
    assert work(f, array(*inputs), array(*kernel)) == Work(2 * int(terms))


def test_the_gradient_of_a_strided_convolution():
    """Each of the two backward convolutions meets the pairs of the forward one, and no zeros."""

    def loss(x, w):
        return jnp.sum(lax.conv_general_dilated(x, w, (2, 2), "VALID") ** 2)

    args = array(2, 3, 9, 9), array(5, 3, 3, 3)
    forward = 2 * 2 * 5 * 3 * (4 * 4) * 9
    assert work(jax.grad(loss, argnums=(0, 1)), *args) == Work(3 * forward)


def test_complex_numbers():
    """A multiplication of complex numbers is four of real ones."""
    args = (array(N, N, dtype=jnp.complex64),) * 2
    assert work(lambda x, y: x @ y, *args) == Work(4 * ONE)


@pytest.mark.slow
@needs_libtpu
def test_ragged_products():
    """Each row meets the weights of its own group alone; likewise each term of a ragged sum."""
    mesh = spmd.topology("v5e:2x2", {"x": 4})
    sizes = array(4, dtype=jnp.int32)
    jitted = functools.partial(jax.jit, in_shardings=NamedSharding(mesh, P()))
    assert work(jitted(lax.ragged_dot), array(64, 32), array(4, 32, 16), sizes) == Work(
        2 * 64 * 32 * 16
    )
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    f = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    assert work(jitted(f), array(64, 32), array(64, 16), sizes) == Work(2 * 64 * 32 * 16)


# Loops, branches and calls


def test_loops():
    """A loop counts as often as it runs, in a loop as often as both together, never run not."""

    def loop(count):
        return lambda x: lax.fori_loop(0, count, lambda i, c: c @ c, x)

    assert products(loop(7), SQUARE) == 7
    assert products(loop(0), SQUARE) == 0
    assert products(lambda x: lax.fori_loop(0, 3, lambda i, c: loop(5)(c) @ x, x), SQUARE) == 18
    layers = array(4, N, N)
    assert products(lambda x, w: lax.scan(lambda c, a: (c @ a, None), x, w)[0], SQUARE, layers) == 4


def test_loops_that_the_data_end():
    """Products in a loop without a known end count once, and are said to; without, it is known."""

    def until(step):
        return lambda x: lax.while_loop(lambda c: jnp.sum(c) < 10, step, x)

    assert work(until(lambda c: c @ c), SQUARE) == Work(ONE, loops=True)
    assert products(until(lambda c: c + 1), SQUARE) == 0
    assert products(lambda x: until(lambda c: c + 1)(x) @ x, SQUARE) == 1


def test_one_branch_runs():
    """The branch with most counts, also in a loop and in another branch."""

    def once(x):
        return x @ x

    def twice(x):
        return x @ x @ x

    def branch(x):
        return lax.cond(x[0, 0] > 0, twice, once, x)

    assert products(branch, SQUARE) == 2
    assert products(lambda x: lax.cond(x[0, 0] > 0, once, once, x), SQUARE) == 1
    number = array(dtype=jnp.int32)
    assert products(lambda i, x: lax.switch(i, [once, lambda x: x, branch], x), number, SQUARE) == 2
    assert products(lambda x: lax.fori_loop(0, 5, lambda i, c: branch(c), x), SQUARE) == 10


def test_a_branch_that_is_not_known():
    """A loop without a known end counts as unknown, also in the branch with less."""

    def forever(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c @ c, x)

    found = work(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, forever, x), SQUARE)
    assert found == Work(2 * ONE, loops=True)


def test_functions_in_functions():
    """A jitted function that is called twice counts twice, at any depth."""

    @jax.jit
    def square(x):
        return x @ x

    @jax.jit
    def fourth(x):
        return square(square(x))

    assert products(lambda x: fourth(x) + fourth(x + 1) + square(x), SQUARE) == 5


# What is computed again


def layer(x, w):
    """Two products, of which the second's result is needed no more."""
    return jnp.tanh(jnp.tanh(x @ w) @ w)


POLICIES = {
    "nothing again": lambda f: f,
    "all again": jax.checkpoint,
    "products kept": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    ),
    "in a loop": functools.partial(jax.checkpoint, prevent_cse=False),
    "twice": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "a function of its own": lambda f: jax.checkpoint(jax.jit(f)),
    "around a function": lambda f: jax.jit(jax.checkpoint(f)),
    "a function of spmd": lambda f: jax.checkpoint(spmd.pjit(f, mesh=_one_device())),
}


@functools.cache
def _one_device():
    return spmd.Mesh(np.array(jax.devices()[:1]), ("x",))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_computed_again_is_left_out(name):
    """Whatever is saved, a gradient has three times the products of the forward pass."""
    again = POLICIES[name]

    def scanned(ws, x):
        return jnp.sum(lax.scan(lambda c, w: (again(layer)(c, w), None), x, ws)[0] ** 2)

    def unrolled(ws, x):
        for i in range(3):
            x = again(layer)(x, ws[i])
        return jnp.sum(x**2)

    for loss in (scanned, unrolled):
        assert products(jax.grad(loss, argnums=(0, 1)), array(3, N, N), SQUARE) == 3 * 2 * 3


def test_checkpoints_around_checkpoints():
    """A checkpoint of layers, each a checkpoint, computes all again twice: none of it counts."""

    def loss(ws, x):
        def layers(x, ws):
            return lax.scan(lambda c, w: (jax.checkpoint(layer)(c, w), None), x, ws)[0]

        return jnp.sum(jax.checkpoint(layers)(x, ws) ** 2)

    assert products(jax.grad(loss, argnums=(0, 1)), array(4, N, N), SQUARE) == 3 * 2 * 4


# Parts


def test_a_shard_map_counts_for_each_part(mesh):
    """What stands in it is of one device: it counts once for each part that its specs make."""

    def mlp(x, up, down):
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    specs = P("data"), P(None, "model"), P("model")
    args = array(32, 24), array(24, 40), array(40, 24)
    mapped = jax.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P("data"))
    both = 2 * 32 * 24 * 40 * 2
    found = model_work(module_of(jax.jit(mapped).lower(*args), subject="test"))
    assert found == Work(both)

    def loss(*args):
        return jnp.sum(mapped(*args) ** 2)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args)
    assert model_work(module_of(gradient, subject="test")) == Work(3 * both)
    propagation = propagate(module_of(gradient, subject="test"), subject="test", steps=False)
    assert device_work(propagation) == Work(3 * both // 8)


def test_an_axis_that_a_shard_map_does_not_split(mesh):
    """What all devices along an axis repeat is no further work of the program."""
    mapped = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    lowered = jax.jit(mapped).lower(array(32, 24), array(24, 40))
    whole = 2 * 32 * 24 * 40
    assert model_work(module_of(lowered, subject="test")) == Work(whole)
    propagation = propagate(module_of(lowered, subject="test"), subject="test", steps=False)
    assert device_work(propagation) == Work(whole // 4)


def test_axes_that_a_shard_map_leaves_to_the_partitioner(mesh):
    """Within `axis_names` the code is by hand, over other axes the partitioner splits it."""
    mapped = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"),
        axis_names={"data"},
    )  # fmt: skip
    placed = (NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model")))
    lowered = jax.jit(mapped, in_shardings=placed).lower(array(32, 24), array(24, 40))
    whole = 2 * 32 * 24 * 40
    assert model_work(module_of(lowered, subject="test")) == Work(whole)
    propagation = propagate(module_of(lowered, subject="test"), subject="test", steps=False)
    assert device_work(propagation) == Work(whole // 8)


def test_a_device_has_its_part(mesh):
    """Products are split over the axes of their operands, those that are summed over too."""
    f = spmd.pjit(lambda x, w: x @ w, in_axis_resources=(P("data", "model"), P("model")), mesh=mesh)
    lowered = f.lower(array(32, 24), array(24, 40))
    propagation = propagate(module_of(lowered, subject="test"), subject="test", steps=False)
    assert device_work(propagation) == Work(2 * 32 * 24 * 40 // 8)


# Kernels written by hand


def _kernel(estimate):
    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2.0

    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(double, out_shape=shape, cost_estimate=estimate, name="doubled")(
            x
        )

    return call


@pytest.mark.few(1)
@needs_libtpu
@pytest.mark.parametrize("told", [True, False])
def test_kernels(told):
    """A kernel counts what its author says, in each part; without that it is named."""
    mesh = spmd.topology("v5e:2x2", {"data": 2, "model": 2})
    estimate = pallas.CostEstimate(flops=12345, bytes_accessed=1, transcendentals=0)
    kernel = _kernel(estimate if told else None)
    mapped = jax.shard_map(
        kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )

    def f(x, w):
        return lax.fori_loop(0, 3, lambda i, c: mapped(c), x) @ w

    placed = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    lowered = jax.jit(f, in_shardings=placed).lower(array(512, 256), array(256, 128))
    product = 2 * 512 * 256 * 128
    module = module_of(lowered, subject="test")
    propagation = propagate(module, subject="test", steps=False)
    whole, part = model_work(module), device_work(propagation)
    if told:
        assert whole == Work(product + 3 * 2 * 12345)
        assert part == Work(product // 2 + 3 * 12345)
        assert kernel_work(propagation) == Work(3 * 12345)
    else:
        assert kernel_work(propagation) == part._replace(flops=0)
        assert whole == Work(product, left_out=("doubled (tpu_custom_call)",))
        assert part == Work(product // 2, left_out=("doubled (tpu_custom_call)",))


def test_what_attention_computes_again():
    """Of seven products of flash attention's gradient, four are of the formula."""
    queries = Shape(dtype="bf16", dims=(2, 4, 512, 128))
    operands, one = (queries,) * 4, 2 * 2 * 4 * 512 * 512 * 128

    def count(name, results, **options):
        found = known_flops(f"jit(f)/{name}", operands, (queries,) * results, **options)
        return found[0] / one

    assert count("flash_mha_fwd", 1) == count("flash_mha_fwd", 1, again=False) == 2
    executed = count("flash_mha_bwd_dq", 1) + count("flash_mha_bwd_dkv", 2)
    written = count("flash_mha_bwd_dq", 1, again=False) + count("flash_mha_bwd_dkv", 2, again=False)
    assert (executed, written) == (7, 4)
    assert count("flash_mha_bwd_dkv", 3) == 5
    assert count("flash_mha_bwd_dkv", 3, again=False) == 4
