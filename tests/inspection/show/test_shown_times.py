"""What terminals and logs show of the time of a call: figures, bars and lanes."""

import dataclasses
from pathlib import Path
import re

from hypothesis import given, settings, strategies as st
import pytest
from reports import MIB, SMALL, collective, report, source
from rich.cells import cell_len
from test_text import drawn, row_of
from timed import MS, TIME, TIMED, permute, timed_reports

import spmd
from spmd.inspection import Exchange, Fit, Sweep, SweepRow, Time
from spmd.inspection.records.sums import grouped, line_of
from spmd.inspection.show import lanes, terminal, times, words
from spmd.inspection.show.layout import plain
from spmd.inspection.show.sweep import render_sweep

GOLDENS = Path(__file__).parents[1] / "goldens"


def test_golden():
    """A report with a time looks as in the file, to the letter."""
    assert drawn(TIMED, 120) == (GOLDENS / "time_120.txt").read_text(encoding="utf-8")


# The head


def test_the_head_says_how_long_how_well_and_why():
    """The second line has the time, the utilization, the chip and what bounds it."""
    text = "100 ms a call on v5e; MFU 30%, HFU 40%; bound by compute"
    assert str(TIMED).splitlines()[1] == text
    less = dataclasses.replace(TIME, mfu=None, compute=0.02, seconds=0.07, source="predicted")
    one = dataclasses.replace(TIMED, time=less)
    assert str(one).splitlines()[1] == (
        "70.0 ms a call on v5e (predicted); HFU 40%; bound by exchange over data"
    )


def test_no_time_is_never_a_wrong_one():
    """Without a time the head says why, and nothing else names one."""
    for fields, wanted in (
        ({"backend": "cpu", "device_kind": "cpu", "stand_in": True},
         "no time for CPU; give topology= or chip="),
        ({"backend": "cpu", "device_kind": "cpu"}, "no time for CPU; give topology= or chip="),
        ({"backend": "gpu", "device_kind": "NVIDIA Z9"},
         "no time: the figures of NVIDIA Z9 are not known; give chip="),
        ({}, "no time: the report was made without one, or is of several slices"),
    ):  # fmt: skip
        text = str(dataclasses.replace(TIMED, time=None, **fields))
        assert text.splitlines()[1] == wanted
        assert not re.search(r"\d ms|exposed|Time of a call|lane", text)


def test_nothing_takes_no_time():
    """A program that does nothing has a time of 0, and no share of it is worked out."""
    nothing = Time(
        chip="v5e", seconds=0.0, compute=0.0, memory=0.0, exchanges=(), hardware_flops=0, hfu=0.0,
        source="compiler",
    )  # fmt: skip
    text = str(report(time=nothing))
    assert "0 s a call on v5e; HFU 0%" in text
    report(time=nothing).to_html()


# The bar


def test_the_parts_of_the_bar():
    """Signs are as long as shares of a call, and each part has its time, share and first line."""
    text = drawn(terminal.render_report(TIMED), 120)
    (bar,) = [line.strip() for line in text.splitlines() if "█▒" in line and "core" not in line]
    assert (bar.count("█"), bar.count("▒"), bar.count("░")) == (50, 10, 40)
    assert row_of(text, "█ compute")[2:] == ["50.0", "ms", "50%"]
    assert row_of(text, "▒ memory")[2:] == ["10.0", "ms", "10%"]
    assert row_of(text, "░ exposed over model")[4:] == [
        "6.00", "ms", "6.0%", "/w/model/transformer.py:57", "mlp"
    ]  # fmt: skip
    assert "exchanges take 68.0 ms: 40.0 ms exposed, 28.0 ms hidden\n" in text
    assert "uncertain: the loop while.3 runs an unknown number of times: once here\n" in text


def test_axes_of_the_bar_have_their_colours():
    """A wait has the colour of the first axis that is crossed; what the core does has none."""
    text = drawn(TIMED, 120, color="standard")
    assert re.search(r"\x1b\[36m░{30}\x1b\[0m\x1b\[33m░{6}", text)
    assert "\x1b[36m" + "█" * 47 in text


@given(st.lists(st.floats(0, 1e6, exclude_min=True), min_size=1, max_size=8), st.integers(8, 100))
def test_a_bar_is_whole(shares, width):
    """Pieces add up to the width, none is lost, and each is within two signs of its share."""
    sizes = lanes.stacked(shares, width)
    assert sum(sizes) == width
    assert min(sizes) >= 1
    longest = sizes.index(max(sizes))
    for i, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        assert i == longest or abs(size - width * share / sum(shares)) <= len(shares)


def test_many_doubts_are_counted():
    """Six doubts are told and the others counted; JSON and the page have all of them."""
    doubts = tuple(f"doubt {i:02}" for i in range(9))
    one = dataclasses.replace(TIMED, time=dataclasses.replace(TIME, unknown=doubts))
    found = re.findall(r"uncertain: (.*)", str(one))
    assert found == [*doubts[:6], "3 more"]
    assert one.to_json()["time"]["unknown"] == [*doubts]
    page = one.to_html()
    assert all(f"<li>{doubt}</li>" in page for doubt in doubts)
    assert "<summary>3 more</summary>" in page


# Beside bytes


def test_time_is_divided_as_bytes_are():
    """Two halves of a combined sum take half of its time each, and all lines that of all."""
    found = times.Times(TIMED)
    assert found.of([TIMED.collectives[1]]) == pytest.approx((40 * MS, 30 * MS))
    lines = grouped(TIMED.collectives, line_of)
    assert found.of(lines[None]) == pytest.approx((20 * MS, 15 * MS))
    whole = found.of(TIMED.collectives)
    assert whole == pytest.approx((68 * MS, 40 * MS))
    parts = [found.of(some) for some in lines.values()]
    assert [sum(one) for one in zip(*parts, strict=True)] == pytest.approx(whole)


def test_what_is_not_known_has_no_time():
    """A collective that the clock did not reach has no figure; one that takes nothing has 0."""
    extra = collective(name="unreached")
    empty = collective(name="empty")
    nothing = Exchange(name="empty", mesh_axes=(), source=None, seconds=0.0, exposed=0.0)
    time = dataclasses.replace(TIME, exchanges=(*TIME.exchanges, nothing))
    one = dataclasses.replace(TIMED, collectives=(*TIMED.collectives, extra, empty), time=time)
    found = times.Times(one)
    assert found.cells([extra]) == ("", "")
    assert found.summary([extra]) == ""
    assert found.cells([empty]) == ("0 s", "")
    assert times.Times(report(collectives=(extra,))).cells([extra]) == ("", "")


def test_a_prediction_goes_by_place():
    """Names of what is predicted are not told apart: its times are in its order."""
    pair = tuple(collective(name="same", wire_bytes=n) for n in (5, 7))
    exchanges = tuple(
        Exchange(name="same", mesh_axes=("data",), source=None, seconds=n * MS, exposed=n * MS)
        for n in (2, 3)
    )
    time = dataclasses.replace(TIME, exchanges=exchanges)
    found = times.Times(report(collectives=pair, predicted=True, time=time))
    assert [found.of([one]).seconds for one in pair] == [2 * MS, 3 * MS]


def test_findings_have_their_time():
    """Bytes of a finding take that part of their line's time; repeated products that of all."""
    found = times.Times(TIMED)
    in_loop, work = TIMED.findings
    # Line 57 sends 36 MiB in 24 ms, of which 6 are exposed; a quarter of them is meant.
    assert found.cost(in_loop) == "about 6.00 ms, 1.5% exposed"
    # 2 of 8 TFLOP that take 50 ms.
    assert found.cost(work) == "about 12.5 ms, 12% of a call"
    for other in (
        dataclasses.replace(in_loop, source=None),
        dataclasses.replace(in_loop, source=source(1)),
        dataclasses.replace(in_loop, measure="memory"),
        dataclasses.replace(in_loop, nbytes=100 * MIB),
    ):
        assert found.cost(other) == ""
    assert "9.0 MiB on the wire; about 6.00 ms, 1.5% exposed;" in " ".join(str(TIMED).split())
    assert times.Times(SMALL).cost(in_loop) == ""


def test_where_a_device_waits():
    """Waits are by axes and line, longest first, with the kinds that are waited for."""
    found = times.Times(TIMED).waits()
    assert [(one.mesh_axes, one.source and one.source.line, one.kinds) for one in found] == [
        (("data",), 42, ("all-reduce",)),
        (("data",), None, ("all-reduce",)),
        (("model",), 57, ("all-gather",)),
        ((), 9, ("all-to-all",)),
    ]
    assert [one.seconds / MS for one in found] == pytest.approx([15, 15, 6, 4])


# Rows that are alike


def test_alike():
    """Steps of one product are one row whose runs add up, and everything else has its own."""
    assert words.alike(TIMED.collectives) == [[0], [1], [2, 3, 4], [5]]
    one = words.together(TIMED.collectives[2:5])
    assert (one.executions, one.total_wire_bytes, one.op_name) == (12, 24 * MIB, "")
    text = drawn(terminal.render_collectives(TIMED), 160)
    assert row_of(text, "collective-permute") == [
        "collective-permute", "x3", "model", "f32[2048,2048]", "2.0", "MiB", "2.0", "MiB", "12",
        "24.0", "MiB", "12.0", "ms", "0%", "forward", "/w/model/transformer.py:57", "mlp",
    ]  # fmt: skip
    assert "1 more row (1.0 MiB on the wire), not shown" in str(
        plain(terminal.render_collectives(TIMED, limit=3))
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "all-gather"}, {"mesh_axes": ("data",)}, {"wire_bytes": 7}, {"payload_bytes": 7},
        {"direction": "backward"}, {"source": source(58, "mlp")}, {"is_async": False},
        {"conditional": True}, {"executions": None}, {"group_size": 2}, {"sliced": (0,)},
        {"source": None},
    ],
)  # fmt: skip
def test_what_a_row_shows_sets_it_apart(fields):
    """A difference in anything that a row shows makes it another row."""
    other = dataclasses.replace(permute(9, 4), **fields)
    assert words.alike((permute(1, 2), other)) == [[0], [1]]
    assert words.alike((permute(1, 2), permute(9, 4))) == [[0, 1]]


def test_stacks_set_rows_apart_where_they_are_shown():
    """With all frames each collective has its own row, and JSON always has all of them."""
    text = plain(terminal.render_collectives(TIMED, all_frames=True), width=160)
    assert len(re.findall(r"^collective-permute  ", text, re.MULTILINE)) == 3
    assert " x3" not in text
    assert len(TIMED.to_json()["collectives"]) == 6


# Lanes


def test_lanes_of_a_layer():
    """Each lane has its events at their places, a sign for each kind, and how busy it is."""
    text = drawn(lanes.render_time(TIME, (), TIMED.mesh), 127)
    rows = {line.split("  ")[0]: line for line in text.splitlines() if "%" in line}
    strips = {name: row[23:].ljust(100) for name, row in rows.items() if name in LANES}
    # 20 ms on 100 places.
    assert strips == {
        "core": "█" * 50 + "▒" * 10 + "░" * 30 + "█" * 10,
        "memory": " " * 20 + "▒" * 10 + " " * 70,
        "host": "▒" * 25 + " " * 75,
        "links x+": " " * 40 + "█" * 50 + " " * 10,
        "links x-": " " * 40 + "█" * 50 + " " * 10,
        "links y+": " " * 10 + "█" * 20 + " " * 70,
    }
    busy = {name: rows[name].split("%")[0].split()[-1] for name in LANES}
    assert busy == dict(zip(LANES, ("70", "10", "25", "50", "50", "20"), strict=True))
    assert "One layer, 20.0 ms: an iteration of the loop that takes longest\n" in text
    assert row_of(text, "0 s") == ["0", "s", "20.0", "ms"]


LANES = ("core", "memory", "host", "links x+", "links x-", "links y+")


def test_a_program_without_loops_is_a_layer():
    """Lanes of the whole program are not said to be of a loop."""
    time = dataclasses.replace(TIME, seconds=0.02)
    assert times.layer_title(time) == "The whole call, 20.0 ms"


def test_lanes_in_a_log():
    """In ASCII what the core does is told apart by signs of its own."""
    text = str(TIMED)
    assert "#=." in re.sub(r"([#=.])\1*", r"\1", row_of(text, "core")[-1])
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(timed_reports(), st.integers(60, 200))
def test_any_time_fits_any_width(one, width):
    """No line with a time in it is longer than the terminal or trails blanks."""
    for line in drawn(one, width).split("\n"):
        assert cell_len(line) <= width
        assert line == line.rstrip()
        assert line.isprintable()


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(timed_reports(), st.integers(1, 59))
def test_narrow_terminals(one, width):
    """Terminals that are narrower than any table get the same, on more lines."""
    lines = drawn(one, width).split("\n")
    assert all(line == line.rstrip() for line in lines)
    assert max(map(cell_len, lines)) <= max(width, 2)


# Differences


def test_a_difference_begins_with_the_time():
    """The head says how the time and its shares changed, and a section has all parts."""
    less = dataclasses.replace(TIME, seconds=0.08, compute=0.03, mfu=0.375)
    text = str(spmd.diff(TIMED, dataclasses.replace(TIMED, time=less)))
    assert text.splitlines()[1] == "100 ms -> 80.0 ms a call (-20.0%); MFU 30% -> 38%; HFU 40%"
    assert row_of(text, "compute")[1:] == ["50.0", "ms", "30.0", "ms", "-20.0", "ms", "(-40.0%)"]
    assert row_of(text, "MFU")[1:] == ["30%", "38%", "+7.5", "points", "(+25.0%)"]
    assert "HFU  " not in text
    other = str(spmd.diff(TIMED, dataclasses.replace(TIMED, time=None)))
    assert (
        other.splitlines()[1] == "100 ms -> unknown a call; MFU 30% -> unknown; HFU 40% -> unknown"
    )
    assert "a call" not in str(spmd.diff(SMALL, report()))


def test_alike_rows_of_a_difference():
    """Steps that one report lacks are one row of the difference, with all of their bytes."""
    text = str(spmd.diff(TIMED, dataclasses.replace(TIMED, collectives=TIMED.collectives[:2])))
    assert row_of(text, "-  collective-permute")[:4] == ["-", "collective-permute", "x3", "model"]
    assert "24.0 MiB" in text
    assert "0 added (+); 4 removed (-)" in text


# Sweeps


def swept(*rows):
    """A sweep of reports with a time, by devices, seconds and MFU."""
    return Sweep(
        name="step",
        rows=tuple(
            SweepRow.of(
                dataclasses.replace(
                    TIMED,
                    mesh={"data": count},
                    num_devices=count,
                    time=dataclasses.replace(
                        TIME, seconds=seconds, compute=seconds - 0.05, mfu=mfu, hfu=0.5
                    ),
                ),
                label=f"v5e:{count}",
            )
            for count, seconds, mfu in rows
        ),
    )


def test_a_sweep_draws_time_and_mfu():
    """Bars are in the order of devices, as long as the times, and made of their parts."""
    sweep = swept((16, 0.1, 0.25), (4, 0.4, 0.5), (16, 0.08, 0.3), (8, 0.2, None))
    text = plain(render_sweep(sweep), width=160)
    assert text.splitlines()[1] == (
        "fastest: 80.0 ms a call on v5e:16 (data=16); best MFU: 50% on v5e:4 (data=4)"
    )
    rows = text.partition("Time of a call, by the number of devices")[2].splitlines()[3:7]
    assert [row.split()[:4] for row in rows] == [
        ["4", "data=4", "400", "ms"],
        ["8", "data=8", "200", "ms"],
        ["16", "data=16", "80.0", "ms"],
        ["16", "data=16", "100", "ms"],
    ]
    bars = [re.findall(r"[#=.]+(?= )", row)[0] for row in rows]
    assert [len(bar) for bar in bars] == [40, 20, 8, 10]
    # A sign is 10 ms: memory and the waits over data, model and no axis are 10, 30, 6 and 4.
    assert re.fullmatch(r"#{34}=\.{3}\.\.", bars[0])
    assert [len(row.split("%")[1].strip()) for row in rows] == [10, 10, 6, 5]
    assert "HFU 50%" in rows[1]


def test_a_sweep_of_one_time_has_no_chart():
    """There is nothing to draw a single time against, and no place for what has none."""
    text = plain(render_sweep(swept((4, 0.4, 0.5))), width=160)
    assert "by the number of devices" not in text
    assert "400 ms" in text
    alone = Sweep(name="step", rows=(SweepRow.of(SMALL),))
    assert plain(render_sweep(alone)).splitlines()[-1] == "no time for CPU; give topology= or chip="


# Whether it fits


def test_a_fit_says_how_long_a_call_takes():
    """The answer whether a program fits has the line of the time, where that is known."""
    fit = Fit(
        fits=True, needed=10, budget=20, memory=None, buffers=(), verdict="fits: step", name="step",
        mesh={}, num_devices=16, device_kind="TPU v5 lite", backend="tpu", stand_in=False,
        time=TIME,
    )  # fmt: skip
    assert str(fit).splitlines()[1] == f"  {TIME}"
    assert str(dataclasses.replace(fit, time=None)) == "fits: step"
