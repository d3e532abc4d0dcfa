"""The programs whose time on hardware is published, with small sizes."""

from benchmarks.published import operations, runs
from benchmarks.published.model import Model, training
from benchmarks.published.operations import Operation
from hardware import needs_libtpu
import jax
import numpy as np
import pytest

import spmd


def made(one):
    """What a program gives for random numbers, and these."""
    function, shapes = operations._program(one)
    rng = np.random.default_rng(0)
    args = [
        rng.integers(0, one.w[-1], s.shape).astype(s.dtype)
        if s.dtype == np.int32
        else jax.numpy.asarray(rng.standard_normal(s.shape), s.dtype)
        for s in shapes
    ]
    return np.asarray(function(*args), np.float64), [np.asarray(a, np.float64) for a in args]


def operation(kind, x, **more):
    """One without a time."""
    return Operation(kind=kind, x=x, milliseconds={}, **more)


def test_a_cross_entropy():
    """Against NumPy, in what bfloat16 leaves of it."""
    found, (x, w, labels) = made(operation("cross_entropy", (16, 32), w=(32, 64)))
    logits = x @ w
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert found == pytest.approx(-logs[np.arange(16), labels.astype(int)].mean(), rel=0.02)


@pytest.mark.parametrize("x", [(8, 16), (2, 8, 16)])
def test_a_gated_unit(x):
    """The first half of the weights makes the gate."""
    found, (x, w) = made(operation("gated", x, w=(16, 2, 4), activation="sigmoid"))
    wanted = x @ w[:, 1] / (1 + np.exp(-x @ w[:, 0]))
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("axis", [0, -1])
def test_a_normalization(axis):
    """To mean 0 and variance 1, then scaled and moved."""
    found, (x, scale, offset) = made(operation("normalization", (8, 6), axis=axis))
    wanted = (x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True)
    side = (-1, 1) if axis == 0 else (1, -1)
    wanted = wanted * scale.reshape(side) + offset.reshape(side)
    np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05)


def test_every_operation_has_a_time_on_each_chip():
    """Those are above what the chip's peak allows."""
    every = [*operations.read()]
    assert len(every) == 54
    for one in every:
        assert {*one.milliseconds} == {*operations.SLICES}
        for chip, milliseconds in one.milliseconds.items():
            assert milliseconds * 1e-3 > one.flops / spmd.inspection.CHIPS[chip].flops


def test_layers_with_windows_are_as_many_as_without():
    """A cycle of windows changes which words are looked at, and none of the FLOPs that count."""
    sizes = {"emb_dim": 64, "num_heads": 4, "mlp_dim": 128, "num_layers": 8}
    plain = Model.of({**sizes, "per_device_batch_size": 1})
    local = Model.of({**sizes, "per_device_batch_size": 1, "windows": [512, 0]})
    assert local.windows == (512, 0)
    assert local.flops() == plain.flops()
    # Half of attention: 4 FLOPs for each pair of words, layer and element of the heads, thrice.
    halved = Model.of({**sizes, "per_device_batch_size": 1, "halved": True})
    attention = 3 * 4 * 2048**2 * 8 * 4 * 128
    assert plain.flops() - halved.flops() == attention / 2


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["22B v4-128", "128B v5e-256", "7B tpu7x-128"])
def test_a_run_is_lowered(name):
    """Its step, with two cycles of its layers and small matrices, for four devices."""
    run = next(one for one in runs.read() if one.name == name)
    settings = {k: v for k, v in run.model.items() if k != "scale"}
    settings |= {
        "emb_dim": 256, "num_heads": 4, "mlp_dim": 512, "vocab_size": 512,
        "num_layers": 2 * len(run.model.get("windows", [0])),
    }  # fmt: skip
    mesh = spmd.topology("v5e:2x2", {"fsdp": -1, "tensor": min(run.tensor, 2)})
    step, args = training(Model.of(settings), mesh.shape)
    with mesh, jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert "splash" in step.lower(*args).as_text()
