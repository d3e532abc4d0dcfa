"""Plans as JSON: lossless, documented, and refused with a reason."""

import dataclasses
import json

from hypothesis import given, settings
from plans import BARE, GPT, plans
import pytest
from schemas import faults, schema_of, undocumented

from spmd import Report
from spmd.errors import ReportError
from spmd.inspection.records import plan_codec
from spmd.inspection.records.later import Later
from spmd.inspection.records.plan import Candidate, Inside, Placed

SCHEMA = schema_of("plan.schema.json")

#: Written by hand from `plan.schema.json`, and all that a reader needs.
BY_HAND = {
    "schema": "spmd-plan/1",
    "name": "step",
    "axes": [{"axis": "model", "size": 2}, {"axis": "data", "size": 4}],
    "topology": "v5e:4x2",
    "device_kind": "TPU v5 lite",
    "chip": "v5e",
    "budget": None,
    "arguments": [{"name": "x", "dtype": "f32", "shape": [8, 4], "spec": [["data", "model"], []]}],
    "results": [],
    "pins": [],
    "candidates": [
        {
            "name": "found",
            "axes": [{"axis": "model", "size": 2}, {"axis": "data", "size": 4}],
            "orders": [{"axis": "model", "classes": ["d_ff"]}, {"axis": "data", "classes": []}],
            "estimated": 1,
            "estimated_peak": 160,
            "compute": 0.5,
            "memory": 0.25,
            "exchange": 0.25,
            "predicted": 1.0,
            "sent": 12,
        }
    ],
    "report": None,
    "tried": 3,
    "searched": 0.5,
    "compiled": 0.0,
    "complete": True,
    "program": "01ab",
    "versions": {"spmd": "0.1.0"},
}


def encoded(plan):
    """A plan as it comes back from the text of a file."""
    return json.loads(json.dumps(plan_codec.encode(plan, force=True)))


def decoded(data):
    """The plan of JSON values."""
    return plan_codec.decode(data, subject="file `p.json`")


def error(data):
    """The lines of the error for JSON values that are no plan."""
    with pytest.raises(ReportError) as caught:
        decoded(data)
    return str(caught.value).split("\n")


# Round trip


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(plans())
def test_round_trip(one):
    """A plan comes back equal from JSON text, and writes the same text again."""
    text = json.dumps(plan_codec.encode(one, force=True))
    back = decoded(json.loads(text))
    assert back == one
    assert (back.inside and back.inside.get()) == (one.inside and one.inside.get())
    assert [*back.axes] == [*one.axes]
    assert json.dumps(plan_codec.encode(back, force=True)) == text


@pytest.mark.parametrize("one", [GPT, BARE], ids=["full", "bare"])
def test_round_trip_of_a_file(one, tmp_path):
    """A plan comes back equal from a file, with its report, its constraints and its drawing."""
    plan_codec.save_json(one, tmp_path / "p.json")
    back = plan_codec.load(tmp_path / "p.json")
    assert back == one
    assert str(back) == str(one)
    assert back.constraints == one.constraints
    assert back.report == one.report
    assert one.report is None or back.report.origins == one.report.origins
    assert [*back.candidates[0].orders] == ["data", "model"]
    assert isinstance(hash(back.arguments[0]), int)


def test_by_hand():
    """A file that is written by hand from the schema is read as it says."""
    found = decoded(BY_HAND)
    assert (*found.axes.items(),) == (("model", 2), ("data", 4))
    assert found.arguments == (
        Placed(name="x", dtype="f32", shape=(8, 4), spec=(("data", "model"), ())),
    )
    one = found.chosen
    assert (one.time, one.peak, one.verified, one.failure) == (None, None, "", "")
    assert (one.estimated, type(one.estimated)) == (1.0, float)
    assert one.orders == {"model": ("d_ff",), "data": ()}
    assert (found.inside, found.constraints) == (None, ())
    # Fields that came later.
    assert (found.deviations, one.told) == ((), None)
    assert (found.passed_over, found.compiles) == ({}, 0)


def test_a_line_for_each_array_candidate_and_collective(tmp_path):
    """Files compare line by line, those of the report inside included."""
    plan_codec.save_json(GPT, tmp_path / "p.json")
    lines = (tmp_path / "p.json").read_text(encoding="utf-8").split("\n")
    assert sum(line.startswith(' {"name": ') and '"is_fixed"' in line for line in lines) == 40
    assert sum(line.startswith(' {"name": ') and '"orders"' in line for line in lines) == 7
    assert sum(line.startswith(' {"kind": ') and '"groups"' in line for line in lines) == 6
    assert lines[-1] == ""


# Constraints


def test_constraints_are_worked_out_on_demand():
    """Without `force` nobody waits for them: they are null until somebody has asked."""
    asked = []
    inside = Inside(constraints=GPT.constraints)
    one = dataclasses.replace(GPT, inside=Later(lambda: asked.append(1) or inside))
    assert plan_codec.encode(one, force=False)["inside"] is None
    assert asked == []
    data = plan_codec.encode(one, force=True)
    assert (asked, len(data["inside"]["constraints"])) == ([1], 2)
    assert plan_codec.encode(one, force=False) == data
    assert decoded(data).constraints == GPT.constraints


# Schema


def test_schema_knows_everything():
    """Every key that is written stands in the schema, in the order of the schema."""
    data = encoded(GPT)
    assert undocumented(data, SCHEMA) == []
    assert [*data] == [*SCHEMA["properties"]]
    records = {"candidates": "Candidate", "arguments": "Placed", "pins": "Pin"}
    for key, name in (records | {"deviations": "Deviation"}).items():
        assert [*data[key][0]] == [*SCHEMA["$defs"][name]["properties"]]
    (first, *_) = data["inside"]["constraints"]
    assert [*first] == [*SCHEMA["$defs"]["SourceConstraint"]["properties"]]
    assert SCHEMA["properties"]["schema"]["const"] == plan_codec.SCHEMA


@pytest.mark.parametrize("one", [GPT, BARE], ids=["full", "bare"])
def test_schema_holds_for_plans_by_hand(one):
    """What is written is what the schema says."""
    assert faults(encoded(one), SCHEMA) == []


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(plans())
def test_schema_holds(one):
    """What is written of any plan is what the schema says."""
    assert faults(encoded(one), SCHEMA) == []


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "spmd-plan/2"},
        {"axes": {"data": 4}},
        {"budget": -1},
        {"complete": 1},
        {"report": {}},
        {"arguments": [BY_HAND["arguments"][0] | {"spec": ["data"]}]},
        {"candidates": [BY_HAND["candidates"][0] | {"verified": "by hand"}]},
        {"candidates": [BY_HAND["candidates"][0] | {"time": {"seconds": 1}}]},
        {"inside": {"exact": True}},
        {"deviations": [{"kind": "all-reduce", "cause": "none"}]},
    ],
)
def test_schema_refuses(change):
    """The schema holds for the file written by hand, and does not for these changes of it."""
    assert faults(BY_HAND, SCHEMA) == []
    assert faults(BY_HAND | change, SCHEMA)


# Errors


def test_other_kinds(tmp_path):
    """What is no plan is refused with what it is; a report is told how it is read."""
    assert error(GPT.report.to_json()) == [
        "file `p.json` is no plan.",
        "  expected  a JSON object with schema 'spmd-plan/1'",
        "  got       schema 'spmd-report/1'",
        "  fix       spmd.Report.load(...) reads it: it is a report",
    ]
    assert error([])[2:] == [
        "  got       a value of type list",
        "  fix       pass what plan.save() writes",
    ]
    with pytest.raises(ReportError, match="is no report"):
        Report.from_json(encoded(GPT))
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ReportError, match=r"expected  a file that plan.save\(\) wrote"):
        plan_codec.load(tmp_path / "p.json")


def test_newer_version():
    """A file of a later version is refused with the version that wrote it."""
    assert error(BY_HAND | {"schema": "spmd-plan/2", "versions": {"spmd": "9.0"}}) == [
        "file `p.json` is a plan of a version that this spmd does not read.",
        "  expected  schema 'spmd-plan/1'",
        "  got       schema 'spmd-plan/2', written by spmd 9.0",
        "  fix       install the version of spmd that wrote it, or write the plan anew",
    ]


def test_all_that_is_wrong_is_named():
    """Wrong types and missing keys are told at once, with their places, those of the report too."""
    data = encoded(GPT)
    data["candidates"][1]["sent"] = "much"
    data["candidates"][2]["orders"] = {"data": ["batch"]}
    del data["candidates"][3]["predicted"]
    data["deviations"][0]["source"] = "model.py:57"
    data["report"]["collectives"][0]["frames"] = [99]
    del data["report"]["cost"]
    data["inside"]["constraints"][0]["line"] = None
    found = error(data)
    assert [line for line in found if line.startswith("file")] == [
        "file `p.json` has a wrong value in candidates[1].sent.",
        "file `p.json` has a wrong value in candidates[2].orders.",
        "file `p.json` misses the key candidates[3].predicted.",
        "file `p.json` has a wrong value in report.collectives[0].frames.",
        "file `p.json` misses the key report.cost.",
        "file `p.json` has a wrong value in deviations[0].source.",
        "file `p.json` has a wrong value in inside.constraints[0].line.",
    ]
    assert found[1:3] == ["  expected  an integer", '  got       "much"']


@pytest.mark.parametrize(
    ("text", "got"), [("1e999", "Infinity"), ("-Infinity", "-Infinity"), ("NaN", "NaN")]
)
def test_what_is_not_finite_is_no_number(text, got):
    """JSON has none, though Python reads them, and makes one of a number that is too large."""
    told = error(json.loads(json.dumps(BY_HAND).replace("0.25", text)))
    assert "file `p.json` has a wrong value in candidates[0].memory." in told
    assert told[1:3] == ["  expected  a number", f"  got       {got}"]


def test_a_report_of_another_version():
    """The report inside is held to its own version."""
    data = encoded(GPT)
    data["report"]["schema"] = "spmd-report/2"
    assert error(data)[:2] == [
        "file `p.json` has a wrong value in report.",
        "  expected  schema 'spmd-report/1'",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"candidates": []}, ["candidates", "at least one candidate: the chosen one", "none"]),
        (
            {"arguments": [BY_HAND["arguments"][0] | {"spec": [["data"]]}]},
            ["arguments[0].spec", "an entry for each of the 2 dimensions of x", "1 entries"],
        ),
        (
            {"arguments": [BY_HAND["arguments"][0] | {"spec": [["dta"], []]}]},
            ["arguments[0].spec", "axes of the mesh: model, data", "dta"],
        ),
        (
            {"results": [BY_HAND["arguments"][0] | {"spec": [["data"], ["data"]]}]},
            ["results[0].spec", "each axis once", "data, data"],
        ),
    ],
)
def test_places_that_are_none(change, told):
    """What has the right types and cannot be a plan is refused where it is read."""
    place, expected, got = told
    assert error(BY_HAND | change) == [
        f"file `p.json` has a wrong value in {place}.",
        f"  expected  {expected}",
        f"  got       {got}",
    ]


@pytest.mark.parametrize("wrong", [7, "text", [3], {"x": 1}, [{"axis": 3}], 2.5, True, None])
def test_wrong_values_never_break_the_reader(wrong):
    """A value that the schema refuses is refused with its place; others are read."""
    for key in BY_HAND.keys() - {"schema"}:
        data = BY_HAND | {key: wrong}
        if faults(data, SCHEMA):
            assert any(key in line for line in error(data))
        elif key != "candidates":
            assert isinstance(decoded(data).chosen, Candidate)
