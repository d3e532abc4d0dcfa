"""Traces of the program order, and the figures for loggers."""

import json
import math

from hypothesis import given, settings
import pytest
from reports import MIB, SMALL, collective, report, reports

from spmd.inspection import Collective, Cost, Reshard


def complete(one):
    """The events that stand for collectives."""
    return [event for event in one.trace_events() if event["ph"] == "X"]


def test_one_event_per_collective():
    """Events come in program order, one after another, as long as their bytes: 1 us is 1000."""
    assert [(e["name"], e["ts"], e["dur"]) for e in complete(SMALL)] == [
        # One execution of 16,384 bytes; 12 and 3 times 25,165,824 bytes; nothing, to be seen.
        ("all-gather (unknown runs)", 0, 16),
        ("all-reduce x12", 16, 301_989),
        ("collective-permute x3", 302_005, 75_497),
        ("all-to-all", 377_502, 1),
    ]
    assert [e["cat"] for e in complete(SMALL)] == ["forward", "backward", "other", "backward"]


def test_tracks_are_axes():
    """Each set of mesh axes has a track of its own, which is named and in order."""
    found = tuple(collective(mesh_axes=a) for a in ((), ("data",), (), ("data", "model")))
    one = report(collectives=found)
    assert [e["tid"] for e in complete(one)] == [1, 2, 1, 3]
    metadata = [e for e in one.trace_events() if e["ph"] == "M"]
    names = {e["tid"]: e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    assert names == {1: "none", 2: "data", 3: "data, model"}
    order = {e["tid"]: e["args"] for e in metadata if e["name"] == "thread_sort_index"}
    assert order == {i: {"sort_index": i} for i in (1, 2, 3)}
    (title,) = (e["args"]["name"] for e in metadata if e["name"] == "process_name")
    assert title == "step: bytes on the wire, not time (1 us = 1,000 bytes)"


def test_arguments_hold_every_field():
    """The details of an event name every field of the record, as text where it is nested."""
    details = complete(SMALL)[1]["args"]
    assert Collective.__dataclass_fields__.keys() <= details.keys()
    assert details["executions"] == 12
    assert details["total_wire_bytes"] == 288 * MIB
    assert details["source"] == "/w/model/transformer.py:42 block"
    assert details["frames"] == ["/w/model/transformer.py:42 block", "/w/train.py:90 main"]
    assert details["shapes"]["operands"] == "f32[2048,1024], f32[2048,1024]"
    assert complete(SMALL)[3]["args"]["source"] is None


def test_file(tmp_path):
    """The file is an object of the trace format that says what its durations are."""
    SMALL.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert trace["traceEvents"] == SMALL.trace_events()
    assert trace["displayTimeUnit"] in ("ms", "ns")
    about = trace["otherData"]
    assert about["durations"] == "bytes on the wire per device and call; they are not times"
    assert about["bytes_per_microsecond"] == 1000
    assert (about["mesh"], about["stand_in"]) == ("data=4, model=2", True)


def test_empty_report(tmp_path):
    """A program without collectives gives a trace without events, with its name."""
    assert complete(report()) == []
    report().save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["function"] == "step"


def test_giant_figures_stay_in_range():
    """Where bytes would leave the range of viewers, a microsecond stands for more of them."""
    one = report(collectives=(collective(wire_bytes=2**80), collective(wire_bytes=2**79)))
    first, second = complete(one)
    assert first["dur"] == pytest.approx(2 * second["dur"])
    assert (second["ts"] + second["dur"]) * 1000 < 2**63
    assert "(1 us = 1,000,000,000,000,000 bytes)" in one.trace_events()[0]["args"]["name"]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(reports)
def test_structure(one):
    """Any trace has what viewers need: known phases, integer times in order, no overlap."""
    events = json.loads(json.dumps(one.trace_events()))
    assert {e["ph"] for e in events} <= {"M", "X"}
    assert all({"name", "ph", "ts", "pid", "tid", "args"} <= e.keys() for e in events)
    events = [e for e in events if e["ph"] == "X"]
    assert len(events) == len(one.collectives)
    end = 0
    for event, found in zip(events, one.collectives, strict=True):
        assert event["ts"] == end
        assert event["dur"] >= 1
        end += event["dur"]
        assert event["args"]["kind"] == found.kind
    assert end < 2 * 10**12


# Scalars


def test_scalars():
    """The figures of the small report, counted by hand, under the documented names."""
    found = SMALL.scalars()
    expected = {
        "collectives/unknown_sites": 1,
        "collectives/total/sites": 4,
        "collectives/total/executions": 12 + 3 + 1,
        "collectives/total/payload_bytes": (12 * 16 + 3 * 24 + 16) * MIB,
        "collectives/total/wire_bytes": 15 * 24 * MIB,
        "collectives/backward/wire_bytes": 288 * MIB,
        "collectives/forward/sites": 1,
        "collectives/forward/wire_bytes": 0,
        "collectives/all-reduce/data/executions": 12,
        "collectives/all-gather/model/executions": 0,
        "collectives/collective-permute/data:(2)2+model/wire_bytes": 72 * MIB,
        "collectives/all-to-all/none/payload_bytes": 16 * MIB,
        "cost/flops": 123_456_789_012,
        "cost/unknown_loops": 1,
        "cost/flops_per_wire_byte": 123_456_789_012 / (360 * MIB),
        "cost/wire_bytes_per_hbm_byte": 360 / 5120,
        "memory/peak_bytes": 150 * MIB,
        "memory/aliased_bytes": 32 * MIB,
        "reshards/arguments": 1,
        "reshards/bytes": MIB,
    }
    assert {name: found[name] for name in expected} == expected


def test_scalars_of_nothing():
    """Names that do not depend on kinds and axes are there for an empty report too."""
    found = report().scalars()
    assert found["collectives/total/wire_bytes"] == 0
    assert found["collectives/other/wire_bytes"] == 0
    assert found["reshards/bytes"] == 0
    assert not [name for name in found if name.startswith("memory/")]
    assert "cost/flops_per_wire_byte" not in found


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(reports)
def test_scalars_are_plain_finite_numbers(one):
    """Loggers take every figure: a flat dictionary of finite numbers, of the same names always."""
    found = one.scalars()
    for name, value in found.items():
        assert type(value) in (int, float), name
        assert math.isfinite(value), name
    assert report(predicted=one.predicted).scalars().keys() <= found.keys()
    parts = [v for n, v in found.items() if n.endswith("/sites") and n.count("/") == 3]
    assert sum(parts) == found["collectives/total/sites"] == len(one.collectives)


def test_scalars_sum_reshards():
    """Bytes of all arguments that are moved are one figure."""
    moved = [Reshard(argument=str(i), given="", wanted="", nbytes=i) for i in (3, 4)]
    found = report(reshards=tuple(moved), cost=Cost(flops=7, hbm_bytes=2)).scalars()
    assert (found["reshards/arguments"], found["reshards/bytes"]) == (2, 7)
    assert found["cost/wire_bytes_per_hbm_byte"] == 0.0
