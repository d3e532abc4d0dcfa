"""What `calibrate` finds out: on a machine whose speeds are known, and on this one."""

import dataclasses
import json
import math

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.errors import MeshError
from spmd.inspection import CHIPS, Chip, calibrate
from spmd.inspection.compile import calibrate as module

#: A device of a machine that is made up: FLOPs and bytes in a second, and seconds for a message.
FLOPS, COPIED, LINK, HOP = 3e9, 2e8, 5e7, 1e-3


@pytest.fixture(name="small", autouse=True)
def _small(monkeypatch):
    """Arrays that are made at once."""
    monkeypatch.setattr(module, "_LARGE_ON_CPU", 2**20)
    monkeypatch.setattr(module, "_LARGEST", 512)


@pytest.fixture(name="sizes")
def _sizes(monkeypatch):
    """The made-up machine, with the bytes of what each run made: all devices work at once."""
    sizes = []

    def seconds(run, *, queued):
        assert not queued  # these devices share the host's cores
        made = run()
        if isinstance(made, jax.Array):  # gathered: each device receives what it has not
            count = len(made.sharding.device_set)
            assert made.is_fully_replicated
            sizes.append(made.nbytes * count)
            return HOP + made.nbytes * (1 - 1 / count) / LINK
        sizes.append(sum(one.nbytes for one in made))
        assert len({one.sharding for one in made}) == len(made)
        one = made[0]
        if one.ndim == 2:
            x = np.asarray(jax.random.uniform(jax.random.key(0), one.shape, one.dtype, -1, 1))
            np.testing.assert_allclose(one, x @ x, rtol=1e-3, atol=1e-3)
            return 2 * len(one) ** 3 / FLOPS
        assert float(one[0]) == 1.0
        return 2 * one.nbytes / COPIED

    monkeypatch.setattr(module, "_seconds", seconds)
    return sizes


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_a_known_machine_can_do(count, sizes):
    """The figures are those of the machine; of memory, that with which a copy takes as long."""
    said = []
    chip = calibrate(jax.devices()[:count], say=said.append)
    assert chip == Chip(
        name="cpu",
        flops=pytest.approx(FLOPS),
        hbm=pytest.approx(COPIED / 0.83),
        link=pytest.approx(LINK),
        hop=pytest.approx(HOP),
        box=count,
        across=chip.link,
    )
    assert said == ["copies", "products", "exchanges"]
    # On CPU devices share a memory: all of them together take no more than one.
    copied, gathered = sizes[0], sizes[-1]
    assert max(copied, gathered) <= 2**20


@pytest.mark.slow
def test_a_copy_takes_as_long_as_it_was_measured(sizes, mesh):
    """The time of a program that copies is the time that copies took."""
    chip = calibrate(mesh)
    f = spmd.pjit(lambda x: x + 1.0, P(("data", "model")), P(("data", "model")), mesh=mesh)
    struct = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    time = spmd.report(f, struct, chip=chip).time
    assert time.seconds == time.memory == pytest.approx(2 * 4096 * 16 * 4 / 8 / COPIED)


@pytest.mark.slow
def test_an_exchange_takes_as_long_as_it_was_measured(sizes, mesh):
    """The time of a gather over all devices is the time that it took."""
    chip = calibrate(mesh)
    whole = P(("data", "model"))
    f = spmd.pjit(lambda x: x * 1.0, whole, P(), mesh=mesh)
    time = spmd.report(f, jax.ShapeDtypeStruct((4096, 16), jnp.float32), chip=chip).time
    assert time.exchange == pytest.approx(HOP + 4096 * 16 * 4 * 7 / 8 / LINK)


@pytest.mark.slow
def test_one_device_exchanges_nothing(sizes, in_mesh):
    """Its exchanges are not measured; a time that needs them says so."""
    said = []
    chip = calibrate(jax.devices()[:1], say=said.append)
    assert said == ["copies", "products"]
    assert (chip.box, chip.link, chip.hop) == (1, chip.hbm, 0.0)
    text = "exchanges were not measured: they are taken to be as fast as main memory"
    f = spmd.pjit(lambda x: x @ x.T, P("data"), P("data"))
    struct = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert text in spmd.report(f, struct, chip=chip).time.unknown
    alone = spmd.report(jax.jit(lambda x: x @ x.T).lower(struct), chip=chip)
    assert text not in alone.time.unknown


def test_messages_that_hide_the_bytes(monkeypatch):
    """Where both sizes take as long, the speed is what was reached at least, and not endless."""
    monkeypatch.setattr(module, "_seconds", lambda run, **_: 1e-3)
    chip = calibrate(jax.devices()[:4])
    received = 2**20 / 4 * 3 / 4  # of an array that each of four devices has
    assert (chip.link, chip.hop) == (pytest.approx(received / 1e-3), 0.0)


@pytest.mark.parametrize("queued", [False, True])
def test_what_the_host_does_beside_a_fast_device(monkeypatch, queued):
    """A queue of runs hides that the host takes a millisecond to see that one has ended."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module.jax, "block_until_ready", lambda last: now.append(now.pop() + 1e-3))
    begun = []

    def run():
        begun.append(now.pop() + 1e-4)
        now.append(begun[-1])

    found = module._seconds(run, queued=queued)
    assert found == pytest.approx(1e-4 + 1e-3 / (64 if queued else 1))
    assert len(begun) == (1 + 127 + 6 * 64 if queued else 8)


def test_a_clock_with_steps(monkeypatch):
    """A run that takes no time on a coarse clock divides nothing by zero."""
    monkeypatch.setattr(module.time, "perf_counter", lambda: 1.0)
    chip = calibrate(jax.devices()[:2])
    assert all(0 < one < math.inf for one in (chip.flops, chip.hbm, chip.link))


@pytest.mark.slow
def test_larger_products_are_not_tried_for_long(monkeypatch, sizes):
    """A size is tried while its runs fit the budget of seconds: a slow machine ends early."""
    monkeypatch.setattr(module, "_LARGEST", 16_384)
    # Eight runs of the third size take 8 * 2 * 1024**3 / 3e9 seconds; of the next, eight times it.
    monkeypatch.setattr(module, "_BUDGET", 6.0)
    calibrate(jax.devices()[:1])
    assert sizes[1:] == [4 * 256**2, 4 * 512**2, 4 * 1024**2]


def test_a_tpu_keeps_its_peak(monkeypatch, sizes):
    """Of a known TPU only the memory is measured: cycles go by its clock, links by its torus."""
    monkeypatch.setattr(module, "chip_of", lambda kind: CHIPS["v5e"])
    chip = calibrate(jax.devices()[:2])
    assert chip == dataclasses.replace(CHIPS["v5e"], hbm=pytest.approx(COPIED / 0.83))
    monkeypatch.setattr(module, "chip_of", lambda kind: CHIPS["h100"])
    assert calibrate(jax.devices()[:2]).flops == pytest.approx(FLOPS)


@pytest.mark.slow
def test_this_machine(mesh, tmp_path):
    """The figures of this machine are finite; a file of them is read by chip=."""
    chip = calibrate()
    assert (chip.name, chip.box) == ("cpu", 8)
    assert all(0 < one < math.inf for one in (chip.flops, chip.hbm, chip.link))
    assert 0 <= chip.hop < math.inf
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(chip.to_json()))
    f = spmd.pjit(lambda x: x @ x.T, P("data"), P("data"), mesh=mesh)
    found = spmd.report(f, jax.ShapeDtypeStruct((64, 16), jnp.float32), chip=path)
    assert (found.time.chip, found.time.source) == ("cpu", "predicted")
    assert found == spmd.report(f, jax.ShapeDtypeStruct((64, 16), jnp.float32), chip=chip)


def refused(devices, got):
    """Checks that devices are refused, and the text."""
    with pytest.raises(MeshError) as caught:
        calibrate(devices)
    assert str(caught.value) == (
        "calibrate needs devices that can run something.\n"
        "  expected  devices of this machine, such as jax.devices()\n"
        f"  got       {got}"
    )


def test_what_cannot_be_measured():
    """What is no device is refused before anything runs."""
    refused([], "none")
    refused(5, "5")
    refused("cpu", "'cpu'")


@needs_libtpu
def test_described_devices_cannot_be_measured():
    """A described chip runs nothing."""
    mesh = spmd.topology("v5e:2x2")
    refused(mesh, repr(mesh.devices.flat[0]))
    refused([jax.devices()[0], mesh.devices.flat[0]], repr(jax.devices()[0]))
