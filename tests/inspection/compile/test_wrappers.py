"""Programs with references, and functions of Flax and Equinox, have all that one of JAX has."""

import equinox as eqx
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import pytest

import spmd
from spmd.testing import assert_collectives

BATCH, D, H = 16, 8, 12


@pytest.fixture(name="mesh")
def _mesh():
    return Mesh(jax.devices()[:4], ("data",))


def _on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


# References


@jax.jit
def add_sum(total, x):
    """Adds the sum over the batch to a reference; the one output is not that."""
    total[...] += x.sum(0)
    return x * 2


@pytest.fixture(name="reference")
def _reference(mesh):
    """A whole reference of D numbers, and a batch that is split over 4 devices."""
    total = jax.new_ref(jax.device_put(jnp.zeros(D), _on(mesh)))
    return total, jax.device_put(jnp.ones((BATCH, D)), _on(mesh, "data"))


def test_a_reference_as_an_argument(reference):
    """The one exchange is the sum for the reference; both arguments have name and sharding."""
    for f, args in (
        (add_sum, reference),
        (add_sum.trace(*reference), ()),
        (add_sum.lower(*reference), ()),
        (add_sum.lower(*reference).compile(), ()),
    ):
        found = spmd.report(f, *args)
        (one,) = found.collectives
        assert (one.kind, one.mesh_axes, one.payload_bytes) == ("all-reduce", ("data",), D * 4)
        assert [(a.path, a.shape, a.sharding) for a in found.arguments] == [
            ("args[0]", (D,), "P()"),
            ("args[1]", (BATCH, D), "P('data')"),
        ]
    assert_collectives(add_sum, *reference, only=["all-reduce@data"])


def test_a_reference_before_the_compile(reference):
    """`preview`, `why` and `fits` take one, too; `why` counts arguments that JAX does not name."""
    (one,) = spmd.preview(add_sum, *reference).collectives
    assert (one.kind, one.mesh_axes, one.payload_bytes) == ("all-reduce", ("data",), D * 4)
    (value,) = spmd.why(add_sum, "argument 1", *reference).values
    assert (value.shape, [*value.spec]) == ((BATCH, D), [("data",), ()])
    fit = spmd.fits(add_sum, *reference, budget="1MB")
    # The whole reference, a quarter of the batch, and as much for what is given back.
    assert fit.fits
    assert fit.memory.arguments == D * 4 + BATCH // 4 * D * 4


def test_a_reference_for_other_hardware(reference, mesh):
    """A reference is described for another mesh as an array is, split over the same axes."""
    elsewhere = spmd.Mesh(jax.devices()[4:8], ("data",))
    f = spmd.pjit(lambda total, x: add_sum(total, x), mesh=elsewhere)
    fit = spmd.fits(f, *reference, mesh=elsewhere, budget="1MB")
    assert fit.memory.arguments == D * 4 + BATCH // 4 * D * 4


# Other libraries


@nnx.jit
def nnx_step(model, x):
    """The gradient of a layer of Flax."""
    return nnx.grad(lambda model: jnp.sum(jnp.tanh(model(x))))(model)


@eqx.filter_jit
def eqx_step(model, x):
    """The gradient of a layer of Equinox."""
    return eqx.filter_grad(lambda model: jnp.sum(jnp.tanh(jax.vmap(model)(x))))(model)


@pytest.fixture(name="call", params=["nnx", "eqx"])
def _call(request, mesh):
    """A function with its arguments: a whole layer, and a batch that is split."""
    x = jax.device_put(jnp.ones((BATCH, D)), _on(mesh, "data"))
    if request.param == "nnx":
        model = nnx.Linear(D, H, rngs=nnx.Rngs(0))
        nnx.update(model, jax.device_put(nnx.state(model), _on(mesh)))
        return nnx_step, (model, x)
    model = eqx.filter_shard(eqx.nn.Linear(D, H, key=jax.random.key(0)), _on(mesh))
    return eqx_step, (model, x)


def _summed(report):
    """Bytes that are summed over the batch, which is all that is sent."""
    assert {(one.kind, one.mesh_axes) for one in report.collectives} == {("all-reduce", ("data",))}
    assert {one.source.function.rpartition(".")[2] for one in report.collectives} <= {
        "<lambda>", "nnx_step", "eqx_step", "gradient",
    }  # fmt: skip
    return report.total.payload_bytes


@pytest.mark.few(1)
def test_functions_and_stages_of_other_libraries(call):
    """The gradients of weights and of the bias are summed, whatever stage the function is at."""
    f, args = call
    grads = (D * H + H) * 4
    for given in (f, f.lower(*args), f.lower(*args).compile()):
        found = spmd.report(given, *(args if given is f else ()))
        assert found.name == ("nnx_step" if f is nnx_step else "eqx_step")
        assert _summed(found) == grads
    assert_collectives(f, *args, only=["all-reduce@data"], max_bytes=grads * 3 // 2)
    assert _summed(spmd.preview(f, *args)) == grads
    assert _summed(spmd.preview(f.lower(*args))) == grads


@pytest.mark.slow
def test_a_trace_of_nnx(mesh):
    """`nnx.jit(f).trace()` is a stage as well."""
    model = nnx.Linear(D, H, rngs=nnx.Rngs(0))
    traced = nnx_step.trace(model, jnp.ones((BATCH, D)))
    assert spmd.report(traced).name == "nnx_step"


class Net(nnx.Module):
    """A model whose gradient is a method."""

    def __init__(self):
        self.inner = nnx.Linear(D, H, rngs=nnx.Rngs(0))

    @nnx.jit
    def gradient(self, x):
        """The gradient of its only layer."""
        return nnx.grad(lambda net: jnp.sum(jnp.tanh(net.inner(x))))(self)


class Module(eqx.Module):
    """The same of Equinox."""

    inner: eqx.nn.Linear

    @eqx.filter_jit
    def gradient(self, x):
        """The gradient of its only layer."""
        return eqx.filter_grad(lambda net: jnp.sum(jnp.tanh(jax.vmap(net.inner)(x))))(self)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Net, lambda: Module(eqx.nn.Linear(D, H, key=jax.random.key(0)))])
def test_methods_of_other_libraries(mesh, make):
    """A jitted method is reported with its object."""
    x = jax.device_put(jnp.ones((BATCH, D)), _on(mesh, "data"))
    found = spmd.report(make().gradient, x)
    assert (found.name, _summed(found)) == ("gradient", (D * H + H) * 4)


@pytest.mark.slow
def test_fits_and_why_of_other_libraries(call):
    """The plan has the weights and a part of the batch, and the gradients are found by name."""
    f, args = call
    fit = spmd.fits(f, *args, budget="1MB")
    assert fit.fits
    assert fit.memory.arguments == (D * H + H + BATCH // 4 * D) * 4
    shapes = {value.shape for value in spmd.why(f, "result", *args).values}
    assert {(H,), (D, H) if f is nnx_step else (H, D)} <= shapes


@pytest.mark.slow
def test_compiled_stages_are_refused_where_a_compiled_one_of_jax_is(call):
    """`preview` and `why` are for what is not compiled, arguments for what has none yet."""
    f, args = call
    compiled = f.lower(*args).compile()
    with pytest.raises(spmd.ReportError, match="preview is for what is not compiled yet"):
        spmd.preview(compiled)
    with pytest.raises(spmd.ReportError, match="compiled"):
        spmd.why(compiled, "result")
    with pytest.raises(TypeError, match="takes no arguments for a Compiled, which has them"):
        spmd.report(compiled, *args)
