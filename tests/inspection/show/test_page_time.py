"""The time of a call on pages of reports, differences and sweeps, in a real browser."""

import dataclasses
import json

from browser import assert_fits_screens, chromium, opened
from hypothesis import given, settings
import pytest
from reports import SMALL, source
from test_page import _CONTRAST, EVIL, column, order, saved
from test_shown_times import swept
from timed import MS, TIME, TIMED, exchange, permute, timed_reports

import spmd
from spmd.inspection import Sweep, SweepRow

#: Of the pages only those of reports open in Chromium by the README's command.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests here."""
    with chromium() as found:
        yield found


BOXES = (
    "all => all.map(one => { const b = one.getBoundingClientRect(); "
    "return {left: b.left, width: b.width, kind: one.className.baseVal, "
    "fill: getComputedStyle(one).fill, title: one.textContent}; })"
)
ONE_BOX = "one => { const b = one.getBoundingClientRect(); return [b.left, b.width]; }"


# The head and the bar


def test_the_head_and_one_bar(browser, tmp_path):
    """The head answers in a line, and the bar's pieces add up to the whole, by their shares."""
    with opened(browser, saved(TIMED, tmp_path), width=1400) as tab:
        assert tab.inner_text(".headline") == (
            "100 ms a call on v5e; MFU 30%, HFU 40%; bound by compute"
        )
        left, width = tab.eval_on_selector("#time .stack", ONE_BOX)
        pieces = tab.eval_on_selector_all("#time .stack rect", BOXES)
        shares = [0.5, 0.1, 0.3, 0.06, 0.04]
        assert [one["width"] for one in pieces] == pytest.approx(
            [width * share for share in shares], abs=0.5
        )
        assert sum(one["width"] for one in pieces) == pytest.approx(width, abs=0.5)
        ends = [left + width * sum(shares[:i]) for i in range(5)]
        assert [one["left"] for one in pieces] == pytest.approx(ends, abs=0.5)
        assert tab.locator("#time .legend li").all_inner_texts() == [
            "Compute 50.0 ms 50%",
            "Memory 10.0 ms 10%",
            "Exposed over data 30.0 ms 30%",
            "Exposed over model 6.00 ms 6.0%",
            "Exposed over no axis 4.00 ms 4.0%",
        ]
        # Each piece has a colour of its own, and that of a mesh axis is the axis's.
        colours = [one["fill"] for one in pieces]
        assert len({*colours}) == 5
        chip = "one => getComputedStyle(one).color"
        for i, axis in ((2, "axis-0"), (3, "axis-1")):
            assert colours[i] == tab.eval_on_selector(f".where .chip.{axis}", chip)


def test_waits_over_several_axes_have_a_colour_of_their_own(browser, tmp_path):
    """That of the axes, mixed: neither that of the first one nor of the last one."""
    waits = ("data",), ("model",), ("data", "model")
    exchanges = [exchange(f"{axes}", MS, MS, *axes) for axes in waits]
    time = dataclasses.replace(TIME, exchanges=(*exchanges,))
    with opened(browser, saved(dataclasses.replace(TIMED, time=time), tmp_path)) as tab:
        pieces = tab.eval_on_selector_all("#time .stack rect", BOXES)
        found = [one["fill"] for one in pieces if "exposed" in one["kind"]]
        assert len({*found}) == len(found) == 3


@pytest.mark.slow
def test_the_words_of_time(browser, tmp_path):
    """Beside the bar stand what is hidden, what each word means and what is not known."""
    with opened(browser, saved(TIMED, tmp_path)) as tab:
        text = tab.inner_text("#time")
        for wanted in (
            "Exchanges take 68.0 ms: 40.0 ms exposed, 28.0 ms hidden.",
            "Hidden: an exchange goes on while the core works.",
            "MFU: the products of the program as it is written, 30% of the peak.",
            "Uncertain\nthe loop while.3 runs an unknown number of times: once here",
        ):
            assert wanted in text
        assert tab.locator(".figures .value").all_inner_texts()[0] == "100 ms"
        notes = tab.locator(".figures dd.quiet").all_inner_texts()
        assert notes[:2] == [
            "MFU 30%, HFU 40%; bound by compute",
            "sent by each device in a call; 68.0 ms, 40% exposed",
        ]
        found = tab.locator("#findings .value").all_inner_texts()
        assert [" ".join(one.split()) for one in found] == [
            "9.0 MiB sent by each device in a call; about 6.00 ms, 1.5% exposed",
            "2.0 TFLOP repeated by each device in a call; about 12.5 ms, 12% of a call",
        ]


@pytest.mark.slow
def test_a_page_without_a_time(browser, tmp_path):
    """A stand-in says in the head that it has none, and no section, link or column names one."""
    with opened(browser, saved(SMALL, tmp_path), width=1400) as tab:
        assert "No time for CPU; give topology= or chip=." in tab.inner_text("header")
        assert tab.locator("#time, nav a[href='#time'], .headline, .lanes").count() == 0
        heads = tab.locator("#rows th, #traffic th").all_inner_texts()
        assert not {"time", "exposed"} & {*heads}


# Lines that wait


@pytest.mark.slow
def test_a_wait_leads_to_its_collectives(browser, tmp_path):
    """Lines stand longest wait first, and a click on one shows the collectives of that line."""
    with opened(browser, saved(TIMED, tmp_path), width=1400) as tab:
        rows = tab.eval_on_selector_all(
            "#waits tbody tr", "all => all.map(row => [...row.cells].map(c => c.innerText.trim()))"
        )
        assert [row[:5] for row in rows] == [
            ["transformer.py:42 block", "data", "all-reduce", "15.0 ms", "15%"],
            ["no line", "data", "all-reduce", "15.0 ms", "15%"],
            ["transformer.py:57 mlp", "model", "all-gather", "6.00 ms", "6.0%"],
            ["ops.py:9 ring", "none", "all-to-all", "4.00 ms", "4.0%"],
        ]
        tab.click("#waits button[data-line$=':57']")
        assert order(tab) == [2, 0]
        assert tab.input_value("#filter-text") == "/w/model/transformer.py:57"


# Beside bytes


@pytest.mark.slow
def test_tables_have_time_beside_bytes(browser, tmp_path):
    """The ledger, sums and lines of source have the time and the share that is exposed."""
    with opened(browser, saved(TIMED, tmp_path), width=1400) as tab:
        assert column(tab, 1) == [
            "all-reduce", "collective-permute \N{MULTIPLICATION SIGN}3", "all-gather", "all-to-all"
        ]  # fmt: skip
        assert column(tab, 5) == ["4", "12", "2", "1"]
        assert column(tab, 7) == ["40.0 ms", "12.0 ms", "12.0 ms", "4.00 ms"]
        assert column(tab, 8) == ["30%", "0%", "6.0%", "4.0%"]
        tab.locator("#rows th", has_text="exposed").locator("button").click()
        assert order(tab) == [1, 0, 5, 2]
        sums = tab.eval_on_selector_all(
            "#traffic tbody tr", "all => all.map(row => [...row.cells].map(c => c.innerText))"
        )
        took = {tuple(row[:2]): row[5:7] for row in sums if len(row) == 8}
        assert took["all-reduce", "data"] == ["40.0 ms", "30%"]
        assert took["collective-permute", "model"] == ["12.0 ms", "0%"]
        modules = {row[0]: row[3:5] for row in sums if len(row) == 6}
        assert modules["layer_*"] == ["12.0 ms", "0%"]
        assert modules["Model/layers_*/mlp"] == ["20.0 ms", "15%"]
        whats = tab.locator("table.source .what").all_inner_texts()
        assert "all-reduce over data; 20.0 ms, 15% exposed" in whats
        assert (
            "all-gather over model, collective-permute over model; 24.0 ms, 6.0% exposed" in whats
        )


@pytest.mark.slow
def test_rows_that_are_alike_open_to_all_of_them(browser, tmp_path):
    """One row for several collectives has their runs, groups, names and instructions."""
    with opened(browser, saved(TIMED, tmp_path), width=1400) as tab:
        tab.click("tr[data-i='2'] button.open")
        text = tab.inner_text("tr.detail")
        for wanted in (
            "3 places of the program, which run 2, 4, 6 times",
            "permute.1, permute.2, permute.3",
            "{{0,1}}; or {{0,2}}; or {{0,3}}",
            "jit(step)/layer_1/dot_general, jit(step)/layer_2/dot_general",
            "direction\nforward",
            "12 runs",
        ):
            assert wanted in text
        tab.fill("#filter-text", "permute.3")
        assert order(tab) == [2]
        assert tab.inner_text("#shown") == "1 of 4 rows"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 1100, 900, 701, 420])
def test_each_row_is_on_its_lines(width, browser, tmp_path):
    """With the columns of time no cell of the ledger falls below its row, at any width."""
    with opened(browser, saved(TIMED, tmp_path), width=width) as tab:
        rows = tab.eval_on_selector_all(
            "#rows tr",
            "all => all.map(row => [...row.children].filter(c => c.checkVisibility())"
            ".map(c => Math.round(c.getBoundingClientRect().top)))",
        )
    for tops in rows:
        # On narrow screens the line, which is last, has one of its own.
        assert len({*tops[:-1]}) == 1
        assert (tops[-1] > tops[0]) == (width <= 700)


# Lanes


@pytest.mark.slow
def test_lanes(browser, tmp_path):
    """Lanes have their names, axes and shares, and every event its place, colour and name."""
    with opened(browser, saved(TIMED, tmp_path), width=1400) as tab:
        heads = tab.eval_on_selector_all(
            ".lanes tbody tr",
            "all => all.map(row => [...row.cells].slice(0, 3).map(c => c.innerText.trim()))",
        )
        assert heads == [
            ["core", "70%", ""],
            ["memory", "10%", ""],
            ["host", "25%", ""],
            ["links x+", "50%", "data"],
            ["links x-", "50%", "data"],
            ["links y+", "20%", "model"],
        ]
        assert tab.inner_text("#layer-title") == (
            "One layer, 20.0 ms: an iteration of the loop that takes longest"
        )
        assert tab.locator(".ticks span").all_inner_texts() == [
            "0 s", "5.00 ms", "10.0 ms", "15.0 ms", "20.0 ms"
        ]  # fmt: skip
        drawn = []
        for lane in tab.locator(".lanes tbody svg").all():
            left, width = lane.evaluate(ONE_BOX)
            pieces = lane.locator("rect").evaluate_all(BOXES)
            drawn.append(
                [
                    (round(20 * (p["left"] - left) / width, 1), round(20 * p["width"] / width, 1))
                    for p in pieces
                ]
            )
        core, data, model = ([p["fill"] for p in tab.locator(f".lanes tbody tr:nth-child({i}) rect")
                              .evaluate_all(BOXES)] for i in (1, 4, 6))  # fmt: skip
        titles = tab.locator(".lanes rect title").all_text_contents()
    assert drawn == [
        [(0, 10), (10, 2), (12, 6), (18, 2)], [(4, 2)], [(0, 5)], [(8, 10)], [(8, 10)], [(2, 4)]
    ]  # fmt: skip
    # The core waits in the colour of what it waits for.
    assert core[2] == data[0] != model[0]
    assert core[0] == core[3] != core[1]
    assert titles[2] == "wait for all-reduce over data: 6.00 ms, from 12.0 ms on"


# Looks


@pytest.mark.slow
def test_nothing_is_wider_than_the_window(browser, tmp_path):
    """Pages with a time fit every screen, in light and in dark."""
    diff = spmd.diff(TIMED, dataclasses.replace(TIMED, time=dataclasses.replace(TIME, memory=0.0)))
    sweep = swept((16, 0.1, 0.25), (4, 0.4, 0.5), (1024, 0.08, 0.3))
    for one in (TIMED, diff, sweep):
        assert_fits_screens(browser, saved(one, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, browser, tmp_path):
    """All text has the contrast of WCAG AA, and neighbours in the bar are told apart."""
    sweep = swept((16, 0.1, 0.25), (4, 0.4, 0.5))
    for one in (TIMED, sweep):
        with opened(browser, saved(one, tmp_path), width=1440, color_scheme=scheme) as tab:
            assert tab.evaluate(_CONTRAST) == []
    with opened(browser, saved(TIMED, tmp_path), color_scheme=scheme) as tab:
        fills = [one["fill"] for one in tab.eval_on_selector_all("#time .stack rect", BOXES)]
    shades = [luminance(fill) for fill in fills]
    # Work and memory have no hue: their lightness alone sets them apart.
    lighter, darker = max(shades[:2]), min(shades[:2])
    assert (lighter + 0.05) / (darker + 0.05) >= 3


def luminance(fill):
    """Relative luminance of ``rgb(1, 2, 3)``, as WCAG 2 defines it."""
    channels = [int(part) / 255 for part in fill.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.slow
def test_names_stay_text(browser, tmp_path):
    """Whatever a lane, a chip, an axis or an event is called, it is shown and never markup."""
    events = tuple(dataclasses.replace(one, name=EVIL, lane=EVIL) for one in TIME.layer)
    exchanges = tuple(
        dataclasses.replace(one, mesh_axes=(EVIL,), source=source(3, EVIL, f"/w/{EVIL}"))
        for one in TIME.exchanges
    )
    time = dataclasses.replace(TIME, chip=EVIL, unknown=(EVIL,), layer=events, exchanges=exchanges)
    place = source(3, EVIL, f"/w/{EVIL}")
    found = tuple(
        dataclasses.replace(one, mesh_axes=(EVIL,), source=place) for one in TIMED.collectives
    )
    one = dataclasses.replace(TIMED, mesh={EVIL: 8}, collectives=found, time=time, name=EVIL)
    sweep = Sweep(name=EVIL, rows=tuple(SweepRow.of(one, label=EVIL) for _ in range(2)))
    for page in (one, sweep):
        with opened(browser, saved(page, tmp_path), width=1440) as tab:
            assert tab.evaluate("window.broken") is None
            assert tab.locator("img").count() == 0
            assert tab.locator("script").count() == 2
            assert EVIL in tab.inner_text("main")


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(timed_reports())
def test_any_time_has_a_page(one):
    """Whatever a time holds, its page, a difference's and a sweep's can be written."""
    sweep = Sweep(name=one.name, rows=(SweepRow.of(one), SweepRow.of(TIMED)))
    for page in (one.to_html(), spmd.diff(one, TIMED).to_html(), sweep.to_html()):
        page.encode("utf-8")
        assert page.count("<script") == page.count("</script>") == 2
        assert page.rstrip().endswith("</html>")


# Differences and sweeps


@pytest.mark.slow
def test_the_page_of_a_difference(browser, tmp_path):
    """The head says how the time changed, and its parts stand before the collectives."""
    less = dataclasses.replace(TIME, seconds=0.08, compute=0.03, mfu=0.375)
    other = dataclasses.replace(
        TIMED, time=less, collectives=(*TIMED.collectives[:2], permute(7, 1))
    )
    with opened(browser, saved(spmd.diff(TIMED, other), tmp_path), width=1400) as tab:
        assert tab.inner_text(".headline") == (
            "100 ms → 80.0 ms a call (-20.0%); MFU 30% → 38%; HFU 40%"
        )
        rows = tab.eval_on_selector_all(
            "#time tbody tr", "all => all.map(row => [...row.cells].map(c => c.innerText))"
        )
        assert ["compute", "50.0 ms", "30.0 ms", "-20.0 ms"] in rows
        assert ["MFU", "30%", "38%", "+7.5 points"] in rows
        sections = tab.eval_on_selector_all("section", "all => all.map(one => one.id)")
        assert sections.index("time") < sections.index("ledger")
        kinds = tab.locator("#differences tbody td:nth-child(2)").all_inner_texts()
        assert "collective-permute \N{MULTIPLICATION SIGN}2" in kinds


@pytest.mark.slow
def test_the_page_of_a_sweep(browser, tmp_path):
    """Points lie where their devices and times say, the line goes through the fastest of each."""
    sweep = swept((16, 0.1, 0.25), (4, 0.4, 0.5), (16, 0.08, 0.3), (8, 0.2, 0.4))
    with opened(browser, saved(sweep, tmp_path), width=1400) as tab:
        assert tab.inner_text(".headline") == (
            "Fastest: 80.0 ms a call on v5e:16 (data=16); best MFU: 50% on v5e:4 (data=4)"
        )
        time, mfu = (
            {
                title: (x, y)
                for title, x, y in plot.locator("circle").evaluate_all(
                    "all => all.map(c => "
                    "[c.textContent, ...['cx', 'cy'].map(n => Number(c.getAttribute(n)))])"
                )
            }
            for plot in tab.locator(".plot").all()
        )
        lines = [
            [tuple(map(float, point.split(","))) for point in line.split()]
            for line in tab.eval_on_selector_all(
                "polyline", "all => all.map(one => one.getAttribute('points'))"
            )
        ]
        shown = tab.eval_on_selector_all(
            "#meshes tbody tr", "all => all.map(row => [...row.cells].map(c => c.innerText.trim()))"
        )
        pieces = tab.eval_on_selector_all(
            "#meshes tbody tr:nth-child(2) .bar rect", "all => all.map(r => r.width.baseVal.value)"
        )
        tab.locator("#meshes th", has_text="time").locator("button").first.click()
        assert column(tab, 3, "#meshes") == ["400 ms", "200 ms", "100 ms", "80.0 ms"]
    four, eight = time["v5e:4 (data=4): 400 ms"], time["v5e:8 (data=8): 200 ms"]
    fast, slow = time["v5e:16 (data=16): 80.0 ms"], time["v5e:16 (data=16): 100 ms"]
    # Twice the devices are as far to the right, and half the time as far below, everywhere.
    assert eight[0] - four[0] == pytest.approx(slow[0] - eight[0], abs=0.2)
    assert eight[1] - four[1] == pytest.approx(slow[1] - eight[1], abs=0.3)
    assert fast[0] == slow[0]
    assert fast[1] > slow[1]
    ideal, best, best_mfu = lines
    assert best == [four, eight, fast]
    assert ideal == [four, eight, slow]
    assert best_mfu[0] == mfu["v5e:4 (data=4): 50%"]
    assert best_mfu[-1] == mfu["v5e:16 (data=16): 30%"]
    heights = [mfu[key][1] for key in ("v5e:4 (data=4): 50%", "v5e:8 (data=8): 40%")]
    assert heights[0] < heights[1]
    assert shown[1][:3] == ["v5e:4", "data=4", "400 ms"]
    # The longest bar is whole: 350 of 400 ms of work, 10 of memory, 30, 6 and 4 of waits.
    assert pieces == pytest.approx([87.5, 2.5, 7.5, 1.5, 1.0], abs=0.01)


def test_a_sweep_is_saved_as_a_page(tmp_path):
    """`Sweep.save` writes a page, and a notebook shows it in a frame."""
    sweep = swept((4, 0.4, 0.5), (8, 0.2, 0.4))
    sweep.save(tmp_path / "sweep.html")
    assert (tmp_path / "sweep.html").read_text(encoding="utf-8") == sweep.to_html()
    assert "<iframe sandbox" in sweep._repr_html_()
    assert json.loads(json.dumps(sweep.records()))[0]["step_seconds"] == 400 * MS


def test_a_sweep_without_times_has_no_chart():
    """Meshes that have no time are a table, and what each lacks is said."""
    page = Sweep(name="step", rows=(SweepRow.of(SMALL), SweepRow.of(SMALL))).to_html()
    assert "<polyline" not in page
    assert "no time for CPU; give topology= or chip=" in page
