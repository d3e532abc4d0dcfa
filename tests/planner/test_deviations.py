"""Bytes that a compiled program sends otherwise than predicted, and what is said of them."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
from planned_programs import f32, ints, mlp
import pytest

import spmd
from spmd import P
from spmd.inspection import Collective, Part, Shape, Shapes, Source
from spmd.planner.deviations import deviations

AXES = {"data": 4, "model": 2}


def source(line, column=3):
    """A line of a user's code."""
    return Source(file="/w/model.py", line=line, column=column, function="block")


def sent(kind, dims, *, axes=("data",), times=1, dtype="f32", line=42):
    """Exchanges of arrays of so many elements before or after, whichever are more.

    Their bytes are those of rings: all but one part of an array, twice for an all-reduce.
    """
    group = math.prod(AXES[axis] for axis in axes)
    whole = Shape(dtype=dtype, dims=dims)
    part = Shape(dtype=dtype, dims=(-(-dims[0] // group), *dims[1:]))
    shapes = {
        "all-gather": ((part,), (whole,)),
        "reduce-scatter": ((whole,), (part,)),
    }.get(kind, ((whole,), (whole,)))
    wire = whole.nbytes * (group - 1) // group * (1 + (kind == "all-reduce"))
    return Collective(
        kind=kind,
        mesh_axes=axes,
        shapes=Shapes(*shapes),
        dtype=dtype,
        payload_bytes=whole.nbytes,
        wire_bytes=whole.nbytes if kind == "collective-permute" else wire,
        group_size=group,
        executions=times,
        source=line and source(line),
        direction="backward",
        op_name="jit(step)/dot_general",
        is_async=False,
        combined=1,
    )


def told(predicted, compiled):
    """Bytes and causes of what differs."""
    return [(one.predicted, one.compiled, one.cause) for one in deviations(predicted, compiled)]


SUM = sent("all-reduce", (64, 32))
GATHER = sent("all-gather", (64, 32))
KEPT = sent("all-reduce", (256, 256), axes=("model",))  # 256 KiB, the same on both sides


# Causes. An array of 64 x 32 floats has 8,192 bytes: an all-reduce of four devices sends 12,288 of
# them, a gather 6,144.


@pytest.mark.parametrize(
    ("predicted", "compiled", "expected"),
    [
        (
            [sent("all-gather", (64, 32), times=12)],
            [sent("all-gather", (64, 32), times=6)],
            (73728, 36864, "runs 6 times, not 12"),
        ),
        (
            [sent("all-reduce", (64, 32), times=12)],
            [SUM],
            (147456, 12288, "runs once, not 12 times"),
        ),
        ([SUM], [SUM, SUM], (12288, 24576, "runs 2 times, not once")),
        (
            [GATHER],
            [sent("all-gather", (64, 32), dtype="bf16")],
            (6144, 3072, "sent as bf16, not f32"),
        ),
        (
            [SUM],
            [sent("reduce-scatter", (64, 32))],
            (12288, 6144, "a reduce-scatter, not an all-reduce"),
        ),
        (
            [SUM],
            [sent("reduce-scatter", (64, 32), dtype="bf16")],
            (12288, 3072, "a reduce-scatter of bf16, not an all-reduce of f32"),
        ),
        # Three quarters of the gather go around, one after the other, and in vain a fourth.
        (
            [GATHER],
            [sent("collective-permute", (16, 32), times=4)],
            (6144, 8192, "its parts go around a ring"),
        ),
        (
            [SUM],
            [sent("collective-permute", (8, 32), times=8)],
            (12288, 8192, "its parts go around a ring"),
        ),
        (
            [sent("collective-permute", (16, 32), times=4)],
            [SUM],
            (8192, 12288, "an all-reduce, not parts around a ring"),
        ),
        # Over all eight devices 14,336 bytes; over four 12,288 and over two 8,192.
        (
            [sent("all-reduce", (64, 32), axes=("data", "model"))],
            [SUM, sent("all-reduce", (64, 32), axes=("model",))],
            (14336, 20480, "one for each of data and model, not one for all"),
        ),
        (
            [SUM, sent("all-reduce", (64, 32), axes=("model",))],
            [sent("all-reduce", (64, 32), axes=("data", "model"))],
            (20480, 14336, "one for all, not one for each of data and model"),
        ),
        (
            [sent("all-reduce", (64, 32), axes=("model",))],
            [SUM],
            (8192, 12288, "over data, not over model"),
        ),
        (
            [SUM],
            [sent("all-reduce", (128, 32))],
            (12288, 24576, "of f32[128,32], not f32[64,32]"),
        ),
        (
            [SUM],
            [sent("all-reduce", (48, 32), times=3)],
            (12288, 27648, "3 of f32[48,32], not 1 of f32[64,32]"),
        ),
        ([], [GATHER], (0, 6144, "no sharding asks for it")),
        ([GATHER], [], (6144, 0, "the compiler does without it")),
    ],
)
def test_causes(predicted, compiled, expected):
    """Each way in which a compiler sends other bytes is named, with the bytes of both sides."""
    kept = sent("all-to-all", (64, 64), axes=("model",))
    assert told([kept, *predicted], [*compiled, kept]) == [expected]


def test_the_record():
    """A difference has kind, axes and line as predicted; what only the compiler has, its own."""
    compiled = sent("reduce-scatter", (64, 32), line=7)
    (one,) = deviations([SUM], [compiled])
    assert (one.kind, one.mesh_axes, one.change) == ("all-reduce", ("data",), -6144)
    assert one.source == source(42, column=0)
    (one,) = deviations([], [compiled])
    assert (one.kind, one.source) == ("reduce-scatter", source(7, column=0))
    (one,) = deviations([sent("all-reduce", (64, 32), line=None)], [compiled])
    assert one.source == source(7, column=0)
    runner = Source(file="<frozen runpy>", line=88, column=0, function="_run_code")
    (one,) = deviations([], [dataclasses.replace(compiled, source=runner)])
    assert one.source is None


# What is no difference


def test_lines_that_move_are_no_difference():
    """Twelve gathers of one line are the same as six and six of two lines, and as twelve peeled."""
    twelve = sent("all-gather", (64, 32), times=12)
    six = sent("all-gather", (64, 32), times=6)
    assert told([twelve], [six, dataclasses.replace(six, source=source(7))]) == []
    eleven = sent("all-gather", (64, 32), times=11, line=None)
    turned = sent("all-gather", (32, 64))  # the compiler lays it out otherwise
    assert told([twelve], [turned, eleven]) == []


def test_what_is_combined_is_taken_apart():
    """A combined all-reduce is its parts: two of them are not the third one, which is too much."""
    other = sent("all-reduce", (16, 32), line=57)
    parts = tuple(
        Part(
            shapes=one.shapes, payload_bytes=one.payload_bytes, wire_bytes=one.wire_bytes,
            source=one.source, direction=one.direction, op_name=one.op_name,
        )
        for one in (SUM, SUM, other)
    )  # fmt: skip
    whole = dataclasses.replace(SUM, wire_bytes=2 * 12288 + 3072, combined=3, parts=parts)
    assert told([SUM, other, SUM], [whole]) == []
    (one,) = deviations([SUM, SUM], [whole])
    assert (one.predicted, one.compiled, one.source and one.source.line) == (0, 3072, 57)
    assert one.cause == "no sharding asks for it"


def test_two_percent():
    """Differences are told above 2% of the larger total; alike ones of one cause count together."""
    # All-reduces over model send as many bytes as the array has: 262,144, of which 2% are 5,242.
    small = [sent("all-gather", (rows, 32)) for rows in (16, 20, 12)]  # 1,536, 1,920 and 1,152
    assert told([KEPT], [KEPT, *small]) == []
    more = [*small, sent("all-gather", (24, 32))]  # 2,304: together 6,912
    assert told([KEPT], [KEPT, *more]) == [(0, 6912, "no sharding asks for it")]
    assert told([KEPT] * 2, [KEPT] * 2 + more) == []
    assert told([], []) == []


def test_what_cancels_out_is_not_told():
    """A sum that is scattered and gathered again sends as much over the same axes."""
    again = [sent("reduce-scatter", (64, 32)), sent("all-gather", (64, 32))]
    assert told([SUM], again) == []
    assert told([SUM], [*again, sent("all-to-all", (96, 32))]) == [
        (0, 9216, "no sharding asks for it")
    ]
    halves = [sent(kind, (32, 32)) for kind in ("all-gather", "all-to-all")]  # 3,072 each
    assert told([SUM], [again[0], *halves]) == []
    # Over other axes it does not cancel.
    elsewhere = [again[0], sent("all-gather", (64, 32), axes=("model",))]
    assert len(told([SUM], elsewhere)) == 2


def test_the_largest_comes_first():
    """Differences are told by their size, whichever side has more."""
    a = [sent("all-to-all", (64, 32)), sent("all-reduce", (64, 32), axes=("model",))]
    b = [sent("all-gather", (640, 33), axes=("data", "model"))]
    found = deviations(a, b)
    assert [abs(one.change) for one in found] == [73920, 8192, 6144]


def test_loops_of_unknown_length_count_once():
    """What the compiler moves out of such a loop is no difference; what it adds to one is."""
    often = dataclasses.replace(GATHER, executions=None)
    assert told([SUM, often], [SUM, GATHER]) == []
    assert told([SUM], [SUM, often]) == told([SUM], [SUM, GATHER]) != []


@pytest.mark.slow
def test_what_is_moved_out_of_a_loop_of_unknown_length_is_not_added_by_the_compiler(mesh):
    """CPUs gather the weights before the loop: the time that was predicted has that already."""

    def f(w, x, n):
        def body(carry):
            i, x = carry
            return i + 1, jnp.tanh(x @ w["up"]) @ w["down"]

        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x))[1]

    both = P(("data", "model"))
    args = {"up": f32(512, 2048), "down": f32(2048, 512)}, f32(4096, 512), ints()
    found = planned(mesh, f, args, fixed={"w": both, "x": both, "result": both})
    weights = 2 * 512 * 2048 * 4 * 7 // 8
    assert found.chosen.told == found.chosen.sent == weights
    assert (found.chosen.added, found.deviations) == (0.0, ())
    assert "a loop of unknown length counts once" in str(found).splitlines()


# Real programs


@pytest.fixture(scope="module")
def mesh():
    """Of eight devices."""
    return spmd.make_mesh(AXES)


def planned(mesh, function, args, **options):
    """A plan that the compiler has seen, and that nothing keeps."""
    options = {"top": 1, "seeds": False, "cache": False, "progress": False, **options}
    return spmd.plan(function, *args, mesh=mesh, **options)


@pytest.mark.slow
def test_an_mlp_with_adam_sends_what_was_predicted(mesh):
    """The plan of an MLP with Adam: the compiler's bytes are those of the preview, to 2%."""
    program = mlp(rows=16384, width=1024, hidden=4096)
    found = planned(mesh, program.function, program.args)
    assert found.chosen.sent == found.report.total.wire_bytes > 0
    assert found.chosen.told == pytest.approx(found.chosen.sent, rel=0.02)
    assert found.deviations == ()
    assert "Bytes that were not predicted" not in str(found)


def backwards(x, w):
    """Rows in their other order, times a matrix."""
    return x[::-1] @ w  # here: backwards


def test_what_no_sharding_asks_for_has_a_line(mesh):
    """Rows that are turned round go to other devices, of which shardings say nothing.

    Each device sends its shard, 96 x 32 floats.
    """
    found = planned(
        mesh, backwards, (f32(384, 32), f32(32, 64)), fixed={"x": P("data"), "w": P(None, "model")}
    )
    (one,) = found.deviations
    assert (one.kind, one.predicted, one.compiled) == ("collective-permute", 0, 96 * 32 * 4)
    assert one.cause == "no sharding asks for it"
    lines, first = inspect.getsourcelines(backwards)
    assert one.source
    assert one.source.file == __file__
    assert "# here: backwards" in lines[one.source.line - first]
    assert (found.chosen.told, found.chosen.sent) == (0, one.compiled)
    assert "no sharding asks for it" in str(found)


def test_without_a_compile_nothing_deviates(mesh):
    """A plan that no compiler saw has predicted bytes, and nothing to compare them with."""
    args = (f32(384, 32), f32(32, 64))
    found = planned(mesh, backwards, args, top=0, fixed={"x": P("data"), "w": P(None, "model")})
    assert (found.deviations, found.chosen.told, found.chosen.sent) == ((), 0, 0)


def test_a_program_as_written_is_compared_with_its_own_preview(mesh):
    """The function's own specs have bytes of their own preview, and so has all that is compiled."""
    step = spmd.pjit(
        backwards,
        in_axis_resources=(P("data"), P(None, "model")),
        out_axis_resources=P("data", "model"),
    )
    with mesh:
        found = planned(mesh, step, (f32(384, 32), f32(32, 64)), seeds=True)
    written = next(one for one in found.candidates if one.name == "as written")
    assert (written.told, written.sent) == (0, 96 * 32 * 4)
    assert all(one.told is not None for one in found.candidates if one.verified)
