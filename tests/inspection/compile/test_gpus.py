"""GPUs that are described: what a name gives, what is compiled for them, and what is refused."""

import importlib.util
import subprocess
import sys

from hardware import environment, needs_cuda
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

import spmd
from spmd import P, pjit, topology
from spmd.inspection import CHIPS, hbm_bytes
from spmd.inspection.compile import gpus
from spmd.inspection.compile.topology import is_described, is_stand_in, limit_of
from spmd.inspection.timing.chips import chip_of

WIDTH, ROWS = 512, 2048
WEIGHTS = {"up": P(None, "model"), "down": P("model")}


def step(weights, x):
    """A step of two products: each sums over `model` once there, and `data` for the gradients."""

    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    gradients = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def shapes(width=WIDTH, rows=ROWS):
    """Its arguments."""
    up = jax.ShapeDtypeStruct((width, 4 * width), np.float32)
    down = jax.ShapeDtypeStruct((4 * width, width), np.float32)
    return {"up": up, "down": down}, jax.ShapeDtypeStruct((rows, width), np.float32)


def refused(name):
    """The text of the error that a topology is refused with."""
    with pytest.raises(spmd.MeshError) as caught:
        topology(name)
    return str(caught.value)


@needs_cuda
@pytest.mark.parametrize(("count", "processes"), [(1, 1), (5, 1), (8, 1), (24, 3)])
def test_every_server_is_a_process(count, processes):
    """Devices have the name that the driver gives, and are in servers of eight."""
    devices = list(topology(f"h100:{count}").devices.flat)
    assert [one.id for one in devices] == [*range(count)]
    assert [one.process_index for one in devices] == [i // 8 for i in range(count)]
    assert len({one.process_index for one in devices}) == processes
    assert {one.device_kind for one in devices} == {"NVIDIA H100 80GB HBM3"}
    assert {one.platform for one in devices} == {"gpu"}
    assert is_described(devices)
    assert not is_stand_in(devices)
    assert topology(f" H100:{count}") == topology(f"h100:{count}")


@pytest.mark.slow
@needs_cuda
def test_exchanges_and_memory_of_a_step():
    """The compiler's program has the exchanges that a hand counts, with lines, bytes and a time."""
    with topology("h200:8", {"data": 4, "model": 2}):
        train = pjit(step, in_axis_resources=(WEIGHTS, P("data")), out_axis_resources=WEIGHTS)
        report = spmd.report(train, *shapes())
    assert (report.backend, report.device_kind, report.stand_in) == ("gpu", "NVIDIA H200", False)
    sent = {axes: total.payload_bytes for axes, total in report.totals("axis").items()}
    rows = ROWS // 4 * WIDTH * 4  # of the sum over the two halves of what is between
    weights = 2 * WIDTH * 4 * WIDTH * 4 // 2  # of two gradients, of which each device keeps a half
    assert sent == {("model",): rows, ("data",): weights}
    assert {one.source.file.rsplit("/")[-1] for one in report.collectives} == {"test_gpus.py"}
    arguments = weights + ROWS // 4 * WIDTH * 4
    assert report.memory.arguments == arguments
    assert report.memory.outputs == pytest.approx(weights, abs=64)
    assert report.time.chip == "h200"
    # All of it is within a server, where an all-reduce of n sends 2(n-1)/n of its bytes, in 2 hops.
    chip = CHIPS["h200"]
    within = (2 * 3 / 4 * weights + 2 * 1 / 2 * rows) / chip.link + 2 * 2 * chip.hop
    assert report.time.exchange == pytest.approx(within, rel=1e-3)


@needs_cuda
def test_an_axis_that_leaves_the_server_takes_longer():
    """Of 16 devices, 8 sum within a server; 2 sum from one server to the other."""
    seconds = {}
    for sizes in ({"wide": 2, "rest": 8}, {"rest": 8, "wide": 2}):
        mesh = topology("h100:16", sizes)
        split, whole = NamedSharding(mesh, P("wide")), NamedSharding(mesh, P())
        total = jax.jit(lambda x: x.sum(0), in_shardings=split, out_shardings=whole)
        shape = jax.ShapeDtypeStruct((2, 2**22), np.float32)
        report = spmd.report(total.lower(shape).compile())
        seconds[next(iter(sizes))] = report.time.exchange
    inside, across = 2**24 / CHIPS["h100"].link, 2**24 / CHIPS["h100"].across
    assert seconds["rest"] == pytest.approx(inside, rel=0.1)
    assert seconds["wide"] == pytest.approx(across, rel=0.1)


@needs_cuda
@pytest.mark.slow
def test_programs_with_what_libraries_compute():
    """Products, convolutions, factorisations, random numbers and sorting compile without a GPU."""

    def program(x, image):
        noise = x + jax.random.normal(jax.random.key(0), x.shape)
        root = jnp.linalg.cholesky(noise @ noise.mT)
        kernel = jnp.ones((3, 3, 8, 8), np.float32)
        dims = ("NHWC", "HWIO", "NHWC")
        around = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims)
        return jnp.sort(root, axis=-1), around

    split = NamedSharding(topology("h100:8", {"data": 8}), P("data"))
    x, image = (jax.ShapeDtypeStruct(s, np.float32) for s in ((16, 32, 32), (16, 8, 8, 8)))
    compiled = jax.jit(program, in_shardings=split, out_shardings=split).lower(x, image).compile()
    assert not spmd.report(compiled).collectives
    assert "cusolver" in compiled.as_text()


@needs_cuda
@pytest.mark.slow
def test_a_plan():
    """The planner takes them as any topology: its answer is compiled, for the memory there is."""
    plan = spmd.plan(step, *shapes(width=1024, rows=8192), topology="h200:8", top=1)
    assert "compiled" in str(plan)
    assert f"of {hbm_bytes('NVIDIA H200') / 2**30:.1f} GiB a device" in str(plan)
    assert plan.mesh.size == 8
    replicated = pjit(step, in_axis_resources=(None, P("device")), out_axis_resources=None)
    with topology("h200:8"):
        expert = spmd.report(replicated, *shapes(width=1024, rows=8192))
    assert plan.seconds <= expert.time.seconds


def test_memory():
    """What JAX's runtime said of an H200 that it had started on: 104.9 GiB of 139.9."""
    assert hbm_bytes("NVIDIA H200") / 2**30 == pytest.approx(104.9, abs=0.05)
    assert hbm_bytes("NVIDIA H100 80GB HBM3") / 2**30 == pytest.approx(59.3, abs=0.05)
    assert hbm_bytes("NVIDIA A100-SXM4-80GB") is None


@needs_cuda
@pytest.mark.parametrize("name", gpus.KINDS)
def test_a_described_one_is_the_chip_that_has_figures(name):
    """The compiler hands on the name of the kind that times and memory are looked up by."""
    (device,) = topology(f"{name}:1").devices.flat
    assert chip_of(device.device_kind) == CHIPS[name]
    assert hbm_bytes(device.device_kind) == int(0.75 * gpus.KINDS[name])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "h100:12",
            "topology('h100:12') has no such sizes.\n"
            "  expected  whole servers of 8, or a part of one\n"
            "  got       12\n  fix       h100:8 or h100:16",
        ),
        (
            "h200:2x4",
            "topology('h200:2x4') has no such sizes.\n"
            "  expected  one size, as in 'h200:8'\n  got       2x4 = 8",
        ),
        (
            "h200:0",
            "topology('h200:0') has no such sizes.\n  expected  sizes of at least 1\n  got       0",
        ),
        (
            "h200:80000",
            "topology('h200:80000') has no such sizes.\n"
            "  expected  at most 65536 GPUs\n  got       80000",
        ),
        (
            "h100",
            "topology('h100') cannot be read.\n"
            "  expected  a kind and its sizes, such as 'v5e:16x16', 'v5p:8x16x16', 'h100:64' or"
            " 'cpu:64'\n  fix       say how many there are",
        ),
    ],
)
def test_what_is_refused(name, text):
    """Sizes that no servers have, and names without one."""
    assert refused(name) == text


@needs_cuda
def test_axes_that_do_not_take_all_of_them():
    """They are counted as devices, not as chips."""
    with pytest.raises(spmd.MeshError, match="whose product is 8, the number of devices"):
        topology("h100:8", {"data": 4})


def test_without_the_compiler(monkeypatch):
    """Where JAX has no plugin for CUDA, one sentence says how to get it."""

    def none(*args, **more):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", none)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    gpus.described.cache_clear()
    assert refused("h100:16") == (
        "topology('h100:16') needs the compiler for GPUs, which is not installed.\n"
        "  fix       pip install 'spmd[gpu]', or let CPU devices stand in: topology('cpu:64')"
    )


SCRIPT = """
import spmd{first}
mesh = spmd.topology("h200:8", {{"data": 8}})
import os
assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
import jax, numpy as np
split = jax.NamedSharding(mesh, spmd.P("data"))
whole = jax.NamedSharding(mesh, spmd.P())
add = jax.jit(lambda x: x.sum(0), in_shardings=split, out_shardings=whole)
text = add.lower(jax.ShapeDtypeStruct((8, 4), np.float32)).compile().as_text()
print("all-reduce" in text, jax.default_backend())
"""


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "; import jax; jax.devices()"])
def test_without_a_driver_nothing_is_said(first):
    """Where JAX may look for GPUs their compiler is there, before JAX starts and after.

    Who asks for it first sees nothing of the libraries that are missing.
    """
    outer = environment()
    outer["JAX_PLATFORMS"] = ""
    command = [sys.executable, "-c", SCRIPT.format(first=first)]
    done = subprocess.run(
        command, env=outer, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "True cpu\n"
    assert "cuDNN" not in done.stderr or first


@pytest.mark.gpu
def test_a_real_one_is_as_described():
    """Its name, its memory and the peak of a step are those of the described one."""
    real = jax.devices()[0]
    name = chip_of(real.device_kind).name
    assert limit_of(real) == pytest.approx(hbm_bytes(real.device_kind), rel=0.01)
    peaks = []
    for mesh in (spmd.make_mesh({"data": 1, "model": 1}, devices=[real]), topology(f"{name}:1")):
        whole = NamedSharding(mesh, P())
        compiled = jax.jit(step, in_shardings=whole, out_shardings=whole).lower(*shapes()).compile()
        peaks.append(spmd.report(compiled).memory.peak)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.1)
