"""Text of a program that the reader does not understand is said wherever the program is."""

import dataclasses

from hardware import require_libtpu
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import pytest

import spmd
from spmd import inspection
from spmd.inspection import Report, Unread
from spmd.testing import assert_collectives, assert_golden

LINE = "  %new = f32[8]{0} <a spelling of tomorrow>"
SAID = f"2 lines of the compiled program not understood; first: {LINE.strip()}"


@pytest.fixture(name="program", scope="module")
def _program():
    """A sum over eight devices, which takes one all-reduce."""
    mesh = jax.sharding.Mesh(jax.devices()[:8], ("x",))
    x = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    return jax.jit(jnp.sum).lower(x).compile()


def _spoiled(text):
    """A text with two more lines in its entry."""
    entry = text.index("\n", text.index("ENTRY ")) + 1
    return f"{text[:entry]}{LINE}\n  what is this\n{text[entry:]}"


@pytest.fixture(name="unread", scope="module")
def _unread(program):
    """The report of a program whose text has two lines that nothing reads."""
    text = program.as_text()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Compiled, "as_text", lambda self: _spoiled(text))
        return spmd.report(program)


def test_a_report_says_what_was_not_understood(program, unread):
    """The count and the first line are in the record; all that was understood is there as well."""
    assert unread.unread == Unread(lines=2, first=LINE.strip())
    whole = spmd.report(program)
    assert whole.unread is None
    assert dataclasses.replace(unread, unread=None) == whole
    assert [one.kind for one in unread.collectives] == ["all-reduce"]


def test_every_form_of_a_report_says_it(program, unread):
    """Terminal, page, JSON, scalars and a diff tell it, and none of them of another report."""
    assert f"\n{SAID}\n" in str(unread)
    assert SAID.replace("<", "&lt;").replace(">", "&gt;") in unread.to_html()
    assert unread.to_json()["unread"] == {"lines": 2, "first": LINE.strip()}
    assert Report.from_json(unread.to_json()) == unread
    assert unread.scalars()["collectives/unread_lines"] == 2
    whole = spmd.report(program)
    told = [(one.what, one.a, one.b) for one in spmd.diff(whole, unread).header]
    assert told == [("not understood", "none", SAID)]
    assert "not understood" not in str(whole) + whole.to_html()
    assert whole.scalars()["collectives/unread_lines"] == 0
    assert whole.to_json()["unread"] is None


def test_an_empty_ledger_is_none_of_what_was_understood(unread):
    """Nothing is said to exchange nothing while something was not read."""
    empty = dataclasses.replace(unread, collectives=())
    for text in (str(empty), empty.to_html()):
        assert "in the text that was understood" in text
        assert "the devices exchange nothing" not in text


def test_no_limit_is_kept_by_what_is_not_known(unread, tmp_path):
    """An assertion that the rest of the program keeps fails, and a golden is not written."""
    with pytest.raises(AssertionError) as caught:
        assert_collectives(unread, none=["all-gather"])
    assert str(caught.value).splitlines()[:2] == [
        "`sum` breaks a limit on its collectives (mesh x=8; cpu).",
        f"1. all limits: not known to be kept, {SAID}",
    ]
    with pytest.raises(AssertionError) as caught:
        assert_golden(unread, tmp_path / "sum.ledger", update=True)
    assert str(caught.value) == f"The exchanges of `sum` are not known: {SAID}"
    assert not list(tmp_path.iterdir())


def test_a_ledger_of_a_text_warns(program):
    """`collectives` has no other place to say it than a warning."""
    text = _spoiled(program.as_text())
    with pytest.warns(UserWarning, match="collectives: 2 lines not understood; first: %new = f32"):
        found = inspection.collectives(text, {"x": 8})
    assert [one.kind for one in found] == ["all-reduce"]


def test_what_hosts_exchange_is_not_read_and_said():
    """Weights that are gathered in the memory of hosts are no silent program without exchanges."""
    require_libtpu()
    mesh = spmd.topology("v5e:2x4", {"data": 8})
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)

    def first(weights):
        return jax.device_put(weights, NamedSharding(mesh, P(), memory_kind="device")) * 2

    host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    found = spmd.report(jax.jit(first), jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=host))
    assert found.collectives == ()
    assert found.unread.lines == 1
    assert 'custom_call_target="MegaScaleCollectiveInputStart"' in found.unread.first
    with pytest.raises(AssertionError, match="all limits: not known to be kept, 1 line of"):
        assert_collectives(found, none=["*"])
