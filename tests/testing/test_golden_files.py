"""Goldens: what they hold, what they ignore, and what they say when they differ."""
# ruff: noqa: E501 texts are compared as they are printed

import dataclasses
import os
from pathlib import Path
import textwrap

from made import collective, joined, report
import pytest

from spmd.inspection import Shape, Shapes, Source
from spmd.testing import assert_golden, golden_text
from spmd.testing._goldens import Session, sessions

HEADER = """\
# spmd golden, version 1: collectives per device and call, one row per group of equal ones
# function: step
# mesh: data=4, model=2
# backend: cpu
# jax: 0.10.2
# kind | axes | shapes | payload | runs | how many | direction | place
"""

GATHER = collective(
    "all-gather",
    ("model",),
    shapes=Shapes((Shape(dtype="bf16", dims=(4, 8)),), (Shape(dtype="bf16", dims=(8, 8)),)),
    payload_bytes=128,
    executions=6,
    op_name="jit(step)/transpose(jvp(layer_3))/attention/dot_general",
    direction="backward",
)


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """A session of its own, so that a test of updating leaves no trace."""
    sessions.append(Session())
    yield sessions[-1]
    sessions.pop()


@pytest.fixture
def golden(tmp_path):
    """A function that writes the golden of a report and then compares another with it."""

    def compare(then, now):
        path = tmp_path / "a.ledger"
        path.write_text(golden_text(then))
        assert assert_golden(now, path) is now

    return compare


def told(message, error, call, *args):
    """Checks the class and the whole text of what `call` raises."""
    with pytest.raises(error) as caught:
        call(*args)
    assert str(caught.value) == textwrap.dedent(message).strip("\n")


# Text


def test_text():
    """The file, to the letter: header, sorted rows, equal exchanges counted in one row."""
    pieces = Shapes((Shape(dtype="f32", dims=(2,)),) * 3, (Shape(dtype="s8", dims=()),))
    got = golden_text(
        report(
            collective(),
            GATHER,
            dataclasses.replace(
                GATHER, op_name="jit(step)/transpose(jvp(layer_4))/attention/dot_general"
            ),
            collective("all-to-all", ("data", "model"), shapes=pieces, executions=None, op_name=""),
            collective("send", (), direction="other", op_name="x", conditional=True, executions=2),
            collective(executions=0),
        )
    )
    assert got == HEADER + (
        "all-gather | model | bf16[4,8] -> bf16[8,8] | 128 B | 6 runs | x2 | backward | layer_*/attention/dot_general\n"
        "all-reduce | data | f32[256,1024] -> f32[256,1024] | 1048576 B | 0 runs | x1 | forward | mlp/dot_general\n"
        "all-reduce | data | f32[256,1024] -> f32[256,1024] | 1048576 B | 1 run | x1 | forward | mlp/dot_general\n"
        "all-to-all | data, model | 3*f32[2] -> s8[] | 24 B | unknown runs | x1 | forward | -\n"
        "send | 4 devices | f32[256,1024] -> f32[256,1024] | 1048576 B | 2 runs in a branch | x1 | other | x\n"
    )


def test_header_without_mesh():
    """A program without a mesh, on hardware that has a name."""
    text = golden_text(report(mesh={}, backend="tpu", device_kind="TPU v5 lite", versions={}))
    assert text.splitlines()[2:5] == [
        "# mesh: none",
        "# backend: tpu (TPU v5 lite)",
        "# jax: unknown",
    ]


def test_text_with_separators_in_names(golden):
    """Names with the file's own separators, or with line ends, do not break a row."""
    odd = report(collective(op_name="jit(step)/a | b\nc/~ add", axes=("x|y",)), mesh={"x|y": 4})
    assert "| x\N{BROKEN BAR}y |" in golden_text(odd)
    assert golden_text(odd).splitlines()[-1].endswith(" | a \N{BROKEN BAR} b c/~ add")
    golden(odd, odd)


# What is compared


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "reduce-scatter"},
        {"mesh_axes": ("model",)},
        {"mesh_axes": ("data:(2)2",)},
        {"mesh_axes": ()},
        {
            "shapes": Shapes(
                (Shape(dtype="f32", dims=(1024, 256)),), (Shape(dtype="f32", dims=(1024, 256)),)
            )
        },
        {
            "shapes": Shapes(
                (Shape(dtype="s32", dims=(256, 1024)),), (Shape(dtype="s32", dims=(256, 1024)),)
            )
        },
        {"executions": 2},
        {"executions": None},
        {"conditional": True},
        {"direction": "backward"},
        {"op_name": "jit(step)/jvp(attention)/dot_general"},
        {"op_name": "jit(step)/jvp(mlp)/sharding_constraint"},
    ],
)
def test_what_a_golden_holds(golden, change):
    """One other kind, axis, part of an axis, shape, dtype, number of runs or place is a difference."""
    golden(report(collective()), report(collective()))
    with pytest.raises(AssertionError, match="does not exchange what its golden"):
        golden(report(collective()), report(dataclasses.replace(collective(), **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"is_async": True},
        {"name": "all-reduce.17"},
        {"groups": "[2,4]<=[8]"},
        {"source": Source(file="model.py", line=99, column=1, function="loss")},
        {"source": None},
        {"in_loop": True},
        {"wire_bytes": 7},
        {"op_name": "pjit(other)/jvp(mlp)/while/body/closed_call/dot_general"},
    ],
)
def test_what_a_golden_ignores(golden, change):
    """What a compiler changes on the way is not in it."""
    golden(report(collective()), report(dataclasses.replace(collective(), **change)))


def test_order_and_numbers(golden):
    """The order does not count, the number does."""
    golden(report(collective(), GATHER), report(GATHER, collective()))
    with pytest.raises(AssertionError, match=r"\(2 in the golden, 1 now\)"):
        golden(report(GATHER, GATHER), report(GATHER))
    with pytest.raises(AssertionError, match=r"\(1 in the golden, 2 now\)"):
        golden(report(GATHER), report(GATHER, GATHER))


def test_layers(golden):
    """Unrolled layers count as one row, so that which of them it is does not matter."""
    layers = [dataclasses.replace(GATHER, op_name=f"jit(f)/layer_{i}/mul") for i in range(4)]
    golden(report(*layers[:2]), report(*layers[2:]))


# Combined exchanges


MLP = collective(op_name="jit(step)/jvp(mlp)/dot_general")
ATTN = collective(op_name="jit(step)/jvp(attention)/dot_general")
HEAD = collective(op_name="jit(step)/jvp(head)/dot_general")


def test_combining_is_no_difference(golden):
    """Two exchanges and the same two combined are equal, in either order and direction."""
    golden(report(MLP, ATTN), report(joined(MLP, ATTN)))
    golden(report(joined(MLP, ATTN)), report(MLP, ATTN))
    golden(report(joined(MLP, ATTN)), report(joined(ATTN, MLP)))
    golden(report(MLP, ATTN, HEAD), report(joined(MLP, ATTN), HEAD))
    golden(report(joined(MLP, ATTN), HEAD), report(MLP, joined(ATTN, HEAD)))


def test_combining_hides_nothing_else(golden):
    """Another number, size or axis among combined exchanges is a difference, as without it."""
    for other in (
        report(joined(MLP, ATTN), HEAD),
        report(joined(MLP, collective(dims=(8,)))),
        report(
            joined(MLP, ATTN, axes=("model",))
            if False
            else joined(collective(axes=("model",)), ATTN)
        ),
        report(MLP),
    ):
        with pytest.raises(AssertionError):
            golden(report(MLP, ATTN), other)
    with pytest.raises(AssertionError, match="only now:"):
        golden(report(joined(MLP, ATTN), ATTN), report(joined(MLP, ATTN), HEAD))


def test_combined_rows_are_matched_as_well_as_they_can(golden):
    """What could stand for anything is left to what needs it."""
    then = joined(MLP, ATTN, op_name="jit(step)/a", direction="backward")
    now = joined(MLP, ATTN, op_name="jit(step)/b", direction="backward")
    golden(report(then, HEAD), report(now, MLP))


def test_a_combined_row_says_so():
    """The place of a combined exchange is that of one of them, and marked."""
    rows = golden_text(report(joined(MLP, ATTN))).splitlines()[6:]
    assert rows == [
        "all-reduce | data | f32[256,1024] -> f32[256,1024] | 1048576 B | 1 run | x2 | forward | ~ mlp/dot_general"
    ]


def test_what_is_combined_and_cannot_be_taken_apart(golden):
    """An exchange of several that is one whole has the place of one of them too."""
    then = collective("all-to-all", combined=2)
    assert golden_text(report(then)).splitlines()[6].endswith(" | ~ mlp/dot_general")
    golden(report(then), report(dataclasses.replace(then, op_name="jit(step)/head/mul")))


def test_a_name_for_each(golden):
    """Where the compiler kept a name for each array, each has its own place and direction."""
    names = "jit(step)/(jvp(mlp)/dot_general:transpose(jvp(head))/mul)"
    both = report(joined(MLP, collective(dims=(8,)), op_name=names))
    apart = collective(
        dims=(8,), op_name="jit(step)/transpose(jvp(head))/mul", direction="backward"
    )
    assert golden_text(both) == golden_text(report(MLP, apart))
    with pytest.raises(AssertionError, match=r"\+ .*, backward, at head/mul\n(.*\n)*  - "):
        golden(report(MLP, dataclasses.replace(apart, direction="forward")), both)


def test_pieces_of_one_exchange_are_not_taken_apart():
    """An all-to-all of several pieces is one exchange."""
    piece = Shape(dtype="f32", dims=(2,))
    whole = collective("all-to-all", shapes=Shapes((piece,) * 4, (piece,) * 4))
    assert golden_text(report(whole)).splitlines()[6:] == [
        "all-to-all | data | 4*f32[2] -> 4*f32[2] | 32 B | 1 run | x1 | forward | mlp/dot_general"
    ]


# Other releases, backends and meshes


def test_another_release_of_jax(golden):
    """Releases name operations differently: places are then not compared, all else is."""
    newer = {"jax": "0.12.0"}
    golden(report(MLP), report(dataclasses.replace(ATTN, direction="other"), versions=newer))
    golden(report(MLP, MLP), report(MLP, ATTN, versions=newer))
    with pytest.raises(
        AssertionError, match=r"jax      golden 0\.10\.2, now 0\.12\.0; places are not"
    ):
        golden(report(MLP), report(MLP, MLP, versions=newer))


def test_another_backend_is_told_first(golden):
    """A golden of another backend fails even where the rows agree, and says why before the rows."""
    told(
        f"""
        `step` does not exchange what its golden {golden_path(golden)} says.
          backend  golden cpu, now tpu (TPU v4); rows of two backends cannot agree: keep a golden for each
        only in the golden:
          - all-gather over model: bf16[4,8] -> bf16[8,8], payload 128 B, 6 runs, backward, at layer_*/attention/dot_general
        payload of all rows, per device: golden 768 B, now 0 B
        If this is meant: pytest --spmd-update, and review the file.
        """,
        AssertionError,
        golden,
        report(GATHER),
        report(backend="tpu", device_kind="TPU v4"),
    )
    with pytest.raises(AssertionError, match="backend  golden cpu, now tpu"):
        golden(report(), report(backend="tpu", device_kind="TPU v4"))


def test_another_mesh(golden):
    """A golden of another mesh fails even where the rows agree."""
    with pytest.raises(AssertionError, match="mesh     golden data=4, model=2, now data=8\n"):
        golden(report(GATHER), report(GATHER, mesh={"data": 8}))
    golden(report(GATHER), report(GATHER, name="renamed"))


def golden_path(fixture):
    """Where the fixture `golden` writes."""
    return fixture.__closure__[0].cell_contents / "a.ledger"


def test_difference(golden):
    """Rows that are new, gone and of another number stand apart, sizes in words."""
    told(
        f"""
        `step` does not exchange what its golden {golden_path(golden)} says.
        only now:
          + all-gather over model: bf16[4,8] -> bf16[8,8], payload 128 B, 6 runs, backward, at layer_*/attention/dot_general (1 in the golden, 3 now)
          + all-to-all over data: f32[256,1024] -> f32[256,1024], payload 1.0 MiB, unknown runs, forward, at mlp/dot_general
        only in the golden:
          - all-reduce over data: f32[256,1024] -> f32[256,1024], payload 1.0 MiB, 1 run, forward, at mlp/dot_general, combined with others (2 times)
        payload of all rows, per device: golden 2.0 MiB, now at least 2.2 KiB
        If this is meant: pytest --spmd-update, and review the file.
        """,
        AssertionError,
        golden,
        report(GATHER, joined(MLP, ATTN)),
        report(GATHER, GATHER, GATHER, collective("all-to-all", executions=None)),
    )


def test_long_differences_are_cut(golden):
    """Forty rows are shown of each part."""
    many = [collective(dims=(i,)) for i in range(45)]
    with pytest.raises(AssertionError) as caught:
        golden(report(), report(*many))
    lines = str(caught.value).splitlines()
    assert sum(line.startswith("  + ") for line in lines) == 40
    assert "  ... and 5 more rows" in lines


def test_large_goldens_compare_fast(golden):
    """Thousands of rows that all differ are compared without comparing each with each."""
    many = [collective(dims=(i, 2)) for i in range(3000)]
    with pytest.raises(AssertionError):
        golden(report(*many), report(*(collective(dims=(i, 3)) for i in range(3000))))


# Files


def test_a_missing_golden(tmp_path):
    """The message shows what would be written, and how."""
    path = tmp_path / "new.ledger"
    told(
        f"""
        `step` has no golden {path}.
        it would hold:
          + all-gather over model: bf16[4,8] -> bf16[8,8], payload 128 B, 6 runs, backward, at layer_*/attention/dot_general (2 times)
        Write it with pytest --spmd-update, and commit it.
        """,
        AssertionError,
        assert_golden,
        report(GATHER, GATHER),
        path,
    )
    assert not path.exists()
    with pytest.raises(AssertionError, match="it would hold no rows"):
        assert_golden(report(), path)


def test_update(tmp_path, session):
    """Updating writes the file, folders included, and only where it changes."""
    path = tmp_path / "deep" / "er" / "a.ledger"
    session.update = True
    assert_golden(report(GATHER), path)
    assert path.read_text() == golden_text(report(GATHER))
    assert session.updated == [path]
    assert_golden(report(GATHER), path)
    assert session.updated == [path]
    assert os.listdir(path.parent) == ["a.ledger"]
    path.write_text("something else")
    assert_golden(report(GATHER), path)
    assert session.updated == [path] * 2
    session.update = False
    assert_golden(report(GATHER), path)
    with pytest.raises(AssertionError):
        assert_golden(report(), path)


def test_update_by_argument(tmp_path, session):
    """`update` beats the session in both directions."""
    path = tmp_path / "a.ledger"
    assert_golden(report(GATHER), path, update=True)
    session.update = True
    with pytest.raises(AssertionError):
        assert_golden(report(), path, update=False)


def test_two_goldens_of_one_name(tmp_path, session):
    """Two tests that write one file otherwise would each undo the other."""
    path = tmp_path / "a.ledger"
    path.write_text(golden_text(report(GATHER)))
    session.update = True
    assert_golden(report(GATHER), path)
    with pytest.raises(ValueError, match=r"has written .*a\.ledger otherwise a moment ago"):
        assert_golden(report(), path)
    assert path.read_text() == golden_text(report(GATHER))


def test_line_ends_of_another_system(tmp_path):
    """A file that version control gave other line ends, or blank lines at the end, is the same."""
    path = tmp_path / "a.ledger"
    path.write_bytes(golden_text(report(GATHER, MLP)).replace("\n", "\r\n").encode() + b"\r\n")
    assert_golden(report(MLP, GATHER), path)


def test_a_row_that_stands_twice(tmp_path):
    """A merge can leave a row twice: their numbers add up."""
    path = tmp_path / "a.ledger"
    text = golden_text(report(GATHER))
    path.write_text(text + text.splitlines()[-1])
    assert_golden(report(GATHER, GATHER), path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.ledger, line 1\.\n  given     nothing"),
        ("# another title\n", r"a\.ledger, line 1\."),
        (HEADER + "<<<<<<< HEAD\n", r"a\.ledger, line 7\.\n  given     <<<<<<< HEAD"),
        (HEADER + "all-gather | data | f32[] -> f32[]\n", r"a\.ledger, line 7\."),
    ],
)
def test_files_that_are_no_goldens(tmp_path, text, message):
    """A file with something else in it, such as a conflict, is told with the line."""
    path = tmp_path / "a.ledger"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        assert_golden(report(GATHER), path)


def test_names_and_relative_paths(tmp_path, monkeypatch):
    """A name is a file in `goldens` beside the caller; a path is relative to the caller's folder."""
    monkeypatch.chdir(tmp_path)
    here = Path(__file__).parent
    for given, path in (
        ("step", here / "goldens" / "step.ledger"),
        ("step.v1", here / "goldens" / "step.v1.ledger"),
        ("step.ledger", here / "step.ledger"),
        ("../x/y.txt", here.parent / "x" / "y.txt"),
    ):
        with pytest.raises(AssertionError) as caught:
            assert_golden(report(), given)
        assert str(caught.value).splitlines()[0] == f"`step` has no golden {path}."
    # Without a file, as in a prompt, it is the current folder.
    code = compile("assert_golden(report(), 'step')", "<prompt>", "exec")
    with pytest.raises(AssertionError, match=r"has no golden goldens/step\.ledger\."):
        exec(code, {"assert_golden": assert_golden, "report": report})


def test_a_report_takes_no_arguments(tmp_path):
    """Arguments beside a ready report are refused in the name of this function."""
    with pytest.raises(TypeError, match="assert_golden takes no arguments and no mesh"):
        assert_golden(report(), tmp_path / "a", 1)
