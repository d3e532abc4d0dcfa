"""Two reports side by side."""

from collections import Counter
import dataclasses
import html
import io
import json
from pathlib import Path

from hypothesis import given, settings, strategies as st
import pytest
from reports import MIB, SMALL, collective, collectives, pretty, report, reports, shape, source
from rich.cells import cell_len
from rich.console import Console

from spmd import diff
from spmd.errors import ArgumentError, ReportError
from spmd.inspection import Cost, Shapes, show_bytes
from spmd.inspection.records.diff import COMPARED, Delta, Difference, Pair, match
from spmd.inspection.records.names import plain_path
from spmd.inspection.show import diff as show_diff, page
from spmd.inspection.show.layout import plain

GOLDENS = Path(__file__).parents[1] / "goldens"
replace = dataclasses.replace

#: SMALL after a change: twice the runs of one, another instead of the ring, other versions.
OTHER = replace(
    SMALL,
    mesh={"data": 8},
    versions={"spmd": "0.1.0", "jax": "0.12.0.1"},
    collectives=(
        SMALL.collectives[0],
        replace(SMALL.collectives[1], executions=24, source=source(50), is_async=False),
        collective(kind="all-gather", op_name="jit(step)/mlp/dot_general"),
        replace(SMALL.collectives[3], op_name="jit(step_2)/moe/all_to_all_1"),
    ),
    cost=replace(SMALL.cost, flops=5),
    memory=replace(SMALL.memory, peak=200 * MIB),
    reshards=(),
)


def ledgers(a, b):
    """The differences of two ledgers."""
    return diff(report(collectives=tuple(a)), report(collectives=tuple(b)))


def test_golden():
    """The differences of two small reports look as in the file, to the letter."""
    golden = (GOLDENS / "diff_100.txt").read_text(encoding="utf-8")
    assert str(diff(SMALL, OTHER)) + "\n" == golden


def test_in_a_notebook(monkeypatch):
    """A notebook shows the page in a frame, without Jinja2 the text, and in lists a sentence."""
    found = diff(SMALL, OTHER)
    sentence = f"Diff of {found.names[0]} and {found.names[1]}"
    assert repr(found) == f"<{sentence}: 1 changed, 1 added, 1 removed collectives>"
    assert pretty(found) == str(found)
    shown = found._repr_html_()
    assert html.escape(found.to_html()) in shown
    assert f'title="{html.escape(sentence)}"' in shown
    monkeypatch.setattr(page, "LARGEST_CELL", 1000)
    assert found._repr_html_() is None


def test_parts():
    """Each collective is in one part, counted by hand."""
    found = diff(SMALL, OTHER)
    assert found
    assert [pair.b.kind for pair in found.unchanged] == ["all-gather", "all-to-all"]
    ((changed,), (added,), (removed,)) = found.changed, found.added, found.removed
    assert changed == Pair(a=SMALL.collectives[1], b=OTHER.collectives[1])
    assert changed.changes == ("executions", "is_async")
    assert (added.kind, removed.kind) == ("all-gather", "collective-permute")
    assert found.header == (
        Difference(what="mesh", a="data=4, model=2", b="data=8"),
        Difference(what="jax", a="0.10.2", b="0.12.0.1"),
    )
    assert Delta(name="flops", a=123_456_789_012, b=5) in found.cost
    assert Delta(name="peak", a=150 * MIB, b=200 * MIB) in found.memory
    assert {d.name: d.change for d in found.memory}["peak"] == 50 * MIB
    assert (found.reshards_added, found.reshards_removed) == ((), SMALL.reshards)
    assert [total.wire_bytes for total in found.total] == [360 * MIB, (576 + 24) * MIB]


def test_totals():
    """Sums by kind and axes stand side by side, the largest difference first, zero where none."""
    found = diff(SMALL, OTHER).totals
    assert [(t.kind, t.mesh_axes, t.a.wire_bytes, t.b.wire_bytes) for t in found] == [
        ("all-reduce", ("data",), 288 * MIB, 576 * MIB),
        ("collective-permute", ("data:(2)2", "model"), 72 * MIB, 0),
        ("all-gather", ("data",), 0, 24 * MIB),
        ("all-gather", ("model",), 0, 0),
        ("all-to-all", (), 0, 0),
    ]
    assert [t.b.sites for t in found] == [1, 0, 1, 1, 1]


# Matching


def test_lines_do_not_matter():
    """A collective that moved to another line or file, or got another name, is the same."""
    a = collective(name="all-reduce.1", frames=(source(1),))
    b = collective(name="all-reduce.7", source=source(99, "g", "/elsewhere.py"), groups="{{0,1}}")
    assert not ledgers([a], [b])
    assert not ledgers([a], [replace(b, source=None)])


@pytest.mark.parametrize("field", COMPARED)
def test_each_figure_matters(field):
    """A change of any compared figure is a change of the pair, and nothing is added."""
    both = (shape(7),)
    changed = {
        "shapes": Shapes(both, both), "payload_bytes": 1, "wire_bytes": 2, "executions": None,
        "group_size": 8, "conditional": True, "is_async": True, "combined": 3,
    }  # fmt: skip
    found = ledgers([collective()], [collective(**{field: changed[field]})])
    assert found
    assert [pair.changes for pair in found.changed] == [(field,)]
    assert found.added == found.removed == ()


@pytest.mark.parametrize(
    "other", [{"kind": "all-gather"}, {"mesh_axes": ("model",)}, {"direction": "forward"}]
)
def test_what_identifies(other):
    """Another kind, axis or direction is another collective, never a changed one."""
    found = ledgers([collective()], [collective(**other)])
    assert (len(found.added), len(found.removed), found.changed) == (1, 1, ())


def test_several_of_a_kind():
    """Of several that look alike, the equal ones are paired first, wherever they stand."""
    one, two, three = (collective(payload_bytes=size) for size in (1, 2, 3))
    found = ledgers([one, two, two, three], [three, two, one])
    assert (len(found.unchanged), found.added, found.removed) == (3, (), (two,))
    found = ledgers([one, one], [one, two, three])
    assert (len(found.unchanged), len(found.changed), len(found.added)) == (1, 1, 1)


def test_those_that_changed_are_paired_in_program_order():
    """Where no figures are equal, the first of one program goes with the first of the other."""
    a, b = ([collective(wire_bytes=n) for n in sizes] for sizes in ((1, 2, 3), (4, 5, 6)))
    pairs, _, _ = match(tuple(a), tuple(b))
    assert [(p.a.wire_bytes, p.b.wire_bytes) for p in pairs] == [(1, 4), (2, 5), (3, 6)]


def test_names_beat_numbers():
    """A layer is paired with the layer of its own number, even where another fits better."""
    a = [collective(op_name=f"jit(f)/layer_{i}/dot", payload_bytes=i) for i in (0, 1)]
    b = [collective(op_name=f"jit(f)/layer_{i}/dot", payload_bytes=i + 1) for i in (0, 1)]
    pairs, removed, added = match(tuple(a), tuple(b))
    assert [(p.a.payload_bytes, p.b.payload_bytes) for p in pairs] == [(0, 1), (1, 2)]
    assert removed == added == ()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("jit(step)/jit(main)/transpose(jvp())/dot_general", "transpose(jvp())/dot_general"),
        ("jit(<lambda>)/while/body/closed_call/add.12", "while/body/add"),
        ("pjit(f)/mlp_3/dot_general_1", "mlp/dot_general"),
        ("jit(f)/cond/branch_1_fun/mul", "cond/branch_1_fun/mul"),
        ("jit(f)/a_1:jit(g)/b_2", "a:b"),
        ("batch['x'][0]", "batch['x'][0]"),
        ("jit(f)", ""),
        ("my_jit(f)/x", "my_jit(f)/x"),
        ("", ""),
    ],
)
def test_plain_paths(given, expected):
    """Paths are compared without jitted functions and without numbers at the ends of names."""
    assert plain_path(given) == expected


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(reports)
def test_no_difference_to_itself(one):
    """A report does not differ from itself in anything, and the text says so."""
    found = diff(one, one)
    assert not found
    assert len(found.unchanged) == len(one.collectives)
    assert found.header == found.reshards_added == found.reshards_removed == ()
    assert all(delta.a == delta.b for delta in (*found.totals, *found.cost, *found.memory))
    assert "the same in both" in str(found)
    assert "Totals" not in str(found)


few = st.lists(st.sampled_from([
    collective(op_name=path, executions=runs, kind=kind)
    for path in ("jit(f)/a_1", "jit(f)/a_2", "jit(g)/a_1")
    for runs in (1, 2)
    for kind in ("all-reduce", "send")
]), max_size=8)  # fmt: skip


@settings(deadline=None)
@given(few, few)
def test_every_collective_is_somewhere(a, b):
    """Each side's collectives are its halves of pairs and what it has alone, each once."""
    found = ledgers(a, b)
    pairs = (*found.unchanged, *found.changed)
    assert Counter(p.a for p in pairs) + Counter(found.removed) == Counter(a)
    assert Counter(p.b for p in pairs) + Counter(found.added) == Counter(b)
    assert all(p.a.kind == p.b.kind for p in pairs)
    # Nothing is left on both sides that could be paired: here the kind alone tells apart.
    assert not {c.kind for c in found.added} & {c.kind for c in found.removed}
    assert len(found.unchanged) >= (Counter(a) & Counter(b)).total()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(collectives, max_size=6), st.randoms(use_true_random=False))
def test_order_does_not_matter(found, random):
    """The same collectives in another order are no difference."""
    shuffled = random.sample(found, len(found))
    assert not ledgers(found, shuffled)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(reports, reports, few, few)
def test_mirror(a, b, more_a, more_b):
    """Comparing the other way round gives the same with the sides exchanged."""
    a = replace(a, collectives=(*a.collectives, *more_a))
    b = replace(b, collectives=(*b.collectives, *more_b))
    there, back = diff(a, b), diff(b, a)
    assert there.added == back.removed
    assert there.removed == back.added
    for name in ("changed", "unchanged"):
        mirrored = Counter(Pair(a=p.b, b=p.a) for p in getattr(back, name))
        assert Counter(getattr(there, name)) == mirrored
    for name in ("header", "totals", "cost"):
        mirrored = Counter(replace(d, a=d.b, b=d.a) for d in getattr(back, name))
        assert Counter(getattr(there, name)) == mirrored
    assert there.reshards_added == back.reshards_removed
    assert there.total == back.total[::-1]
    assert bool(there) == bool(back)


# Ways in and out


def test_files_and_dictionaries(tmp_path):
    """Reports, their JSON and their files are compared alike, and files give the names."""
    path = tmp_path / "a.json"
    SMALL.save(path)
    expected = diff(SMALL, OTHER)
    assert diff(SMALL.to_json(), OTHER) == expected
    found = diff(str(path), OTHER)
    assert found == diff(path, OTHER)
    assert found.names == (str(path), "step")
    assert replace(found, names=expected.names) == expected
    assert expected.names == ("step (a)", "step (b)")


def test_errors():
    """What is no report is refused with the argument that it is."""
    with pytest.raises(ArgumentError) as caught:
        diff(SMALL, 3)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "argument b of `diff` is no report.\n"
        "  expected  a Report, the path of a file that report.save() wrote, or report.to_json()\n"
        "  got       a value of type int"
    )
    with pytest.raises(ReportError, match="argument a of `diff` is no report"):
        diff({}, SMALL)


def test_json():
    """The JSON of differences holds every part, without stacks, under one schema."""
    data = json.loads(json.dumps(diff(SMALL, OTHER).to_json()))
    assert data["schema"] == "spmd-diff/1"
    assert data["different"] is True
    assert data["changed"][0]["changes"] == ["executions", "is_async"]
    assert data["changed"][0]["a"]["executions"] == 12
    assert data["changed"][0]["a"]["frames"] == []
    assert data["added"][0]["kind"] == "all-gather"
    assert data["header"][0] == {"what": "mesh", "a": "data=4, model=2", "b": "data=8"}
    assert data["total"][0]["wire_bytes"] == 360 * MIB
    assert diff(SMALL, SMALL).to_json()["different"] is False


def test_memory_of_one_side_only():
    """A side whose backend tells no memory has unknown figures, not zeros."""
    found = diff(replace(SMALL, memory=None), SMALL)
    assert Delta(name="peak", a=None, b=150 * MIB) in found.memory
    assert found.memory[0].change is None
    row = [line.split() for line in str(found).splitlines() if line.startswith("  peak")]
    assert row == [["peak", "unknown", "150.0", "MiB", "unknown"]]
    assert diff(report(), report()).memory == ()


def test_show():
    """`show` prints to the console that is given, the largest changes first, in colour or not."""
    a = [collective(op_name=str(i), wire_bytes=i * MIB) for i in range(1, 4)]
    console = Console(file=io.StringIO(), width=120, color_system=None)
    ledgers(a, []).show(console, limit=2)
    text = console.file.getvalue()
    assert "3 removed (-)" in text
    assert "1 more row, not shown" in text
    rows = [line for line in text.splitlines() if line.startswith("  -  all-reduce")]
    assert [row.split("MiB")[1].split()[1] for row in rows] == ["3.0", "2.0"]


def test_changes_of_figures():
    """A change is told with its sign and its share; from nothing it has no share."""
    show = show_diff.show_change
    assert show(100, 150, show_bytes) == "+50 B (+50.0%)"
    assert show(MIB, 0, show_bytes) == "-1.0 MiB (-100.0%)"
    assert show(0, 7, show_bytes) == "+7 B"
    assert show(7, 7, show_bytes) == "none"


def test_unknown_sums_have_no_change():
    """A sum with unknown runs on one side is not subtracted from a known one."""
    text = str(ledgers([collective()], [collective(), collective(executions=None)]))
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["all"])
    assert row.split()[1:] == ["1", "->", "2", "24.0", "MiB", ">=", "24.0", "MiB", "unknown"]


def test_cost():
    """FLOPs and bytes are compared with their units."""
    found = diff(report(cost=Cost(flops=10**9, hbm_bytes=MIB)), report(cost=Cost.zeros()))
    rows = {line.split()[0]: line for line in str(found).splitlines() if line.startswith("  ")}
    assert rows["FLOPs"].split()[1:] == ["1.0", "GFLOP", "0", "FLOP", "-1.0", "GFLOP", "(-100.0%)"]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(reports, reports, st.integers(60, 200))
def test_any_diff_fits_any_width(a, b, width):
    """No line is longer than the terminal, trails blanks or holds what cannot be printed."""
    for line in plain(diff(a, b), width=width).split("\n"):
        assert cell_len(line) <= width
        assert line == line.rstrip()
        assert line.isprintable()
