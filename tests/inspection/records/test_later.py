"""Findings that are worked out when they are first asked for, by whatever asks."""

import copy
import dataclasses
import pickle

import pytest
from reports import SMALL

from spmd.inspection import Report
from spmd.inspection.records.later import Later, without_findings


@pytest.fixture
def made():
    """Grows with each time that findings are worked out."""
    return []


@pytest.fixture
def unfilled(made):
    """`SMALL`, whose findings nobody asked for."""

    def make():
        made.append(True)
        return SMALL.findings

    return without_findings(dataclasses.replace(SMALL, _findings_later=Later(make)))


ASKING = {
    "a comparison": lambda report: report == SMALL,
    "its findings": lambda report: report.findings == SMALL.findings,
    "text": lambda report: str(report) == str(SMALL),
    "a page": lambda report: report.to_html() == SMALL.to_html(),
    "JSON": lambda report: Report.from_json(report.to_json()) == SMALL,
    "a pickle": lambda report: pickle.loads(pickle.dumps(report)) == SMALL,
    "a copy": lambda report: copy.deepcopy(report) == SMALL,
    "a change": lambda report: dataclasses.replace(report, name="step").name == "step",
}


@pytest.mark.parametrize("asking", ASKING)
def test_whatever_asks_finds_them(unfilled, made, asking):
    """A report has its findings wherever they are needed, and works them out once."""
    assert SMALL.findings
    assert ASKING[asking](unfilled)
    assert ASKING[asking](unfilled)
    assert unfilled.findings is SMALL.findings
    assert len(made) == 1


def test_nothing_else_asks(unfilled, made):
    """Collectives, sums, the short form and a hash need no findings."""
    assert unfilled.collectives == SMALL.collectives
    assert unfilled.totals("axis") == SMALL.totals("axis")
    assert (repr(unfilled), hash(unfilled)) == (repr(SMALL), hash(SMALL))
    assert unfilled.scalars() == SMALL.scalars()
    assert not made


def test_a_name_that_no_report_has(unfilled, made):
    """What a report lacks is an error in Python's own words, and works out nothing."""
    with pytest.raises(AttributeError, match="'Report' object has no attribute 'finding'"):
        _ = unfilled.finding
    assert not hasattr(unfilled, "found")
    assert not made


def test_an_interrupt_leaves_them_to_be_asked_for_again():
    """Who is interrupted while findings are worked out can ask again."""
    answers = iter([KeyboardInterrupt(), SMALL.findings])

    def make():
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    report = without_findings(dataclasses.replace(SMALL, _findings_later=Later(make)))
    with pytest.raises(KeyboardInterrupt):
        _ = report.findings
    assert report == SMALL
