"""Reports as JSON: lossless, stable, documented, and refused with a reason."""

import dataclasses
import json
import re

from hypothesis import given, settings
import pytest
from reports import (
    MIB,
    SMALL,
    collective,
    part,
    report,
    reports,
    source,
    timed_reports,
    value_origins,
)
from schemas import faults, schema_of, undocumented

from spmd import Report
from spmd.errors import ReportError
from spmd.inspection import Cost, Origins, Shapes
from spmd.inspection.records import codec
from spmd.inspection.records.later import known

SCHEMA = schema_of("report.schema.json")

#: Written by hand from `report.schema.json`, and all that a reader needs.
BY_HAND = {
    "schema": "spmd-report/1",
    "name": "step",
    "backend": "tpu",
    "device_kind": "TPU v4",
    "stand_in": False,
    "mesh": [{"axis": "model", "size": 2}, {"axis": "data", "size": 4}],
    "num_devices": 8,
    "versions": {"spmd": "0.1.0", "jax": "0.12.0.1"},
    "collectives": [
        {
            "kind": "all-gather",
            "mesh_axes": ["data"],
            "shapes": {
                "operands": [{"dtype": "f32", "dims": [2, 8]}],
                "results": [{"dtype": "f32", "dims": [8, 8]}],
            },
            "dtype": "f32",
            "payload_bytes": 256,
            "wire_bytes": 192,
            "group_size": 4,
            "executions": None,
            "source": {"file": "a.py", "line": 7, "column": 1, "function": "f"},
            "direction": "forward",
            "op_name": "jit(step)/add",
            "is_async": True,
            "combined": 1,
            "frames": [1, 0],
        }
    ],
    "cost": {"flops": 5, "hbm_bytes": 6},
    "memory": None,
    "frames": [
        {"file": "b.py", "line": 1, "column": 0, "function": "main"},
        {"file": "a.py", "line": 7, "column": 1, "function": "f"},
    ],
}


def error(function, *args):
    """The text of the error that a call raises."""
    with pytest.raises(ReportError) as caught:
        function(*args)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


# Round trip


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(reports | timed_reports)
def test_round_trip(one):
    """A report comes back equal from JSON text, and writes the same text again."""
    text = json.dumps(one.to_json())
    back = Report.from_json(json.loads(text))
    assert back == one
    assert back.origins == one.origins  # which takes no part in the comparison of reports
    assert list(back.mesh) == list(one.mesh)
    assert json.dumps(back.to_json()) == text


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(reports | timed_reports)
def test_round_trip_of_a_file(tmp_path_factory, one):
    """A report comes back equal from a file, whatever its names hold."""
    path = tmp_path_factory.mktemp("reports") / "r.json"
    one.save(path)
    assert Report.load(path) == one
    assert Report.load(str(path)) == one


def test_types_come_back():
    """Tuples, records and None come back as such: the report can be hashed, summed and drawn."""
    back = Report.from_json(SMALL.to_json())
    assert str(back) == str(SMALL)
    assert isinstance(back.collectives[0].shapes, Shapes)
    assert len({*back.collectives, *SMALL.collectives}) == 4
    assert back.total == SMALL.total


def test_by_hand():
    """A file that is written by hand from the schema is read as it says."""
    found = Report.from_json(BY_HAND)
    one = found.collectives[0]
    assert found.mesh == {"model": 2, "data": 4}
    assert list(found.mesh) == ["model", "data"]
    assert [str(frame) for frame in one.frames] == ["a.py:7", "b.py:1"]
    assert one.shapes.results[0].nbytes == 256
    assert (one.executions, one.is_async, one.conditional) == (None, True, False)
    assert found.cost == Cost(flops=5, hbm_bytes=6)
    assert found.reshards == ()
    assert BY_HAND.items() <= strip(found.to_json()).items()


def strip(data):
    """JSON of a report without what is derived, or later than its first version."""
    keys = BY_HAND["collectives"][0].keys()
    slim = [{k: v for k, v in c.items() if k in keys} for c in data["collectives"]]
    order = data["frames"]
    for one in slim:
        one["frames"] = [BY_HAND["frames"].index(order[i]) for i in one["frames"]]
    cost = {k: data["cost"][k] for k in ("flops", "hbm_bytes")}
    return data | {"collectives": slim, "cost": cost, "frames": BY_HAND["frames"]}


# Schema


def test_schema_knows_everything():
    """Every key that is written stands in the schema, in the order of the schema."""
    data = SMALL.to_json()
    assert undocumented(data, SCHEMA) == []
    assert list(data) == list(SCHEMA["properties"])
    assert list(data["collectives"][0]) == list(SCHEMA["$defs"]["Collective"]["properties"])


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(reports | timed_reports)
def test_schema_holds(one):
    """What is written is what the schema says."""
    assert faults(one.to_json(), SCHEMA) == []


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "spmd-report/2"},
        {"stand_in": 1},
        {"num_devices": True},
        {"num_devices": -1},
        {"memory": {}},
        {"mesh": {"data": 4}},
        {"versions": {"jax": 12}},
        {"collectives": [BY_HAND["collectives"][0] | {"kind": "gather"}]},
        {"collectives": [BY_HAND["collectives"][0] | {"executions": "many"}]},
        {"totals": {"all": {}}},
    ],
)
def test_schema_refuses(change):
    """The schema holds for the file written by hand, and does not for these changes of it."""
    assert faults(BY_HAND, SCHEMA) == []
    assert faults(BY_HAND | change, SCHEMA)


def test_derived_figures():
    """Totals are written for other readers, and ignored when they come back."""
    data = SMALL.to_json()
    # 12 * 24 MiB, 3 * 24 MiB, one unknown and one that sends nothing.
    assert data["totals"]["all"]["wire_bytes"] == 15 * 24 * MIB
    assert data["totals"]["all"]["unknown"] == 1
    assert [(row["line"], row["wire_bytes"]) for row in data["totals"]["line"]][:3] == [
        (None, 6 * 24 * MIB),
        ("/w/model/transformer.py:42", 6 * 24 * MIB),
        ("/w/ops.py:9", 3 * 24 * MIB),
    ]
    assert data["totals"]["kind_and_mesh_axes"][1] == {
        "kind": "collective-permute",
        "mesh_axes": ["data:(2)2", "model"],
        "sites": 1,
        "unknown": 0,
        "executions": 3,
        "payload_bytes": 72 * MIB,
        "wire_bytes": 72 * MIB,
    }
    assert [c["total_wire_bytes"] for c in data["collectives"]] == [None, 288 * MIB, 72 * MIB, 0]
    data["totals"] = "nonsense"
    data["collectives"][0]["total_wire_bytes"] = -1
    assert Report.from_json(data) == SMALL


def test_frames_are_written_once():
    """Stacks that collectives share stand in the file once."""
    stack = tuple(source(i) for i in range(20))
    big = report(collectives=(collective(frames=stack),) * 100)
    data = big.to_json()
    assert len(data["frames"]) == 20
    assert data["collectives"][99]["frames"] == list(range(20))
    assert Report.from_json(data) == big


def test_records_of_origins_are_written_once():
    """Lines, annotations and steps that values share stand in the file once."""
    big = dataclasses.replace(
        SMALL, _origins=known(Origins(values=(value_origins(),) * 50, left_out=2))
    )
    data = big.to_json()
    assert len(data["origins"]["steps"]) == len(data["origins"]["annotations"]) == 1
    place = data["frames"][data["origins"]["steps"][0]["source"]]
    assert (place["file"], place["line"]) == ("/w/model/transformer.py", 42)
    assert [value["origins"][0]["steps"] for value in data["origins"]["values"]] == [[0]] * 50
    assert Report.from_json(data).origins == big.origins


def test_a_file_without_origins():
    """A file of an earlier release is read, and its report says that it holds none."""
    data = SMALL.to_json()
    del data["origins"]
    found = Report.from_json(data)
    assert found == SMALL
    assert found.origins == Origins(
        missing="The report does not hold where its shardings come from."
    )


def test_wrong_origins_are_named():
    """Indices of origins that lead nowhere are told with their place."""
    data = json.loads(json.dumps(SMALL.to_json()))
    data["origins"]["steps"][0]["dimension"] = "first"
    data["origins"]["values"][2]["source"] = True
    data["origins"]["annotations"][1]["source"] = -1
    data["origins"]["values"][3]["conflicts"][0]["lost"] = {"kind": "constraint"}
    del data["origins"]["values"][3]["name"]
    assert error(Report.from_json, data).split("\n") == [
        "argument of `Report.from_json` has a wrong value in origins.annotations[1].source.",
        "  expected  an index below 4",
        "  got       -1",
        "argument of `Report.from_json` has a wrong value in origins.steps[0].dimension.",
        "  expected  an integer",
        '  got       "first"',
        "argument of `Report.from_json` has a wrong value in origins.values[2].source.",
        "  expected  an index below 4",
        "  got       true",
        "argument of `Report.from_json` misses the key origins.values[3].name.",
        "argument of `Report.from_json` has a wrong value in origins.values[3].conflicts[0].lost.",
        "  expected  an index below 2",
        '  got       {"kind": "constraint"}',
    ]


def test_file_has_a_line_per_collective(tmp_path):
    """Files compare line by line: a collective is a line, and the end of the file a newline."""
    SMALL.save(tmp_path / "r.json")
    lines = (tmp_path / "r.json").read_text(encoding="utf-8").split("\n")
    assert sum(line.startswith(' {"kind": ') and '"groups"' in line for line in lines) == 4
    assert sum(line.startswith(' {"kind": ') and '"conflicts"' in line for line in lines) == 4
    assert lines[-1] == ""


# Errors


def test_other_kinds():
    """What is no report is refused with what was found instead."""
    assert error(Report.from_json, {"schema": "spmd-diff/1"}) == (
        "argument of `Report.from_json` is no report.\n"
        "  expected  a JSON object with schema 'spmd-report/1'\n"
        "  got       schema 'spmd-diff/1'\n"
        "  fix       pass what report.to_json() gives or report.save() writes"
    )
    assert "got       an object without a schema" in error(Report.from_json, {})
    assert "got       schema 7" in error(Report.from_json, {"schema": 7})
    for wrong, name in (([], "list"), (None, "NoneType"), ("r.json", "str")):
        assert f"got       a value of type {name}" in error(Report.from_json, wrong)


def test_newer_version(tmp_path):
    """A file of a later version is refused with the version that wrote it."""
    path = tmp_path / "r.json"
    newer = SMALL.to_json() | {"schema": "spmd-report/2", "versions": {"spmd": "9.0"}}
    path.write_text(json.dumps(newer), encoding="utf-8")
    assert error(Report.load, path) == (
        f"file `{path}` is a report of a version that this spmd does not read.\n"
        "  expected  schema 'spmd-report/1'\n"
        "  got       schema 'spmd-report/2', written by spmd 9.0\n"
        "  fix       install the version of spmd that wrote it, or write the report anew"
    )


def test_missing_keys_are_named():
    """All keys that are missing are named at once, with their place."""
    data = json.loads(json.dumps(SMALL.to_json()))
    del data["backend"]
    del data["collectives"][1]["kind"]
    del data["memory"]["buffers"][0]["shape"]["dims"]
    assert error(Report.from_json, data).split("\n") == [
        "argument of `Report.from_json` misses the key backend.",
        "argument of `Report.from_json` misses the key collectives[1].kind.",
        "argument of `Report.from_json` misses the key memory.buffers[0].shape.dims.",
    ]


@pytest.mark.parametrize("wrong", [7, "text", [3], {"x": 1}, [{"axis": 3}], 2.5, True, None])
def test_wrong_values_are_named(wrong):
    """A value that the schema refuses is refused with its place, and never breaks the reader."""
    for key in SMALL.to_json().keys() - {"schema", "totals"}:
        data = SMALL.to_json() | {key: wrong}
        if faults(data, SCHEMA):
            assert re.search(f"(in|key) {key}", error(Report.from_json, data))
        else:
            assert isinstance(Report.from_json(data), Report)


def test_wrong_types_are_named():
    """A wrong value is told with what it should be and what it is."""
    data = json.loads(json.dumps(SMALL.to_json()))
    data["collectives"][1]["executions"] = True
    data["collectives"][2]["frames"] = [0, -1]
    data["collectives"][3]["frames"] = [4]
    assert error(Report.from_json, data).split("\n") == [
        "argument of `Report.from_json` has a wrong value in collectives[1].executions.",
        "  expected  an integer",
        "  got       true",
        "argument of `Report.from_json` has a wrong value in collectives[2].frames.",
        "  expected  indices into the 4 frames",
        "  got       [0, -1]",
        "argument of `Report.from_json` has a wrong value in collectives[3].frames.",
        "  expected  indices into the 4 frames",
        "  got       [4]",
    ]


def test_unknown_keys_are_ignored():
    """A file that a later release of the same version wrote, with more in it, is read."""
    data = json.loads(json.dumps(SMALL.to_json()))
    data["later"] = data["collectives"][0]["later"] = data["cost"]["later"] = {"x": 1}
    assert Report.from_json(data) == SMALL


def test_no_json(tmp_path):
    """A file that is no JSON, or no text, is named; one that is not there is Python's own error."""
    path = tmp_path / "r.json"
    for content in (b"spmd report", b"", b"\xff\xfe\x00", b'{"schema": ', b"[" * 100_000):
        path.write_bytes(content)
        assert error(Report.load, path).startswith(f"file `{path}` holds no JSON.\n  expected")
    with pytest.raises(FileNotFoundError):
        Report.load(tmp_path / "nothing.json")


def test_other_endings(tmp_path):
    """Only JSON and pages are written, and the error says which name to take."""
    assert error(SMALL.save, tmp_path / "r.txt") == (
        f"report of `step` cannot be saved as `{tmp_path / 'r.txt'}`.\n"
        "  expected  a file name that ends in .json or .html\n"
        "  got       the ending '.txt'\n"
        f"  fix       report.save('{tmp_path / 'r.json'}')"
    )
    for name in ("r.htm", "r.XHTML"):
        assert f"report.save('{tmp_path / 'r.html'}')" in error(SMALL.save, tmp_path / name)
    assert "a name without an ending" in error(SMALL.save, tmp_path / "r")
    assert list(tmp_path.iterdir()) == []
    SMALL.save(tmp_path / "R.JSON")


def test_every_field_comes_back_changed():
    """No field of a collective is dropped: a change of any one makes another report of it."""
    one = SMALL.collectives[1]
    other = collective(
        kind="send", mesh_axes=("model",), shapes=Shapes((), ()), dtype="u8", payload_bytes=1,
        wire_bytes=2, group_size=3, executions=5, source=None, direction="other", op_name="x",
        is_async=False, combined=7, source_is_consumer=True, frames=(), conditional=True,
        in_loop=True, name="send.1", groups="{{0}}",
        parts=(part(8, source_is_consumer=True, frames=(source(1), source(42))),), sliced=(0,),
    )  # fmt: skip
    for field in dataclasses.fields(one):
        changed = dataclasses.replace(one, **{field.name: getattr(other, field.name)})
        assert changed != one, field.name
        back = Report.from_json(json.loads(json.dumps(report(collectives=(changed,)).to_json())))
        assert back.collectives == (changed,), field.name


def test_version_is_the_schema_s():
    """The version that is written is the one that the schema describes."""
    assert SCHEMA["properties"]["schema"]["const"] == codec.SCHEMA
