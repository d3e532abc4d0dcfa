"""The benchmark of steps on one device: what it finds, of programs that are small."""

import io
import json

from benchmarks import stepping
import pytest

from spmd.inspection import CHIPS


@pytest.mark.few(0)
@pytest.mark.parametrize("name", ["MLP", "decoding"])
def test_a_step(name):
    """A case runs, and hands on what it donates; its report has a time and a peak."""
    found = stepping.step(name, CHIPS["cpu"], small=True)
    assert found["measured"] > 0
    assert found["calibrated"] > 0
    assert found["roofline"] is None  # no chip of its own: a CPU
    assert found["peak"] > 0
    line = stepping._line(name, found)
    assert line.split()[: len(name.split()) + 3][-2:] == ["-", f"{1e3 * found['calibrated']:.2f}"]


def test_the_chip_of_a_process_of_its_own(monkeypatch, capsys):
    """It is the chip that was calibrated, in each of its figures, though JSON has no tuples."""
    chip = CHIPS["h200"]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(chip.to_json())))
    monkeypatch.setattr("sys.argv", ["stepping", "MLP"])
    monkeypatch.setattr(stepping, "step", lambda name, got: {"name": name, "same": got == chip})
    stepping.main()
    assert json.loads(capsys.readouterr().out) == {"name": "MLP", "same": True}


def test_an_unknown_case():
    """It is said, and nothing is measured."""
    (line,) = stepping.run(["MPL"])
    assert line.startswith("no such case: MPL; there are MLP, demo, ")
