"""The page's section of shardings in a real browser: the words of `why`, a click away."""

import dataclasses
import io
from pathlib import Path

from browser import chromium, opened
import jax
import pytest
from reports import ORIGINS, SMALL, conflict, report, source, value_origins
from rich.console import Console

import spmd
from spmd.inspection import Annotation, Argument, Origin, Origins, Split, Step, Why
from spmd.inspection.records.later import known

EVIL = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>\"'&<!--"
_CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


#: Of the pages only those of reports open in Chromium by the README's command.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests here."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def demo():
    """The demo's training step as it was lowered, and the page of its preview as a report."""
    from spmd.demo import corpus, train

    with spmd.make_mesh({"data": 4, "model": 2}):
        trainer = train.Trainer(corpus.load(), steps=1, seed=0)
        # optax multiplies floats by integers.
        with jax.numpy_dtype_promotion("standard"):
            lowered = trainer.step.lower(trainer.state, trainer.sample_batch())
    return lowered, lowered.preview()


#: The hand-made report with an argument that has an origin, on a mesh with its axes.
WITH_ARGUMENT = dataclasses.replace(
    SMALL,
    arguments=(
        Argument(
            path="batch['x']", dtype="f32", shape=(8, 4), sharding="P('data')", nbytes=32,
            splits=(Split(axes=("data",), parts=4, block=2), Split(axes=(), parts=1, block=4)),
        ),
        Argument(path="rate", dtype="f32", shape=(), sharding="P()", nbytes=4, splits=()),
    ),
    device_ids=tuple(range(8)),
)  # fmt: skip


def saved(one, folder):
    """The page of a report as a file."""
    one.save(folder / "page.html")
    return folder / "page.html"


_SAID = """all => all.map(one => [
    one.querySelector("summary").textContent,
    ...[...one.querySelectorAll("li")].map(line => line.textContent),
])"""


def everything_said(tab):
    """What the page says of each value: its own line, then the lines below it, as words."""
    found = tab.eval_on_selector_all("#values details", _SAID)
    return [[line.split() for line in lines] for lines in found]


def printed(value, mesh):
    """What a terminal says of a value, in the same form, with the signs between parts left out."""
    why = Why(name="", function="", mesh=mesh, values=(value,))
    out = io.StringIO()
    Console(file=out, width=4000).print(why)
    head, *lines = out.getvalue().splitlines()[2:]
    before, _, after = head.partition(": ")
    spec, _, place = after.partition("; ")
    place = place if value.kind == "output" else ""
    kept_out = dict.fromkeys(one.axis for one in value.conflicts)
    mark = f"kept out: {', '.join(kept_out)}" if kept_out else ""
    return [[*before.split(), *spec.split(), *mark.split(), *place.split()], *map(str.split, lines)]


def visible(tab):
    """Places of the values that are shown."""
    shown = tab.eval_on_selector_all(
        "#values details", "all => all.filter(one => one.checkVisibility())"
        ".map(one => one.querySelector('.said').id)",
    )  # fmt: skip
    return [int(name.partition("-")[2]) for name in shown]


def opens(tab):
    """Places of the values that are open."""
    found = tab.eval_on_selector_all("#values details[open] > .said", "all => all.map(o => o.id)")
    return [int(name.partition("-")[2]) for name in found]


# What is said


@pytest.mark.slow
def test_a_click_says_what_why_says(demo, browser, tmp_path):
    """A click on a value of the demo opens the words that `why` prints of it."""
    lowered, one = demo
    values = one.origins.values
    output = next(i for i, v in enumerate(values) if v.kind == "output" and any(v.spec))
    travelled = max(range(len(values)), key=lambda i: sum(len(o.steps) for o in values[i].origins))
    place = values[travelled].source
    asked = {
        output: lowered.why(values[output].name).values,
        travelled: lowered.why(f"{place.file}:{place.line}").values,
    }
    with opened(browser, saved(one, tmp_path)) as tab:
        for i, records in asked.items():
            (record,) = [record for record in {*records} if record == values[i]]
            body = tab.locator(f"#value-{i}")
            assert not body.is_visible()
            tab.locator(f"details:has(> #value-{i}) summary").click()
            assert body.is_visible()
            assert everything_said(tab)[i] == printed(record, one.mesh)
    assert any(len(origin.steps) > 3 for origin in values[travelled].origins)


@pytest.mark.slow
def test_every_value_of_the_demo(demo, browser, tmp_path):
    """All values are there in their groups, and each says what a terminal says."""
    _, one = demo
    with opened(browser, saved(one, tmp_path)) as tab:
        found = everything_said(tab)
        titles = tab.locator("#values h3").all_text_contents()
        ids = tab.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
        more = tab.inner_text("#shardings > .hint:last-child")
    assert found == [printed(value, one.mesh) for value in one.origins.values]
    assert titles[:2] == ["Arguments", "Outputs"]
    assert len(titles) == len({*titles}) > 3
    assert len(ids) == len({*ids})
    assert more.startswith(f"{one.origins.left_out:,} more values are not listed")


def test_words(browser, tmp_path):
    """Origins, whole dimensions and each kind of conflict, word for word."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        found = [" | ".join(map(" ".join, lines)) for lines in everything_said(tab)]
        hint = tab.inner_text("#shardings > .hint:last-child")
    line = "/w/model/transformer.py"
    lost = f"lost constraint P(None, 'model') at {line}:40"
    assert found == [
        "batch['x'] f32[8,4] P('data', None) | data on dimension 0: its own annotation, argument "
        "batch['x'] P('data', None), priority 1 | dimension 1: not split, and no axis was kept out",
        f"result['loss'] f32[] P() {line}:42 | a scalar has no dimension to split",
        "dot_general f32[8,4] P('data', None) | data on dimension 0: from argument batch['x'] "
        f"P('data', None) | -> dot_general [8,4], dimension 0; {line}:42 | "
        "dimension 1: not split, and no axis was kept out",
        "dot_general f32[8,4] P(None, None) kept out: model | "
        "dimension 0: not split, and no axis was kept out | "
        "model did not reach dimension 1: the annotation keeps the dimension whole | "
        f"met at add, 1 operation away; {line}:43 | {lost} | "
        "won argument batch['x'] P('data', None) | "
        "model did not reach dimension 1: the dimension is split over other axes | "
        f"met at add, 1,200 operations away; {line}:43 | {lost} | "
        "won argument batch['x'] P('data', None) | "
        "model did not reach dimension 1: the axis splits another dimension already | "
        f"met at add, at this value | {lost} | "
        "won argument batch['x'] P('data', None) | "
        "model did not reach dimension 1: two operands ask for different axes, and neither gets "
        f"its own | met at add, at this value; {line}:43 | {lost} | "
        "and argument batch['x'] P('data', None) | "
        "model did not reach dimension 1: the operation does not pass the axis on | "
        f"met at add, at this value; {line}:43 | lost an annotation that the passes do not name",
    ]
    assert hint == (
        '1,234 more values are not listed: lowered.why("model.py:42") gives all of a line.'
    )


@pytest.mark.slow
def test_what_is_long_is_cut(browser, tmp_path):
    """Of a long route both ends are told, of many conflicts the nearest, and how many are not."""
    steps = tuple(
        Step(
            operation=f"op_{i}", source=None, way="forward", value=f"op_{i}", shape=(), dimension=0
        )
        for i in range(1025)
    )
    origin = Origin(axis="data", dimension=0, annotation=None, priority=None, steps=steps)
    stops = tuple(conflict("tie", operation=f"at_{i}") for i in range(11))
    long = value_origins(origins=(origin,), conflicts=stops)
    one = dataclasses.replace(SMALL, _origins=known(Origins(values=(long,))))
    with opened(browser, saved(one, tmp_path)) as tab:
        ((_, *lines),) = everything_said(tab)
    told = [*range(12), *range(1013, 1025)]
    assert [" ".join(line) for line in lines[1:26] if line[0] == "and"] == [
        "and 1,001 operations in between"
    ]
    assert [line[1] for line in lines[1:26] if line[0] == "->"] == [f"op_{i}" for i in told]
    assert [line[2] for line in lines if line[0] == "met"] == [f"at_{i}," for i in range(8)]
    assert " ".join(lines[-1]) == "and 3 more did not get through"


@pytest.mark.slow
def test_axes_have_their_colours(browser, tmp_path):
    """An axis has the colour that it has everywhere on the page."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        chips = tab.eval_on_selector_all(
            "#values .chip", "all => all.map(one => [one.textContent, one.className])"
        )
        classes = {name.strip("'"): kind for name, kind in chips}
        head = tab.eval_on_selector_all(
            ".where .chip", "all => all.map(one => [one.textContent, one.className])"
        )
    assert classes == {"data": "chip axis-0", "model": "chip axis-1"}
    assert {name.partition("=")[0]: kind for name, kind in head} == classes


@pytest.mark.slow
@pytest.mark.parametrize(
    "why",
    ["The report does not hold where its shardings come from.", "report <b>lacks</b> passes."],
)
def test_none(why, browser, tmp_path):
    """Where a report has no origins, one line says why, and there is nothing to click."""
    one = dataclasses.replace(SMALL, _origins=known(Origins(missing=why)))
    with opened(browser, saved(one, tmp_path)) as tab:
        assert tab.inner_text("#shardings").split("\n") == ["Shardings", "", why]
        assert tab.locator("a[href^='#value-'], a[href^='#made-']").count() == 0


# Ways to a value


@pytest.mark.slow
def test_filter(browser, tmp_path):
    """Words hide values that lack them, with groups that are empty then; Escape shows all."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        assert visible(tab) == [0, 1, 2, 3]
        tab.fill("#values-text", "DOT_general 'data'")
        # Both products: one says it in its spec, one in what it met.
        assert visible(tab) == [2, 3]
        assert tab.inner_text("#values-shown") == "2 of 4 values"
        assert not tab.locator("h3", has_text="Arguments").is_visible()
        tab.fill("#values-text", "priority 1")
        assert visible(tab) == [0]
        tab.fill("#values-text", "transformer.py:42 kept")
        assert visible(tab) == [2, 3]  # of a group, by its heading
        tab.keyboard.press("Escape")
        assert visible(tab) == [0, 1, 2, 3]
        assert tab.input_value("#values-text") == ""


@pytest.mark.slow
def test_an_argument_of_the_mesh_leads_to_its_value(browser, tmp_path):
    """The sharding of an argument is a link that opens its value, even where that was hidden."""
    with opened(browser, saved(WITH_ARGUMENT, tmp_path)) as tab:
        assert tab.locator("#arguments a").count() == 1  # nothing is known of the other one
        tab.fill("#values-text", "no such thing")
        assert visible(tab) == []
        tab.click("#arguments a")
        assert opens(tab) == [0]
        assert visible(tab) == [0, 1, 2, 3]
        assert tab.locator("#value-0").is_visible()
        focused = tab.evaluate("document.activeElement.innerText")
        assert "batch['x']" in focused


@pytest.mark.slow
def test_a_line_leads_to_what_it_makes(browser, tmp_path):
    """The number of a line whose values are listed leads to them."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        link = tab.locator("table.source .number a")
        assert link.all_inner_texts() == ["42"]
        link.click()
        assert tab.evaluate("location.hash") == "#made-2"
        assert tab.locator("#made-2").inner_text() == "/w/model/transformer.py:42"


@pytest.mark.slow
def test_by_keyboard(browser, tmp_path):
    """Tab leads from the filter to a value, Enter opens it, Escape closes it and stays there."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        tab.focus("#values-text")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") == "values"
        for _ in range(3):
            tab.keyboard.press("Tab")
        assert "dot_general" in tab.evaluate("document.activeElement.innerText")
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.keyboard.press("Enter")
        assert opens(tab) == [2]
        tab.keyboard.press("Escape")
        assert opens(tab) == []
        assert "dot_general" in tab.evaluate("document.activeElement.innerText")
        tab.keyboard.press("Space")
        assert opens(tab) == [2]


@pytest.mark.slow
def test_without_script(browser, tmp_path):
    """Without JavaScript values open all the same, links lead there, and no filter is shown."""
    with opened(browser, saved(WITH_ARGUMENT, tmp_path), java_script_enabled=False) as tab:
        assert not tab.locator("#values-filters").is_visible()
        # By key: rows that come into view get their height, and a click would miss what moves.
        tab.press("details:has(> #value-3) summary", "Enter")
        tab.locator("#value-3").wait_for(state="visible")  # a busy browser takes its time
        assert not tab.locator("#value-0").is_visible()
        tab.press("#arguments a", "Enter")
        tab.locator("#value-0").wait_for(state="visible")


# Looks


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_open_values_fit_and_can_be_read(scheme, demo, browser, tmp_path):
    """With values open nothing is wider than the window, and all text has contrast."""
    stop = conflict("tie", operation="y" * 300)
    long = value_origins(name="x" * 300, shape=(2,) * 60, spec=(("data",),) * 60, conflicts=(stop,))
    one = dataclasses.replace(
        demo[1], _origins=known(Origins(values=(*ORIGINS.values, long, *demo[1].origins.values)))
    )
    with opened(browser, saved(one, tmp_path), color_scheme=scheme) as tab:
        for i in (*range(7), 60, 100):
            tab.click(f"details:has(> #value-{i}) summary")
        assert tab.evaluate(_CONTRAST) == []
        for width in (400, 900, 1440):
            tab.set_viewport_size({"width": width, "height": 900})
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            inner = "e => [e.scrollWidth, e.clientWidth]"
            wide, room = tab.eval_on_selector("#values", inner)
            assert wide <= room


@pytest.mark.slow
def test_print(demo, browser, tmp_path):
    """Paper has all values, and what of them is open, without a control."""
    with opened(browser, saved(demo[1], tmp_path)) as tab:
        tab.locator("#values summary").first.click()
        tab.emulate_media(media="print")
        height, shown = tab.eval_on_selector("#values", "e => [e.scrollHeight, e.clientHeight]")
        assert shown >= height
        assert tab.locator("#value-0").is_visible()
        assert not tab.locator("#values-filters").is_visible()


# Safety


@pytest.mark.slow
def test_names_stay_text(browser, tmp_path):
    """Whatever a name holds, it is shown as it is, filtered by, and never markup or script."""
    place = dataclasses.replace(source(3), file=f"/w/{EVIL}", function=EVIL)
    asked = Annotation(kind=EVIL, name=EVIL, source=place, spec=((EVIL,),))
    passed = Step(operation=EVIL, source=place, way=EVIL, value=EVIL, shape=(8,), dimension=0)
    origin = Origin(axis=EVIL, dimension=0, annotation=asked, priority=None, steps=(passed,))
    stop = conflict(EVIL, axis=EVIL, operation=EVIL, source=place, at=EVIL, lost=asked, won=asked)
    fields = {"dtype": EVIL, "shape": (8,), "spec": ((EVIL,),), "annotation": asked}
    values = tuple(
        value_origins(
            kind=kind, name=EVIL, source=place, origins=(origin,), conflicts=(stop,), **fields
        )
        for kind in ("argument", "output", "result", EVIL)
    )
    argument = Argument(path=EVIL, dtype="f32", shape=(8,), sharding=EVIL, splits=None, nbytes=4)
    one = report(
        mesh={EVIL: 8}, arguments=(argument,), _origins=known(Origins(values=values, left_out=1))
    )
    with opened(browser, saved(one, tmp_path), width=1440) as tab:
        tab.click("#arguments a")
        tab.fill("#values-text", "<img src=x")
        assert visible(tab) == [0, 1, 2, 3]
        assert everything_said(tab) == [printed(value, one.mesh) for value in values]
        assert tab.evaluate("window.broken") is None
        assert tab.locator("img").count() == 0
        assert tab.locator("script").count() == 2
    bare = dataclasses.replace(one, _origins=known(Origins(missing=EVIL)))
    with opened(browser, saved(bare, tmp_path)) as tab:
        assert EVIL in tab.inner_text("#shardings")
        assert tab.evaluate("window.broken") is None
