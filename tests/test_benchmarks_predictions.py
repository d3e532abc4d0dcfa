"""The planner's predictions are those that were recorded, and one that is moved is seen."""

import dataclasses

from benchmarks import predicting
from benchmarks.predicting import Line, Prediction
from hardware import require_libtpu
import jax
import pytest

ONE = Prediction(case="MLP", topology="v5e:4x4", mesh="4x4", ms=20.0)
#: Planned in seconds, and alike at both ends of JAX; the nightly run takes the others.
FAST = ("decoding", "v5e:4x4")
#: Before 0.12 JAX lowers some of these otherwise: the demo is predicted 0.6 % slower on 0.10.2.
OTHERWISE = jax.__version_info__ < (0, 12)
OTHERS = [
    pytest.mark.soak,
    pytest.mark.skipif(OTHERWISE, reason="recorded with JAX 0.12, which lowers some otherwise"),
]


@pytest.mark.parametrize(
    ("change", "passed"),
    [({}, True), ({"ms": 20.01}, True), ({"ms": 20.2}, False), ({"mesh": "8x2"}, False)],
)
def test_what_is_moved(change, passed):
    """By more than rounding, or to another mesh."""
    line = Line(found=dataclasses.replace(ONE, **change), before=ONE)
    assert line.passed == passed
    assert str(line).split()[:4] == ["MLP", "v5e:4x4", line.found.mesh, f"{line.found.ms:.3f}"]


def test_what_was_never_recorded():
    """It is told as such, and does not pass."""
    line = Line(found=ONE, before=None)
    assert not line.passed
    assert str(line).endswith("none")


def test_an_unknown_case():
    """It is said, and nothing is planned."""
    (line,) = predicting.run(["MPL"], None)
    assert line.startswith("no such case: MPL; there are MLP, demo, ")


def test_all_programs_are_recorded():
    """Each on each of its topologies, with the version of JAX that all have."""
    found = predicting.recorded()
    assert [*found] == predicting.rows()
    assert len({one.jax for one in found.values()}) == 1


def test_what_is_recorded_is_read(tmp_path, monkeypatch):
    """One that is planned again takes the place of what was there."""
    monkeypatch.setattr(predicting, "RECORDED", tmp_path / "predictions.csv")
    monkeypatch.setattr(predicting, "predicted", lambda *_: ONE)
    (tmp_path / "predictions.csv").write_text("case,topology,mesh,ms,jax\nMLP,v5e:4x4,2x8,30.0,0\n")
    (line,) = predicting.run(["MLP"], "v5e:4x4", record=True)
    assert "2x8    30.000  -33.3%" in line
    assert predicting.recorded() == {("MLP", "v5e:4x4"): ONE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [row if row == FAST else pytest.param(*row, marks=OTHERS) for row in predicting.rows()],
)
def test_a_prediction_is_the_recorded_one(name, where):
    """Else plan it again with the compiler, and record it: `tests/benchmarks/predicting.py`."""
    require_libtpu()
    before = predicting.recorded()[name, where]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = predicting.predicted(name, where)
    assert found.is_as(before), f"{found.mesh}, {found.ms} ms; recorded {before.mesh}, {before.ms}"
