"""Traces of the program order, and the figures for loggers."""

import itertools
import json
import math

from hardware import needs_libtpu
from hypothesis import given, settings
import jax
import jax.numpy as jnp
import pytest
from reports import MIB, SMALL, collective, report, reports
from timed import TIMED, timed_reports

import spmd
from spmd import P
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


# A layer in time


def lanes_of(trace):
    """By name, the slices of each track of the process that shows times."""
    (process,) = {
        e["pid"] for e in trace if e["name"] == "process_name" and "in time" in e["args"]["name"]
    }
    events = [e for e in trace if e["pid"] == process]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({*names.values()}) == len(names)
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    slices = {name: [] for _, name in sorted(names.items(), key=lambda one: order[one[0]])}
    for event in events:
        if event["ph"] == "X":
            slices[names[event["tid"]]].append(event)
    return slices


def test_a_layer_has_a_track_for_each_lane(tmp_path):
    """Core, memories and links are tracks in this order, with times in microseconds."""
    TIMED.save_trace(tmp_path / "layer.json")
    trace = json.loads((tmp_path / "layer.json").read_text(encoding="utf-8"))
    found = lanes_of(trace["traceEvents"])
    assert [*found] == ["core", "memory", "host", "links x+", "links x-", "links y+"]
    slices = {
        name: [(e["name"], e["cat"], round(e["ts"]), round(e["dur"])) for e in events]
        for name, events in found.items()
    }
    assert slices["core"] == [
        ("dot_general", "compute", 0, 10_000),
        ("add", "memory", 10_000, 2_000),
        ("wait for all-reduce", "exposed", 12_000, 6_000),
        ("dot_general", "compute", 18_000, 2_000),
    ]
    assert slices["host"] == [("copy", "memory", 0, 5_000)]
    assert slices["links x-"] == [("all-reduce", "exchange", 8_000, 10_000)]
    assert found["links x-"][0]["args"] == {"mesh_axes": ["data"]}
    assert "process 2 are times, in microseconds" in trace["otherData"]["durations"]
    # Bytes stand in a process of their own.
    assert {e["pid"] for e in trace["traceEvents"]} == {1, 2}
    assert {e["pid"] for e in SMALL.trace_events()} == {1}


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(timed_reports())
def test_any_layer_is_a_trace(one):
    """Slices of a track come in the order of their starts, none of them before the layer."""
    trace = json.loads(json.dumps(one.trace_events()))
    if not any("in time" in e["args"].get("name", "") for e in trace):
        pytest.fail("a report with a time has a process that shows it")
    found = lanes_of(trace)
    assert sum(map(len, found.values())) == len(one.time.layer)
    for events in found.values():
        starts = [e["ts"] for e in events]
        assert starts == sorted(starts)
        assert min(starts) >= 0
        assert all(e["dur"] >= 0 for e in events)


@pytest.fixture(scope="module")
def pod():
    """A compiled step for a slice, whose products and exchanges the compiler interleaves."""

    def loss(w, x):
        def layer(h, ws):
            return h + jnp.tanh(h @ ws["up"]) @ ws["down"], None

        return (jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2).mean()

    def bf16(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    specs = {"up": P(None, "data", "model"), "down": P(None, "model", "data")}
    step = spmd.pjit(jax.grad(loss), in_axis_resources=(specs, P("data")), out_axis_resources=specs)
    w = {"up": bf16(4, 2048, 8192), "down": bf16(4, 8192, 2048)}
    with spmd.topology("v5e:4x4", mesh={"data": 8, "model": 2}):
        return spmd.report(step, w, bf16(64, 512, 2048))


@pytest.mark.slow
@needs_libtpu
def test_a_layer_of_a_real_program(pod):
    """No slice of a track begins before the one before it ends, and the core is never idle."""
    found = lanes_of(json.loads(json.dumps(pod.trace_events())))
    assert next(iter(found)) == "core"
    assert {"links x+", "links x-"} <= found.keys()
    for events in found.values():
        for first, second in itertools.pairwise(events):
            assert second["ts"] >= first["ts"] + first["dur"] - 1e-3
    core = found["core"]
    end = max(e["ts"] + e["dur"] for events in found.values() for e in events)
    assert sum(e["dur"] for e in core) == pytest.approx(end, rel=1e-6)
    # What the core waits for is on links meanwhile.
    waits = [e for e in core if e["cat"] == "exposed"]
    sent = [e for name, events in found.items() if name.startswith("links") for e in events]
    assert waits
    for wait in waits:
        assert any(
            e["args"] == wait["args"]
            and e["ts"] < wait["ts"] + wait["dur"] <= e["ts"] + e["dur"] + 1
            for e in sent
        )


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
