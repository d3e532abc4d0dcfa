"""Programs of other platforms than the CPU, whose operands JAX's own callbacks bring to the host.

On the CPU that path is taken by force; with `SPMD_TEST_PLATFORM=cuda pytest -m gpu` it is the only
one, and the tests below run on the GPU as they are.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import P, host_callback as hcb
from spmd.host_callback import _lowering

ON_CPU = jax.default_backend() == "cpu"

# Where a GPU is, these tests are the ones to run; elsewhere they run with the path forced.
pytestmark = [] if ON_CPU else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """Lets programs for the CPU be lowered as those of other platforms are."""
    monkeypatch.setattr(_lowering, "NATIVE", ())


def collect():
    """A tap and the list that it fills."""
    seen = []

    def tap(value, transforms, **more):
        seen.append((value, transforms, more))

    return tap, seen


def test_the_path_is_that_of_jax():
    """The program calls JAX's own handler, not ours."""
    tap, _ = collect()
    text = jax.jit(lambda x: hcb.id_tap(tap, x)).lower(1.0).as_text()
    assert "spmd_host_callback" not in text
    assert "callback" in text


def test_values_order_and_device():
    """Taps of a loop arrive in order, as NumPy arrays in their tree, with the device."""
    tap, seen = collect()

    @jax.jit
    def program(x):
        def step(x, i):
            hcb.id_tap(tap, {"i": i, "x": x}, tap_with_device=True)
            return x + 1, None

        return lax.scan(step, x, jnp.arange(5))[0]

    assert program(jnp.float32(2)) == 7
    hcb.barrier_wait()
    assert [int(value["i"]) for value, _, _ in seen] == [*range(5)]
    assert [float(value["x"]) for value, _, _ in seen] == [2, 3, 4, 5, 6]
    assert all(type(v) is np.ndarray for value, _, _ in seen for v in value.values())
    assert {more["device"] for _, _, more in seen} == {jax.local_devices()[0]}


def test_transformations():
    """`vmap` makes one call, and `grad` taps the primal value."""
    tap, seen = collect()

    def program(x):
        return hcb.id_tap(tap, x * x)

    assert jax.jit(jax.vmap(program))(jnp.arange(3.0)).tolist() == [0, 1, 4]
    assert jax.jit(jax.grad(program))(3.0) == 6
    hcb.barrier_wait()
    (batched, transforms, _), (primal, none, _) = seen
    assert batched.tolist() == [0, 1, 4]
    assert transforms == (("batch", {"batch_dims": (0,)}),)
    assert primal == 9
    assert none == ()


def test_call():
    """A call returns what the host function returns."""
    program = jax.jit(lambda x: hcb.call(np.sin, x, result_shape=x) + 1)
    np.testing.assert_allclose(program(jnp.arange(3.0)), np.sin(np.arange(3.0)) + 1, rtol=1e-6)


def test_call_that_raises():
    """The error names the function, at the result and at the barrier; later programs run."""

    def broken(x):
        raise OSError("no such file")

    with pytest.raises(RuntimeError, match=r"call of `broken` raised OSError: no such file"):
        jax.block_until_ready(jax.jit(lambda x: hcb.call(broken, x, result_shape=x))(1.0))
    with pytest.raises(hcb.CallbackException) as caught:
        hcb.barrier_wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert jax.jit(lambda x: hcb.call(np.sin, x, result_shape=x))(0.0) == 0


def test_tap_that_raises():
    """An error of a tap stops nothing."""

    def fragile(value, transforms):
        if value == 1:
            raise OSError("full")
        seen.append(int(value))

    seen = []
    jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: hcb.id_tap(fragile, i, result=x), x))(0)
    with pytest.raises(hcb.CallbackException, match="full"):
        hcb.barrier_wait()
    assert seen == [0, 2]


def test_each_device_of_a_shard_map(row):
    """Inside of `shard_map` each device calls with its own values, and says which it is."""
    tap, seen = collect()
    local = lambda x: hcb.id_tap(tap, x, tap_with_device=True)  # noqa: E731 - one expression
    program = jax.jit(jax.shard_map(local, mesh=row, in_specs=P("x"), out_specs=P("x")))
    x = np.arange(2.0 * row.size)
    np.testing.assert_array_equal(program(x), x)
    hcb.barrier_wait()
    found = {more["device"]: value.tolist() for value, _, more in seen}
    assert found == {d: [2 * i, 2 * i + 1] for i, d in enumerate(row.devices.flat)}


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_whole_operand(row):
    """A program over a mesh calls once, with everything; its results reach all devices."""
    tap, seen = collect()

    def program(x):
        hcb.id_tap(tap, x)
        return hcb.call(np.negative, x, result_shape=x)

    x = np.arange(2.0 * row.size, dtype=np.float32)
    out = jax.jit(program)(jax.device_put(x, NamedSharding(row, P("x"))))
    np.testing.assert_array_equal(out, -x)
    hcb.barrier_wait()
    assert [value.tolist() for value, _, _ in seen] == [x.tolist()]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"per_shard": True},
            "id_tap cannot reach `tap` from a program for {platform} shard by shard.\n"
            "  given     per_shard=True\n"
            "  fix       wrap it in jax.shard_map, where each device calls by itself",
        ),
        (
            {"device_index": 1},
            "id_tap cannot reach `tap` from a program for {platform} from device 1.\n"
            "  given     device_index=1\n"
            "  expected  device_index=0",
        ),
    ],
)
def test_what_cannot_be_kept(row, options, text):
    """What JAX's callbacks cannot do is said when the program is lowered."""
    tap, _ = collect()
    x = jax.device_put(np.arange(2.0 * row.size), NamedSharding(row, P("x")))
    with pytest.raises(spmd.OptionError) as caught:
        jax.jit(lambda x: hcb.id_tap(tap, x, **options)).lower(x)
    assert str(caught.value) == text.format(platform=jax.default_backend().replace("gpu", "cuda"))


def test_a_full_queue_pauses_the_program():
    """Where one more does not fit, the program waits; nothing is lost, and the order stays."""
    tap, seen = collect()
    hcb.configure(max_queue_bytes=8)
    try:
        x = jnp.zeros(4)
        jax.jit(lambda x: lax.fori_loop(0, 9, lambda i, x: hcb.id_tap(tap, x) + 1, x))(x)
        hcb.barrier_wait()
    finally:
        hcb.configure()
    assert [value[0] for value, _, _ in seen] == [*range(9)]
