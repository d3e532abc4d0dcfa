"""`Report.time`, `preview.time` and ``chip=``: against counts by hand of programs and of chips."""

import dataclasses
import functools
import json
from pathlib import Path

from hardware import needs_libtpu, require_libtpu
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
import numpy as np
import pytest

import spmd
from spmd import PartitionSpec as P
from spmd.inspection import CHIPS, Chip
from spmd.inspection.compile.topology import places_for

replace = dataclasses.replace

LAYERS, BATCH, D, H = 5, 32, 24, 40
#: FLOPs of the forward pass on all devices: two products in each layer.
FORWARD = LAYERS * 2 * (2 * BATCH * D * H)


def array(*dims, dtype=jnp.float32):
    """An array that need not be there."""
    return jax.ShapeDtypeStruct(dims, dtype)


ARGS = (array(LAYERS, D, H), array(LAYERS, H, D)), array(BATCH, D)
SPECS = (P(None, None, "model"), P(None, "model", None)), P("data")


def layer(x, w):
    """An MLP, split over `model` from its first product to its second."""
    up, down = w
    return jnp.tanh(x @ up) @ down, None


def loss(ws, x):
    """Layers that are computed again in the backward pass."""
    return jnp.sum(lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)


@pytest.fixture(scope="module", name="big")
def _big():
    """The mesh of the tests, for the whole file."""
    return spmd.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module", name="step")
def _step(big):
    """The gradient of the layers, lowered."""
    grad = jax.grad(loss)
    return spmd.pjit(grad, SPECS, SPECS[0], mesh=big).lower(*ARGS)


@pytest.fixture(scope="module", name="compiled")
def _compiled(step):
    """The same, compiled."""
    return step.compile()


def adds_up(time):
    """Checks that compute, memory and waits are all of the time."""
    waits = sum(one.seconds for one in time.exposed)
    assert time.compute + time.memory + waits == pytest.approx(time.seconds, rel=1e-9)
    assert waits == pytest.approx(sum(time.exposed_by_axes.values()), rel=1e-9)
    assert all(0 <= one.exposed <= one.seconds * (1 + 1e-9) for one in time.exchanges)
    return time


# CPU


def test_no_time_for_cpus(step, compiled):
    """CPUs have no time, compiled or predicted: never a wrong one. The head says it once."""
    for found in (spmd.report(compiled), compiled.report(), spmd.preview(step)):
        assert found.time is None
        assert str(found).count("no time for CPU; give topology= or chip=") == 1
        assert found.to_html().count("No time for CPU; give topology= or chip=") == 1
        assert found.to_json()["time"] is None
        assert not [name for name in found.scalars() if name.startswith("time")]


def test_no_time_for_described_cpus(big):
    """Described CPUs are CPUs."""
    mesh = spmd.topology("cpu:8", {"data": 4, "model": 2})
    f = spmd.pjit(lambda x: x @ x.T, P("data"), P("data"), mesh=mesh)
    assert spmd.report(f, array(16, 8)).time is None
    assert spmd.preview(f, array(16, 8)).time is None


# MFU and HFU


def count(found, *, model, hardware):
    """Checks the FLOPs of a report on v5e, and the shares of the peak that they make."""
    time = adds_up(found.time)
    peak = CHIPS["v5e"].flops * time.seconds
    assert (time.model_flops, time.hardware_flops) == (model, hardware)
    assert time.mfu == pytest.approx(model / (8 * peak))
    assert time.hfu == pytest.approx(hardware / peak)
    assert (time.chip, time.source) == ("v5e", "predicted")


@pytest.mark.slow
def test_the_gradient_of_layers_computed_again(step, compiled, big):
    """MFU counts three times the forward pass; HFU its first product once more, on each device.

    The second product of a layer is not computed again: its result is needed by nothing.
    """
    grad = jax.grad(loss)
    placed = jax.tree.map(
        lambda spec: NamedSharding(big, spec), SPECS, is_leaf=lambda one: isinstance(one, P)
    )
    jitted = jax.jit(grad, in_shardings=placed, out_shardings=placed[0])
    inner = spmd.pjit(loss, SPECS, P(), mesh=big)
    expected = {"model": 3 * FORWARD, "hardware": 7 * FORWARD // 2 // 8}
    for f, args in (
        (step, ()),
        (compiled, ()),
        (jitted, ARGS),
        (jitted.lower(*ARGS), ()),
        (jax.jit(jax.grad(inner)), ARGS),
    ):
        count(spmd.report(f, *args, chip="v5e"), **expected)
    count(spmd.preview(step, chip="v5e"), **expected)


def test_a_shard_map_inside(big):
    """Products in a shard_map are those of the whole program for the MFU."""

    def mlp(w, x):
        def part(x, up, down):
            return lax.psum(jnp.tanh(x @ up) @ down, "model")

        specs = P("data"), P(None, "model"), P("model")
        return jax.shard_map(part, mesh=big, in_specs=specs, out_specs=P("data"))(x, *w)

    args = (array(D, H), array(H, D)), array(BATCH, D)
    one = 2 * 2 * BATCH * D * H
    count(spmd.report(jax.jit(mlp), *args, chip="v5e"), model=one, hardware=one // 8)

    def total(w, x):
        return jnp.sum(mlp(w, x) ** 2)

    # The input is not asked for: its gradient, one product, is in neither.
    count(
        spmd.report(jax.jit(jax.grad(total)), *args, chip="v5e"),
        model=3 * one - one // 2,
        hardware=(3 * one - one // 2) // 8,
    )


def test_one_device():
    """A program of one device has a time, and no exchange."""
    found = spmd.report(jax.jit(lambda x: x @ x.T), array(64, 32), chip="v5e")
    time = adds_up(found.time)
    assert time.exchanges == ()
    assert time.model_flops == time.hardware_flops == 2 * 64 * 32 * 64
    assert time.mfu == time.hfu


@pytest.mark.parametrize("flops", [123e12, 7, np.int64(10**9), np.float32(2.5e6)])
def test_flops_that_the_user_counts(compiled, flops):
    """`model_flops` is what the MFU counts, and HFU stays as it is."""
    plain = spmd.report(compiled, chip="v5e").time
    given = spmd.report(compiled, chip="v5e", model_flops=flops).time
    peak = 8 * CHIPS["v5e"].flops * plain.seconds
    assert given == replace(plain, model_flops=int(flops), mfu=pytest.approx(flops / peak))


@pytest.mark.parametrize("flops", [0, -1.0, float("nan"), float("inf"), "1e12", True, [1]])
def test_what_is_no_number_of_flops(step, flops):
    """Anything else is told before the compile, by both functions."""
    for function, name in ((spmd.report, "report"), (spmd.preview, "preview")):
        with pytest.raises(TypeError) as caught:
            function(step, model_flops=flops)
        assert str(caught.value) == (
            f"{name} cannot read model_flops.\n"
            "  expected  a number above 0: floating-point operations of one call on all devices\n"
            f"  got       {flops!r}"
        )


def test_a_program_that_was_compiled_elsewhere(big):
    """`jax.stages.Compiled` holds no program to count: the MFU is unknown, and it is said."""
    placed = NamedSharding(big, P("data"))
    compiled = jax.jit(lambda x: x @ x.T, in_shardings=placed).lower(array(16, 8)).compile()
    time = spmd.report(compiled, chip="v5e").time
    assert (time.mfu, time.model_flops) == (None, None)
    assert time.hfu > 0
    why = "the MFU is not known, since the program was compiled elsewhere: give model_flops="
    assert why in time.unknown
    given = spmd.report(compiled, chip="v5e", model_flops=1e6).time
    assert given.mfu > 0
    assert why not in given.unknown


def test_a_program_without_products(big):
    """Its MFU is known: it is nothing."""
    f = spmd.pjit(lambda x: x + 1.0, P("data"), P("data"), mesh=big)
    for found in (
        spmd.report(f, array(64, 32), chip="v5e"),
        spmd.preview(f, array(64, 32), chip="v5e"),
    ):
        assert (found.time.model_flops, found.time.hardware_flops) == (0, 0)
        assert not found.time.mfu
        assert not found.time.hfu


def test_a_loop_that_the_data_end(big):
    """It counts once, in both, and is said to; the MFU is not known, unless the user knows it."""

    def until(x):
        return lax.while_loop(lambda c: jnp.sum(c) < 10, lambda c: c @ c, x)

    f = spmd.pjit(until, P(), P(), mesh=big)
    for function in (spmd.report, spmd.preview):
        time = function(f, array(16, 16), chip="v5e").time
        assert time.seconds > 0
        assert (time.mfu, time.model_flops) == (None, None)
        often = [one for one in time.unknown if "an unknown number of times" in one]
        assert len(often) == 2
        assert often[1].startswith("the MFU is not known, since a loop with products runs an")
        assert function(f, array(16, 16), chip="v5e", model_flops=8).time.model_flops == 8


# The roofline, by hand

#: Of this chip only one thing is slow.
FAST = Chip(name="fast", flops=1e30, hbm=1e30, link=1e30, hop=0.0)


def test_products_at_the_peak(big):
    """With memory and links that take no time, a call takes its FLOPs at the peak."""
    chip = replace(FAST, flops=1e9)
    f = spmd.pjit(lambda x, w: x @ w, (P("data"), P(None, "model")), P("data", "model"), mesh=big)
    found = spmd.report(f, array(64, 32), array(32, 48), chip=chip)
    seconds = 2 * 64 * 32 * 48 / 8 / 1e9
    for one in (found, spmd.preview(f, array(64, 32), array(32, 48), chip=chip)):
        time = adds_up(one.time)
        assert time.seconds == time.compute == pytest.approx(seconds)
        assert time.mfu == time.hfu == pytest.approx(1.0)
        assert (time.bound, time.chip, time.source) == ("compute", "fast", "predicted")


@pytest.mark.parametrize(
    ("types", "share"),
    [((jnp.int8, jnp.int8), 0.5), ((jnp.int8, jnp.int16), 1), ((jnp.float32, jnp.float32), 1)],
)
def test_products_of_types_that_are_twice_as_fast(big, types, share):
    """They take half as long, both are at the peak, and FLOPs are FLOPs."""
    chip = replace(FAST, flops=1e9, doubled=("s8",))
    multiply = functools.partial(jnp.matmul, preferred_element_type=types[1])
    f = spmd.pjit(multiply, (P("data"), P(None, "model")), P("data", "model"), mesh=big)
    args = array(64, 32, dtype=types[0]), array(32, 48, dtype=types[1])
    time = adds_up(spmd.preview(f, *args, chip=chip).time)
    assert time.seconds == pytest.approx(share * 2 * 64 * 32 * 48 / 8 / 1e9)
    assert time.mfu == time.hfu == pytest.approx(1.0)
    assert time.model_flops == 8 * time.hardware_flops == 2 * 64 * 32 * 48


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "dtype", "share"),
    [("v5e:2x2", jnp.int8, 0.5)] + [pytest.param(*one, marks=pytest.mark.soak) for one in (
        ("tpu7x:2x2x1", jnp.float8_e4m3fn, 0.5),
        ("v5p:2x2x1", jnp.int8, 0.5), ("tpu7x:2x2x1", jnp.int8, 1),
        ("v5e:2x2", jnp.float8_e4m3fn, 1), ("v4:2x2x1", jnp.int8, 1))],
)  # fmt: skip
def test_what_is_twice_as_fast_by_libtpu(topology, dtype, share):
    """The compiler's cycles of a product by itself, and ours of one with other work beside it."""
    require_libtpu()

    def compute(dtype, out, f):
        def run(x, y):
            return f(jnp.matmul(x, y, preferred_element_type=out))

        step = spmd.pjit(run, mesh=spmd.topology(topology))
        return spmd.report(step, *[array(4096, 4096, dtype=dtype)] * 2).time.compute

    wide = jnp.int32 if dtype == jnp.int8 else jnp.float32
    for f in (lambda x: x, lambda x: jnp.tanh(x.astype(jnp.float32)).astype(jnp.bfloat16)):
        taken = compute(dtype, wide, f) / compute(jnp.bfloat16, jnp.float32, f)
        assert taken == pytest.approx(share, rel=0.2)


F32, BF16 = jnp.float32, jnp.bfloat16
# Products of bf16, by the operands' types and the precision that is asked of them.
PRECISIONS = [
    ((F32, F32), "default", 1),
    ((F32, F32), "high", 3),
    ((F32, F32), "highest", 6),
    ((F32, F32), ("highest", "default"), 3),
    ((F32, BF16), "highest", 3),
    ((BF16, BF16), "highest", 1),
    ((F32, F32), "BF16_BF16_F32_X3", 3),
    ((F32, F32), "BF16_BF16_F32_X6", 6),
]


def multiplied(precision):
    """A product that asks for a precision, or an algorithm."""
    return lambda x, w: jax.lax.dot(x, w, precision=precision, preferred_element_type=F32)


@pytest.mark.parametrize(("types", "precision", "passes"), PRECISIONS)
def test_precision_takes_several_products_of_a_tpu(big, types, precision, passes):
    """Each takes as long as one of bf16, and FLOPs are FLOPs; GPUs have other ways."""
    x, w = (array(*dims, dtype=one) for dims, one in zip(((64, 32), (32, 48)), types, strict=True))
    f = spmd.pjit(multiplied(precision), (P("data"), P(None, "model")), mesh=big)
    for multipliers, times in ((1, passes), (0, 1)):
        chip = replace(FAST, flops=1e9, multipliers=multipliers)
        time = adds_up(spmd.preview(f, x, w, chip=chip).time)
        assert time.compute == pytest.approx(times * 2 * 64 * 32 * 48 / 8 / 1e9)
        assert time.hfu == pytest.approx(time.compute / time.seconds)
        assert time.hardware_flops == 2 * 64 * 32 * 48 / 8


@pytest.mark.few(0)
@pytest.mark.parametrize(("types", "precision", "passes"), PRECISIONS[1:4])
def test_libtpu_makes_as_many_products(types, precision, passes):
    """By its cycles of a product by itself."""
    require_libtpu()
    mesh = spmd.topology("v5e:2x2")

    def compute(types, precision):
        args = [array(2048, 2048, dtype=one) for one in types]
        return spmd.report(spmd.pjit(multiplied(precision), mesh=mesh), *args).time.compute

    taken = compute(types, precision) / compute((BF16, BF16), "default")
    assert taken == pytest.approx(passes, rel=0.15)


def test_elementwise_work_at_the_memory(big):
    """What multiplies nothing takes its bytes: each device reads and writes its part once.

    Issue J's figure: elementwise work reaches 83 % of the bandwidth.
    """
    f = spmd.pjit(lambda x: jnp.sin(x) * 2.0 + x, P("data"), P("data"), mesh=big)
    time = adds_up(spmd.report(f, array(64, 32), chip=replace(FAST, hbm=1e6)).time)
    assert time.seconds == time.memory == pytest.approx(2 * 64 * 32 * 4 / 4 / (0.83 * 1e6))
    assert time.bound == "memory"


def row_parallel(big):
    """A product that is summed over `model`, and its arguments: 1/4 of 16 rows are exchanged."""
    f = spmd.pjit(lambda x, w: x @ w, (P("data", "model"), P("model")), P("data"), mesh=big)
    return f, (array(16, 32), array(32, 64))


def test_a_sum_in_a_box(big):
    """Scatter and gather: each of two devices sends half twice, and twice there is a message.

    The devices along `model` are neighbours, so they are in one box, of 8 as of 2; in boxes of one
    they send over the network.
    """
    f, args = row_parallel(big)
    payload = 16 // 4 * 64 * 4
    chip = replace(FAST, link=1e6, hop=1e-3, box=8, across=1e3)
    for box, speed in ((8, 1e6), (2, 1e6), (1, 1e3)):
        for function in (spmd.report, spmd.preview):
            time = adds_up(function(f, *args, chip=replace(chip, box=box)).time)
            seconds = 2 * payload / 2 / speed + 2 * 1e-3
            assert time.exposed_by_axes == {("model",): pytest.approx(seconds)}
            assert time.exchange == pytest.approx(seconds)
            (wait,) = time.exposed
            assert Path(wait.source.file).name == "test_timed.py"
            assert time.bound == "exchange"
    alone = spmd.report(f, *args, chip=replace(chip, box=1)).time.unknown
    text = "exchanges were not measured: they are taken to be as fast as main memory"
    assert text in alone
    assert text not in spmd.report(f, *args, chip=chip).time.unknown


@pytest.mark.parametrize(("name", "hbm"), [("h100", 3.35e12), ("h200", 4.8e12)])
def test_boxes_of_gpus(name, hbm, big):
    """Tables of GPUs give a roofline that is marked as one; figures of NVIDIA's data sheets."""
    double = spmd.pjit(lambda x: x * 2.0, P("data"), P("data"), mesh=big)
    time = spmd.report(double, array(4096, 1024), chip=name).time
    assert (time.chip, time.source) == (name, "predicted")
    assert time.memory == pytest.approx(2 * 4096 * 1024 * 4 / 4 / (0.83 * hbm))
    assert any("at the peak of bf16" in one for one in time.unknown)
    square = spmd.report(jax.jit(lambda x: x @ x), array(16384, 16384), chip=name).time
    assert square.compute == pytest.approx(2 * 16384**3 / 989.4e12)
    f, args = row_parallel(big)
    nbytes = 16 // 4 * 64 * 4  # half of it twice, over NVLink at 450 GB/s, and two messages
    assert spmd.report(f, *args, chip=name).time.exchange == pytest.approx(nbytes / 4.5e11 + 2e-6)
    assert "(predicted)" in str(spmd.report(f, *args, chip=name))


@pytest.mark.slow
def test_every_chip_has_a_time(step, compiled):
    """Every chip of the table gives a time of parts that add up, compiled and predicted."""
    for name in CHIPS:
        for found in (spmd.report(compiled, chip=name), spmd.preview(step, chip=name)):
            time = adds_up(found.time)
            assert (time.chip, time.source) == (name, "predicted")
            assert time.seconds > 0
            assert 0 < time.mfu < time.hfu < 1
            # Sums of a layer over `model`, and of its gradients over `data`.
            assert set(time.exposed_by_axes) == {("data",), ("model",)}
            assert spmd.Report.from_json(json.loads(json.dumps(found.to_json()))) == found
        assert any("CPU's compiler" in one for one in spmd.report(compiled, chip=name).time.unknown)


# What names a chip


def test_ways_to_name_a_chip(compiled, tmp_path):
    """A name in any case, the record, and a file of its figures are the same."""
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(CHIPS["v5p"].to_json()))
    expected = spmd.report(compiled, chip="v5p")
    assert expected.time.chip == "v5p"
    for chip in ("V5P", CHIPS["v5p"], path, str(path)):
        assert spmd.report(compiled, chip=chip) == expected
    assert spmd.report(compiled).time is None


def test_chips_that_are_not_known(step):
    """A wrong name is told with the nearest one; so is what is no chip at all."""
    names = "v4, v5e, v5p, v6e, tpu7x, h100, h200, cpu"
    listed = f"one of {names}, a Chip, or the file of `spmd calibrate`"
    cases = {"h1000": " (did you mean 'h100'?)", "": "", "abc": "", 5: "", ("v5e",): ""}
    for chip, near in cases.items():
        for function, name in ((spmd.report, "report"), (spmd.preview, "preview")):
            with pytest.raises(TypeError) as caught:
                function(step, chip=chip)
            assert (
                str(caught.value) == f"{name} knows no chip {chip!r}{near}.\n  expected  {listed}"
            )


GOOD = Chip(name="mine", flops=1e12, hbm=1e11, link=1e9)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"flops": 0.0}, "flops to be a finite number above 0"),
        ({"flops": float("nan")}, "flops to be a finite number above 0"),
        ({"flops": "1e12"}, "flops to be a finite number above 0"),
        ({"hbm": 0}, "hbm to be a finite number above 0"),
        ({"hbm": -1.0}, "hbm to be a finite number above 0"),
        ({"link": float("inf")}, "link to be a finite number above 0"),
        ({"link": None}, "link to be a finite number above 0"),
        ({"product_share": 0}, "product_share to be a finite number above 0"),
        ({"hop": float("nan")}, "hop to be a finite number of at least 0"),
        ({"hop": True}, "hop to be a finite number of at least 0"),
        ({"host": -1}, "host to be a finite number of at least 0"),
        ({"box": 2.5}, "box to be a whole number of at least 0"),
        ({"cores": 0}, "cores to be a whole number above 0"),
        ({"multipliers": -4}, "multipliers to be a whole number of at least 0"),
        ({"box": 8}, "across to be a finite number above 0"),
        ({"name": None}, "a name that is text"),
    ],
)
def test_figures_that_no_chip_has(change, expected, step):
    """Figures are checked before anything compiles: none is NaN, none divides by zero."""
    chip = replace(GOOD, **change)
    for function, name in ((spmd.report, "report"), (spmd.preview, "preview")):
        with pytest.raises(TypeError) as caught:
            function(step, chip=chip)
        assert str(caught.value) == (
            f"{name} cannot use the chip {chip.name!r}.\n"
            f"  expected  {expected}\n"
            f"  got       {chip!r}"
        )


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (None, "No such file or directory"),
        ("", "Expecting value"),
        ("[1]", "not of schema 'spmd-chip/1'"),
        ("{}", "not of schema 'spmd-chip/1'"),
        (json.dumps(GOOD.to_json() | {"schema": "spmd-chip/2"}), "not of schema 'spmd-chip/1'"),
        (json.dumps(GOOD.to_json() | {"flops": float("nan")}), "figures have to be finite"),
        (json.dumps(GOOD.to_json() | {"hbm": 0}), "figures have to be finite"),
        (json.dumps(GOOD.to_json() | {"cores": 0}), "figures have to be finite"),
        (json.dumps(GOOD.to_json() | {"link": "fast"}), "figures have to be finite"),
        (json.dumps(GOOD.to_json() | {"doubled": "s8"}), "doubled has to be an array"),
        (json.dumps(GOOD.to_json() | {"doubled": [8]}), "doubled has to be an array"),
        ('{"schema": "spmd-chip/1", "name": "x"}', "missing 3 required"),
    ],
)
def test_files_that_hold_no_chip(text, got, tmp_path, step):
    """A file that is not there, or holds something else, is told with what is wrong in it."""
    path = tmp_path / "chip.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TypeError) as caught:
        spmd.report(step, chip=path)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"report cannot read a chip from {str(path)!r}."
    assert lines[1] == "  expected  a file that `spmd calibrate` wrote"
    assert lines[2].startswith("  got       ")
    assert got in lines[2]


def test_a_report_has_its_chip(compiled):
    """A report that is made already takes no other chip."""
    found = spmd.report(compiled, chip="v5e")
    assert spmd.report(found) is found
    for given in ({"chip": "v5p"}, {"model_flops": 1e9}):
        with pytest.raises(TypeError, match=r"^report takes no arguments for a Report"):
            spmd.report(found, **given)


# Fits and sweeps


def test_a_fit_has_a_time(big):
    """The answer has the time of a call, in its text as well; on CPU none, and no wrong one."""
    f, args = row_parallel(big)
    fit = spmd.fits(f, *args, mesh=big, budget="1GB", chip="v5e")
    assert fit.time == spmd.report(f, *args, chip="v5e").time
    assert f"  {fit.time}" in str(fit).splitlines()
    given = spmd.fits(f, *args, mesh=big, budget="1GB", chip="v5e", model_flops=1e6).time
    assert given.model_flops == 10**6
    none = spmd.fits(f, *args, mesh=big, budget="1GB")
    assert none.time is None
    assert "a call" not in str(none)
    with pytest.raises(TypeError, match=r"^fits of `<lambda>` knows no chip 'v55'"):
        spmd.fits(f, *args, mesh=big, budget="1GB", chip="v55")


def test_the_time_of_the_largest_size(big):
    """With `vary` it is the time of the size that was found, and each trial has its own."""
    double = spmd.pjit(lambda x: x * 2.0, P("data"), P("data"), mesh=big)
    chip, seen = replace(FAST, hbm=1e6), {}
    fit = spmd.fits(
        double, array(64, 16), mesh=big, budget="64KiB", vary=("x", 0), chip=chip,
        progress=lambda size, one: seen.update({size: one.time.seconds}),
    )  # fmt: skip
    # An argument and a result of rows / 4 x 16 floats fit 64 KiB.
    assert fit.largest == 64 * 1024 * 4 // (2 * 16 * 4)
    for size, seconds in seen.items():
        assert seconds == pytest.approx(2 * size // 4 * 16 * 4 / (0.83 * 1e6))
    assert fit.time.seconds == seen[fit.largest]
    with pytest.raises(TypeError) as caught:
        spmd.fits(double, array(64, 16), mesh=big, budget="1MB", vary=("x", 0), model_flops=1e9)
    assert str(caught.value) == (
        "fits of `<lambda>` has no use for model_flops= where sizes vary: each has its own.\n"
        "  given     model_flops=1000000000.0, vary=('x', 0)\n"
        "  fix       fits(f, *args, model_flops=...) at the size that was found"
    )


def test_a_sweep_has_times(big):
    """Each row has the time of its mesh; figures for JSON and the table as well."""

    def double(x):
        return (x @ x.T) * 2.0

    f = spmd.pjit(double, P("data"), P("data"))
    meshes = [("cpu:2", {"data": 2}), ("cpu:4", {"data": 4})]
    chip = replace(FAST, flops=1e9)

    def rows(mesh):
        return (array(16 * mesh.shape["data"], 8),)

    found = spmd.sweep(
        f, meshes=meshes, args_of=rows, chip=chip,
        model_flops=lambda mesh: 1e3 * mesh.shape["data"],
    )  # fmt: skip
    for row, n in zip(found, (2, 4), strict=True):
        assert row.time.seconds == pytest.approx(2 * 16 * 8 * 16 * n / 1e9)
        assert row.time.model_flops == 1000 * n
        data = row.record()
        assert data["step_seconds"] == row.time.seconds
        assert (data["mfu"], data["hfu"]) == (row.time.mfu, row.time.hfu)
        assert data["exposed_seconds"] == sum(row.time.exposed_by_axes.values())
    assert "time" in str(found)
    assert "MFU" in str(found)
    plain = spmd.sweep(f, meshes=meshes[:1], args_of=rows)
    assert [row.time for row in plain] == [None]
    assert "MFU" not in str(plain)
    assert plain[0].record()["step_seconds"] is None
    with pytest.raises(TypeError, match=r"^sweep of `double` cannot read model_flops"):
        spmd.sweep(f, meshes=meshes, args_of=rows, chip=chip, model_flops=lambda mesh: -1)
    with pytest.raises(TypeError, match=r"^sweep of `double` cannot use the chip 'fast'"):
        spmd.sweep(f, meshes=meshes, args_of=rows, chip=replace(chip, hbm=0.0))


# TPU


@pytest.fixture(scope="module", name="on_tpu")
def _on_tpu():
    """The gradient of the layers, compiled for a TPU that is described."""
    mesh = spmd.topology("v5e:2x4", {"data": 4, "model": 2})
    sizes = (array(LAYERS, 128, 256), array(LAYERS, 256, 128)), array(64, 128)
    return spmd.pjit(jax.grad(loss), SPECS, SPECS[0], mesh=mesh).lower(*sizes)


@needs_libtpu
@pytest.mark.slow
def test_a_step_on_a_tpu(on_tpu):
    """The compiler's schedule gives the time; FLOPs are those of the hand count."""
    compiled = on_tpu.compile()
    found = spmd.report(compiled)
    time = adds_up(found.time)
    assert (time.chip, time.source) == ("v5e", "compiler")
    forward = LAYERS * 2 * (2 * 64 * 128 * 256)
    assert time.model_flops == 3 * forward
    assert time.hardware_flops == 7 * forward // 2 // 8
    assert time == spmd.report(compiled, chip="v5e").time
    assert set(time.exposed_by_axes) <= {("data",), ("model",)}
    assert time.layer
    assert f"\n{time}\n" in str(found)
    assert spmd.Report.from_json(json.loads(json.dumps(found.to_json()))) == found


@needs_libtpu
@pytest.mark.slow
def test_other_chips_for_a_tpu_program(on_tpu):
    """Cycles count for the chip that they are of alone; for all others a roofline is said to be."""
    compiled = on_tpu.compile()
    own = spmd.report(compiled).time
    slower = spmd.report(compiled, chip=replace(CHIPS["v5e"], hbm=4e11)).time
    assert slower.source == "compiler"
    assert slower.memory > own.memory
    bare = Chip(name="v5e", flops=197e12, hbm=8.19e11, link=4.5e10)  # it has no clock
    others = [spmd.report(compiled, chip=chip).time for chip in ("v5p", "tpu7x", "h100", GOOD)]
    for time in (*others, spmd.report(compiled, chip=bare).time):
        assert time.source == "predicted"
        assert adds_up(time).seconds > 0
    text = "TPU v5 lite's compiler fuses, widens and orders otherwise than that of the chip"
    assert all(text in time.unknown for time in others)
    assert text not in own.unknown


@needs_libtpu
def test_a_preview_for_a_tpu():
    """A prediction needs no compile: products of a device at the peak, then the exchanges."""
    mesh = spmd.topology("v5e:2x4", {"data": 4, "model": 2})
    f = spmd.pjit(lambda x, w: x @ w, (P("data", "model"), P("model")), P("data"), mesh=mesh)
    found = spmd.preview(f, array(512, 1024), array(1024, 256))
    time = adds_up(found.time)
    assert (time.chip, time.source, time.memory) == ("v5e", "predicted", 0.0)
    flops = 2 * 512 * 1024 * 256
    assert (time.model_flops, time.hardware_flops) == (flops, flops // 8)
    assert time.compute == pytest.approx(flops / 8 / 197e12)
    assert [*time.exposed_by_axes] == [("model",)]
    assert [one.name for one in time.exchanges] == [one.name for one in found.collectives]
    assert "(predicted)" in str(found)


@needs_libtpu
def test_a_preview_for_chips_of_two_devices():
    """Two devices of a chip are in one place: another kind of chip has places of its own."""
    mesh = spmd.topology("tpu7x:2x2x1", {"data": 4, "model": 2})
    f = spmd.pjit(lambda x, w: x @ w, (P("data", "model"), P("model")), P("data"), mesh=mesh)
    args = array(512, 1024), array(1024, 256)
    own = spmd.preview(f, *args).time
    assert (own.chip, own.source) == ("tpu7x", "predicted")
    assert not any("places" in one for one in own.unknown)
    other = spmd.preview(f, *args, chip="v5e").time
    assert PLACES.format("v5e:2x4") in other.unknown
    assert other.exchange > 0


# Places that are not known

PLACES = "the places of the chips are not known: taken as those that make_mesh gives on {}"
RINGS = "the places of the chips are not known: each mesh axis is taken as a ring of its own"


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    ["v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:16x16", "v6e:4x8", "v4:2x2x4", "v5p:2x2x1",
     "v5p:4x4x4", "tpu7x:2x2x1", "tpu7x:2x2x4"],
)  # fmt: skip
def test_places_are_those_of_make_mesh(name):
    """Devices that stand in are taken to lie as described ones do, whatever the axes."""
    count = spmd.topology(name).size
    for sizes in (count,), (2, count // 2), (count // 2, 2), (count // 4, 2, 2):
        mesh = spmd.topology(name, dict(zip("abc", sizes, strict=False)))
        found, places = places_for(name.partition(":")[0], mesh.devices.flat[0].device_kind, sizes)
        assert found == name
        own = [(tuple(one.coords), one.core_on_chip) for one in mesh.devices.flat]
        assert [(one.coords, one.core_on_chip) for one in places] == own


@needs_libtpu
def test_stand_ins_have_the_links_of_a_slice():
    """A sum takes as long on CPU devices, with the figures of a v5e, as on a slice of it."""
    sizes = {"data": 4, "model": 2}
    times = []
    for mesh in spmd.make_mesh(sizes), spmd.topology("v5e:2x4", sizes):
        f = spmd.pjit(lambda x, w: x @ w, (P(None, "data"), P("data")), P(), mesh=mesh)
        args = array(512, 1024), array(1024, 256)
        times.append(spmd.preview(f, *args, chip="v5e").time)
    here, there = times
    assert here.exchange == there.exchange > 0
    assert [one for one in here.unknown if one not in there.unknown] == [PLACES.format("v5e:2x4")]


@pytest.mark.parametrize("abstract", [False, True])
def test_exchanges_of_a_preview_are_those_of_the_chip_that_is_named(abstract):
    """Of bf16 a TPU and a GPU send two bytes for each element, each by the rules of its compiler.

    Each device of a pair sends its 64 x 64 sums once, half of them twice; CPUs send them as f32.
    """
    sizes = {"data": 4, "model": 2}
    mesh = AbstractMesh((4, 2), ("data", "model")) if abstract else spmd.make_mesh(sizes)
    f = spmd.pjit(jnp.matmul, (P(None, "model"), P("model")), P(), mesh=mesh)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (32, 64))]
    own = spmd.preview(f, *args)
    assert own.time is None
    assert own.collectives[0].dtype == ("bf16" if abstract else "f32")
    chips = {
        "v5e": ("bf16", 2, "for tpu"),
        "h100": ("bf16", 2, "for gpu"),
        "cpu": ("f32", 4, "for cpu"),
    }
    for chip, (dtype, width, prediction) in chips.items():
        found = spmd.preview(f, *args, chip=chip)
        (one,) = found.collectives
        assert (one.dtype, one.wire_bytes) == (dtype, 64 * 64 * width)
        assert found.prediction.startswith(prediction)
        assert found.backend == own.backend
        assert found.time.exchange > 0


@pytest.mark.parametrize(
    ("chip", "count"),
    [("v5e", 3), ("v5p", 2), ("tpu7x", 3), ("v5e", 512), (replace(CHIPS["v5e"], name="mine"), 8)],
)
def test_without_a_slice_each_axis_is_a_ring(chip, count):
    """No slice has three chips, or 512 of a v5e; a chip that only its user knows has none."""
    mesh = AbstractMesh((count,), ("x",))
    f = spmd.pjit(jnp.sum, P("x"), P(), mesh=mesh)
    assert RINGS in spmd.preview(f, array(24 * count), chip=chip).time.unknown


# Sums that are sent together


def _sums(f, args, specs, outs):
    """A preview for a v5e, its all-reduces, and the seconds of one that sends nothing."""
    mesh = spmd.topology("v5e:4x4", {"data": 16})
    found = spmd.preview(spmd.pjit(f, specs, outs, mesh=mesh).lower(*args))
    pairs = zip(found.collectives, found.time.exchanges, strict=True)
    times = [time for one, time in pairs if one.kind == "all-reduce"]
    # Twice, over two lines of four chips without a ring: three hops each.
    return found, times, 2 * 6 * CHIPS["v5e"].hop


@needs_libtpu
def test_sums_of_gradients_have_one_delay():
    """No product depends on a gradient: those of both layers are one message, as compiled."""

    def f(a, b, x):
        return jax.grad(lambda a, b: jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ b)), (0, 1))(a, b)

    args = (array(64, 64), array(64, 64), array(512, 64))
    specs = P(), P(), P("data")
    found, times, delay = _sums(f, args, specs, (P(), P()))
    nbytes = sum(2 * one.payload_bytes * 15 / 16 for one in found.collectives)
    assert [one.kind for one in found.collectives] == ["all-reduce"] * 2
    assert len(times) == 2
    assert found.time.exchange == pytest.approx(delay + nbytes / (2 * CHIPS["v5e"].link))
    mesh = spmd.topology("v5e:4x4", {"data": 16})
    compiled = spmd.report(spmd.pjit(f, specs, (P(), P()), mesh=mesh).lower(*args).compile())
    assert [one.kind for one in compiled.collectives] == ["all-reduce"]
    assert compiled.time.exchange == pytest.approx(found.time.exchange, rel=0.05)


@needs_libtpu
def test_sums_that_products_wait_for_have_each_a_delay():
    """Activations of two row-parallel layers are summed one after the other."""

    def f(a, b, x):
        return jnp.tanh(jnp.tanh(x @ a) @ b) @ a

    args = (array(64, 64), array(64, 64), array(8, 64))
    specs = P("data"), P("data"), P()
    found, times, delay = _sums(f, args, specs, P())
    # The first layer's weights are split by columns first, since its result is, for the next one.
    kinds = ["all-to-all", "all-reduce", "all-reduce"]
    assert [one.kind for one in found.collectives] == kinds
    assert all(one.seconds > delay for one in times)
    mesh = spmd.topology("v5e:4x4", {"data": 16})
    compiled = spmd.report(spmd.pjit(f, specs, P(), mesh=mesh).lower(*args).compile())
    assert [one.kind for one in compiled.collectives] == kinds
