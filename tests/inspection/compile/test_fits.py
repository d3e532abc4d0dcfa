"""Whether programs fit: against sizes counted by hand, brute force, and the compiler's verdicts."""

import bisect
import dataclasses
import gc
import random
import re

from benchmarks.fitting import PROGRAMS, bracket
from hardware import needs_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest
from reports import pretty

import spmd
from spmd import fits
from spmd.errors import explain
from spmd.inspection import explain_oom, oom_failure
from spmd.inspection.compile.search import IndivisibleSizeError, search
from spmd.inspection.hlo.oom import out_of_memory
from spmd.inspection.records.fit import MOST, Trial

F32 = jnp.float32


def _spec(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


@spmd.pjit(in_axis_resources=(P("data"),), out_axis_resources=P("data"))
def double(x):
    """Takes and gives x: on each device 1/4 of it, twice, and nothing in between."""
    return x * 2.0


def needed_by_double(rows, columns=16):
    """Bytes on each of the devices of data=4, counted by hand."""
    return 2 * (rows // 4) * columns * 4


# One size


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_threshold_is_one_byte(mesh, over):
    """A program fits a budget of exactly what it needs, and not one byte less."""
    needed = needed_by_double(64)
    fit = fits(double, _spec(64, 16), mesh=mesh, budget=needed + over)
    assert (bool(fit), fit.needed, fit.margin) == (over >= 0, needed, over)
    assert fit.memory is not None
    assert fit.memory.peak == needed


def test_what_a_fit_knows(mesh):
    """The answer tells for which devices, and marks those that stand in."""
    fit = fits(double, _spec(64, 16), mesh=mesh, budget="1MB")
    assert (fit.mesh, fit.num_devices, fit.backend) == ({"data": 4, "model": 2}, 8, "cpu")
    assert fit.stand_in
    assert (fit.budget, fit.name, fit.largest, fit.tried) == (10**6, "double", None, ())


def test_text_of_what_fits(mesh):
    """What fits is told with what is left, the parts, and the largest arrays."""
    fit = fits(double, _spec(64, 16), mesh=mesh, budget="1MiB")
    lines = str(fit).splitlines()
    assert lines[:5] == [
        "fits: double needs 2.0 KiB of 1.0 MiB on each of 8 CPU stand-ins; 1022.0 KiB to spare",
        "  the CPU stands in: another backend's compiler plans memory differently",
        "  arguments 1.0 KiB, outputs 1.0 KiB",
        "  largest",
        "      1.0 KiB  argument   f32[16,16]  x",
    ]
    assert lines[5].startswith("      1.0 KiB  output     f32[16,16]  ")
    assert len(lines) == 6


def test_text_of_what_does_not_fit(mesh):
    """What does not fit is told with what is too much."""
    fit = fits(double, _spec(64, 16), mesh=mesh, budget=1024)
    assert fit.verdict == (
        "does not fit: double needs 2.0 KiB of 1.0 KiB on each of 8 CPU stand-ins: 1.0 KiB too much"
    )
    assert str(fit).startswith(fit.verdict + "\n")


def test_donated_arguments_count_once(mesh):
    """A result in a donated argument needs nothing of its own."""
    donating = spmd.pjit(
        lambda x: x * 2.0,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
        donate_argnums=0,
    )
    fit = fits(donating, _spec(64, 16), mesh=mesh, budget="1MB")
    assert fit.needed == needed_by_double(64) // 2


@pytest.mark.parametrize("stage", ["trace", "lower", "compile"])
def test_stages(mesh, stage):
    """A stage has its arguments already; the answer is that of the function."""
    with mesh:
        here = double.trace(_spec(64, 16))
    here = here if stage == "trace" else here.lower()
    here = here.compile() if stage == "compile" else here
    assert fits(here, budget="1MB").needed == needed_by_double(64)


def test_functions_of_jit(mesh):
    """A jax.jit function and its stages are answered as a pjit function is, without a mesh too."""
    place = NamedSharding(mesh, P("data"))
    jitted = jax.jit(lambda x: x * 2.0, in_shardings=place, out_shardings=place)
    for f, args in (
        (jitted, (_spec(64, 16),)),
        (jitted.lower(_spec(64, 16)), ()),
        (jitted.lower(_spec(64, 16)).compile(), ()),
    ):
        fit = fits(f, *args, budget="1MB")
        assert (fit.needed, fit.num_devices) == (needed_by_double(64), 8)
    assert fits(jax.jit(lambda x: x * 2.0), _spec(64, 16), budget="1MB").needed == 2 * 64 * 16 * 4


def test_arrays_are_taken_as_shapes(mesh):
    """Arrays of any kind stand for their shapes, wherever they lie, and are not touched."""
    array = jax.device_put(np.zeros((64, 16), np.float32), jax.devices()[3])
    for x in (array, np.zeros((64, 16), np.float32)):
        assert fits(double, x, mesh=mesh, budget="1MB").needed == needed_by_double(64)
    assert not array.is_deleted()


@pytest.mark.parametrize("how", ["mesh", "topology", "sizes", "stand-ins", "current"])
def test_ways_to_give_a_mesh(mesh, how):
    """A mesh, its sizes, a topology by name, and the current mesh say where the program runs."""
    sizes = {"data": 4, "model": 2}
    options = {
        "mesh": {"mesh": mesh},
        "topology": {"topology": mesh},
        "sizes": {"mesh": sizes},
        "stand-ins": {"topology": "cpu:8", "mesh": sizes},
        "current": {"topology": "cpu:8"},
    }[how]
    if how == "current":
        with mesh:
            fit = fits(double, _spec(64, 16), budget="1MB", **options)
    else:
        fit = fits(double, _spec(64, 16), budget="1MB", **options)
    assert (fit.mesh, fit.needed) == (sizes, needed_by_double(64))


# Arguments that lie elsewhere

PLACED = jax.jit(lambda w, x: (x @ w, x * 2.0))


def _placed(mesh, rows=64):
    """A weight split over both axes and a batch over one, on the devices of a mesh."""
    w = jax.device_put(np.ones((32, 32), np.float32), NamedSharding(mesh, P("model", "data")))
    return w, jax.device_put(np.ones((rows, 32), np.float32), NamedSharding(mesh, P("data")))


@pytest.mark.parametrize("mesh_given", [{"data": 8, "model": 2}, None])
def test_shardings_of_arguments_are_carried_over(mesh, mesh_given):
    """Arrays for a described topology are split over the axes of the same names, or their mesh."""
    fit = fits(PLACED, *_placed(mesh), topology="cpu:16", mesh=mesh_given, budget="1MB")
    assert (fit.mesh, fit.num_devices) == ({"data": 8, "model": 2}, 16)
    assert fit.memory is not None
    # A sixteenth of the weight and an eighth of the batch.
    assert fit.memory.arguments == 32 * 32 * 4 // 16 + 64 * 32 * 4 // 8


def test_sizes_of_carried_arguments_go_in_the_steps_of_their_sharding(mesh):
    """A batch that is split by its own sharding varies in multiples of what splits it."""
    f = jax.jit(lambda w, x: x * 2.0)
    fit = fits(f, *_placed(mesh), topology="cpu:16", budget=6 * 2 * 32 * 4, vary=("x", 0))
    # Six rows in and six rows out on each of the devices, beside nothing: w is not used.
    assert (fit.largest, fit.step, fit.is_exact) == (6 * 8, 8, True)


def test_axes_that_the_other_mesh_lacks(mesh):
    """Without its axes an argument has no place, which is an error and no replicated array."""
    w, x = _placed(mesh)
    with pytest.raises(spmd.ShardingError) as e:
        fits(PLACED, w, x, topology="cpu:16", mesh={"data": 16}, budget="1MB")
    assert str(e.value) == (
        "fits of `<lambda>` cannot split argument w there as it is here.\n"
        "  given     P('model', 'data') over mesh data=4, model=2\n"
        "  expected  axes of mesh data=16\n"
        "  fix       mesh={'data': 16, 'model': 1}, or the sizes that you want with all of these "
        "axes"
    )


def test_specs_of_pjit_need_no_axes_of_arguments(mesh):
    """A pjit function says itself how its arguments are split: where they lie does not matter."""
    x = jax.device_put(np.ones((64, 16), np.float32), NamedSharding(mesh, P("data", "model")))
    fit = fits(double, x, topology="cpu:16", mesh={"data": 16}, budget="1MB")
    assert fit.needed == 2 * (64 // 16) * 16 * 4


def test_other_errors_pass_through(mesh):
    """Only too little memory is an answer: what the function itself raises stays an exception."""

    def broken(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        fits(spmd.pjit(broken), _spec(4), mesh=mesh, budget="1MB")


# Errors


def test_a_budget_is_needed(mesh):
    """A device whose memory is not known needs a budget, and nothing is compiled before."""
    before = spmd.counts().compiles
    with pytest.raises(spmd.OptionError) as e:
        fits(double, _spec(64, 16), mesh=mesh)
    assert spmd.counts().compiles == before
    assert str(e.value) == (
        "fits of `double` needs a budget.\n"
        "  expected  the memory of one device, which is not known\n"
        "  got       devices of kind 'cpu'\n"
        "  fix       budget='16GB', or topology='v5e:4x4', whose memory is known"
    )


def test_an_unreadable_budget(mesh):
    """A budget that is no number of bytes is told so."""
    with pytest.raises(spmd.OptionError) as e:
        fits(double, _spec(64, 16), mesh=mesh, budget="lots")
    assert str(e.value) == (
        "fits of `double` cannot read the budget.\n"
        "  got       'lots' is no number of bytes: write 4096, '16GB' or '15.75GiB'"
    )


def test_no_function(mesh):
    """A plain function is told how to partition it."""

    def plain(x):
        return x

    with pytest.raises(spmd.ArgumentError) as e:
        fits(plain, _spec(4), mesh=mesh, budget="1MB")
    assert str(e.value) == (
        "fits of `plain` cannot compile this.\n"
        "  expected  a function of spmd.pjit or jax.jit, or a stage of one\n"
        "  got       plain <class 'function'>\n"
        "  fix       fits(jax.jit(f), *args), or fits(spmd.pjit(f, in_axis_resources=...), *args)"
    )


def test_two_meshes(mesh):
    """A mesh twice is one too many."""
    with pytest.raises(spmd.OptionError) as e:
        fits(double, _spec(4), topology=mesh, mesh=mesh, budget="1MB")
    assert str(e.value) == (
        "fits of `double` got a mesh twice.\n"
        "  given     topology=mesh data=4, model=2, mesh=mesh data=4, model=2\n"
        "  expected  topology='v5e:4x4' with the sizes of its axes as mesh, or one mesh"
    )


@spmd.pjit(in_axis_resources=({"x": P("data"), "y": P()}, P()))
def tree(batch, scale):
    """Has arguments with paths."""
    return batch["x"] * scale


BATCH = {"x": _spec(64, 16), "y": [_spec(3), _spec(4)]}


@pytest.mark.parametrize(
    ("vary", "text"),
    [
        (
            ("batch['z']", 0),
            "has no array batch['z'] (did you mean \"batch['x']\"?).\n"
            "  given     vary=(\"batch['z']\", 0)\n"
            "  expected  the path of an array: batch['x'], batch['y'][0], batch['y'][1], scale",
        ),
        (
            ("batch", 0),
            "cannot vary batch, which holds several arrays.\n"
            "  given     vary=('batch', 0)\n"
            "  expected  the path of an array: batch['x'], batch['y'][0], batch['y'][1]",
        ),
        (
            ('batch["x"]', 2),
            'has no dimension 2 in batch["x"].\n'
            "  given     vary=('batch[\"x\"]', 2)\n"
            "  expected  a dimension from -2 to 1\n"
            "  got       shape (64, 16)",
        ),
        (
            ("scale", 0),
            "has no dimension 0 in scale.\n"
            "  given     vary=('scale', 0)\n"
            "  expected  an array of rank 1 or more\n"
            "  got       shape ()",
        ),
        (
            ("scale",),
            "cannot read vary.\n"
            "  given     vary=('scale',)\n"
            "  expected  an argument's path and a dimension, or a list of such pairs\n"
            "  fix       vary=(\"batch['x']\", 0)",
        ),
    ],
)
def test_what_cannot_vary(mesh, vary, text):
    """A path or dimension that is not there is told with those that are."""
    with pytest.raises((spmd.OptionError, spmd.ArgumentError)) as e:
        fits(tree, BATCH, _spec(), mesh=mesh, budget="1MB", vary=vary)
    assert str(e.value) == f"fits of `tree` {text}"


def test_a_stage_has_one_size(mesh):
    """The size of a stage cannot vary."""
    with mesh:
        lowered = double.lower(_spec(64, 16))
    with pytest.raises(spmd.ArgumentError, match="cannot vary the size of a Lowered stage"):
        fits(lowered, budget="1MB", vary=("x", 0))


# The largest size


def _brute_force(mesh, budget, sizes):
    """The largest of all sizes that fits, each compiled by JAX alone."""
    place = NamedSharding(mesh, P("data"))
    jitted = jax.jit(
        lambda x, y: jnp.tanh(x @ x.T) @ x + y, in_shardings=place, out_shardings=place
    )
    found = None
    for size in sizes:
        m = jitted.lower(_spec(size, 3), _spec(size, 3)).compile().memory_analysis()
        needed = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
        found = size if needed <= budget else found
    return found


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("budget", "start"),
    [(3_000, 4), (3_000, 96), (9_000, 28), (700, 64)],
)
def test_the_largest_size_against_brute_force(mesh, budget, start):
    """The search finds what compiling every size finds, wherever it starts."""
    f = spmd.pjit(
        lambda x, y: jnp.tanh(x @ x.T) @ x + y,
        in_axis_resources=P("data"),
        out_axis_resources=P("data"),
    )
    args = _spec(start, 3), _spec(start, 3)
    fit = fits(f, *args, mesh=mesh, budget=budget, vary=[("x", 0), ("y", 0)])
    assert fit.largest == _brute_force(mesh, budget, range(4, 129, 4))
    assert fit.is_exact
    assert fit.vary == (("x", 0), ("y", 0))


def test_sizes_go_in_the_steps_of_the_sharding(mesh):
    """Only sizes that the mesh divides are compiled, from one that it does not divide on."""
    seen = []
    fit = fits(
        double,
        _spec(30, 16),
        mesh=mesh,
        budget=needed_by_double(64) + 5,
        vary=("x", 0),
        progress=lambda size, one: seen.append((size, one.needed, bool(one))),
    )
    assert (fit.largest, fit.too_large, fit.step) == (64, 68, 4)
    assert [*fit.tried] == seen
    assert all(needed == needed_by_double(size) for size, needed, _ in seen)
    assert fit.needed == needed_by_double(64)
    assert fit.verdict == (
        "fits: 64 for dimension 0 of x, which needs 2.0 KiB of 2.0 KiB on each of 8 CPU stand-ins; "
        "5 B to spare; 68 does not fit"
    )


def test_negative_dimensions_and_other_quotes(mesh):
    """A dimension may count from the end, and a path may have double quotes."""
    fit = fits(tree, BATCH, _spec(), mesh=mesh, budget=10_000, vary=('batch["x"]', -2))
    assert fit.vary == (("batch['x']", 0),)
    # x is split by four, the result is where the partitioner leaves it: split, too.
    assert fit.largest == (10_000 - 4) // (2 * 16 * 4) * 4


def test_not_even_the_smallest_fits(mesh):
    """Where nothing fits there is no largest size, and the answer is no."""
    fit = fits(double, _spec(64, 16), mesh=mesh, budget=100, vary=("x", 0))
    assert not fit
    assert fit.largest is None
    assert fit.is_exact
    assert fit.verdict == (
        "does not fit: not even 4 for dimension 0 of x, which needs 128 B of 100 B on each of 8 "
        "CPU stand-ins: 28 B too much"
    )


def test_a_size_that_takes_no_memory(mesh):
    """Where nothing ever fails the search ends, and says so."""
    unused = spmd.pjit(lambda x: jnp.zeros(4), in_axis_resources=P("data"))
    fit = fits(unused, _spec(64), mesh=mesh, budget=100, vary=("x", 0))
    assert fit
    assert fit.largest == MOST
    assert not fit.is_exact
    assert fit.verdict.endswith(
        "no larger size was tried: the memory does not seem to depend on it"
    )


def test_a_cap_on_compiles(mesh):
    """With its compiles used up, the search gives what it knows, and says that it is not all."""
    fit = fits(double, _spec(4, 16), mesh=mesh, budget=10**6, vary=("x", 0), max_compiles=2)
    assert [size for size, _, _ in fit.tried] == [4, 8]
    assert (fit.largest, fit.too_large, fit.is_exact) == (8, None, False)
    assert fit.verdict.endswith("; 2 sizes were compiled, and larger ones may fit")
    with pytest.raises(spmd.OptionError, match="cannot compile so often"):
        fits(double, _spec(4, 16), mesh=mesh, budget=10**6, vary=("x", 0), max_compiles=0)


@pytest.mark.slow
def test_a_tolerance(mesh):
    """With a tolerance the search stops earlier, within it, and says that more may fit."""
    f = spmd.pjit(
        lambda x: jnp.tanh(x @ x.T) @ x, in_axis_resources=P("data"), out_axis_resources=P("data")
    )
    ask = {"mesh": mesh, "budget": 10**6, "vary": ("x", 0)}
    exact, rough = fits(f, _spec(8, 3), **ask), fits(f, _spec(8, 3), **ask, tolerance=0.3)
    assert None not in (exact.largest, rough.largest, rough.too_large)
    assert rough.largest <= exact.largest < rough.too_large <= 1.3 * rough.largest
    assert len(rough.tried) < len(exact.tried)
    assert not rough.is_exact
    assert rough.verdict.endswith(f"compiled, and more may fit, but not {rough.too_large:,}")
    with pytest.raises(spmd.OptionError, match="cannot stop there"):
        fits(f, _spec(8, 3), **ask, tolerance=2)


def test_text_with_sizes(mesh):
    """The text lists what was tried."""
    text = str(fits(double, _spec(64, 16), mesh=mesh, budget=2048, vary=("x", 0)))
    assert text.partition("  tried\n")[2].splitlines()[:2] == [
        "               64     2.0 KiB  fits",
        "              128     4.0 KiB  does not fit",
    ]


@pytest.mark.slow
def test_a_search_shows_what_it_tries(mesh, capsys, monkeypatch):
    """The standard error has each size in a terminal or where asked for, else nothing."""

    def shown(progress):
        fits(double, _spec(64, 16), mesh=mesh, budget=2048, vary=("x", 0), progress=progress)
        return capsys.readouterr().err

    assert (shown(None), shown(False)) == ("", "")
    first, *tried, last = shown(True).splitlines()
    assert first == "fits of `double` ..."
    assert tried[:2] == ["compiling size 64, after 0 others", "compiling size 128, after 1 others"]
    assert re.fullmatch(r"fits of `double`: \d+\.\d s", last)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal
    assert tried[-1] in shown(None)  # the last one is drawn for sure, others if there is time
    assert shown(False) == ""


def test_a_fit_in_a_notebook(mesh):
    """The last value of a notebook's cell is shown as `print` shows it, in lists as a sentence."""
    fit = fits(double, _spec(64, 16), mesh=mesh, budget="1MiB")
    assert repr(fit) == f"<Fit: {fit.verdict}>"
    assert pretty(fit) == str(fit)


@pytest.mark.slow
def test_a_function_that_reshapes_its_argument(mesh):
    """Sizes that the function itself does not take are passed over, not errors."""

    def f(x):
        return x.reshape(-1, 24, 4).sum(axis=1)

    rows = spmd.pjit(f, in_axis_resources=P("data"))
    budget = 50_000
    fit = fits(rows, _spec(96, 4), mesh=mesh, budget=budget, vary=("x", 0))
    assert fit.largest is not None
    assert (fit.step % 24, 96 % fit.step, fit.is_exact) == (0, 0, True)
    assert fits(rows, _spec(fit.largest, 4), mesh=mesh, budget=budget)
    assert not fits(rows, _spec(fit.largest + fit.step, 4), mesh=mesh, budget=budget)


def test_an_error_at_one_size_names_it(mesh):
    """An error that a size provokes passes through, with the size."""

    def f(x):
        if x.shape[0] > 100:
            raise ValueError("too many rows")
        return x

    with pytest.raises(ValueError, match="too many rows") as e:
        fits(spmd.pjit(f), _spec(64), mesh=mesh, budget="1MB", vary=("x", 0))
    note = "This is from spmd.fits, which tried 128 for dimension 0 of x."
    assert note in e.value.__notes__


@pytest.mark.slow
def test_programs_of_a_search_are_released(mesh):
    """What was compiled for a size is gone afterwards, and the function's own caches stay."""

    def programs():
        gc.collect()
        return sum(type(o).__name__ == "MeshExecutable" for o in gc.get_objects())

    f = spmd.pjit(lambda x: x * 3.0, in_axis_resources=P("data"))
    with mesh:
        f(np.ones((8, 4), np.float32))
    before = programs()
    fit = fits(f, _spec(64, 16), mesh=mesh, budget=2_000, vary=("x", 0))
    assert len(fit.tried) > 2
    assert programs() <= before
    compiled = spmd.counts().compiles
    with mesh:
        f(np.ones((8, 4), np.float32))
    assert spmd.counts().compiles == compiled


# The search alone


@pytest.mark.parametrize("seed", range(300))
def test_the_search_against_brute_force(seed):
    """Any memory that grows with the size, any step, any start: the search is exact."""
    rng = random.Random(seed)
    base, slope = rng.randrange(500), rng.choice([0.3, 1, 7.5])
    power, step = rng.choice([0.5, 1, 1, 2]), rng.choice([1, 2, 6, 8])
    budget, sized = rng.randrange(1, 2000), rng.random()

    def needed(size):
        return int(base + slope * size**power)

    def trial(size):
        assert 0 < size <= MOST
        if size % step:
            raise IndivisibleSizeError(step)
        told = needed(size) if rng.random() < sized else None
        return Trial(size, told, needed(size) <= budget)

    found = search(trial, start=rng.randrange(1, 500), budget=lambda: budget, max_trials=200)
    sizes = range(step, MOST + 1, step)
    count = bisect.bisect_right(sizes, budget, key=needed)
    assert found.largest == (sizes[count - 1] if count else None)
    assert found.is_exact == (count < len(sizes))
    assert len({t.size for t in found.tried}) == len(found.tried)


def test_memory_in_proportion_takes_few_compiles():
    """Where memory is a straight line, four sizes are enough."""

    def trial(size):
        return Trial(size, 1000 + 37 * size, 1000 + 37 * size <= 10**9)

    found = search(trial, start=64, budget=lambda: 10**9, max_trials=100)
    assert found.largest == (10**9 - 1000) // 37
    assert found.is_exact
    assert len(found.tried) == 4


# What the compiler says

EARLY = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total \
memory required for HLO temporaries (17.50G) exceeds available HBM (15.75G). HLO module: jit_f.
See https://openxla.org/xla/errors/error_1000 for more details."""

LATE = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out \
of memory in memory space hbm. Used 15.75G of 15.75G hbm. Exceeded hbm capacity by 181.5K.

Total hbm usage >= 12.94G:
    reserved        258.00M
    program           9.25G
    arguments         3.43G

Output size 3.06G; shares 0B with arguments.

  Largest program allocations in hbm:

  1. Size: 3.06G
     Operator: op_name="jit(f)/transpose/dot_general" source_file="train.py" source_line=12
     Shape: f32[49,4096,4095]{2,1,0:T(8,128)}
     Unpadded size: 3.06G
     XLA label: broadcast.1.clone = broadcast(constant.21), dimensions={}
     Allocation type: HLO temp
     ==========================

  2. Size: 1.17M
     XLA label: overlays
     Allocation type: overlays
     ==========================

  Largest program arguments and outputs in hbm:

  1. Size: 6.00G
     Shape: bf16[49,8192,8192]{2,1,0:T(8,128)(2,1)}
     XLA label: Argument 0 index {}
     ==========================
"""

VMEM = """RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem. \
Exceeded vmem capacity by 4.00M."""


def test_the_early_verdict():
    """The compiler's first estimate says how much is needed, and how much there is."""
    verdict = out_of_memory(RuntimeError(EARLY))
    assert verdict is not None
    assert (verdict.needed, verdict.available) == (int(17.5 * 2**30), int(15.75 * 2**30))
    assert explain_oom(EARLY) == "needs 17.5 GiB of 15.8 GiB on each device: 1.8 GiB too much"


def test_the_late_verdict():
    """The compiler's plan says by how much it is too large, and what is large in it."""
    verdict = out_of_memory(LATE)
    assert verdict is not None
    assert verdict.needed is not None
    assert verdict.available is not None
    assert verdict.needed - verdict.available == int(181.5 * 1024)
    assert explain_oom(LATE) == (
        "needs 15.8 GiB of 15.8 GiB on each device: 181.5 KiB too much\n"
        "  largest\n"
        "      6.1 GiB  argument   bf16[49,8192,8192]  Argument 0 index {}\n"
        "      3.1 GiB  temporary  f32[49,4096,4095]  train.py:12  jit(f)/transpose/dot_general"
    )
    # 4095 columns take 32 tiles of 128.
    assert [b.nbytes for b in verdict.buffers] == [49 * 8192 * 8192 * 2, 49 * 4096 * 4096 * 4]


def test_the_late_verdict_as_an_error():
    """Every row of an error stands below the first: nothing is indented twice."""
    failure = oom_failure(RuntimeError(LATE), given="mesh data=4")
    assert failure is not None
    assert str(explain("f", [failure])) == (
        "f does not fit: it needs 15.8 GiB of 15.8 GiB on each device: 181.5 KiB too much.\n"
        "  given     mesh data=4\n"
        "  got       largest\n"
        "            6.1 GiB  argument   bf16[49,8192,8192]  Argument 0 index {}\n"
        "            3.1 GiB  temporary  f32[49,4096,4095]  train.py:12  "
        "jit(f)/transpose/dot_general\n"
        "  fix       "
        "spmd.fits(f, *args, vary=(argument, dimension)) finds the largest size that fits"
    )


def test_a_verdict_that_rounding_hides():
    """Where the compiler rounds what is needed to what there is, the amount is not known."""
    verdict = out_of_memory(EARLY.replace("17.50G", "15.75G"))
    assert verdict is not None
    assert verdict.needed is None
    text = explain_oom(EARLY.replace("17.50G", "15.75G"))
    assert text == "needs a little more than the 15.8 GiB on each device"


def test_verdicts_are_found_in_causes():
    """An exception that wraps the compiler's is read, too."""
    error = ValueError("compile failed")
    error.__cause__ = RuntimeError(EARLY)
    assert out_of_memory(error) == out_of_memory(EARLY)


@pytest.mark.parametrize("text", [VMEM, "INVALID_ARGUMENT: no", "", "out of paper"])
def test_other_errors_are_no_verdicts(text):
    """On-chip memory and other errors are not about what a device holds."""
    assert out_of_memory(RuntimeError(text)) is None
    assert explain_oom(RuntimeError(text)) is None


# TPU


@pytest.fixture(name="v5e", scope="module")
def _v5e():
    return spmd.topology("v5e:2x2", mesh={"data": 4})


def _tpu(f, **options):
    return spmd.pjit(f, in_axis_resources=P("data"), out_axis_resources=P("data"), **options)


GIB = 2**30


@pytest.mark.slow
@needs_libtpu
def test_a_tpu_program_that_fits(v5e):
    """On described chips the budget is their memory, and what is needed is told to the byte."""
    fit = fits(_tpu(lambda x: x * 2.0), _spec(2**20, 1024), mesh=v5e)
    assert fit
    assert fit.memory is not None
    # A quarter of 4 GiB, in and out, and the program.
    assert fit.needed == 2 * GIB + fit.memory.code
    assert fit.budget == spmd.inspection.hbm_bytes("TPU v5 lite")
    assert not fit.stand_in
    assert fit.verdict.startswith(
        "fits: <lambda> needs 2.0 GiB of 15.8 GiB on each of 4 TPU v5 lite"
    )


@pytest.mark.slow
@needs_libtpu
def test_a_budget_below_the_chips_memory(v5e):
    """A budget of one's own is held, where the compiler would have been content."""
    f = _tpu(lambda x: x * 2.0)
    fit = fits(f, _spec(2**20, 1024), mesh=v5e, budget="1GiB")
    assert not fit
    assert fit.margin is not None
    assert -GIB - 2**24 < fit.margin < -GIB


@needs_libtpu
@pytest.mark.parametrize("budget", [None, "64GiB"])
def test_arguments_that_do_not_fit(v5e, budget):
    """Arguments alone may be too large: the compiler's verdict is the answer, not an exception."""
    fit = fits(_tpu(lambda x: x[..., 0]), _spec(17 * 2**20, 1024), mesh=v5e, budget=budget)
    assert not fit
    assert fit.memory is None
    # A quarter of 68 GiB, and a column of results.
    assert fit.needed == pytest.approx(17 * GIB, rel=0.01)
    assert fit.budget == pytest.approx(15.75 * GIB, rel=0.001)
    assert fit.verdict.startswith("does not fit: <lambda> needs 17.0 GiB of 15.8 GiB on each of 4")


@needs_libtpu
def test_temporaries_that_do_not_fit(v5e):
    """Small arguments with large temporaries are refused, with the amount."""

    def f(x):
        large = jnp.sort(x[:, :1] * jnp.arange(2**13, dtype=F32)[None, :], axis=0)
        return jnp.sum(jnp.sort(large.T, axis=0), axis=0)[:, None] + x

    fit = fits(_tpu(f), _spec(2**20, 8), mesh=v5e)
    assert not fit
    assert fit.needed is None or fit.needed > 15.75 * GIB


@pytest.mark.slow
@needs_libtpu
def test_the_largest_batch_for_a_tpu(v5e):
    """The search ends within a page of what the chip holds, in steps of the mesh."""
    f = _tpu(lambda x: x * 2.0, donate_argnums=0)
    fit = fits(f, _spec(2**18, 1024), mesh=v5e, vary=("x", 0))
    assert fit.largest is not None
    assert fit.largest % 4 == 0
    # x alone lies there, 4 KiB a row, a quarter of the rows on each chip.
    assert fit.largest / 4 * 4096 == pytest.approx(15.75 * GIB, rel=0.001)
    assert fit.too_large is not None


@needs_libtpu
def test_jit_with_shardings_of_described_chips(v5e):
    """A jax.jit function with shardings of described chips needs no mesh, refused or not."""
    place = NamedSharding(v5e, P("data"))
    f = jax.jit(lambda x: x * 2.0, in_shardings=place, out_shardings=place)
    fit = fits(f, _spec(2**20, 1024))
    assert (bool(fit), fit.device_kind, fit.mesh) == (True, "TPU v5 lite", {"data": 4})
    refused = fits(f, _spec(2**23, 1024))
    assert not refused
    assert refused.needed == pytest.approx(16 * GIB, rel=0.01)
    assert refused.verdict == (
        "does not fit: <lambda> needs 16.0 GiB of 15.8 GiB on each device: 256.0 MiB too much"
    )


@pytest.mark.few(0)
@needs_libtpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        # The compiler's own temporaries, with all else, would be above the memory.
        ("scan", 1_540_096),
        ("scan, forward", 22_000_640),
        ("fori_loop, forward", 10_600_448),
    ],
)
def test_what_the_tpu_compiler_accepts_and_refuses(name, rows):
    """The figure is within the memory where the compiler accepts, near it, and above where not."""
    program = dataclasses.replace(PROGRAMS[name], rows=rows)
    (accepted, fit), (refused, verdict) = bracket(program, within=0.02)
    assert fit
    assert fit.needed <= fit.budget == 15.75 * GIB
    assert fit.needed * refused / accepted >= 0.97 * fit.budget
    assert not verdict
    # The compiler rounds to 10 MiB, and where that hides the difference there is no figure.
    assert verdict.needed is None or fit.budget < verdict.needed <= 1.02 * fit.budget


def test_the_current_mesh_grows_to_the_topology():
    """Without sizes, the first axis of the current mesh takes what the topology has."""
    f = spmd.pjit(
        lambda x: x * 2, in_axis_resources=spmd.P("data"), out_axis_resources=spmd.P("data")
    )
    x = jax.ShapeDtypeStruct((1024, 4), np.float32)
    with spmd.make_mesh({"data": 4, "model": 2}):
        fit = fits(f, x, topology="cpu:16", budget="1MB")
        assert dict(fit.mesh) == {"data": 8, "model": 2}
        # Arguments and results of 1024/8 rows of 4 floats.
        assert fit.needed == 2 * 1024 // 8 * 4 * 4
        with pytest.raises(spmd.ShardingError, match="unknown axis 'data'"):
            fits(f, x, topology="cpu:3", budget="1MB")


@needs_libtpu
def test_a_compile_that_does_not_fit_says_so_in_words():
    """What the TPU compiler refuses is an OutOfMemoryError, with its figures and a way on."""
    f = spmd.pjit(lambda x: (x @ x).T @ x, in_axis_resources=None, out_axis_resources=None)
    with spmd.topology("v5e:2x2", mesh={"data": 4}):
        lowered = f.lower(jax.ShapeDtypeStruct((2**17, 2**17), np.float32))
    with pytest.raises(spmd.OutOfMemoryError) as e:
        lowered.compile()
    first, *rest = str(e.value).splitlines()
    found = re.fullmatch(
        r"pjit of `<lambda>` does not fit: it needs ([\d.]+) GiB of 15.[78] GiB on each device: "
        r"([\d.]+) GiB too much\.",
        first,
    )
    # Argument, result and the first product, 64 GiB each.
    assert 128 <= float(found[1]) <= 256
    assert abs(float(found[1]) - float(found[2]) - 15.75) < 0.2
    assert rest == [
        "  given     mesh data=4",
        "  fix       spmd.fits(f, *args, vary=(argument, dimension)) finds the largest size that "
        "fits",
    ]
    assert isinstance(e.value.__cause__, jax.errors.JaxRuntimeError)
