"""What terminals and logs show of a plan: a screen, prices of other places, differences."""

import dataclasses
from pathlib import Path
import re

from hypothesis import given, settings, strategies as st
from plans import (
    BARE,
    DEVIATIONS,
    GIB,
    GPT,
    MIB,
    MODEL,
    UP,
    candidate,
    compiled,
    placed,
    plans,
    tree,
)
import pytest
from rich.cells import cell_len
from test_text import drawn, row_of

from spmd.errors import ArgumentError
from spmd.inspection.records.later import Later
from spmd.inspection.records.plan import Placed
from spmd.inspection.show import plan_words as said
from spmd.inspection.show.plan import MOST_ROWS, difference, why

GOLDENS = Path(__file__).parents[1] / "goldens"


def changed(plan, **fields):
    """A plan whose chosen candidate has other fields."""
    chosen = dataclasses.replace(plan.chosen, **fields)
    return dataclasses.replace(plan, candidates=(chosen, *plan.candidates[1:]))


# A screen


def test_golden():
    """A plan looks as in the file, to the letter, and fits a screen."""
    text = drawn(GPT, 100)
    assert text == (GOLDENS / "plan_100.txt").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100


def test_print_is_what_a_log_has(capsys):
    """`print(plan)` has the same words in ASCII, and `plan.print()` draws them."""
    assert str(GPT).split() == drawn(GPT, 100).replace("─", "-").split()
    GPT.print()
    assert "train_step on v5e:4x2" in capsys.readouterr().out
    assert repr(GPT) == (
        "<Plan of train_step on v5e:4x2, data=4, model=2: 100 ms a call, verified by time>"
    )


def test_nothing_is_worked_out_for_a_screen():
    """Constraints take seconds to find: a screen does not wait for them."""
    asked = []
    one = dataclasses.replace(GPT, inside=Later(lambda: asked.append(1)))
    assert str(one) == str(GPT)
    assert asked == []


def test_how_it_was_verified():
    """The head says whether a compiler saw the plan, and whether it was for the hardware."""
    assert "\ncompiled; 122 ms a call was predicted (+22%)\n" in str(GPT)
    by_bytes = str(changed(GPT, verified="bytes"))
    assert "\n122 ms a call on v5e (predicted); bound by compute\n" in by_bytes
    doubt = "CPU devices stand in for the hardware; topology= asks its own compiler"
    assert f"\nverified by bytes: {doubt}\n" in by_bytes
    bare = str(BARE).splitlines()
    assert bare[:5] == [
        "train_step on cpu; mesh data=4, model=2 of 8 devices",
        "110 ms a call on v5e (predicted); bound by compute",
        "4.0 GiB a device, estimated",
        "not verified: no compiler has seen this plan",
        "the search was ended early: there may be a better plan",
    ]
    assert bare[-1] == "2,842 plans tried in 2.80 s"


def test_memory_and_the_budget():
    """What a device holds is told with its share of the budget, above which it stands out."""
    assert "\n3.0 GiB of 5.0 GiB a device, 60%\n" in str(GPT)
    over = drawn(changed(GPT, peak=6 * GIB), 100, color="standard")
    assert "\x1b[1;31m6.0 GiB of 5.0 GiB a device, 120%" in over
    assert "chosen, over the budget" in over


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (compiled("x", 0.1004, GIB), "as fast"),
        (compiled("x", 0.08, GIB), "20% faster"),
        (compiled("x", 0.15, GIB), "50% slower"),
        (compiled("x", 0.15, 6 * GIB), "over the budget"),
        (candidate("x", failure="no room"), "refused"),
        # Not compiled: what was predicted of both, 122 ms for the chosen one.
        (candidate("x", predicted=0.183), "predicted 50% slower"),
        (candidate("x", predicted=0.061, estimated_peak=9 * GIB), "over the budget"),
        (candidate("x", predicted=0.061, verified="bytes", peak=GIB), "50% slower"),
    ],
)
def test_verdicts(one, verdict):
    """A candidate is compared with the chosen one by what is known of both."""
    if verdict == "50% slower" and one.verified == "bytes":
        one = dataclasses.replace(one, predicted=0.183)
    assert said.verdict(one, GPT) == verdict
    assert said.verdict(GPT.chosen, GPT) == "chosen"


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (candidate("x", predicted=0.0976), "predicted 20% faster at most"),
        (candidate("x", predicted=0.1221), "predicted as fast at most"),
        (candidate("x", predicted=0.1464), "predicted 20% slower"),
        (candidate("x", predicted=0.0976, told=MIB), "predicted 20% faster"),
        (compiled("x", 0.08, GIB), "20% faster"),
    ],
)
def test_what_shardy_was_not_asked_of_is_a_bound(one, verdict):
    """Its exchanges can only add to a prediction, and are part of that of the chosen one."""
    assert GPT.chosen.predicted == 0.122
    assert said.verdict(one, changed(GPT, told=MIB)) == verdict
    assert said.verdict(one, changed(GPT, told=None)) == verdict.removesuffix(" at most")


def test_meshes_that_were_passed_over():
    """Below all, those for one reason together; nothing where there are none."""
    assert "passed over" not in str(GPT)
    left = {"data=8, model=1": "ValueError: x", "data=1, model=8": "TypeError: y\x1b[0m"}
    left |= {"data=2, model=4": "ValueError: x"}
    text = drawn(dataclasses.replace(GPT, passed_over=left), 200)
    name = GPT.name
    assert text.rstrip().splitlines()[-2:] == [
        f"passed over: data=8, model=1; data=2, model=4, for which {name} raises ValueError: x",
        f"passed over: data=1, model=8, for which {name} raises TypeError: y\\x1b[0m",
    ]


def test_waits_by_axes():
    """Of a compiled candidate waits are told by axis, in full where there is room."""
    row = next(line for line in drawn(GPT, 140).splitlines() if line.startswith("  found"))
    assert "data 30.0 ms; model 6.00 ms; no axis 4.00 ms" in row
    assert "data 30.0 ms + 2 " in row_of_line(drawn(GPT, 100), "  found")
    assert "56.0 ms at most" in drawn(GPT, 100)
    alone = dataclasses.replace(GPT, candidates=(candidate("x", exchange=0.0),))
    assert " none " in row_of_line(drawn(alone, 100), "  x ")


def row_of_line(text, start):
    """The first line that begins so."""
    return next(line for line in text.splitlines() if line.startswith(start))


# Where arrays lie


def test_arrays_that_lie_alike_are_a_row():
    """Parameters with their moments are a row; results that lie as an argument are one."""
    text = drawn(GPT, 140)
    assert row_of(text, "state{['params'], ['opt'].mu, ['opt'].nu}['up']") == [
        "state{['params'],", "['opt'].mu,", "['opt'].nu}['up']", "x3", "P(None,", "'data',",
        "'model')", "24.0", "MiB",
    ]  # fmt: skip
    assert row_of(text, "batch")[-1] == "fixed"
    assert row_of(text, "result[0]") == ["result[0]", "x19", "as", "state", "118.9", "MiB"]
    assert row_of(text, "result[1]") == ["result[1]", "P()", "4", "B"]


def test_results_that_lie_elsewhere():
    """A result that differs from the argument in one place is not said to lie as it does."""
    results = (dataclasses.replace(GPT.results[0], spec=((), (), ())), *GPT.results[1:])
    one = dataclasses.replace(GPT, results=results)
    assert "as state" not in str(one)
    assert row_of(drawn(one, 140), "result[0]['params']['down', 'norm']")[2:4] == ["x2", "P()"]


def test_many_rows_are_those_of_most_bytes():
    """Of a program with many different places those of most bytes are shown, in their order."""
    arrays = tuple(
        placed(f"a{i}", (2**i, 8), (("data",),) if i % 2 else ((), MODEL)) for i in range(20)
    )
    one = dataclasses.replace(GPT, arguments=arrays, results=())
    text = str(one)
    shown = re.findall(r"^  (a\d+) ", text, re.M)
    assert shown == [f"a{i}" for i in range(20 - MOST_ROWS, 20)]
    assert "8 more rows of 8 arrays, not shown" in text


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("f32", 64), ("float32", 64), ("bfloat16", 32), ("bf16", 32), ("int4", 8), ("s4", 8),
     ("bool", 16), ("pred", 16), ("float8_e4m3fn", 16), ("complex64", 128), ("key<fry>", None)],
)  # fmt: skip
def test_bytes_of_a_device(dtype, nbytes):
    """An array of 8 x 8 over four devices has a quarter of its bytes on each."""
    one = Placed(name="x", dtype=dtype, shape=(8, 8), spec=(("data",), ()))
    assert one.nbytes_on({"data": 4, "model": 2}) == nbytes
    assert said.nbytes([one, one], {"data": 4}) == (None if nbytes is None else 2 * nbytes)


def test_candidates_that_are_many():
    """Ten are shown, and the others counted."""
    some = tuple(candidate(f"found {i}") for i in range(14))
    text = str(dataclasses.replace(GPT, candidates=some))
    assert len(re.findall(r"^  found \d+", text, re.M)) == 10
    assert "4 more candidates, not shown" in text


@pytest.mark.parametrize(
    ("same", "title"),
    [
        ((), "found"),
        (("Megatron",), "found = Megatron"),
        (("Megatron", "FSDP x TP", "context"), "found = Megatron and 2 more"),
    ],
)
def test_an_expert_whose_program_it_is(same, title):
    """It is named, and others that are it as well are counted."""
    one = dataclasses.replace(GPT.chosen, name="found", same=same)
    text = str(dataclasses.replace(GPT, candidates=(one, *GPT.candidates[1:])))
    assert re.search(rf"^  {title} +4 x 2", text, re.M)


def test_bytes_that_were_not_predicted():
    """Each difference has its bytes, its cause and its line, above both totals; six are shown."""
    text = drawn(GPT, 140)
    start = text.index("Bytes that were not predicted")
    assert [line.split() for line in text[start:].splitlines()[3:7] if "──" not in line] == [
        ["all-reduce", "data", "80.0", "MiB", "40.0", "MiB", "a", "reduce-scatter,", "not", "an",
         "all-reduce", "/w/model/transformer.py:57", "mlp"],
        ["all-gather", "data,", "model", "none", "20.0", "MiB", "no", "sharding", "asks", "for",
         "it"],
        ["all", "320.0", "MiB", "300.0", "MiB"],
    ]  # fmt: skip
    many = dataclasses.replace(GPT, deviations=DEVIATIONS[:1] * 8)
    assert str(many).count("a reduce-scatter, not an all-reduce") == 6
    assert "2 more differences, not shown" in str(many)
    assert "Bytes that were not predicted" not in str(BARE)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(plans(), st.integers(60, 160))
def test_any_plan_fits_any_width(one, width):
    """No line is longer than the terminal or trails blanks, whatever a plan holds."""
    for line in drawn(one, width).split("\n"):
        assert cell_len(line) <= width
        assert line == line.rstrip()
        assert line.isprintable()


# Prices


def test_prices_of_other_places():
    """Other places are told with what they cost, the least time first."""
    assert why(GPT, UP).splitlines() == [
        "state['params']['up'] f32[4,1024,4096] lies as P(None, 'data', 'model')",
        "  P(None, 'model', 'data')  -50.0 us    -3.0 MiB",
        "  P(None, None, 'model')    +1.20 ms  +192.0 MiB",
        "  replicated                +12.0 ms    +2.5 GiB",
        "estimated: how much longer a call takes, and a device holds more",
    ]
    assert GPT.why(UP) == why(GPT, UP)
    assert why(BARE, "rate").splitlines() == [
        "rate f32[] is a scalar",
        "no other place was looked at",
    ]
    assert why(GPT, "batch").startswith("batch s32[64,512] lies as P('data'); as it was said to\n")
    assert why(GPT, "result[1]")


def test_prices_below_a_path():
    """A path as the table folds it, which holds several arrays, says it of each."""
    below = [one.name for one in GPT.arguments if one.name.startswith("state['params'][")]
    assert len(below) > 1
    assert why(GPT, "state['params']") == "\n".join(why(GPT, name) for name in below)


def test_a_path_that_is_none():
    """An unknown path is refused with the one that was meant."""
    with pytest.raises(ArgumentError) as caught:
        why(BARE, "rat")
    assert str(caught.value).splitlines() == [
        "plan of `train_step` has no argument or result rat (did you mean 'rate'?).",
        "  expected  one of x, rate, result",
    ]


# Two plans


def test_differences():
    """What differs of the whole comes first, then arrays that lie elsewhere, folded."""
    other = dataclasses.replace(
        GPT,
        axes={"data": 2, "model": 4},
        candidates=GPT.candidates[1:],
        arguments=tuple(
            dataclasses.replace(one, spec=((), (), MODEL)) if one.name.endswith("['up']") else one
            for one in GPT.arguments
        ),
    )
    assert GPT.diff(other) == difference(GPT, other)
    golden = (GOLDENS / "plan_diff_100.txt").read_text(encoding="utf-8")
    assert difference(GPT, other) == golden.rstrip("\n")


def test_no_differences():
    """Of two plans that are the same, only what they are is told."""
    assert difference(GPT, GPT).splitlines()[1:] == [
        "",
        "Where arrays lie",
        "  40 arrays the same in both",
    ]


def test_arrays_that_one_plan_lacks():
    """Plans of programs with other arguments are compared by name."""
    other = dataclasses.replace(GPT, arguments=tree("state"), results=())
    text = difference(GPT, other)
    assert row_of(text, "batch") == ["batch", "P('data')", "none"]
    assert row_of(text, "result[1]") == ["result[1]", "P()", "none"]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(plans(), plans())
def test_any_two_plans_are_compared(one, other):
    """Differences of any two plans, and prices of any array, are text that can be printed."""
    text = difference(one, other)
    assert all(line.isprintable() and cell_len(line) <= 100 for line in text.split("\n"))
    for array in one.arguments:
        assert why(one, array.name)
