"""The page of a report in a real browser: what it shows, how it answers, and what it never does."""

import dataclasses
import importlib.util
import itertools
import json
import math
from pathlib import Path
import re

from browser import chromium, opened
from hypothesis import given, settings
import jax
import jax.numpy as jnp
import pytest
from reports import MIB, SMALL, collective, many, report, reports, source

import spmd
from spmd import P
from spmd.errors import ReportError
from spmd.inspection import Argument, Excerpt, Report, Split, show_bytes
from spmd.inspection.show import page as show_page

EVIL = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>\"'&<!--"


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests here."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def real():
    """A compiled program on a mesh of three axes, with arguments of every kind of placement."""
    mesh = spmd.make_mesh({"data": 2, "model": 2, "expert": 2})
    specs = ({"w": P(("expert", "data"), "model"), "b": P()}, P("data", None, "model"), P())

    def step(params, x, rate):
        h = jnp.tanh(jnp.einsum("bsd,df->bsf", x, params["w"]))
        return (h.sum() + params["b"].sum()) * rate

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    with mesh:
        f = spmd.pjit(step, in_axis_resources=specs)
        args = {"w": f32(16, 8), "b": f32(4)}, f32(8, 4, 16), f32()
        return mesh, specs, args, spmd.report(f, *args)


def saved(one, folder, name="page.html"):
    """The page of a report as a file."""
    path = folder / name
    if isinstance(one, Report):
        one.save(path)
    else:
        path.write_text(one.to_html(), encoding="utf-8")
    return path


def column(tab, index, table="#rows"):
    """Texts of a column, of the rows that are shown."""
    return tab.eval_on_selector_all(
        f"{table} tbody tr:not([hidden]):not(.detail) > :nth-child({index})",
        "cells => cells.map(cell => cell.textContent.trim())",
    )


def order(tab):
    """Places in the report of the rows that are shown."""
    return tab.eval_on_selector_all(
        "#rows tbody tr:not([hidden]):not(.detail)",
        "rows => rows.map(row => Number(row.dataset.i))",
    )


SOME = many(240)

#: Lines of code in the text of a page, and those which are on more than one line of the screen.
BROKEN = """() => {
  const walker = document.createTreeWalker(document.getElementById("main"), NodeFilter.SHOW_TEXT);
  const found = { count: 0, broken: [] };
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const match of node.data.matchAll(/[a-z]+\\.py:\\d+/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const rows = new Set([...range.getClientRects()].map((one) => Math.round(one.top)));
      found.count += rows.size > 0;
      if (rows.size > 1) found.broken.push(match[0]);
    }
  }
  return found;
}"""


# What is shown


@pytest.mark.slow
def test_opens_without_a_fault(real, browser, tmp_path):
    """At every width: no error, no request, and nothing wider than the window."""
    alone = report(num_devices=1, mesh={})
    for one in (SMALL, real[-1], report(), alone, spmd.diff(SMALL, real[-1])):
        with opened(browser, saved(one, tmp_path)) as tab:
            assert tab.locator("h1").count() == 1
            for width in (400, 900, 1440):
                tab.set_viewport_size({"width": width, "height": 900})
                assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_ledger_shows_the_records(browser, tmp_path):
    """Each row has the figures of its record, the most bytes first, and unknown is not a number."""
    with opened(browser, saved(SMALL, tmp_path), width=1440) as tab:
        assert order(tab) == [1, 2, 0, 3]
        assert column(tab, 1) == ["all-reduce", "collective-permute", "all-gather", "all-to-all"]
        assert column(tab, 2) == ["data", "data:(2)2 model", "model", "none"]
        assert column(tab, 5) == ["12", "3", "unknown", "1"]
        assert column(tab, 6) == ["288.0 MiB", "72.0 MiB", "unknown", "0 B"]
        assert "combined from 2" in column(tab, 8)[0]
        assert "line of its consumer" in column(tab, 8)[1]
        assert tab.locator(".figures .value").all_inner_texts()[:2] == ["≥ 360.0 MiB", "4"]


@pytest.mark.slow
def test_findings_come_first(browser, tmp_path):
    """What costs more than it has to stands at the top, with its bytes, line, facts and fix."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        found = tab.locator("#findings article").all_inner_texts()
        assert [text.split() for text in found] == [
            text.split()
            for text in (
                "batch['x'] is moved before the program starts "
                "1.0 MiB sent by each device in a call "
                "facts it lies as P('data') the program takes P(None, 'model') "
                "fix make it as P(None, 'model')",
                "nothing is split over mesh axis 'model' line /w/model/transformer.py:7 "
                "fix use a mesh without it",
            )
        ]
        tops = tab.eval_on_selector_all("section", "all => all.map(one => one.id)")
        links = tab.eval_on_selector_all("nav a", "all => all.map(one => one.hash.slice(1))")
        assert tops == links == [
            "findings", "memory", "mesh", "traffic", "source", "ledger", "shardings"
        ]  # fmt: skip


@pytest.mark.slow
def test_pictures_stand_beside_each_other_below_the_findings(real, browser, tmp_path):
    """Memory and mesh are in the first sight of a page, and below each other on narrow screens."""
    one = dataclasses.replace(real[-1], findings=SMALL.findings)
    place = "one => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.bottom]; }"
    with opened(browser, saved(one, tmp_path), width=1280, height=1120) as tab:
        memory, mesh = (tab.eval_on_selector(name, place) for name in (".stack", "#devices"))
        assert memory[0] < 640 < mesh[0]
        assert max(memory[2], mesh[2]) <= 1120
        tab.set_viewport_size({"width": 800, "height": 1120})
        memory, mesh = (tab.eval_on_selector(name, place) for name in ("#memory", "#mesh"))
        assert memory[0] == mesh[0]
        assert memory[2] < mesh[1]


@pytest.mark.slow
def test_one_device_is_told_that_findings_were_skipped(browser, tmp_path):
    """A page of one device says why it has no findings on shardings, and a larger one does not."""
    for one, wanted in (
        (
            report(num_devices=1, mesh={}),
            "Findings on shardings were skipped: the program runs on one device, where nothing can "
            "be split. Compile it for a mesh of several to have them.",
        ),
        (report(), "Nothing costs more than it has to, as far as spmd looks."),
        (report(num_devices=1, mesh={}, predicted=True), "A preview has none."),
    ):
        with opened(browser, saved(one, tmp_path)) as tab:
            assert tab.inner_text("#findings").split("\n")[-1] == wanted


@pytest.mark.parametrize("predicted", [False, True])
def test_a_preview_has_no_figures_of_what_it_does_not_count(predicted):
    """FLOPs and bytes of main memory are of compiled programs; 0 of them would be told else."""
    labels = re.findall(r"<dt>(.*?)</dt>", report(predicted=predicted).to_html())
    assert ("FLOPs" in labels) != predicted
    assert ("Main memory traffic" in labels) != predicted
    assert "Collectives" in labels


@pytest.mark.parametrize("predicted", [False, True])
def test_no_compiler_is_named_that_was_not_asked(predicted):
    """What a preview does not have is not told to be what a backend keeps to itself."""
    page = report(predicted=predicted, collectives=(collective(source=None),)).to_html()
    for text in ("The backend tells", "the compiler left nothing", "The report holds no"):
        assert (text in page) != predicted, text
    assert ("A preview does not know" in page) == predicted


@pytest.mark.slow
def test_a_line_is_never_broken(browser, tmp_path):
    """On screens from 320 pixels on no `transformer.py:42` is split, nor in details and facts."""
    facts = (
        "most of it is made at /a/rather/long/folder/than/which/no/screen/is/wider/model.py:131",
    )
    findings = tuple(
        dataclasses.replace(one, facts=facts, source=source(131)) for one in SMALL.findings
    )
    one = dataclasses.replace(SMALL, findings=findings)
    with opened(browser, saved(one, tmp_path)) as tab:
        for button in tab.locator("button.open").all():
            button.click()
        tab.eval_on_selector_all("details", "all => all.forEach(one => (one.open = true))")
        for width in range(320, 500, 20):
            tab.set_viewport_size({"width": width, "height": 900})
            found = tab.evaluate(BROKEN)
            assert found["count"] > 20
            assert found["broken"] == []


@pytest.mark.slow
def test_heat_column(real, browser, tmp_path):
    """The source view has the text of the file, and the bytes that each line puts on the wire."""
    one = real[-1]
    with opened(browser, saved(one, tmp_path)) as tab:
        found = tab.eval_on_selector_all(
            "table.source button[data-line]",
            "all => all.map(b => [b.dataset.line, b.innerText, "
            "b.closest('tr').querySelector('code').innerText])",
        )
    totals = one.totals("line")
    assert found
    assert len(found) == len(totals)
    for place, nbytes, text in found:
        file, _, line = place.rpartition(":")
        path = next(key for key in totals if key.endswith(f"{file}:{line}"))
        assert nbytes == show_bytes(totals[path].wire_bytes)
        with open(path.rpartition(":")[0], encoding="utf-8") as lines:
            assert text.strip() == lines.read().splitlines()[int(line) - 1].strip()


def test_page_of_a_loaded_report(real, tmp_path):
    """A report that comes back from JSON has the same page, source text included."""
    one = real[-1]
    one.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json").to_html() == one.to_html()
    assert "jnp.tanh(jnp.einsum(" in one.to_html()


@pytest.mark.slow
def test_memory(real, browser, tmp_path):
    """The classes add up to the peak, and each buffer is a bar from its making to its last use."""
    memory = real[-1].memory
    with opened(browser, saved(real[-1], tmp_path), width=1440) as tab:
        widths = tab.eval_on_selector_all(
            ".stack rect", "all => all.map(r => r.getBoundingClientRect().width)"
        )
        bars = tab.eval_on_selector_all(
            "#buffers svg.bar rect",
            "all => all.map(r => [r.x.baseVal.value, r.width.baseVal.value])",
        )
        assert column(tab, 1, "#buffers") == [show_bytes(one.nbytes) for one in memory.buffers]
    kept = memory.outputs - memory.aliased
    parts = (memory.arguments, kept, memory.temporaries, memory.code)
    assert widths == pytest.approx([sum(widths) * part / memory.peak for part in parts], abs=0.5)
    for (x, width), one in zip(bars, memory.buffers, strict=True):
        assert x == pytest.approx(100 * one.first / memory.places, abs=0.01)
        assert x + width <= 100.6


# The mesh


@pytest.mark.slow
def test_hover_shows_the_shard_that_jax_has_there(real, browser, tmp_path):
    """For every argument and device, what the page says is held is what JAX says."""
    mesh, specs, args, one = real
    specs = [specs[0]["b"], specs[0]["w"], *specs[1:]]
    leaves = [args[0]["b"], args[0]["w"], *args[1:]]
    assert [argument.path for argument in one.arguments] == [
        "params['b']",
        "params['w']",
        "x",
        "rate",
    ]
    with opened(browser, saved(one, tmp_path)) as tab:
        assert tab.locator(".facet").count() == 2
        for number, (spec, leaf) in enumerate(zip(specs, leaves, strict=True)):
            tab.click(f"button.choose[data-i='{number}']")
            held = jax.NamedSharding(mesh, spec).devices_indices_map(leaf.shape)
            for place, coordinate in enumerate(itertools.product(range(2), repeat=3)):
                device = mesh.devices[coordinate]
                tab.hover(f".device[data-i='{place}']")
                panel = [line for line in tab.inner_text("#held").split("\n") if line]
                assert panel[0] == f"device {device.id}"
                assert panel[1] == ", ".join(
                    f"{a}={k}" for a, k in zip(mesh.shape, coordinate, strict=True)
                )
                assert panel[2] == shown(one.arguments[number].path, held[device], leaf.shape)
                same = {mesh.devices[c].id for c in itertools.product(range(2), repeat=3)
                        if held[mesh.devices[c]] == held[device]}  # fmt: skip
                marked = tab.locator(".device.same").all_inner_texts()
                assert {int(text) for text in marked} == same


def shown(path, index, shape):
    """``w[0:4, :]``, of what JAX gives."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    parts = [":" if r == (0, n) else f"{r[0]}:{r[1]}" for r, n in zip(ranges, shape, strict=True)]
    return f"{path}[{', '.join(parts)}]" if parts else path


@pytest.mark.slow
def test_uneven_and_unknown_shardings(browser, tmp_path):
    """The last shard of an uneven dimension is smaller, and what no spec says is not guessed."""
    uneven = Argument(
        path="x", dtype="f32", shape=(6, 4), sharding="P('data')", nbytes=32,
        splits=(Split(axes=("data",), parts=4, block=2), Split(axes=(), parts=1, block=4)),
    )  # fmt: skip
    odd = dataclasses.replace(uneven, path="y", splits=None, sharding="GSPMDSharding")
    one = report(arguments=(uneven, odd), device_ids=tuple(range(8)))
    with opened(browser, saved(one, tmp_path)) as tab:
        held = []
        for device in range(0, 8, 2):
            tab.hover(f".device[data-i='{device}']")
            held.append(tab.inner_text("#held .index"))
        assert held == ["x[0:2, :]", "x[2:4, :]", "x[4:6, :]", "x[6:6, :]"]
        tab.click("button.choose[data-i='1']")
        assert "No PartitionSpec says which part lies here." in tab.inner_text("#held")
        assert tab.locator(".device.same").count() == 0


def on_mesh(axes, shape, spec):
    """A report of one argument on a mesh of any size."""
    argument = Argument(
        path="x", dtype="bf16", shape=shape, sharding="P('data', 'model')", nbytes=200,
        splits=tuple(Split.of(n, names, axes) for n, names in zip(shape, spec, strict=True)),
    )  # fmt: skip
    count = math.prod(axes.values())
    return report(
        mesh=axes, num_devices=count, arguments=(argument,), device_ids=tuple(range(count)),
        memory=SMALL.memory,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "device", "held"),
    [
        # 1300 = 10 * 128 + 20
        ({"data": 64, "model": 128}, 1300, "x[100:110, 200:210]"),
        ({"data": 16, "model": 32}, 100, "x[30:40, 40:50]"),
        ({"data": 16, "model": 16}, 255, "x[150:160, 150:160]"),
        # Rows of more devices than there is room for are folded, those of a prime number unevenly.
        ({"data": 1, "model": 8192}, 1300, "x[:, 13000:13010]"),
        ({"data": 2, "model": 257}, 260, "x[10:20, 30:40]"),
        ({"data": 1, "model": 32}, 31, "x[:, 310:320]"),
    ],
)
def test_a_large_mesh_is_drawn_whole(axes, device, held, browser, tmp_path):
    """Every device of a large mesh is in sight beside the memory, apart from the others."""
    shape = tuple(10 * size for size in axes.values())
    one = on_mesh(axes, shape, (("data",), ("model",)))
    with opened(browser, saved(one, tmp_path), width=1280, height=1120) as tab:
        boxes = tab.eval_on_selector_all(
            ".device",
            "all => all.map(one => { const b = one.getBoundingClientRect(); "
            "return [b.left, b.top, b.right, b.bottom]; })",
        )
        frame = tab.eval_on_selector(
            "#devices",
            "one => { const b = one.getBoundingClientRect(); "
            "return [b.left, b.top, b.right, b.bottom]; }",
        )
        cut = tab.eval_on_selector_all(
            ".device", "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
        )
        tab.hover(f".device[data-i='{device}']")
        assert tab.inner_text("#held .index") == held
        assert tab.locator(".device.same").count() == 1
    assert len(boxes) == math.prod(axes.values())
    assert len({(round(left, 2), round(top, 2)) for left, top, _, _ in boxes}) == len(boxes)
    assert cut == 0
    for left, top, right, bottom in boxes:
        assert frame[0] <= left < right <= frame[2]
        assert frame[1] <= top < bottom <= frame[3]
        assert min(right - left, bottom - top) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200, 1440])
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 8},
        {"data": 4, "model": 2},
        {"data": 2, "tensor_parallel": 2},
        {"data": 2, "context_sequence": 4},
        {"replica": 2, "data": 2, "fsdp": 5},
    ],
    ids=lambda axes: "x".join(map(str, axes.values())),
)
def test_a_small_mesh_is_drawn_whole(axes, width, browser, tmp_path):
    """No name stands over the next one, and every device can be seen."""
    spec = [(name,) for name in axes]
    one = on_mesh(axes, tuple(10 * size for size in axes.values()), spec)
    edges = "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    with opened(browser, saved(one, tmp_path), width=width, height=1120) as tab:
        assert (
            tab.eval_on_selector_all(
                ".axis-label.column",
                "all => all.filter(one => one.scrollWidth > one.clientWidth).length",
            )
            == 0
        )
        names = tab.locator(".grid").first.locator(".axis-label").all_inner_texts()
        devices = tab.eval_on_selector_all(".device", edges)
        [frame] = tab.eval_on_selector_all("#devices", edges)
    assert any([*axes][-1] in name for name in names)
    assert len(devices) == math.prod(axes.values())
    for left, right in devices:
        assert frame[0] <= left < right <= frame[1]


@pytest.mark.slow
def test_a_large_mesh_on_a_narrow_screen(browser, tmp_path):
    """Where the devices have no room they scroll, by hand and by the keys."""
    one = on_mesh({"data": 64, "model": 128}, (640, 1280), (("data",), ("model",)))
    with opened(browser, saved(one, tmp_path), width=360) as tab:
        tab.focus(".device[data-i='0']")
        tab.keyboard.press("ArrowDown")
        assert tab.evaluate("document.activeElement.dataset.i") == "128"
        tab.keyboard.press("End")
        assert tab.evaluate("document.activeElement.dataset.i") == "8191"
        edge = "one => one.getBoundingClientRect().right"
        assert 0 < tab.eval_on_selector(".device[data-i='8191']", edge) <= 360
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360


# Sorting, filtering, keys


@pytest.mark.slow
def test_sorting(browser, tmp_path):
    """A click on a header sorts by the figures of the records, another one the other way."""
    rows = SOME.collectives
    with opened(browser, saved(SOME, tmp_path), width=1440) as tab:
        header = tab.locator("#rows th", has_text="payload")
        for sign, arrow in ((-1, "descending"), (1, "ascending")):
            header.locator("button").click()
            assert header.get_attribute("aria-sort") == arrow
            assert order(tab) == sorted(range(240), key=lambda i: sign * rows[i].payload_bytes)
        tab.click("#rows th:first-child button")
        assert column(tab, 1) == ["all-gather"] * 120 + ["all-reduce"] * 120
        assert tab.locator("#rows [aria-sort]").count() == 1


@pytest.mark.slow
def test_filtering(browser, tmp_path):
    """Text, kind, axis and direction hide what does not fit, together and each by itself."""
    rows = SOME.collectives
    with opened(browser, saved(SOME, tmp_path)) as tab:
        assert set(order(tab)) == set(range(240))
        tab.select_option("#filter-kind", "all-gather")
        assert set(order(tab)) == {i for i in range(240) if rows[i].kind == "all-gather"}
        tab.select_option("#filter-axis", "model")
        both = {i for i in range(240) if i % 2 == 1 and "model" in rows[i].mesh_axes}
        assert set(order(tab)) == both
        tab.fill("#filter-text", "LAYER_17")
        assert set(order(tab)) == {i for i in both if str(i).startswith("17")}
        assert tab.inner_text("#shown") == f"{len(order(tab))} of 240 rows"
        tab.fill("#filter-text", "no such thing")
        assert order(tab) == []
        tab.click("#filter-reset")
        # The policy of the page forbids what Playwright would wait with: text that is evaluated.
        for _ in range(300):
            if len(order(tab)) == 240:
                break
            tab.wait_for_timeout(20)
        assert len(order(tab)) == 240


@pytest.mark.slow
def test_two_thousand_collectives(browser, tmp_path):
    """A sort of 2,000 rows lays out those in sight and no others, and filters find every row."""
    with opened(browser, saved(many(2000), tmp_path)) as tab:
        tab.click("#rows th:first-child button")
        assert len(order(tab)) == 2000
        drawn = tab.eval_on_selector_all(
            "#rows tbody td:first-child", "cells => cells.filter(cell => cell.checkVisibility("
            "{contentVisibilityAuto: true})).length"
        )  # fmt: skip
        assert 0 < drawn < 200
        tab.fill("#filter-text", "layer_1999")
        assert order(tab) == [1999]


@pytest.mark.slow
def test_a_line_leads_to_its_rows(browser, tmp_path):
    """A click on the bytes of a line shows the collectives of that line."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        tab.click("button[data-line='/w/model/transformer.py:42']")
        assert order(tab) == [1]
        assert tab.input_value("#filter-text") == "/w/model/transformer.py:42"


@pytest.mark.slow
def test_keyboard_walk(real, browser, tmp_path):
    """Without a mouse: the skip link, a header, a row's details, and the devices."""
    one = dataclasses.replace(real[-1], collectives=SMALL.collectives)
    with opened(browser, saved(one, tmp_path), width=1440) as tab:

        def focus():
            return tab.evaluate("document.activeElement.innerText || document.activeElement.id")

        def press_until(key, wanted, most=60):
            for _ in range(most):
                tab.keyboard.press(key)
                if tab.evaluate(f"document.activeElement.matches({json.dumps(wanted)})"):
                    return
            pytest.fail(f"{most} times {key} do not lead to {wanted}; last: {focus()}")

        tab.keyboard.press("Tab")
        assert focus() == "Skip to the content"
        tab.keyboard.press("Enter")
        assert tab.evaluate("document.activeElement.id") == "main"
        press_until("Tab", "#rows th:first-child button")
        outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        tab.keyboard.press("Enter")
        assert tab.get_attribute("#rows th:first-child", "aria-sort") == "ascending"
        press_until("Tab", "button.open")
        tab.keyboard.press("Enter")
        assert tab.get_attribute("button.open >> nth=0", "aria-expanded") == "true"
        assert "jit(step)" in tab.inner_text("tr.detail")
        tab.keyboard.press("Escape")
        assert tab.locator("tr.detail").count() == 0
        press_until("Tab", ".device")
        for key, place in (
            ("ArrowRight", 1),
            ("ArrowDown", 3),
            ("ArrowLeft", 2),
            ("End", 7),
            ("ArrowDown", 7),
            ("Home", 0),
            ("ArrowLeft", 0),
        ):
            tab.keyboard.press(key)
            assert tab.evaluate("document.activeElement.dataset.i") == str(place)
            assert tab.inner_text("#held h3") == f"device {one.device_ids[place]}"
        press_until("Tab", "button.choose[data-i='2']")
        tab.keyboard.press("Space")
        assert "x[" in tab.inner_text("#held .index")


@pytest.mark.slow
def test_details(browser, tmp_path):
    """The details of a row have its stack, shapes and groups, and go when rows are sorted."""
    with opened(browser, saved(SMALL, tmp_path)) as tab:
        tab.click("tr[data-i='1'] button.open")
        text = tab.inner_text("tr.detail")
        assert "/w/train.py:90 main" in text
        assert "f32[2048,1024], f32[2048,1024]" in text
        tab.click("#rows th:first-child button")
        assert tab.locator("tr.detail").count() == 0
        assert tab.locator("[aria-expanded='true']").count() == 0


# Looks


@pytest.mark.slow
def test_themes(browser, tmp_path):
    """Dark and light follow the system until the button says otherwise."""
    path = saved(SMALL, tmp_path)
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        with opened(browser, path, color_scheme=scheme) as tab:
            seen[scheme] = tab.evaluate(background)
            shades = []
            for _ in range(3):
                tab.click("#theme")
                shades.append((tab.inner_text("#theme-name"), tab.evaluate(background)))
            assert [name for name, _ in shades] == ["light", "dark", "system"]
            assert shades[2][1] == seen[scheme]
            seen[f"chosen in {scheme}"] = (shades[0][1], shades[1][1])
    assert seen["chosen in light"] == seen["chosen in dark"] == (seen["light"], seen["dark"])
    assert seen["light"] != seen["dark"]


_CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.mark.few(0)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, real, browser, tmp_path):
    """All text has the contrast of WCAG AA to what is behind it, heat and devices included."""
    one = dataclasses.replace(
        SMALL, arguments=real[-1].arguments, mesh=real[-1].mesh, device_ids=real[-1].device_ids
    )
    for page in (one, spmd.diff(SMALL, real[-1])):
        with opened(browser, saved(page, tmp_path), width=1440, color_scheme=scheme) as tab:
            assert tab.evaluate(_CONTRAST) == []


@pytest.mark.slow
def test_without_script(browser, tmp_path):
    """Without JavaScript the ledger and the source stand there, and no control without effect."""
    with opened(browser, saved(SMALL, tmp_path), java_script_enabled=False) as tab:
        assert tab.locator("#rows tbody tr").count() == 4
        assert not tab.locator("#filters").is_visible()
        assert not tab.locator("#theme").is_visible()


# Safety


def evil_report():
    """A report whose every name is an attack."""
    place = dataclasses.replace(source(3), file=f"/w/{EVIL}", function=EVIL)
    one = collective(
        kind=EVIL, mesh_axes=(EVIL,), dtype=EVIL, source=place, direction=EVIL, op_name=EVIL,
        frames=(place,), name=EVIL, groups=EVIL,
    )  # fmt: skip
    buffers = tuple(
        dataclasses.replace(b, name=EVIL, op_name=EVIL, source=place) for b in SMALL.memory.buffers
    )
    reshard = dataclasses.replace(SMALL.reshards[0], argument=EVIL, given=EVIL, wanted=EVIL)
    argument = Argument(
        path=EVIL, dtype=EVIL, shape=(8,), sharding=EVIL, nbytes=4,
        splits=(Split.of(8, (EVIL,), {EVIL: 8}),),
    )  # fmt: skip
    return report(
        name=EVIL, backend=EVIL, device_kind=EVIL + "2", mesh={EVIL: 8}, versions={EVIL: EVIL},
        collectives=(one,), memory=dataclasses.replace(SMALL.memory, buffers=buffers),
        reshards=(reshard,), arguments=(argument,), device_ids=tuple(range(8)),
        excerpts=(Excerpt(file=place.file, first=2, lines=("a\u2028b", EVIL, "c")),),
    )  # fmt: skip


@pytest.mark.slow
def test_names_stay_text(browser, tmp_path):
    """Whatever a name or a line of source holds, it is shown and never markup or script."""
    one = evil_report()
    with opened(browser, saved(one, tmp_path), width=1440) as tab:
        tab.click("button.open")
        tab.hover(".device >> nth=1")
        assert tab.evaluate("window.broken") is None
        assert tab.locator("img").count() == 0
        assert tab.locator("script").count() == 2
        assert tab.inner_text("h1") == EVIL
        assert tab.inner_text("table.source tr:nth-child(2) code") == EVIL
        assert tab.inner_text("#held .index") == f"{EVIL}[1:2]"
        assert EVIL in tab.inner_text("tr.detail")
    with opened(browser, saved(spmd.diff(one, SMALL), tmp_path), width=1440) as tab:
        assert tab.evaluate("window.broken") is None
        assert tab.locator("img").count() == 0


def test_embedded_data():
    """The data block has no sign that could end it, and comes back as it was."""
    data = {EVIL: [EVIL, "\u2028\u2029", "層", "\ud800"]}
    text = show_page.embed(data)
    assert json.loads(text) == data
    assert not set("<>&\u2028\u2029") & set(text)


@pytest.mark.slow
def test_policy_allows_no_other_script(browser, tmp_path):
    """Were markup to get into the page, its policy would still run no script from it."""
    path = saved(SMALL, tmp_path)
    text = path.read_text(encoding="utf-8")
    broken = text.replace("<main ", "<script>window.broken=1</script><main ", 1)
    path.write_text(broken, encoding="utf-8")
    with pytest.raises(AssertionError, match="Content Security Policy"):
        _open_broken(browser, path)


def _open_broken(browser, path):
    with opened(browser, path) as tab:
        assert tab.evaluate("window.broken") is None
        assert tab.evaluate("document.documentElement.classList.contains('script')")


def test_no_address(real):
    """The page names no address that a browser would load, and only the one namespace of SVG."""
    for one in (SMALL, real[-1], spmd.diff(SMALL, real[-1])):
        found = set(re.findall(r"[a-z]+://[^\s'\"<]*", one.to_html()))
        assert found == {"http://www.w3.org/2000/svg"}
        assert not re.findall(r"(?:url\(|@import|\bsrc=|<link(?! rel=\"icon\"))", one.to_html())


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(reports, reports)
def test_any_report_has_a_page(one, other):
    """Whatever a report holds, it has a page and so has a difference, and both can be written."""
    for page in (one.to_html(), spmd.diff(one, other).to_html()):
        page.encode("utf-8")
        assert page.count("<script") == page.count("</script>") == 2
        assert page.rstrip().endswith("</html>")


# Notebooks


@pytest.mark.slow
def test_in_a_notebook(browser, tmp_path):
    """A notebook shows the page in a frame that works and reaches nothing outside of itself."""
    one = evil_report()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{one._repr_html_()}", encoding="utf-8")
    with opened(browser, path, width=1200) as tab:
        frame = tab.frame_locator("iframe")
        frame.locator("button.open").click()
        assert frame.locator("h1").inner_text() == EVIL
        assert tab.evaluate("window.broken") is None
        assert tab.evaluate("document.querySelector('iframe').contentDocument") is None


def test_a_page_that_is_too_large_for_a_notebook(monkeypatch):
    """A notebook shows text instead of a page that would make its file too large."""
    assert SMALL._repr_html_()
    monkeypatch.setattr(show_page, "LARGEST_CELL", 1000)
    assert SMALL._repr_html_() is None


MISSING = """\
report of `step` cannot be drawn as HTML: Jinja2 is not installed.
  fix       pip install 'spmd[html]'"""


def test_jinja2_is_optional(monkeypatch, tmp_path):
    """Without Jinja2 a page is an error that says what to install, and a notebook shows text."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "jinja2" else find(name, *a)
    )
    with pytest.raises(ReportError) as e:
        SMALL.save(tmp_path / "r.html")
    assert str(e.value) == MISSING
    assert SMALL._repr_html_() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_diff_page(browser, tmp_path):
    """The page of two reports marks what came, went and changed, with the change in bytes."""
    grown = dataclasses.replace(SMALL.collectives[1], wire_bytes=25 * MIB)
    other = dataclasses.replace(
        SMALL, collectives=(grown, *SMALL.collectives[2:], collective(kind="send"))
    )
    with opened(browser, saved(spmd.diff(SMALL, other), tmp_path), width=1440) as tab:
        rows = {
            cells[0]: cells
            for cells in tab.eval_on_selector_all(
                "#differences tbody tr",
                "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))",
            )
        }
        assert rows.keys() == {"added", "removed", "changed"}
        assert rows["changed"][5:7] == ["288.0 MiB → 300.0 MiB", "+12.0 MiB"]
        assert rows["added"][1::5] == ["send", "+24.0 MiB"]
        assert rows["removed"][6] == "unknown"
