"""The table of the benchmark `plan`, from plans that are made up."""

import dataclasses

from benchmarks.plans.cases import built
from benchmarks.plans.compiled import Figures, place_of, shapes
from benchmarks.plans.experts import FSDP, FSDP_TENSOR, MEGATRON
from benchmarks.plans.outcome import Found, table
from benchmarks.plans.planned import Answer, Candidate
from hardware import needs_libtpu

from spmd import P


def candidate(predicted, seconds, estimated=1.0, peak=1.0):
    """A layout that was compiled, or not."""
    return Candidate(
        name="found",
        sizes={"data": 16, "model": 1},
        predicted=predicted,
        seconds=seconds,
        estimated=estimated,
        peak=peak,
    )


def found(
    seconds, *, expert=10.0, peak=2**30, searched=5.0, candidates=(), specs=None, told=None, **rest
):
    """A plan beside an expert of ten seconds."""
    answer = Answer(
        sizes={"data": 16, "model": 1},
        predicted=seconds,
        seconds=seconds,
        peak=peak,
        candidates=candidates,
        searched=searched,
        tried=1,
        specs=specs or {},
        told=told,
    )
    best = expert and Figures(expert=FSDP, sizes={"data": 16, "model": 1}, seconds=expert, peak=1)
    return Found(
        **{"name": "a", "where": "v5e:4x4", "seeds": True} | rest, answer=answer, expert=best
    )


def rows(*every):
    """Values and states of the table, by what they are of."""
    lines = [line.strip() for line in table(every)][1:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {one[0]: (one[1], one[-1]) for one in cells}


def test_a_plan_is_held_against_the_best_expert():
    """Of two plans with seeds one is slower; the other one is fast enough for a third of cases."""
    lines = rows(found(9.0), found(10.5, name="b"), found(10.4, seeds=False))
    assert lines["compiled time by the best expert's, with seeds"] == (
        "1 of 2, worst 1.05",
        "MISSED",
    )
    assert lines["compiled time by the best expert's, search alone"] == ("1 of 1, worst 1.04", "ok")
    assert lines["cases at 0.95 of it or below, with seeds"] == ("1 of 2", "ok")
    assert lines["plans that keep to their budget"][-1] == "not measured"
    own = rows(found(10.0, is_published=True), found(11.0, name="b"))
    assert own["published runs, by their own layout's time"] == ("1 of 1, worst 1.00", "ok")
    assert own["compiled time by the best expert's, with seeds"][0] == "0 of 1, worst 1.10"


def test_a_prediction_on_cpus_is_held_apart():
    """What the planner did not compile for hardware is no case of those that it did."""
    lines = rows(
        found(10.4, where="cpu:4x2", told=100), found(9.9, where="cpu:4x2", there="v5e:2x4")
    )
    assert lines["compiled time by the best expert's, with seeds"] == ("1 of 1, worst 0.99", "ok")
    assert lines["the same of a prediction on CPUs, with seeds"] == ("0 of 1, worst 1.04", "MISSED")


def test_a_budget_is_held_as_compiled():
    """A gibibyte is more than a gigabyte, and no plan keeps no budget."""
    lines = rows(found(9.0, budget="1GB"), found(9.0, budget="2GB"))
    assert lines["plans that keep to their budget"] == ("1 of 2", "MISSED")
    expert = found(9.0).expert
    none = Found(name="a", where="v5e:4x4", seeds=True, budget="1GB", answer=None, expert=expert)
    assert rows(none)["plans that keep to their budget"] == ("0 of 1", "MISSED")
    # Where no expert fits either, it is right that there is no plan.
    none = dataclasses.replace(none, expert=None)
    assert rows(none)["plans that keep to their budget"] == ("0 of 0", "not measured")


def test_predictions_are_of_all_that_was_compiled():
    """Of a case, each layout counts once; its order is right but for two neighbours of four."""
    every = [candidate(1.0, 1.0), candidate(2.0, 4.0), candidate(4.0, 3.0), candidate(5.0, 5.0)]
    not_compiled = candidate(7.0, None, peak=None)
    lines = rows(
        found(1.0, candidates=[*every, not_compiled]), found(1.0, seeds=False, candidates=every)
    )
    assert lines["error of the predicted time, median"] == ("16.7% of 4", "MISSED")
    assert lines["error of the predicted peak, median"] == ("0.0% of 4", "ok")
    assert lines["Spearman of predicted and compiled time, by case"] == (
        "0 of 1, worst 0.80",
        "MISSED",
    )


def test_fsdp_and_tensors_are_told_by_where_weights_and_rows_lie():
    """Weights over two axes on a dimension each, rows over one of them."""
    up, words = "state['params']['layers']['up']", "batch['words']"
    given = {"name": "GPT-2 small, eight sequences", "budget": "1GB", "seeds": False}
    both = {up: [None, ["data"], ["model"]], words: [["data"], None]}
    fsdp = {up: [None, ["data", "model"], None], words: [["data", "model"], None]}
    name = "FSDP x TP for GPT-2 small from a budget"
    assert rows(found(1.0, specs=both, **given))[name] == ("1 of 1", "ok")
    assert rows(found(1.0, specs=fsdp, **given))[name] == ("0 of 1", "MISSED")


def test_searches_have_a_target_by_size():
    """Ten seconds for a scanned program on 16 chips, thirty for an unrolled one."""
    lines = rows(found(9.0, searched=12.0), found(9.0, searched=12.0, is_unrolled=True))
    assert lines["search, scanned, to 16 chips, s"] == ("0 of 1, worst 12.00", "MISSED")
    assert lines["search, unrolled, to 16 chips, s"] == ("1 of 1, worst 12.00", "ok")


@needs_libtpu
def test_experts_are_compiled_on_meshes_that_they_differ_on():
    """FSDP is one program on all of them; tensors want some of ``model``, and FSDP of ``data``."""
    case = built("MLP", small=True)
    found = {one.name: shapes(case, one, "cpu:8") for one in (FSDP, MEGATRON, FSDP_TENSOR)}
    assert found["FSDP"] == [{"data": 8}]
    assert found["Megatron"] == found["FSDP x TP"] == []
    found = {one.name: shapes(case, one, "v5e:2x4") for one in (FSDP, MEGATRON, FSDP_TENSOR)}
    assert [[*one.values()] for one in found["FSDP"]] == [[8, 1]]
    assert [[*one.values()] for one in found["Megatron"]] == [[4, 2], [2, 4], [1, 8]]
    assert [[*one.values()] for one in found["FSDP x TP"]] == [[4, 2], [2, 4]]


def test_a_third_axis_goes_with_data():
    """On 2x2x2 an expert of two axes uses all of them."""
    case = built("MLP", small=True)
    kept = FSDP_TENSOR.on(place_of("cpu:2x2x2").shape)
    specs = kept.specs(case.args, case.dims)
    assert specs[0]["params"][0]["up"] == P(("data", "more"), "model")
    assert specs[1]["x"] == P(("data", "more"), "model")
