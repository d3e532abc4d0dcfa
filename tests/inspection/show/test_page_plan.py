"""The page of a plan in a real browser: what was looked at, where arrays lie, the schedule."""

import dataclasses
import itertools
import json
import math

from browser import assert_fits_screens, chromium, opened
from hypothesis import given, settings
import numpy as np
from plans import BARE, CODE, CONSTRAINTS, GIB, GPT, UP, candidate, compiled, placed, plans
import pytest
from test_page import _CONTRAST, EVIL, column
from test_page_time import BOXES, ONE_BOX, luminance

from spmd.inspection.records.later import known
from spmd.inspection.records.plan import Inside, Price
from spmd.inspection.show.page import scatter
from spmd.inspection.show.perfetto import trace_events

#: Of the pages only those of reports open in Chromium by the README's command.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests here."""
    with chromium() as found:
        yield found


def saved(plan, folder):
    """The page of a plan as a file."""
    path = folder / "plan.html"
    path.write_text(plan.to_html(), encoding="utf-8")
    return path


CENTERS = (
    "all => all.map(one => { const b = one.firstElementChild.nextElementSibling"
    ".getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; })"
)
ABOUT = "one => [...one.querySelectorAll('dt')].map(t => [t.innerText, t.nextSibling.innerText])"


# The head


def test_the_head(browser, tmp_path):
    """The head says for what the plan is and how long a call takes; figures stand below."""
    with opened(browser, saved(GPT, tmp_path)) as tab:
        assert tab.inner_text("h1") == "train_step"
        assert tab.locator(".where").all_inner_texts() == [
            "v5e:4x2 (TPU v5 lite), mesh data=4 model=2 of 8 devices"
        ]
        assert tab.inner_text(".headline") == (
            "100 ms a call on v5e; MFU 30%, HFU 40%; bound by compute."
        )
        assert tab.locator("header .note").count() == 0
        tiles = [text.split("\n") for text in tab.locator(".figures > div").all_inner_texts()]
        assert [tile[:2] for tile in tiles] == [
            ["Time of a call", "100 ms"],
            ["Predicted", "122 ms"],
            ["Memory", "3.0 GiB"],
            ["On the wire", "300.0 MiB"],
            ["Plans tried", "2,842"],
            ["Compiled", "5"],
        ]
        assert tiles[1][2] == "before any compile (+22%)"
        assert tiles[2][2] == "of 5.0 GiB on each device"


@pytest.mark.slow
def test_doubts_stand_in_the_head(browser, tmp_path):
    """What was not verified, not finished, or does not fit is said before anything else."""
    with opened(browser, saved(BARE, tmp_path)) as tab:
        assert tab.locator("header .note").all_inner_texts() == [
            "Not verified: no compiler has seen this plan.",
            "The search was ended early: there may be a better plan.",
        ]
        assert tab.locator("#scatter, #layer, #trace").count() == 0
        assert "What to write for it is not known: plan again" in tab.inner_text("#code")
        assert tab.locator("#candidate-rows th:has-text('compiled')").count() == 0
    stand_in = dataclasses.replace(GPT.chosen, verified="bytes", peak=6 * GIB)
    one = dataclasses.replace(GPT, candidates=(stand_in, *GPT.candidates[1:]))
    with opened(browser, saved(one, tmp_path)) as tab:
        assert tab.locator("header .note").all_inner_texts() == [
            "Over the budget: 6.0 GiB of 5.0 GiB a device, 120%.",
            "Verified by bytes: CPU devices stand in for the hardware; topology= asks its own "
            "compiler.",
        ]
        assert "110 ms" not in tab.inner_text(".headline")
        assert "122 ms a call on v5e (predicted)" in tab.inner_text(".headline")
        legend = [one.strip() for one in tab.locator(".legend li").all_inner_texts()]
        assert "Exchanges, as predicted" in legend
    more = dataclasses.replace(stand_in, told=stand_in.sent // 2)
    one = dataclasses.replace(one, candidates=(more, *GPT.candidates[1:]))
    with opened(browser, saved(one, tmp_path)) as tab:
        assert more.added > 0
        legend = [one.strip() for one in tab.locator(".legend li").all_inner_texts()]
        assert "Exchanges, as predicted, with those that the compiler adds" in legend


# Candidates


def test_points_are_where_their_figures_are(browser, tmp_path):
    """Half the time and half the memory are as far away everywhere, and the budget is a line."""
    with opened(browser, saved(GPT, tmp_path)) as tab:
        found = tab.eval_on_selector_all("#scatter .mark-of", CENTERS)
        line = tab.eval_on_selector("#scatter .budget", ONE_BOX)[0]
        looks = tab.eval_on_selector_all(
            "#scatter .mark-of", "all => all.map(one => one.className.baseVal)"
        )
        names = tab.locator("#scatter .name").all_text_contents()
    needed = [math.log(one.needed) for one in GPT.candidates]
    took = [math.log(one.seconds) for one in GPT.candidates]
    # FSDP needs least memory, and the last one most.
    (left, _), (right, _) = found[2], found[6]
    unit = (right - left) / (needed[6] - needed[2])
    assert [x for x, _ in found] == pytest.approx(
        [left + unit * (one - needed[2]) for one in needed], abs=0.6
    )
    assert line == pytest.approx(left + unit * (math.log(5 * GIB) - needed[2]), abs=1.5)
    # What takes longest is at the top.
    (top, bottom), (most, least) = (found[6][1], found[3][1]), (took[6], took[3])
    unit = (top - bottom) / (most - least)
    assert [y for _, y in found] == pytest.approx(
        [bottom + unit * (one - least) for one in took], abs=0.6
    )
    assert top < bottom
    assert looks == [
        "mark-of found chosen", "mark-of expert", "mark-of expert", "mark-of written over",
        "mark-of expert hollow over", "mark-of found hollow", "mark-of found hollow over",
    ]  # fmt: skip
    # Those that were compiled come first where names have no room.
    assert {"found", "Megatron", "FSDP", "as written"} <= {*names}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_predictions_are_hollow(scheme, browser, tmp_path):
    """A point that no compiler saw is an outline, in the colour of its kind."""
    with opened(browser, saved(GPT, tmp_path), color_scheme=scheme) as tab:
        looks = tab.eval_on_selector_all(
            "#scatter .mark-of",
            "all => all.map(one => { const s = getComputedStyle(one.children[1]);"
            " return [s.fill, s.stroke]; })",
        )
        paper = tab.eval_on_selector("#scatter", "one => getComputedStyle(one).backgroundColor")
    assert [fill == paper for fill, _ in looks] == [False] * 4 + [True] * 3
    assert len({stroke for _, stroke in looks}) == 3
    assert looks[0][1] == looks[5][1] == looks[6][1] != looks[1][1] == looks[4][1] != looks[3][1]


@pytest.mark.slow
def test_a_point_tells_of_itself(browser, tmp_path):
    """The panel has the chosen one first, then the one under the pointer or with the focus."""
    with opened(browser, saved(GPT, tmp_path)) as tab:
        assert tab.inner_text("#about h3") == "found"
        told = dict(tab.eval_on_selector("#about", ABOUT))
        assert told["waits over data"] == "30.0 ms"
        assert told["memory"] == "3.0 GiB, 60% of the budget"
        assert told["model splits"] == "heads, d_ff, vocab"
        assert told["verdict"] == "chosen"
        tab.hover("#scatter .mark-of[data-i='2'] rect")
        assert tab.inner_text("#about h3") == "FSDP"
        assert dict(tab.eval_on_selector("#about", ABOUT))["mesh"] == "data=8, model=1"
        assert tab.inner_text("#candidate-rows tr.here th") == "FSDP"
        # The row that is marked stays in its table.
        ends = "all => all.map(row => row.lastElementChild.getBoundingClientRect().right)"
        assert len({*tab.eval_on_selector_all("#candidate-rows tbody tr", ends)}) == 1
        tab.focus("#scatter .mark-of[data-i='4']")
        told = dict(tab.eval_on_selector("#about", ABOUT))
        assert told["the compiler"] == "needs 21.0 GiB of 15.8 GiB"
        assert told["memory"] == "4.0 GiB, 80% of the budget, estimated"


@pytest.mark.slow
def test_experts_whose_program_it_is(browser, tmp_path):
    """The row, the picture and the panel name one; the panel has the others as well."""
    one = dataclasses.replace(GPT.chosen, same=("FSDP", "data parallel"))
    found = dataclasses.replace(GPT, candidates=(one, *GPT.candidates[1:]))
    with opened(browser, saved(found, tmp_path)) as tab:
        assert tab.inner_text("#about h3") == "found = FSDP and 1 more"
        mark = tab.locator("#scatter .mark-of[data-i='0']").get_attribute("class")
        assert mark == "mark-of expert chosen"
        told = dict(tab.eval_on_selector("#about", ABOUT))
        assert told["the same program as"] == "FSDP, data parallel"
        assert tab.inner_text("#candidate-rows tr.is-chosen th") == "found = FSDP and 1 more"
        tab.hover("#scatter .mark-of[data-i='2'] rect")
        tab.focus("#scatter .mark-of[data-i='0']")
        assert tab.inner_text("#about h3") == "found = FSDP and 1 more"


@pytest.mark.slow
def test_points_by_the_keyboard(browser, tmp_path):
    """One stop of the tabulator leads to the points, and arrows to the next in their direction."""
    with opened(browser, saved(GPT, tmp_path)) as tab:
        assert tab.locator("#scatter .mark-of[tabindex='0']").count() == 1
        tab.focus("#scatter .mark-of[data-i='0']")
        seen = []
        for key in ("ArrowUp", "ArrowLeft", "ArrowRight", "End", "Home"):
            tab.keyboard.press(key)
            seen.append(int(tab.evaluate("document.activeElement.dataset.i")))
        # Above it the one of 140 ms; left of that FSDP; right of FSDP that one again.
        assert seen == [5, 2, 5, 6, 0]
        assert tab.locator("#scatter .mark-of[tabindex='0']").count() == 1
        assert tab.inner_text("#about h3") == "found"


def test_points_at_one_place_by_the_keyboard(browser, tmp_path):
    """To the right and down one after the other, and then to the next place; and back."""
    first, *others = GPT.candidates
    twins = [dataclasses.replace(first, name=name) for name in ("DP", "FSDP")]
    plan = dataclasses.replace(GPT, candidates=(first, *twins, *others))
    with opened(browser, saved(plan, tmp_path)) as tab:
        seen = []
        tab.focus("#scatter .mark-of[data-i='0']")
        for key in ("ArrowRight", "ArrowDown", "ArrowRight", "Home", "ArrowDown", "ArrowLeft"):
            tab.keyboard.press(key)
            seen.append(int(tab.evaluate("document.activeElement.dataset.i")))
        after = seen.pop(2)
        assert seen == [1, 2, 0, 1, 0]
        assert after > 2


def test_bars_and_verdicts(browser, tmp_path):
    """Each candidate has a bar as long as its time, made of its parts, and a verdict."""
    with opened(browser, saved(GPT, tmp_path), width=1400) as tab:
        table = "#candidate-rows"
        assert column(tab, 3, table) == ["100 ms", "112 ms", "127 ms", "90.0 ms", "", "", ""]
        assert column(tab, 4, table)[4:] == ["110 ms", "140 ms", "310 ms"]
        verdicts = [" ".join(text.split()) for text in column(tab, 7, table)]
        assert verdicts == [
            "chosen", "12% slower", "27% slower", "over the budget",
            "refused needs 21.0 GiB of 15.8 GiB", "predicted 15% slower", "over the budget",
        ]  # fmt: skip
        whole = tab.eval_on_selector(f"{table} tbody tr svg", ONE_BOX)[1]
        drawn = [
            [box["width"] / whole for box in bar.locator("rect").evaluate_all(BOXES)]
            for bar in tab.locator(f"{table} .bar").all()
        ]
        titles = tab.locator(f"{table} tr[data-i='0'] .bar title").all_text_contents()
        pale = tab.locator(f"{table} .bar.pale").count()
    assert [sum(bar) for bar in drawn] == pytest.approx(
        [one.seconds / 0.31 for one in GPT.candidates], abs=0.01
    )
    assert drawn[0] == pytest.approx([p / 310 for p in (50, 10, 30, 6, 4)], abs=0.003)
    assert drawn[6] == pytest.approx([0.5, 0.1, 0.4], abs=0.003)
    assert titles == [
        "Compute: 50.0 ms", "Memory: 10.0 ms", "Exposed over data: 30.0 ms",
        "Exposed over model: 6.00 ms", "Exposed over no axis: 4.00 ms",
    ]  # fmt: skip
    assert pale == 3


@pytest.mark.slow
def test_candidates_are_sorted(browser, tmp_path):
    """A click on a title sorts by it."""
    with opened(browser, saved(GPT, tmp_path), width=1400) as tab:
        tab.click("#candidate-rows th:has-text('memory') button")
        assert column(tab, 6, "#candidate-rows")[0] == "7.0 GiB"
        tab.click("#candidate-rows th:has-text('predicted') button")
        tab.click("#candidate-rows th:has-text('predicted') button")
        assert column(tab, 4, "#candidate-rows")[:2] == ["95.0 ms", "100 ms"]


def test_a_budget_far_away_is_told():
    """A budget that would push all points to one side is said in words."""
    far = scatter.view(dataclasses.replace(GPT, budget=200 * GIB))
    assert (far["budget"], far["budget_said"]) == (None, "200.0 GiB")
    none = scatter.view(dataclasses.replace(GPT, budget=None))
    assert (none["budget"], none["budget_said"]) == (None, "")
    assert scatter.view(BARE) is None


def test_an_expert_on_several_meshes_is_named_once():
    """Beside its first compiled point, which is the fastest one; each point says its mesh."""
    some = [compiled(f"x{i}", 0.1 * 2**i, GIB) for i in range(4)]
    some = [dataclasses.replace(one, name="FSDP") for one in some[:3]] + some[3:]
    some[0] = dataclasses.replace(some[0], peak=None, time=None)
    found = scatter.view(dataclasses.replace(GPT, candidates=(*some,), budget=None))
    names = [one["name"] and one["name"]["text"] for one in found["points"]]
    assert names == [None, "FSDP", None, "x3"]


@pytest.mark.parametrize(
    ("sizes", "times", "columns", "lines"),
    [
        ((1, 8), (0.001, 0.05), "1 GiB 2 GiB 5 GiB", "1 ms 2 ms 5 ms 10 ms 20 ms 50 ms"),
        (
            (3, 3),
            (0.1, 0.1),
            "2.6 GiB 2.8 GiB 3 GiB 3.2 GiB 3.4 GiB",
            "90 ms 100 ms 110 ms 120 ms",
        ),
        (
            (0.9, 1.1),
            (0.9, 1.2),
            "0.8 GiB 0.9 GiB 1 GiB 1.1 GiB 1.2 GiB 1.3 GiB",
            "0.8 s 1 s 1.2 s 1.4 s",
        ),
        ((0.0128, 0.0174), (3e-4, 4e-4), "12 MiB 14 MiB 16 MiB 18 MiB 20 MiB", None),
        ((0.001, 700), (0.5, 4000.0), None, None),
    ],
)
def test_ticks_are_round(sizes, times, columns, lines):
    """Ticks have few digits, and there are three at least and seven at most."""
    some = [compiled("x", took, int(size * GIB)) for size, took in zip(sizes, times, strict=True)]
    found = scatter.view(dataclasses.replace(GPT, candidates=tuple(some), budget=None))
    for ticks, wanted in ((found["columns"], columns), (found["lines"], lines)):
        assert 3 <= len(ticks) <= 7
        if wanted:
            assert [text for _, text in ticks] == [
                " ".join(pair) for pair in zip(*[iter(wanted.split())] * 2, strict=True)
            ]


def test_texts_of_ticks_do_not_run_into_each_other():
    """Where equal distances come close at the end of such a scale, some are left out."""
    some = [compiled("x", 0.1 + i / 10, int(n * 2**20)) for i, n in enumerate((13.5, 34.0))]
    found = scatter.view(dataclasses.replace(GPT, candidates=tuple(some), budget=None))["columns"]
    for (a, left), (b, right) in itertools.pairwise(found):
        assert b - a > 8 * (len(left) + len(right)) / 2
    assert [text for _, text in found][:2] == ["15 MiB", "20 MiB"]
    assert len(found) >= 3


def test_the_last_tick_is_whole():
    """One that stands at the end of the scale is not cut off by the edge of the picture."""
    some = [dataclasses.replace(GPT.chosen, peak=peak * 2**20) for peak in (10, 84, 1023 / 1.2)]
    some = [dataclasses.replace(one, peak=round(one.peak)) for one in some]
    for least, most in ((0, 2), (1, 3)):
        found = scatter.view(
            dataclasses.replace(GPT, candidates=tuple(some[least:most]), budget=None)
        )
        for x, text in found["columns"]:
            assert x + scatter._LETTER * len(text) / 2 <= found["width"], text


def test_names_hit_nothing():
    """Of points that crowd, those keep their names that have room for them."""
    crowd = [compiled(f"expert {i}", 0.1 + i / 1e4, 3 * GIB) for i in range(30)]
    found = scatter.view(dataclasses.replace(GPT, candidates=tuple(crowd)))
    boxes = [
        scatter._box(one["name"]["text"], one["name"]["side"], one["name"]["x"], one["name"]["y"])
        for one in found["points"]
        if one["name"]
    ]
    assert boxes
    marks = [
        scatter._Box(one["x"] - 7, one["y"] - 7, one["x"] + 7, one["y"] + 7)
        for one in found["points"]
    ]
    for i, box in enumerate(boxes):
        assert not any(box.hits(other) for other in (*boxes[:i], *marks))


def test_a_line_leads_to_a_name_that_is_not_beside_its_point():
    """Experts that are near each other all have names, as long as the picture has room."""
    crowd = [compiled(f"expert {i}", 0.1 + i / 500, 3 * GIB) for i in range(6)]
    found = scatter.view(dataclasses.replace(GPT, candidates=(*crowd, compiled("far", 0.3, GIB))))
    names = [one["name"] for one in found["points"]]
    assert all(names)
    assert any(one["line"] for one in names)
    assert names[-1]["line"] is None
    boxes = [scatter._box(one["text"], one["side"], one["x"], one["y"]) for one in names]
    for one, name, box in zip(found["points"], names, boxes, strict=True):
        if line := name["line"]:
            assert (line["x1"], line["y1"]) == (one["x"], one["y"])
            assert box.left <= line["x2"] <= box.right
            assert box.top <= line["y2"] <= box.bottom
            # It crosses no name: no place of a hundred on it, beyond its point, is within one.
            for at in np.linspace(0.4, 0.99, 100):
                x, y = (line[f"{d}1"] + at * (line[f"{d}2"] - line[f"{d}1"]) for d in "xy")
                place = scatter._Box(x, y, x + 1e-3, y + 1e-3)
                assert not any(place.hits(other) for other in boxes if other is not box)


# Bytes that were not predicted


def test_bytes_that_were_not_predicted(browser, tmp_path):
    """Differences are a table, with the total below it; without any there is none, and no link."""
    with opened(browser, saved(GPT, tmp_path), width=1400) as tab:
        rows = tab.eval_on_selector_all(
            "#deviation-rows tbody tr",
            "all => all.map(row => [...row.cells].map(c => c.innerText.trim()))",
        )
        assert [[*row[:5], row[5].replace("\u200b", "")] for row in rows] == [
            ["all-reduce", "data", "80.0 MiB", "40.0 MiB", "a reduce-scatter, not an all-reduce",
             "transformer.py:57"],
            ["all-gather", "data model", "none", "20.0 MiB", "no sharding asks for it", "no line"],
        ]  # fmt: skip
        assert "300.0 MiB; 320.0 MiB predicted." in tab.inner_text("#deviations .hint")
        tab.click("nav a[href='#deviations']")
        assert tab.locator("#deviations-title").is_visible()
        told = dict(tab.eval_on_selector("#about", ABOUT))
        assert told["on the wire"] == "300.0 MiB; 320.0 MiB predicted"
    with opened(browser, saved(dataclasses.replace(GPT, deviations=()), tmp_path)) as tab:
        assert tab.locator("#deviations, a[href='#deviations']").count() == 0


# Where arrays lie, and what is pasted


def test_specs(browser, tmp_path):
    """Arrays that lie alike are a row that opens to all of them; what is fixed is marked."""
    with opened(browser, saved(GPT, tmp_path), width=1400) as tab:
        axes = tab.eval_on_selector("#specs .facts", ABOUT)
        assert axes == [["data=4", "batch, d_model"], ["model=2", "heads, d_ff, vocab"]]
        specs = [text.replace(" ", "") for text in column(tab, 2, "#spec-rows")]
        assert specs[5:9] == ["P(None,'data','model')", "P()", "P('data')fixed", "asstate"]
        assert column(tab, 3, "#spec-rows")[5:9] == ["3", "1", "1", "19"]
        # 4 x 1024 x 4096 floats three times, an eighth of them.
        assert column(tab, 4, "#spec-rows")[5] == "24.0 MiB"
        row = tab.locator("#spec-rows tbody tr").nth(5)
        assert row.locator("li").first.is_hidden()
        row.locator("summary").click()
        assert row.locator("li").all_inner_texts() == [
            f"{path} f32[4,1024,4096]"
            for path in (UP, "state['opt'].mu['up']", "state['opt'].nu['up']")
        ]


@pytest.mark.slow
def test_code_is_copied(browser, tmp_path):
    """The button copies the code to the letter; the constraints stand below with their lines."""
    rights = ["clipboard-read", "clipboard-write"]
    with opened(browser, saved(GPT, tmp_path), permissions=rights) as tab:
        assert tab.locator("#pasted").text_content() == CODE
        tab.click("#code button.copy")
        tab.wait_for_function("document.getElementById('copied').textContent === 'copied'")
        assert tab.evaluate("navigator.clipboard.readText()") == CODE
        rows = tab.eval_on_selector_all(
            "#constraints tbody tr", "all => all.map(row => [...row.cells].map(c => c.innerText))"
        )
        assert [[" ".join(text.split()) for text in row[:2]] for row in rows] == [
            ["/w/model/transformer.py:42 block", "h @ w['up']"],
            ["/w/model/transformer.py:57 mlp", "what a gather makes"],
        ]
        assert tab.inner_text("#code .note") == "It has one gather more."


@pytest.mark.slow
def test_all_code_is_on_paper(browser, tmp_path):
    """However long: it takes the place that it needs, and nothing stands over it."""
    plan = dataclasses.replace(GPT, inside=known(Inside(constraints=(), code=CODE * 40)))
    with opened(browser, saved(plan, tmp_path)) as tab:
        tab.emulate_media(media="print")
        height, shown = tab.eval_on_selector("pre.paste", "e => [e.scrollHeight, e.clientHeight]")
        assert shown >= height > 1000
        assert tab.eval_on_selector(".data th", "e => getComputedStyle(e).position") == "static"


def test_code_without_a_clipboard(browser, tmp_path):
    """In a frame that may not copy, the code is selected at least."""
    page = saved(GPT, tmp_path)
    with opened(browser, page) as tab:
        tab.evaluate("navigator.clipboard.writeText = async () => { throw new Error(); }; 0")
        tab.click("#code button.copy")
        tab.wait_for_function("document.getElementById('copied').textContent !== ''")
        assert tab.evaluate("getSelection().toString()").strip() == CODE.strip()


@pytest.mark.slow
def test_no_constraints(browser, tmp_path):
    """A plan that needs none says so, without a table or a doubt."""
    one = dataclasses.replace(GPT, inside=known(Inside(constraints=(), note="It is the same.")))
    with opened(browser, saved(one, tmp_path)) as tab:
        assert "No constraints inside are needed." in tab.inner_text("#code")
        assert "It is the same." in tab.inner_text("#code .hint")
        assert tab.locator("#constraints, #code .note").count() == 0


@pytest.mark.slow
def test_no_constraints_that_help(browser, tmp_path):
    """Code without any whose program is not the plan's says that, and not that none are needed."""
    inside = known(Inside(constraints=(), note="It sends more.", exact=False))
    with opened(browser, saved(dataclasses.replace(GPT, inside=inside), tmp_path)) as tab:
        text = tab.inner_text("#code")
        assert "No constraints inside were found that bring" in text
        assert "needed" not in text
        assert "It sends more." in tab.inner_text("#code .note")


# The schedule


def test_lanes_and_their_file(browser, tmp_path):
    """A layer of the schedule is drawn as in a report, and downloaded as a trace."""
    with opened(browser, saved(GPT, tmp_path), width=1400) as tab:
        heads = tab.eval_on_selector_all(
            ".lanes tbody tr",
            "all => all.map(row => [...row.cells].slice(0, 3).map(c => c.innerText.trim()))",
        )
        assert heads[0] == ["core", "70%", ""]
        assert heads[-1] == ["links y+", "20%", "model"]
        with tab.expect_download() as download:
            tab.click("#trace")
        assert download.value.suggested_filename == "layer.json"
        found = json.loads(download.value.path().read_text())["traceEvents"]
    whole = trace_events(GPT.report)
    assert found == [one for one in whole if one["pid"] == 2]
    assert sum(one["ph"] == "X" for one in found) == len(GPT.report.time.layer)


# Prices


@pytest.mark.slow
def test_prices(browser, tmp_path):
    """An array opens to what other places cost, the cheapest first; a search finds it."""
    other = placed("third", (8, 8), ((), ()), prices=(Price((("data",), ()), 0.0, 0.0),))
    one = dataclasses.replace(GPT, results=(other,))
    with opened(browser, saved(one, tmp_path)) as tab:
        assert tab.locator("#prices details").count() == 2
        tab.click("#prices details summary >> nth=0")
        rows = tab.eval_on_selector_all(
            "#prices details[open] tbody tr",
            "all => all.map(row => [...row.cells].map(c => c.textContent.replace(/\\s+/g, ' ')"
            ".trim()))",
        )
        assert [[row[0].replace(" ", ""), *row[1:]] for row in rows] == [
            ["P(None,'model','data')", "-50.0 us", "-3.0 MiB"],
            ["P(None,None,'model')", "+1.20 ms", "+192.0 MiB"],
            ["replicated", "+12.0 ms", "+2.5 GiB"],
        ]
        tab.fill("#values-text", "third")
        assert tab.inner_text("#values-shown") == "1 of 2 values"
        assert tab.locator("#prices details:visible .name").all_inner_texts() == ["third"]
    with opened(browser, saved(BARE, tmp_path)) as tab:
        assert "No other places were priced." in tab.inner_text("#prices")


# Looks


@pytest.mark.slow
def test_nothing_is_wider_than_the_window(browser, tmp_path):
    """The page fits every screen, in light and in dark."""
    axes = {"axis" * 15: 4, **{axis: size for axis, size in GPT.axes.items() if axis != "data"}}
    first = dataclasses.replace(GPT.chosen, name="expert" * 12, axes=axes)
    long = dataclasses.replace(
        GPT, axes=axes, arguments=(placed("layer" * 30, (8, 8), (("model",),)),),
        candidates=(first, *GPT.candidates),
        deviations=(dataclasses.replace(GPT.deviations[0], cause="of another kind " * 20),),
    )  # fmt: skip
    for one in (GPT, BARE, long):
        assert_fits_screens(browser, saved(one, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme, browser, tmp_path):
    """All text has the contrast of WCAG AA, and points that of graphics, 3 to 1."""
    for one in (GPT, BARE):
        with opened(browser, saved(one, tmp_path), width=1440, color_scheme=scheme) as tab:
            for row in tab.locator("details").all():
                row.evaluate("one => { one.open = true; }")
            assert tab.evaluate(_CONTRAST) == []
    with opened(browser, saved(GPT, tmp_path), color_scheme=scheme) as tab:
        paper = tab.eval_on_selector("#scatter", "one => getComputedStyle(one).backgroundColor")
        inks = tab.eval_on_selector_all(
            "#scatter .mark-of > :nth-child(2), #scatter .budget",
            "all => all.map(one => getComputedStyle(one).stroke)",
        )
    for ink in inks:
        lighter, darker = sorted([luminance(ink), luminance(paper)], reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3


@pytest.mark.slow
def test_without_a_script(browser, tmp_path):
    """The page reads without JavaScript: every figure is in the document, and no dead button."""
    page = saved(GPT, tmp_path)
    with opened(browser, page, java_script_enabled=False) as tab:
        text = tab.inner_text("body")
        for wanted in ("100 ms a call", "Megatron", "over the budget", "+22%", CODE.split("\n")[0]):
            assert wanted in text
        assert tab.locator("button.copy, #trace, #theme").locator("visible=true").count() == 0
        assert tab.locator("#scatter .mark-of title").all_text_contents()[2] == (
            "FSDP on data=8, model=1: 127 ms, 2.0 GiB; 27% slower"
        )


@pytest.mark.slow
def test_names_stay_text(browser, tmp_path):
    """Whatever a plan names, it is shown and never markup."""
    axes = {EVIL: 8}
    evil = candidate(EVIL, failure=EVIL, axes=axes, orders={EVIL: (EVIL,)})
    found = tuple(
        dataclasses.replace(one, file=f"/w/{EVIL}", function=EVIL, expression=EVIL, spec=((EVIL,),))
        for one in CONSTRAINTS
    )
    array = placed(EVIL, (8,), ((EVIL,),), dtype=EVIL, prices=(Price(((EVIL,),), 0.1, 1.0),))
    one = dataclasses.replace(
        GPT, name=EVIL, topology=EVIL, device_kind=EVIL, chip=EVIL, axes=axes,
        arguments=(array, array), results=(array,), candidates=(evil, evil),
        versions={EVIL: EVIL}, inside=known(Inside(constraints=found, exact=False, note=EVIL)),
    )  # fmt: skip
    with opened(browser, saved(one, tmp_path), width=1440) as tab:
        tab.focus("#scatter .mark-of[data-i='1']")
        assert tab.inner_text("#about h3") == EVIL
        assert tab.evaluate("window.broken") is None
        assert tab.locator("img").count() == 0
        assert tab.locator("script").count() == 2
        assert EVIL in tab.inner_text("main")


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(plans())
def test_any_plan_has_a_page(one):
    """Whatever a plan holds, its page can be written."""
    page = one.to_html()
    page.encode("utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert page.rstrip().endswith("</html>")


def test_in_a_notebook():
    """A cell shows the page in a frame of its own, and the sentence before it."""
    found = GPT._repr_html_()
    assert found.startswith("<p>Plan of train_step on v5e:4x2, data=4, model=2: 100 ms a call")
    assert 'sandbox="allow-scripts"' in found
