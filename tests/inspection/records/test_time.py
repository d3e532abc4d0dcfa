"""The record of a call's time: its sums, its text, its JSON, and how times are written and read."""

import dataclasses
import json
import pickle
import subprocess
import sys

import pytest
from reports import SMALL, TIME, TIMED, source
from schemas import faults, schema_of, undocumented

from spmd import Report, diff
from spmd.errors import ReportError
from spmd.inspection import Exchange, Exposed, Time
from spmd.inspection.records.diff import Delta, Difference
from spmd.inspection.records.sizes import parse_seconds, show_seconds, show_share

replace = dataclasses.replace


# The record


def test_what_is_exposed_by_axes_and_line():
    """Waits are summed by axes and line, longest first; what is hidden is in none of them."""
    assert TIME.exposed == (
        Exposed(("data",), source(42), 0.002),
        Exposed(("data:(2)2", "model"), source(9, "ring", "/w/ops.py"), 0.001),
    )
    assert TIME.exposed_by_axes == {("data",): 0.002, ("data:(2)2", "model"): 0.001}
    assert TIME.exchange == pytest.approx(0.0055)
    waits = sum(one.seconds for one in TIME.exposed)
    assert TIME.compute + TIME.memory + waits == pytest.approx(TIME.seconds)


def test_exchanges_of_a_line_are_one_wait():
    """Exchanges of a line over the same axes are one; of other axes, or elsewhere, another."""
    one, two = TIME.exchanges[1:]
    again = replace(one, name="ar.1", exposed=0.0035)
    elsewhere = replace(one, name="ar.2", source=source(43))
    nowhere = replace(one, name="ar.3", source=None)
    found = replace(TIME, exchanges=(two, one, again, elsewhere, nowhere))
    assert [(w.source, w.seconds) for w in found.exposed] == [
        (source(42), pytest.approx(0.0055)),
        (source(43), 0.002),
        (None, 0.002),
        (source(9, "ring", "/w/ops.py"), 0.001),
    ]
    assert found.exposed_by_axes == pytest.approx(
        {("data",): 0.0095, ("data:(2)2", "model"): 0.001}
    )


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        ({}, "compute"),
        ({"memory": 0.007}, "memory"),
        ({"compute": 0.0029}, "exchange"),  # 2 ms and 1 ms, of other axes, together
        ({"compute": 0.0, "memory": 0.0, "exchanges": (), "seconds": 0.0}, "compute"),
    ],
)
def test_what_bounds_a_call(parts, bound):
    """The largest of the three parts does, and all that is exposed is one of them."""
    assert replace(TIME, **parts).bound == bound


def test_a_time_in_a_line():
    """Time, use of the chip and bound; a prediction says so, and what is not known is not there."""
    assert str(TIME) == "10.0 ms a call on v5e; MFU 40%, HFU 50%; bound by compute"
    assert str(replace(TIME, mfu=None, source="predicted", compute=0.001)) == (
        "10.0 ms a call on v5e (predicted); HFU 50%; bound by exchange over data"
    )


def test_a_time_is_a_value():
    """It cannot be changed, equals its like, and is pickled, alone and in a report."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        TIME.seconds = 1.0
    assert pickle.loads(pickle.dumps(TIME)) == TIME
    assert pickle.loads(pickle.dumps(TIMED)) == TIMED
    assert TIMED != SMALL
    assert replace(TIMED, time=replace(TIME, seconds=0.011)) != TIMED
    assert hash(TIME) == hash(replace(TIME))


# JSON


def test_a_time_comes_back():
    """A report with a time is the same after JSON text and after a file, and so is one without."""
    for one in (TIMED, SMALL):
        assert Report.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert SMALL.to_json()["time"] is None


def test_a_time_comes_back_from_a_file(tmp_path):
    """The file has the time in a line of its own."""
    TIMED.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == TIMED
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert sum(line.startswith('"time": {"chip": "v5e"') for line in text.splitlines()) == 1


def test_what_follows_from_a_time_is_written():
    """Sums and waits are there for other readers, and are not read back."""
    data = json.loads(json.dumps(TIMED.to_json()))
    time = data["time"]
    assert time["exchange"] == pytest.approx(0.0055)
    assert time["bound"] == "compute"
    assert [(one["mesh_axes"], one["seconds"]) for one in time["exposed"]] == [
        (["data"], 0.002),
        (["data:(2)2", "model"], 0.001),
    ]
    assert time["exposed"][0]["source"] == {
        "file": "/w/model/transformer.py", "line": 42, "column": 3, "function": "block",
    }  # fmt: skip
    waits = sum(one["seconds"] for one in time["exposed"])
    assert time["compute"] + time["memory"] + waits == pytest.approx(time["seconds"])
    time["exchange"], time["exposed"], time["bound"] = -1, "nonsense", 7
    assert Report.from_json(data) == TIMED


def test_the_schema_knows_a_time():
    """Every key of a time stands in the schema, in its order; the schema holds for it."""
    data = TIMED.to_json()
    assert undocumented(data, schema_of("report.schema.json")) == []
    assert faults(data, schema_of("report.schema.json")) == []
    defs, time = schema_of("report.schema.json")["$defs"], data["time"]
    assert list(time) == list(defs["Time"]["properties"])
    for key, name in (("exchanges", "Exchange"), ("exposed", "Exposed"), ("layer", "Event")):
        assert list(time[key][0]) == list(defs[name]["properties"]) == defs[name]["required"]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": -1.0},
        {"seconds": "10ms"},
        {"hardware_flops": 1.5},
        {"source": "guessed"},
        {"mfu": "40%"},
        {"exchanges": [{}]},
        {"layer": [{"lane": "core"}]},
    ],
)
def test_the_schema_refuses_other_times(change):
    """Wrong types, negative figures and unknown sources do not fit the schema."""
    data = TIMED.to_json()
    assert faults(data | {"time": data["time"] | change}, schema_of("report.schema.json"))


def test_a_file_from_before_times():
    """A report without the key is read, and has no time; its head does not blame the chip."""
    data = SMALL.to_json()
    del data["time"]
    assert Report.from_json(data) == SMALL
    data = TIMED.to_json()
    del data["time"]
    old = Report.from_json(data)
    assert old.time is None
    line = "no time: the report was made without one, or is of several slices"
    assert str(old).splitlines()[1] == line


def test_keys_of_a_time_that_may_lack():
    """What came with a default may lack; all else is named where it does."""
    data = json.loads(json.dumps(TIMED.to_json()))
    for name in ("model_flops", "mfu", "unknown", "layer", "exchange", "exposed", "bound"):
        del data["time"][name]
    bare = replace(TIME, model_flops=None, mfu=None, unknown=(), layer=())
    assert Report.from_json(data).time == bare
    del data["time"]["chip"]
    data["time"]["seconds"] = "10ms"
    data["time"]["exchanges"][1]["mesh_axes"] = "data"
    with pytest.raises(ReportError) as caught:
        Report.from_json(data)
    assert str(caught.value).split("\n") == [
        "argument of `Report.from_json` misses the key time.chip.",
        "argument of `Report.from_json` has a wrong value in time.seconds.",
        "  expected  a number",
        '  got       "10ms"',
        "argument of `Report.from_json` has a wrong value in time.exchanges[1].mesh_axes.",
        "  expected  an array",
        '  got       "data"',
    ]


def test_whole_numbers_are_seconds_too():
    """JSON has one kind of number: another writer may leave the point out."""
    data = json.loads(json.dumps(TIMED.to_json()))
    data["time"]["seconds"] = 1
    found = Report.from_json(data).time
    assert found.seconds == 1.0
    assert type(found.seconds) is float


# Where no time is known


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "no time for CPU; give topology= or chip="),
        ({"stand_in": False, "predicted": True}, "no time for CPU; give topology= or chip="),
        (
            {"stand_in": False, "backend": "gpu", "device_kind": "NVIDIA L4"},
            "no time: the figures of NVIDIA L4 are not known; give chip=",
        ),
        (
            {"stand_in": False, "backend": "any backend", "device_kind": "", "predicted": True},
            "no time: the figures of any backend are not known; give chip=",
        ),
    ],
)
def test_the_head_says_why_there_is_no_time(fields, line):
    """One line says it, once, in the text; figures for a logger have no time then."""
    one = replace(SMALL, **fields)
    lines = str(one).splitlines()
    assert lines.count(line) == 1
    assert lines.index(line) == 1
    assert not [name for name in one.scalars() if name.startswith("time")]


def test_figures_for_a_logger():
    """Seconds and shares by name; waits in all, and by the axes that are crossed."""
    found = {name: value for name, value in TIMED.scalars().items() if name.startswith("time")}
    assert found == pytest.approx(
        {
            "time/seconds": 0.010,
            "time/compute": 0.006,
            "time/memory": 0.001,
            "time/exchange": 0.0055,
            "time/hfu": 0.5,
            "time/mfu": 0.4,
            "time/exposed": 0.003,
            "time/exposed/data": 0.002,
            "time/exposed/data:(2)2+model": 0.001,
        }
    )
    bare = replace(TIMED, time=replace(TIME, mfu=None)).scalars()
    assert "time/mfu" not in bare


# Differences


def test_times_side_by_side():
    """Each part of both is compared; what one does not wait for is 0 there."""
    faster = replace(
        TIME,
        seconds=0.0065,
        compute=0.0055,
        exchanges=(replace(TIME.exchanges[0], exposed=0.0), *TIME.exchanges[3:]),
        mfu=0.6,
    )
    found = diff(TIMED, replace(TIMED, time=faster))
    assert found.time == (
        Delta(name="seconds", a=0.010, b=0.0065),
        Delta(name="compute", a=0.006, b=0.0055),
        Delta(name="memory", a=0.001, b=0.001),
        Delta(name="exchange", a=TIME.exchange, b=0.0005),
        Delta(name="exposed over data", a=0.002, b=0.0),
        Delta(name="exposed over data:(2)2, model", a=0.001, b=0.0),
        Delta(name="mfu", a=0.4, b=0.6),
        Delta(name="hfu", a=0.5, b=0.5),
    )
    assert not found  # the collectives are the same
    text = " ".join(str(found).split())
    assert "time of a call 10.0 ms 6.50 ms -3.50 ms (-35.0%)" in text
    assert "MFU 40% 60% +20.0 points (+50.0%)" in text
    assert text.count("HFU") == 1  # in the head: what is equal has no row
    assert found.to_json()["time"][0] == {"name": "seconds", "a": 0.010, "b": 0.0065}


def test_a_time_on_one_side():
    """A report without a time leaves the other's figures, and says that its own are unknown."""
    found = diff(replace(TIMED, time=None), TIMED)
    assert found.time[0] == Delta(name="seconds", a=None, b=0.010)
    assert found.time[0].change is None
    assert [one.a for one in found.time] == [None] * len(found.time)
    assert Difference(what="chip", a="none", b="v5e") in found.header
    assert Difference(what="time from", a="nothing", b="compiler") in found.header
    assert "time of a call unknown 10.0 ms unknown" in " ".join(str(found).split())
    assert diff(SMALL, SMALL).time == ()


# Numbers


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.020),
        ("20 ms", 0.020),
        (" 1.5s ", 1.5),
        (".5 s", 0.5),
        ("1_500us", 0.0015),
        ("3\u00b5s", 3e-6),
        ("3\u03bcs", 3e-6),
        ("7ns", 7e-9),
        ("0ms", 0.0),
        (0.02, 0.02),
        (2, 2.0),
    ],
)
def test_times_are_read(text, seconds):
    """A number is in seconds; a text has a unit, of either letter for micro."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20", "'20' has no unit: write 20s, 20ms, 20us or 20ns"),
        ("0.02", "'0.02' has no unit: write 0.02s, 0.02ms, 0.02us or 0.02ns"),
        ("20MS", "'MS' is no unit of time: write 20s, 20ms, 20us or 20ns"),
        ("2 min", "'min' is no unit of time: write 2s, 2ms, 2us or 2ns"),
        ("20 sec", "'sec' is no unit of time: write 20s, 20ms, 20us or 20ns"),
        ("ms", "'ms' is no time: write '20ms', '1.5s' or '300us'"),
        ("", "'' is no time: write '20ms', '1.5s' or '300us'"),
        ("-1ms", "'-1ms' is no time: write '20ms', '1.5s' or '300us'"),
        ("nan", "'nan' is no time: write '20ms', '1.5s' or '300us'"),
        (None, "None is no time: write '20ms', '1.5s' or '300us'"),
        (True, "True is no time: write '20ms', '1.5s' or '300us'"),
        (-1, "a time is at least 0 and finite, not -1"),
        (float("nan"), "a time is at least 0 and finite, not nan"),
        (float("inf"), "a time is at least 0 and finite, not inf"),
    ],
)
def test_what_is_no_time(text, message):
    """What is no time is told with what to write; no unit is guessed."""
    with pytest.raises(ValueError) as caught:
        parse_seconds(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4e-10, "0.40 ns"),
        (2.028e-6, "2.03 us"),
        (9.9951e-7, "1.00 us"),
        (0.0211, "21.1 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (3600, "3,600 s"),
    ],
)
def test_times_are_written(seconds, text):
    """Three digits, in the largest unit that leaves at least one."""
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1e-9, "<0.1%"), (0.0005, "0.1%"), (0.039, "3.9%"), (0.0996, "10%"), (1.5, "150%")],
)
def test_shares_are_written(share, text):
    """A share has a digit more below ten percent, and is not nothing where it is little."""
    assert show_share(share) == text


@pytest.mark.slow
def test_names_are_where_users_look():
    """Records, chips and `calibrate` are in `spmd.inspection`, without JAX until it is needed."""
    code = (
        "import sys, spmd.inspection as inspection, spmd.testing as testing\n"
        "names = 'Time Exchange Exposed Event Chip CHIPS'.split()\n"
        "print([one for one in names if not hasattr(inspection, one)], 'jax' in sys.modules)\n"
        "print(callable(testing.assert_time), 'jax' in sys.modules)\n"
        "print(callable(inspection.calibrate), 'assert_time' in testing.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[] False", "True False", "True True"]


def test_a_time_needs_no_more_than_its_parts():
    """A time of nothing is one: no wait, no exchange, and a text."""
    none = Time(
        chip="v5e", seconds=0.0, compute=0.0, memory=0.0, exchanges=(), hardware_flops=0, hfu=0.0,
        source="predicted",
    )  # fmt: skip
    assert (none.exposed, none.exposed_by_axes, none.exchange) == ((), {}, 0)
    assert str(none) == "0 s a call on v5e (predicted); HFU 0%; bound by compute"
    assert Report.from_json(replace(TIMED, time=none).to_json()).time == none
    assert Exchange(name="a", mesh_axes=(), source=None, seconds=0.0, exposed=0.0).exposed == 0
    assert "0 s a call" in str(replace(TIMED, time=none))
