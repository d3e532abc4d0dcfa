"""Recordings: what they hold, when they begin and end, and that nothing else changes."""

import dataclasses
import threading

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import P, host_callback as hcb
from spmd.host_callback import _running


@pytest.fixture(autouse=True)
def nothing_left():
    """Every test closes its recordings."""
    yield
    hcb.barrier_wait()
    assert not _running.observers


def ignore(arg, transforms, **_):
    """A tap."""


def double(x, **_):
    """A function of the host with a result."""
    return 2 * x


def test_fields():
    """A record has the name, the kind, the value in its tree, transforms, device, and no shard."""
    arg = {"x": np.arange(3, dtype=np.int8), "none": None, "pair": (np.float32(1), [])}
    with hcb.record() as taps:
        jax.jit(lambda arg: hcb.id_tap(ignore, arg))(arg)
    (tap,) = taps
    assert (tap.name, tap.kind, tap.transforms, tap.shard) == ("ignore", "id_tap", (), None)
    assert tap.device == jax.devices()[0]
    assert jax.tree.structure(tap.value) == jax.tree.structure(arg)
    assert tap.value["x"].dtype == np.int8
    np.testing.assert_array_equal(tap.value["x"], arg["x"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        tap.name = "other"
    with pytest.raises(ValueError, match="read-only"):
        tap.value["x"][0] = 1


def test_kinds(capsys):
    """Taps, prints, calls, metrics and progress of one program are there in program order."""
    bar = hcb.progress(5, description="steps")

    def f(x):
        hcb.id_print(x, what="x")
        y = hcb.call(double, x, result_shape=x)
        bar(2)
        hcb.metrics_tap("train", {"y": y}, sink=ignore, step=4)
        return hcb.id_tap(ignore, y)

    with hcb.record() as taps:
        assert jax.jit(f)(1.0) == 2.0
    bar.close()
    capsys.readouterr()
    assert [(t.kind, t.name) for t in taps] == [
        ("id_print", "id_print"),
        ("call", "double"),
        ("progress", "steps"),
        ("metrics_tap", "train"),
        ("id_tap", "ignore"),
    ]
    assert taps[3].value == ({"train/y": 2.0}, 4)


def test_transforms():
    """Transformations are recorded as the tap is told them; a call has none."""

    def f(x):
        hcb.id_tap(ignore, (x, 1.0))
        return hcb.call(double, x, result_shape=x, vmap_method="expand_dims")

    with hcb.record() as taps:
        jax.vmap(f)(jnp.arange(3.0))
    assert [t.transforms for t in taps] == [(("batch", {"batch_dims": (0, None)}),), ()]
    np.testing.assert_array_equal(taps[0].value[0], np.arange(3.0))


def test_executed_iterations():
    """What a loop did is there: each iteration, and the branch that ran."""

    def body(c):
        i, x = c
        lax.cond(i % 2 == 0, lambda: hcb.id_tap(ignore, x, result=0), lambda: 0)
        return i + 1, x + 1

    with hcb.record() as taps:
        jax.jit(lambda: lax.while_loop(lambda c: c[0] < 5, body, (0, 10)))()
    assert [int(t.value) for t in taps] == [10, 12, 14]


@pytest.mark.parametrize("by", ["pjit", "shard_map"])
def test_shards(mesh, by):
    """Each device is recorded with what it holds, and under `per_shard` with where that lies."""
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    spec = P("data", "model")

    def f(x):
        return hcb.id_tap(ignore, x, per_shard=True)

    if by == "pjit":
        f = spmd.pjit(f, spec, spec, mesh=mesh)
    else:
        f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    with hcb.record() as taps, mesh:
        f(x)
    assert {t.device for t in taps} == {*jax.devices()}
    assert {t.shard.device for t in taps} == {*jax.devices()}
    for tap in taps:
        i, j = tap.shard.coordinates["data"], tap.shard.coordinates["model"]
        assert mesh.devices[i, j] == tap.device
        np.testing.assert_array_equal(tap.value, x[2 * i : 2 * i + 2, j : j + 1])


def test_device_without_asking(mesh):
    """The device is known though the function does not ask for it, that of an eager call too."""
    last = jax.devices()[-1]
    with hcb.record() as taps:
        hcb.id_tap(ignore, jax.device_put(1.0, last))
        f = spmd.pjit(lambda x: hcb.id_tap(ignore, x, device_index=3), P("data"), None, mesh=mesh)
        f(jnp.ones(8))
    assert [t.device for t in taps] == [last, jax.devices()[3]]


def test_inline():
    """Calls that run in the caller's thread are recorded as well."""
    hcb.configure(inline=True)
    try:
        with hcb.record() as taps:
            hcb.id_tap(ignore, jnp.float32(3))
            assert len(taps) == 1
    finally:
        hcb.configure()
    assert (taps[0].value, taps[0].device) == (3.0, jax.devices()[0])


def test_begins_and_ends():
    """What was started before is not there, though it comes late; what was started inside is."""
    go = threading.Event()
    seen = []

    def slow(arg, transforms):
        assert go.wait(60)
        seen.append(int(arg))

    f = jax.jit(lambda x: hcb.id_tap(slow, x))
    f(1)
    threading.Timer(0.05, go.set).start()
    with hcb.record() as taps:
        assert seen == [1]
        f(2)
        f(3)
    assert [int(t.value) for t in taps] == [2, 3]
    f(4)
    hcb.barrier_wait()
    assert len(taps) == 2
    assert seen == [1, 2, 3, 4]


def test_without_running():
    """With `run=False` taps and prints do not run; calls do, and the program has their results."""
    seen = []

    def f(x):
        hcb.id_tap(lambda arg, transforms: seen.append(arg), x)
        return hcb.call(double, x, result_shape=x)

    with hcb.record(run=False) as taps:
        assert jax.jit(f)(3.0) == 6.0
    assert [t.kind for t in taps] == ["id_tap", "call"]
    assert seen == []


def test_nested():
    """An inner recording holds its part, the outer one all; a tap runs if all of them want it."""
    seen = []
    tap = jax.jit(lambda x: hcb.id_tap(lambda arg, transforms: seen.append(int(arg)), x))
    with hcb.record() as outer:
        tap(1)
        with hcb.record(run=False) as inner:
            tap(2)
        tap(3)
    assert [int(t.value) for t in outer] == [1, 2, 3]
    assert [int(t.value) for t in inner] == [2]
    assert seen == [1, 3]


def test_function_writes_into_its_argument():
    """What a function does to its argument does not show in the record."""

    def spoil(arg, transforms):
        arg[...] = -1

    with hcb.record() as taps:
        hcb.id_tap(spoil, jnp.arange(4))
    np.testing.assert_array_equal(taps[0].value, np.arange(4))


def test_raising_tap():
    """A tap that raises is recorded, and its error comes at the end of the context."""

    def fail(arg, transforms):
        raise OSError("no")

    def run(found):
        with hcb.record() as taps:
            found.append(taps)
            hcb.id_tap(fail, 1.0)
            hcb.id_tap(ignore, 2.0)

    found = []
    with pytest.raises(hcb.CallbackException, match="OSError: no"):
        run(found)
    assert [t.name for t in found[0]] == ["fail", "ignore"]


def test_raising_body():
    """An exception of the body passes; those of taps wait for the next barrier."""

    def fail(arg, transforms):
        raise OSError("no")

    def run():
        with hcb.record():
            hcb.id_tap(fail, 1.0)
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        run()
    with pytest.raises(hcb.CallbackException, match="OSError: no"):
        hcb.barrier_wait()


def test_several_devices_at_once():
    """Per device the order is that of its programs, whatever others do meanwhile."""
    f = jax.jit(lambda x: hcb.id_tap(ignore, x))
    inputs = [[jax.device_put(10 * d.id + i, d) for i in range(10)] for d in jax.devices()]
    with hcb.record() as taps:
        threads = [threading.Thread(target=lambda xs=xs: [f(x) for x in xs]) for xs in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for d in jax.devices():
        mine = [int(t.value) for t in taps if t.device == d]
        assert mine == [10 * d.id + i for i in range(10)]


def test_no_recompilation():
    """Programs that were compiled before are recorded as they are."""
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return hcb.id_tap(ignore, x)

    f(1.0)
    with hcb.record() as taps:
        f(2.0)
    f(3.0)
    assert len(taps) == 1
    assert len(traces) == 1
