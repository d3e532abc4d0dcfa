"""Described devices: what a topology's name gives, what compiles for it, and what it refuses."""

import importlib.util
import math
import os
from pathlib import Path
import pickle
import re
import subprocess
import sys
import threading

from hardware import needs_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

import spmd
from spmd import pjit, topology
from spmd.inspection.compile.topology import hbm_bytes, is_described, is_stand_in


def two_products(params, x):
    """A loss of two matrix products."""
    return jnp.sum(jnp.tanh(x @ params[0]) @ params[1])


SPECS = (P(None, "model"), P("model"))


def gradient(mesh=None, **shapes):
    """The gradient of `two_products` as pjit has it, and its arguments as shapes."""
    step = pjit(
        jax.grad(two_products),
        in_axis_resources=(SPECS, P("data")),
        out_axis_resources=SPECS,
        mesh=mesh,
    )
    width, hidden, batch = (shapes.get(k, 8192) for k in ("width", "hidden", "batch"))
    sizes = ((width, hidden), (hidden, width), (batch, width))
    first, second, x = (jax.ShapeDtypeStruct(s, np.float32) for s in sizes)
    return step, ((first, second), x)


def places(mesh):
    """Where each device is: coordinates of the chip and which device of the chip."""
    return [(*d.coords, d.core_on_chip) for d in mesh.devices.flat]


def refused(name, mesh=None, error=RuntimeError):
    """The text of the error that a topology is refused with."""
    with pytest.raises(error) as caught:
        topology(name, mesh)
    assert isinstance(caught.value, spmd.SpmdError)
    return str(caught.value)


# What is described


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "axes", "kind"),
    [
        ("v5e:16x16", {"data": 32, "model": 8}, "TPU v5 lite"),
        ("v5p:8x16x16", {"data": 256, "model": 8}, "TPU v5"),
        ("v4:16x16x32", {"data": -1, "model": 16}, "TPU v4"),
    ],
)
def test_every_chip_is_one_device(name, axes, kind):
    """On v5e, v5p and v4 the mesh holds each coordinate of the torus exactly once."""
    mesh = topology(name, axes)
    sizes = [int(s) for s in name.partition(":")[2].split("x")]
    sizes += [1] * (3 - len(sizes))
    assert isinstance(mesh, spmd.Mesh)
    assert sorted(places(mesh)) == sorted((*i, 0) for i in np.ndindex(*sizes))
    assert {d.device_kind for d in mesh.devices.flat} == {kind}
    left = math.prod(sizes) // math.prod(s for s in axes.values() if s > 0)
    assert dict(mesh.shape) == {n: left if s == -1 else s for n, s in axes.items()}


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "devices"), [("v2:4x4", 32), ("v3:4x4", 32), ("tpu7x:2x2x1", 8), ("v6e:8x16", 128)]
)
def test_chips_of_two_devices(name, devices):
    """JAX shows two devices per chip of v2, v3 and tpu7x, and one of v6e: so does a topology."""
    mesh = topology(name)
    assert dict(mesh.shape) == {"device": devices}
    assert len(set(places(mesh))) == devices


@needs_libtpu
def test_neighbours_on_the_torus_are_neighbours_in_the_mesh():
    """An axis as long as a dimension of the torus runs along that dimension."""
    mesh = topology("v5p:4x4x8", {"data": 8, "fsdp": 4, "model": 4})
    coords = np.array([d.coords for d in mesh.devices.flat]).reshape(8, 4, 4, 3)
    moves = [np.abs(np.diff(coords, axis=axis)).reshape(-1, 3) for axis in range(3)]
    assert all((m.sum(axis=1) == 1).all() for m in moves)
    assert moves[0][:, 2].all()


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v5p:4x4x12", {"data": 24, "model": 8}),
        ("v6e:8x16", {"a": 2, "b": 2, "c": 2, "d": 16}),
        ("v5p:2x6x10", {"a": 8, "b": 15}),
        ("v5e:6x10", {"a": 4, "b": 15}),
    ],
)
def test_axes_need_not_follow_the_torus(name, axes):
    """Sizes that are no products of the torus's own make a mesh of all devices all the same."""
    mesh = topology(name, axes)
    assert dict(mesh.shape) == axes
    assert len(set(places(mesh))) == math.prod(axes.values())


@needs_libtpu
def test_one_name_is_one_set_of_devices():
    """Two calls give equal meshes, however the name is written and from however many threads."""
    found = []
    names = ["v5e:4x8", " V5E:4X8", "v5 lite:4x8", "v5litepod:4x8"]
    threads = [threading.Thread(target=lambda n=n: found.append(topology(n))) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert found[0] != topology("v5e:8x4")


@needs_libtpu
def test_rings_are_those_of_real_slices(monkeypatch):
    """3D slices of multiples of four, and 2D axes as long as a pod, close to rings; no others."""
    from jax.experimental import topologies

    from spmd.inspection.compile import topology as compile_topology

    compile_topology._described.cache_clear()
    asked = {}
    real = topologies.get_topology_desc

    def spy(name, platform, **options):
        asked[name] = options
        return real(name, platform, **options)

    monkeypatch.setattr(topologies, "get_topology_desc", spy)
    names = "v4:4x4x16 v4:4x4x6 v5p:4x8x4 v5p:2x2x4 v5e:16x4 v5e:2x16 v5e:8x8 v6e:2x8 v3:2x32"
    for name in names.split():
        topology(name)
    all_three, wrap = (True, True, True), "wrap"
    assert asked == {
        "v4:4x4x16": {"chip_config_name": "megacore", wrap: all_three},
        "v4:4x4x6": {"chip_config_name": "megacore"},
        "v5p:4x8x4": {wrap: all_three},
        "v5p:2x2x4": {},
        "v5e:16x4": {wrap: (True, False, False)},
        "v5e:2x16": {wrap: (False, True, False)},
        "v5e:8x8": {},
        "v6e:2x8": {},
        "v3:2x32": {wrap: (False, True, False)},
    }


# What compiles


@pytest.mark.few(0)
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v5e:16x16", {"data": 32, "model": 8}),
        ("v5p:8x16x16", {"data": 256, "model": 8}),
        ("v4:16x16x32", {"data": 512, "model": 16}),
    ],
)
def test_a_gradient_compiles_for_a_pod(name, axes):
    """A step compiles for 256, 2,048 and 8,192 chips from shapes alone, in its specs."""
    mesh = topology(name, axes)
    step, args = gradient()
    with mesh:
        compiled = step.lower(*args).compile()
    assert compiled.mesh == mesh
    assert compiled.out_specs == SPECS
    assert compiled.in_specs == ((SPECS, P("data")), {})
    assert f"num_partitions={mesh.size}" in compiled.as_text()
    # By hand: float32, 8192 x 8192 each, two of them split over `model` and one over `data`.
    whole = 4 * 8192 * 8192
    hand = 2 * whole // axes["model"] + whole // axes["data"]
    assert compiled.memory_analysis().argument_size_in_bytes == hand


@pytest.mark.slow
@needs_libtpu
def test_the_mesh_may_be_given_in_any_way():
    """`pjit(mesh=...)`, shardings of the arguments and jax.jit compile to what `with` does."""
    mesh = topology("v5e:2x2", {"data": 2, "model": 2})
    sizes = {"width": 256, "hidden": 512, "batch": 128}
    step, args = gradient(mesh, **sizes)
    texts = [step.lower(*args).compile().as_text()]
    sharded = jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        args,
        (SPECS, P("data")),
    )
    free = pjit(jax.grad(two_products), out_axis_resources=SPECS, mesh=mesh)
    texts.append(free.lower(*sharded).compile().as_text())
    outs = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    jitted = jax.jit(jax.grad(two_products), out_shardings=outs)
    texts.append(jitted.lower(*sharded).compile().as_text())
    kinds = [sorted(re.findall(r" (all-\w+|reduce-scatter)(?:-start)?\(", t)) for t in texts]
    assert kinds[0]
    assert kinds[0] == kinds[1] == kinds[2]


@needs_libtpu
def test_arrays_and_constants_are_shapes_too():
    """Arrays that nobody placed, keys and constants of the function lower as shapes do."""
    table = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)

    def step(key, x):
        return x @ table + jax.random.normal(key, x.shape)

    with topology("v5e:2x2", {"data": 4}):
        lowered = pjit(
            step, in_axis_resources=(None, P("data")), out_axis_resources=P("data")
        ).lower(jax.random.key(0), np.ones((8, 64), np.float32))
        assert lowered.compile().out_specs == P("data")


# What cannot be done


@needs_libtpu
def test_described_devices_run_nothing():
    """Calls, gradients, compiled calls and constraints say that the devices are not there."""
    mesh = topology("v5e:2x2", {"data": 4})
    x = jnp.ones((8, 8))

    @pjit(in_axis_resources=P("data"), out_axis_resources=P("data"))
    def double(x):
        return x * 2

    said = """{} cannot run on mesh data=4: its devices are only described.
  expected  devices that are attached to this machine
  got       4 devices tpu:{} of kind TPU v5 lite, of a topology
  fix       stop at .lower(...).compile(), which needs no devices; to run, use a mesh of \
jax.devices()"""
    ids = [d.id for d in mesh.devices.flat]
    shown = "0..3" if ids == [0, 1, 2, 3] else ",".join(map(str, ids))
    with mesh:
        compiled = double.lower(x).compile()
        calls = [
            lambda: double(x),
            lambda: double(np.ones((8, 8), np.float32)),
            lambda: jax.grad(lambda x: double(x).sum())(x),
            lambda: compiled(x),
            lambda: compiled(x),
        ]
        for call in calls:
            with pytest.raises(spmd.MeshError) as caught:
                call()
            assert str(caught.value) == said.format("pjit of `double`", shown)
        with pytest.raises(spmd.MeshError) as caught:
            spmd.with_sharding_constraint(x, P("data"))
        assert str(caught.value) == said.format("with_sharding_constraint", shown)
        with pytest.raises(RuntimeError, match="compile-only"):
            jax.device_put(x, NamedSharding(mesh, P("data")))


@needs_libtpu
def test_a_call_compiles_nothing_for_described_devices():
    """A call is refused before the compiler is started, which may take minutes."""
    double = pjit(lambda x: x * 2, in_axis_resources=P("data"), out_axis_resources=P("data"))
    before = spmd.counts()
    with topology("v5e:2x2", {"data": 4}), pytest.raises(spmd.MeshError):
        double(jnp.ones((8, 8)))
    after = spmd.counts()
    assert (after.lowerings, after.compiles) == (before.lowerings, before.compiles)


@needs_libtpu
def test_a_committed_array_is_told_to_be_a_shape():
    """An argument on real devices cannot be placed on described ones, and the fix says so."""
    placed = jax.device_put(jnp.ones((8, 8)), jax.devices()[0])
    double = pjit(lambda x: x * 2, in_axis_resources=P("data"), out_axis_resources=None)
    with topology("v5e:2x2", {"data": 4}), pytest.raises(spmd.MeshError) as caught:
        double.lower(placed)
    fix = (
        "fix       pass a jax.ShapeDtypeStruct: nothing can be placed on devices that are not there"
    )
    assert str(caught.value).endswith(fix)


@needs_libtpu
def test_a_described_mesh_is_not_pickled():
    """Another process has no such devices; it is told to describe them itself."""
    with pytest.raises(spmd.MeshError) as caught:
        pickle.dumps(topology("v5e:2x2", {"data": 4}))
    assert (
        str(caught.value)
        == """Mesh cannot be pickled: its devices are only described.
  got       mesh data=4
  fix       send the name and the sizes, and call spmd.topology with them there"""
    )


# Names and sizes that are wrong

READ = "  expected  a kind and its sizes, such as 'v5e:16x16', 'v5p:8x16x16', 'h100:64' or 'cpu:64'"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("", ""),
        ("v5e", "say how many chips there are by dimension"),
        ("cpu:", "say how many chips there are by dimension"),
        ("v5e:axb", ""),
        ("v5e:4x", ""),
        ("v5e:-4x4", ""),
        ("v4-128", "write v4:4x4x4, which has 64 chips"),
        ("v4-8", "write v4:2x2x1, which has 4 chips"),
        ("v5p-512", "write v5p:4x8x8, which has 256 chips"),
        ("v5litepod-16", "write v5e:4x4, which has 16 chips"),
        ("v6e-1", "write v6e:1x1, which has 1 chip"),
        ("v4-7", ""),
        ("v6e-0", ""),
        ("v5p-999999999998", ""),
        ("v5e:4x4_twisted", "leave out how it is twisted: programs are described for plain tori"),
    ],
)
def test_names_that_cannot_be_read(name, fix):
    """A malformed name is told how names are written, and an accelerator type its slice."""
    lines = [f"topology({name!r}) cannot be read.", READ, *([f"  fix       {fix}"] * bool(fix))]
    assert refused(name) == "\n".join(lines)


def test_a_name_is_a_string():
    """Another thing than a string is a TypeError that names its type."""
    assert refused(64, error=TypeError) == f"topology(64) is no name.\n{READ}\n  got       int"


@pytest.mark.parametrize(
    ("name", "expected", "got"),
    [
        ("v5e:0x4", "sizes of at least 1", "0x4 = 0"),
        ("cpu:0", "sizes of at least 1", "0"),
        ("v5e:4x4x4", "two sizes, as in 'v5e:16x16'", "4x4x4 = 64"),
        ("v5p:16", "three sizes, as in 'v5p:4x4x4'", "16"),
        ("v3:4", "two sizes, as in 'v3:4x4'", "4"),
        ("v6e:512x512", "at most 65536 chips", "512x512 = 262144"),
        ("v5e:4x20", "at most 16 chips along a dimension, as a pod has", "4x20 = 80"),
    ],
)
def test_sizes_that_no_slice_has(name, expected, got):
    """Sizes that no slice of a kind can have are refused before libtpu, which would crash."""
    assert refused(name) == (
        f"topology({name!r}) has no such sizes.\n  expected  {expected}\n  got       {got}"
    )


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "got", "fix"),
    [
        ("v5e:3x5", "3x5 = 15", "v5e:4x6, which has 24 chips"),
        ("v5p:5x4x3", "5x4x3 = 60", "v5p:6x4x3, which has 72 chips"),
        ("v6e:1x3", "1x3 = 3", "v6e:1x4, which has 4 chips"),
    ],
)
def test_sizes_that_hosts_do_not_fill(name, got, fix):
    """Sizes that hosts of 2x2 chips do not fill are told the next that they do, which exist."""
    assert refused(name) == (
        f"topology({name!r}) has no such sizes.\n"
        "  expected  sizes that whole hosts fill, which have 2x2 chips\n"
        f"  got       {got}\n  fix       {fix}"
    )
    better, chips = re.match(r"(\S+), which has (\d+) chips", fix).groups()
    assert topology(better).size == int(chips)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mi300:8", "names a kind that is not known"),
        ("v5ee:4x4", "names a kind that is not known (did you mean 'v5e'?)"),
    ],
)
def test_kinds_that_nobody_knows(name, what):
    """A kind that neither this library nor libtpu knows is told all that are known."""
    assert refused(name) == (
        f"topology({name!r}) {what}.\n"
        "  expected  a TPU (v2, v3, v4, v5e, v5p, v6e, tpu7x), a GPU (h100, h200) or cpu\n"
        f"  got       {name.partition(':')[0]!r}"
    )


def test_without_libtpu(monkeypatch):
    """Without the compiler for TPUs one sentence says so, and how to install it."""
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        refused("v5e:4x16")
        == """topology('v5e:4x16') needs the TPU compiler, which is not installed.
  fix       pip install 'spmd[tpu]', or let CPU devices stand in: topology('cpu:64')"""
    )
    assert "not known" in refused("mi300:2")
    assert topology("cpu:2").size == 2


@pytest.mark.parametrize(
    ("axes", "got", "fix"),
    [
        ({"data": 32, "model": 2}, "32 * 2 = 64", "data=4"),
        ({"data": 3, "model": 5}, "3 * 5 = 15", "choose sizes that divide 8"),
        ({"data": 4}, "4", "data=8"),
        ({"data": 2, "model": 2}, "2 * 2 = 4", "data=4 or model=4"),
    ],
)
def test_axes_that_do_not_take_all_devices(axes, got, fix):
    """Sizes with another product than the number of devices are told what would fit."""
    given = ", ".join(f"{n}={s}" for n, s in axes.items())
    assert refused("cpu:8", axes) == (
        "topology('cpu:8') cannot be a mesh of these axes.\n"
        f"  given     {given}\n"
        "  expected  sizes whose product is 8, the number of devices\n"
        f"  got       {got}\n  fix       {fix}"
    )


@needs_libtpu
def test_axes_count_devices_and_the_message_counts_chips():
    """The number that sizes have to multiply to is explained: in chips, and devices of each."""
    text = refused("v5e:4x4", {"data": 4})
    assert "  expected  sizes whose product is 16, the number of chips\n" in text
    text = refused("tpu7x:2x2x1", {"data": 4})
    assert (
        "  expected  sizes whose product is 8, the number of devices: 4 chips of 2 each\n" in text
    )


@pytest.mark.parametrize(
    ("axes", "error"),
    [({"data": 3, "model": -1}, RuntimeError), ({"data": 0}, RuntimeError), ([8], TypeError)],
)
def test_axes_that_no_mesh_has(axes, error):
    """What is wrong with axes whatever the devices are is told as by make_mesh."""
    assert refused("cpu:8", axes, error).startswith("Mesh cannot be built.")


# Stand-ins


def test_stand_ins_beyond_the_processes_own():
    """As many as 512 virtual devices compile in a process that has eight, and are marked."""
    mesh = topology("cpu:512", {"data": -1, "model": 8})
    assert len(jax.devices()) == 8
    assert dict(mesh.shape) == {"data": 64, "model": 8}
    assert sorted(d.id for d in mesh.devices.flat) == [*range(512)]
    step, args = gradient(width=256, hidden=512, batch=512)
    with mesh:
        compiled = step.lower(*args).compile()
    assert compiled.out_specs == SPECS
    assert "num_partitions=512" in compiled.as_text()
    assert is_stand_in(mesh)
    assert is_stand_in(list(mesh.devices.flat))
    assert not is_described(mesh)
    assert topology("cpu:512", {"data": 64, "model": 8}) == mesh


def test_stand_ins_of_the_process_run():
    """As many devices as the process has are its own, so that programs run on them."""
    mesh = topology("cpu:8", {"data": 8})
    assert set(mesh.devices.flat) == set(jax.devices())
    total = pjit(jnp.sum, in_axis_resources=P("data"), out_axis_resources=None, mesh=mesh)
    assert float(total(np.arange(16, dtype=np.float32))) == 120.0


def test_too_many_stand_ins():
    """More virtual devices than 512 are refused, and what to do instead is said."""
    assert (
        refused("cpu:513")
        == """topology('cpu:513') has no such sizes.
  expected  at most 512 virtual devices
  got       513
  fix       describe TPUs instead: pip install 'spmd[tpu]'"""
    )
    assert topology("cpu:4x2") == topology("cpu:8")


@needs_libtpu
def test_described_devices_are_no_stand_ins():
    """TPU devices that are described are not marked as CPUs, nor real ones as described."""
    mesh = topology("v5e:2x2")
    assert is_described(mesh)
    assert is_described(mesh.devices.flat[0])
    assert not is_stand_in(mesh)
    assert not is_described(jax.devices())
    assert is_stand_in(jax.devices()[0])


# Memory

NAMES = ("v2:2x2", "v3:2x2", "v4:2x2x1", "v4 lite:2x2", "v5e:2x2", "v5p:2x2x1", "v6e:2x2")


def test_memory_of_kinds_that_are_not_known():
    """Other devices than TPUs have no capacity in the table; two names of one chip have one."""
    assert hbm_bytes("cpu") is None
    assert hbm_bytes("NVIDIA H100") is None
    assert hbm_bytes("TPU v5 lite") == hbm_bytes("TPU v5e") == int(15.75 * 2**30)
    assert hbm_bytes("TPU v5") == hbm_bytes("TPU v5p")


@needs_libtpu
@pytest.mark.parametrize("name", [*NAMES, pytest.param("tpu7x:2x2x1", marks=pytest.mark.slow)])
def test_memory_is_what_the_compiler_says(name):
    """The capacity in the table is that of the compiler's own verdict, to 0.02 GiB.

    Releases differ in the last digit, and the table has the smaller figure.
    """
    device = topology(name).devices.flat[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("one",))
    large = jax.ShapeDtypeStruct((2**18, 2**18), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: (x @ x).T @ x).lower(large).compile()
    said = re.search(r"exceeds available HBM \(([\d.]+)G\)", str(caught.value))
    assert 0 <= float(said[1]) * 2**30 - hbm_bytes(device.device_kind) <= 0.02 * 2**30


# Surroundings


def in_new_process(code, **env):
    """Runs code in a process with nothing set that concerns TPUs; returns what it printed."""
    clean = {k: v for k, v in os.environ.items() if not re.match("TPU|JAX|XLA|ALLOW_MULT", k)}
    clean["PYTHONPATH"] = str(Path(spmd.__file__).parent.parent)
    clean["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # its plugin for GPUs says that it has no driver
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=clean | env
    )


DESCRIBE = """
import os
import jax
before = dict(os.environ)
if "JAX_PLATFORMS" in os.environ:
    assert jax.devices()[0].platform == "cpu"
from spmd.inspection.compile.topology import topology
mesh = topology("v5e:4x4", {"data": 16})
x = jax.ShapeDtypeStruct((16, 16), "float32")
import spmd
double = spmd.pjit(lambda x: x @ x, in_axis_resources=spmd.P("data"), out_axis_resources=None)
with mesh:
    assert double.lower(x).compile().out_specs == spmd.P()
print(topology("v4:2x2x1").size, "devices")
assert dict(os.environ) == before | {"TPU_LIBRARY_PATH": os.environ["TPU_LIBRARY_PATH"]}
"""


# Without JAX_PLATFORMS, JAX itself starts libtpu with its first device, and that one does print.
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("env", [{}, {"JAX_PLATFORMS": "cpu"}], ids=["first", "after JAX"])
def test_nothing_is_printed_and_nothing_is_left_behind(env):
    """Before JAX starts and after, stderr stays empty and the environment is as it was."""
    done = in_new_process(DESCRIBE, **env)
    assert done.stdout == "4 devices\n"
    assert done.stderr == ""


@pytest.mark.slow
@needs_libtpu
def test_processes_describe_at_once():
    """While one process holds libtpu, another describes devices too: no TPU is there to guard."""
    topology("v5e:2x2")
    assert in_new_process(DESCRIBE).stdout == "4 devices\n"


STORED = """
import jax
from jax.sharding import NamedSharding
import spmd
mesh = spmd.topology("v5e:2x2", {"data": 4})
x = jax.ShapeDtypeStruct((64, 64), "float32")
spmd.pjit(lambda x: x @ x, spmd.P("data"), mesh=mesh).lower(x).compile()
placed = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spmd.P("data")))
reduced = jax.jit(lambda x: x.T @ x)
print(spmd.report(reduced, placed).collectives[0].kind, bool(spmd.fits(reduced, placed)))
jax.jit(lambda x: x + 1)(1.0)
"""


@pytest.mark.slow
@needs_libtpu
def test_jax_stores_no_program_that_it_cannot_read(tmp_path):
    """Those of described devices it could not run: it would warn of each at every start."""
    env = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
           "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
           "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}  # fmt: skip
    for _ in range(2):
        done = in_new_process(STORED, **env)
        assert (done.stdout, done.stderr) == ("all-reduce True\n", "")
    assert [*tmp_path.glob("*lambda*")]  # of this machine's devices
    assert not [one for one in tmp_path.glob("*-cache") if one.stat().st_size > 50_000]


@needs_libtpu
def test_a_machine_with_tpus_keeps_its_settings(monkeypatch):
    """Where TPUs are, and where a user has set a variable, libtpu is not told anything else."""
    from spmd import _jax
    from spmd.inspection.compile import libtpu

    monkeypatch.setattr(_jax.mesh, "tpu_chips", lambda: 4)
    before = dict(os.environ)
    with libtpu.quiet():
        assert dict(os.environ) == before
    monkeypatch.setattr(_jax.mesh, "tpu_chips", lambda: 0)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    with libtpu.quiet():
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
        assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
        assert Path(os.environ["TPU_LOG_DIR"]).is_dir()
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD" not in os.environ
    monkeypatch.setenv("TPU_LOG_DIR", "mine")
    with libtpu.quiet():  # all levels, as a user wants them who has named a folder
        assert os.environ["TPU_LOG_DIR"] == "mine"
        assert "TPU_MIN_LOG_LEVEL" not in os.environ
