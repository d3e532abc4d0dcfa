"""What a report looks like in terminals, pipes and logs."""

import dataclasses
import io
import os
from pathlib import Path
import re
import subprocess
import sys

from hypothesis import given, settings, strategies as st
import pytest
from reports import MIB, SMALL, collective, report, reports, shape, source
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from spmd.inspection import Shapes, show_bytes
from spmd.inspection.show import terminal, words
from spmd.inspection.show.layout import Column, Grid, Row, cell, flow, plain

GOLDENS = Path(__file__).parents[1] / "goldens"


def drawn(body, width=120, *, encoding="utf-8", color=None):
    """What is drawn on a terminal or, without colours, in a pipe."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    console = Console(
        file=file,
        width=width,
        color_system=color,
        force_terminal=color is not None,
        legacy_windows=False,
        _environ={},
    )
    console.print(body)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def row_of(text, start):
    """The line that starts with `start`, after blanks."""
    found = [line for line in text.splitlines() if line.strip().startswith(start)]
    assert found, text
    return found[0].split()


@pytest.mark.parametrize("width", [80, 120])
def test_golden(width):
    """A small report with every kind of mark looks as in the file, to the letter."""
    assert drawn(SMALL, width) == (GOLDENS / f"report_{width}.txt").read_text(encoding="utf-8")


def test_str_is_for_logs():
    """`str` of a report is the same at 100 columns, in ASCII signs and without a last newline."""
    text = str(SMALL)
    assert text == drawn(SMALL, 100, encoding="ascii").rstrip("\n")
    assert "|- " not in drawn(SMALL, 100)
    assert max(map(len, text.splitlines())) <= 100
    assert "  peak         150.0 MiB  ####################" in text.splitlines()


def test_str_keeps_the_names_of_users():
    """A name that is not ASCII is readable in a log; a terminal without it shows question marks."""
    one = report(name="schicht_é")
    assert str(one).startswith("schicht_é on tpu")
    assert drawn(one, encoding="ascii").startswith("schicht_? on tpu")


def test_colour_changes_nothing_else():
    """With and without colours the characters are the same, and each mesh axis has its own."""
    colourful = drawn(SMALL, 100, color="standard")
    assert re.sub(r"\x1b\[[0-9;]*m", "", colourful) == drawn(SMALL, 100)
    assert "\x1b[36mdata\x1b[0m" in colourful
    assert "\x1b[33mmodel\x1b[0m" in colourful
    assert "\x1b[36mdata:(2)2\x1b[0m, \x1b[33mmodel\x1b[0m" in colourful


def test_an_axis_has_one_colour_everywhere():
    """The colour of an axis follows from its place in the mesh, not from the row it is in."""
    found = (collective(mesh_axes=("model",)), collective(mesh_axes=("data",), wire_bytes=1))
    text = drawn(report(collectives=found), color="standard")
    assert set(re.findall(r"\x1b\[(\d+)mdata", text)) == {"36"}
    assert set(re.findall(r"\x1b\[(\d+)mmodel", text)) == {"33"}


def test_order_of_the_ledger():
    """Rows come by all bytes of a call; what runs an unknown number of times, by those of one."""
    found = (
        collective(kind="all-gather", wire_bytes=10, executions=3),
        collective(kind="all-to-all", wire_bytes=31, executions=None),
        collective(kind="all-reduce", wire_bytes=16, executions=2),
        collective(kind="send", wire_bytes=29, executions=None),
        collective(kind="recv", wire_bytes=1000, executions=0),
    )
    lines = drawn(terminal.render_collectives(report(collectives=found)), 200).splitlines()[2:]
    kinds = [line.split()[0] for line in lines if not line.startswith("    ")]
    assert kinds == ["all-reduce", "all-to-all", "all-gather", "send", "recv"]
    assert row_of("\n".join(lines), "all-to-all").count("unknown") == 2


def test_unknown_is_never_one():
    """A sum over unknown counts says that it is a lower bound, or that nothing is known."""
    known, unknown = collective(wire_bytes=5 * MIB), collective(executions=None)
    text = drawn(terminal.render_totals(report(collectives=(known, unknown))))
    assert ">= 5.0 MiB" in text
    text = drawn(terminal.render_totals(report(collectives=(unknown,))))
    assert row_of(text, "all-reduce") == ["all-reduce", "data", "1", *["unknown"] * 3]


def test_limit():
    """Forty rows are drawn unless asked otherwise, and the rest is counted with its bytes."""
    found = tuple(collective(wire_bytes=MIB * i, source=source(i)) for i in range(1, 46))
    text = drawn(report(collectives=found), 140)
    assert text.count("all-reduce  data       f32") == 40
    # 1 + 2 + 3 + 4 + 5 of them
    assert "  5 more rows (15.0 MiB on the wire), not shown\n" in text
    assert "  5 more lines, not shown\n" in text
    everything = drawn(terminal.render_report(report(collectives=found), limit=None), 140)
    assert everything.count("all-reduce  data       f32") == 45
    assert "not shown" not in everything


@pytest.mark.slow
def test_two_thousand_rows():
    """A large ledger is drawn whole where that is asked for, and in short otherwise."""
    found = tuple(
        collective(wire_bytes=i, source=source(i), op_name=f"layer_{i}") for i in range(2000)
    )
    big = report(collectives=found)
    whole = plain(terminal.render_collectives(big, limit=None), width=160)
    assert all(f"transformer.py:{i} block" in whole for i in range(2000))
    assert "1,960 more rows" in str(big)


def test_show():
    """`show` prints to the console that is given, with frames below each row where asked for."""
    outputs = []
    for options in ({}, {"all_frames": True}, {"limit": 1}):
        console = Console(file=io.StringIO(), width=120, color_system=None)
        SMALL.show(console, **options)
        outputs.append(console.file.getvalue())
    short, long, one = outputs
    assert short == drawn(SMALL, 120)
    added = [line for line in long.splitlines() if line not in short.splitlines()]
    assert "      /w/model/transformer.py:42 block" in added
    assert "      /w/train.py:90 main" in added
    assert "      jit(step)/transpose(jvp())/dot_general" in added
    assert "3 more rows" in one


def test_show_writes_to_standard_output(capsys):
    """`show` without a console prints on the standard output."""
    report(name="my_step").show()
    assert capsys.readouterr().out.startswith("my_step on tpu (TPU v5 lite)")


def test_empty_ledger():
    """A program that communicates nothing says so in one sentence, and has no empty tables."""
    text = str(report())
    assert "  no collectives: the devices exchange nothing while the program runs\n" in text
    assert "Totals" not in text
    alone = str(report(num_devices=1, mesh={}))
    assert alone.startswith("step on tpu (TPU v5 lite); 1 device, no mesh\n")
    assert "  no collectives: the program runs on one device\n" in alone


def test_one_device_has_no_findings_on_shardings():
    """On one device the report says that findings were skipped and why, beside those it has."""
    said = "  Findings on shardings were skipped: the program runs on one device, where nothing "
    said += "can be split. Compile it for a mesh of several to have them.\n"
    alone = report(num_devices=1, mesh={"data": 1}, findings=SMALL.findings[:1])
    assert f"\nFindings\n{said}" in drawn(report(num_devices=1, mesh={}), 160)
    assert f"    fix  make it as P(None, 'model')\n{said}" in drawn(alone, 160)
    for other in (report(), report(num_devices=1, mesh={}, predicted=True)):
        assert "skipped" not in str(other)


def test_paths_are_relative_to_here():
    """A file below the working directory is shown without it, any other file in full."""
    here = os.path.join(os.getcwd(), "pkg", "train.py")
    text = drawn(report(collectives=(collective(source=source(7, file=here)),)), 160)
    assert "pkg/train.py:7 block" in text.replace(os.sep, "/")
    assert os.getcwd() not in text
    assert terminal.short_path("/elsewhere/train.py") == "/elsewhere/train.py"


def test_long_paths_leave_room():
    """Where a line is too short for a path, the file's name and line stay."""
    deep = source(123, file="/very" * 30 + "/train.py")
    text = plain(report(collectives=(collective(source=deep),)).__rich__(), width=80)
    assert "train.py:123" in text
    assert max(map(len, text.splitlines())) <= 80


def test_spellings_of_a_line():
    """A line is spelled with its path and qualified name first, and its bare place last."""
    inner = source(7, "loss.<locals>.body", "/w/train.py")
    assert [text.plain for text in terminal.source_cell(inner, prefix="for ")] == [
        "for /w/train.py:7 loss.<locals>.body",
        "for train.py:7 loss.<locals>.body",
        "for train.py:7 body",
        "for train.py:7",
    ]
    assert [text.plain for text in terminal.source_cell(None)] == ["no line"]


@pytest.mark.slow
def test_rich_is_loaded_when_something_is_drawn():
    """Records, JSON, traces and differences come without rich; drawing loads it."""
    code = (
        "import sys, reports\n"
        "from spmd.inspection import diff\n"
        "from spmd.inspection.records import codec\n"
        "from spmd.inspection.show import perfetto, scalars\n"
        "reports.SMALL.to_json(), reports.SMALL.trace_events(), reports.SMALL.scalars()\n"
        "diff(reports.SMALL, reports.report())\n"
        "assert 'rich' not in sys.modules\n"
        "str(reports.SMALL)\n"
        "assert 'rich' in sys.modules\n"
    )
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), *sys.path])
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_shapes_are_compact():
    """Equal neighbours are counted, and sides that are the same are shown once."""
    a, b = shape(8), shape(4, 2, dtype="bf16")
    texts = [
        [spelling.plain for spelling in terminal.shapes_cell(Shapes(*sides))]
        for sides in (((a, a, a), (a, a, a)), ((a,), (b,)), ((a, b, b), (a,)), ((), (a,)))
    ]
    assert texts == [
        ["f32[8] x3", "f32[8] x3"],
        ["f32[8] -> bf16[4,2]", "f32[8] -> bf16[4,2]"],
        ["f32[8], bf16[4,2] x2 -> f32[8]", "f32[8] + 1 more -> f32[8]"],
        ["nothing -> f32[8]", "nothing -> f32[8]"],
    ]


def test_ratios():
    """FLOPs per wire byte and wire bytes per HBM byte are those of the records."""
    cost = dataclasses.replace(SMALL.cost, unknown_loops=0, opaque_calls=0)
    found = (collective(wire_bytes=1000, executions=5),)
    text = drawn(terminal.render_cost(report(cost=cost, collectives=found)))
    # 123,456,789,012 / 5,000 and 5,000 / 5,368,709,120
    assert row_of(text, "FLOPs per wire byte")[-1] == "24,691,358"
    assert row_of(text, "wire bytes per HBM byte")[-1] == "9.31e-07"
    assert row_of(text, "FLOPs") == ["FLOPs", "123.5", "GFLOP"]
    assert "lower bound" not in text
    assert "ratio of" not in drawn(terminal.render_cost(report()))


def test_bars_show_shares():
    """The largest class has the longest bar, half of it half of that, and 1 byte is seen."""
    memory = dataclasses.replace(
        SMALL.memory, arguments=50, outputs=1, temporaries=100, aliased=0, code=25, peak=100
    )
    rows = drawn(terminal.render_memory(memory)).splitlines()
    bars = {row.split()[0]: row.count("█") for row in rows[:7]}
    del bars[rows[5].split()[0]]
    assert bars == {
        "arguments": 10, "outputs": 1, "temporaries": 20, "aliased": 0, "code": 5, "peak": 20,
    }  # fmt: skip


def test_memory_counts_hidden_buffers():
    """Ten buffers are drawn, and the rest is counted."""
    memory = dataclasses.replace(SMALL.memory, buffers=SMALL.memory.buffers * 6)
    assert drawn(terminal.render_memory(memory)).splitlines()[-1] == "2 more buffers, not shown"


def test_no_name_is_markup_or_control():
    """Names of users can neither colour the terminal nor move its cursor nor vanish."""
    evil = "[bold]x[/bold]\x1b[2J\r\n:smile:"
    found = (collective(source=source(1, evil, f"/{evil}.py"), op_name=evil),)
    text = drawn(report(name=evil, collectives=found), 200)
    assert text.startswith(r"[bold]x[/bold]\x1b[2J\r\n:smile: on tpu")
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(reports, st.integers(60, 200), st.booleans())
def test_any_report_fits_any_width(one, width, all_frames):
    """No line is longer than the terminal, trails blanks or holds what cannot be printed."""
    body = terminal.render_report(one, all_frames=all_frames)
    for line in drawn(body, width).split("\n"):
        assert cell_len(line) <= width
        assert line == line.rstrip()
        assert line.isprintable()


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(reports, st.integers(60, 200))
def test_no_figure_is_cut(one, width):
    """Every figure of the ledger is in the text as a whole, at any width; of alike rows the sum."""
    text = " ".join(drawn(terminal.render_collectives(one), width).split())
    for places in words.alike(one.collectives):
        found = words.together([one.collectives[i] for i in places])
        assert show_bytes(found.wire_bytes) in text
        assert show_bytes(found.payload_bytes) in text
        total = found.total_wire_bytes
        assert "unknown" in text if total is None else show_bytes(total) in text
        assert "unknown" in text if found.executions is None else f"{found.executions:,}" in text


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(reports, st.integers(1, 59))
def test_narrow_terminals(one, width):
    """Terminals that are narrower than any table get the same, on more lines."""
    for encoding in ("utf-8", "ascii"):
        lines = drawn(one, width, encoding=encoding).split("\n")
        assert all(line == line.rstrip() for line in lines)
        assert max(map(cell_len, lines)) <= max(width, 2)


# Layout

THREE = (
    Column(title="name"),
    Column(title="long", rank=1, label="in full"),
    Column(title="n", right=True),
)


def test_cells_take_the_longest_spelling_that_fits():
    """A cell is spelled shorter before its column leaves the table for the line below."""
    grid = Grid(THREE, [Row(cells=(cell("a"), cell("twelve cells", "six ce"), cell(12345)))])
    assert plain(grid, width=40).splitlines()[2] == "a     twelve cells  12345"
    assert plain(grid, width=24).splitlines()[2] == "a     six ce  12345"
    assert plain(grid, width=16).splitlines()[2:] == [
        "a     12345",
        "    in full",
        "    twelve cells",
    ]


def test_flow_breaks_between_parts():
    """Lines break after a semicolon; only a part that is longer than a line is broken itself."""
    parts = [Text("one two"), Text("three"), Text(), Text("f" * 12)]
    lines = [line.plain for line in flow(parts, 16, indent=2)]
    assert lines == ["  one two;", "  three;", "  ffffffffffff"]
    assert [line.plain for line in flow([Text("a bc d")], 3)] == ["a", "bc", "d"]
