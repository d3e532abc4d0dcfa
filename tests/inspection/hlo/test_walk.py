"""Which computations of a program run, in which order and how often, against counts by hand."""

import pytest

from spmd.inspection.hlo import calls, loops, text as hlo_text
from spmd.inspection.hlo.calls import visits


def _module(**computations):
    """A module out of lists of lines; the computation called `main` is the entry."""
    text = "HloModule m\n\n"
    for name, lines in computations.items():
        entry = "ENTRY " if name == "main" else ""
        inside = "".join(f"  {line}\n" for line in lines)
        text += f"{entry}%{name} (p: f32[8]) -> f32[8] {{\n{inside}}}\n\n"
    return hlo_text.parse_module(text)


X = "%x = f32[8]{0} parameter(0)"


def _call(name, callee, operand="x"):
    return f"%{name} = f32[8]{{0}} call(%{operand}), to_apply=%{callee}"


def _loop(name, body, trips=None, condition="test"):
    count = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' * (trips is not None)
    return f"%{name} = f32[8]{{0}} while(%x), condition=%{condition}, body=%{body}{count}"


def _executions(module):
    return {name: visit.executions for name, visit in visits(module).items()}


def test_the_entry_runs_once():
    """A program without calls is its entry, once, under no conditions."""
    (visit,) = visits(_module(main=[X])).values()
    assert (visit.executions, visit.caller) == (1, None)
    flags = visit.conditional, visit.in_loop, visit.in_fusion, visit.is_async
    assert flags == (False,) * 4


def test_what_is_never_called_is_not_there():
    """A reduction's scalar function and a computation that nobody names do not run."""
    reduce = "%r = f32[] reduce(%x, %x), dimensions={0}, to_apply=%add"
    assert [*visits(_module(add=[X], unused=[X], main=[X, reduce]))] == ["main"]


def test_calls_from_several_places_are_summed():
    """Two calls and one from a loop of five are seven executions of one entry."""
    found = _executions(
        _module(
            work=[X],
            body=[X, _call("c", "work")],
            test=[X],
            main=[X, _call("a", "work"), _loop("w", "body", 5), _call("b", "work")],
        )
    )
    assert found == {"main": 1, "work": 7, "test": 6, "body": 5}


def test_the_order_is_that_of_the_program():
    """What is reached first stands first, also where it is reached again later."""
    module = _module(
        late=[X, _call("a", "early")],
        early=[X],
        inner=[X],
        middle=[X, _call("a", "inner")],
        main=[X, _call("a", "early"), _call("b", "middle"), _call("c", "late")],
    )
    assert [*visits(module)] == ["main", "early", "middle", "inner", "late"]


def test_executions_wait_for_all_callers():
    """A computation passes on what all its callers add up to, the last one included."""
    found = _executions(
        _module(
            leaf=[X],
            shared=[X, _call("a", "leaf"), _call("b", "leaf")],
            far=[X, _call("a", "shared")],
            main=[X, _call("a", "shared"), _call("b", "far"), _call("c", "far")],
        )
    )
    assert found["shared"] == 3
    assert found["leaf"] == 6


def test_nested_loops_multiply():
    """Loops of 3 in loops of 5 run their body 15 times and test 5 * 4 times."""
    module = _module(
        work=[X],
        body=[X, _call("a", "work")],
        outer=[X, _loop("w", "body", 3)],
        test=[X],
        outer_test=[X],
        main=[X, _loop("w", "outer", 5, "outer_test")],
    )
    found = visits(module)
    assert _executions(module) == {
        "main": 1, "outer_test": 6, "outer": 5, "test": 20, "body": 15, "work": 15,
    }  # fmt: skip
    assert {name for name, visit in found.items() if not visit.in_loop} == {"main"}
    assert found["work"].caller.name == "a"


@pytest.mark.parametrize(("limits", "trips"), [((4, 4), 8), ((3, 5), None), ((5, 3), None)])
def test_constants_of_one_caller_alone_are_not_known(limits, trips):
    """A loop to a limit that two calls give is counted where both give the same one."""
    state = "(s32[], s32[])"
    split = [f"%{n} = s32[] get-tuple-element(%p), index={i}" for i, n in enumerate("in")]
    entry = [
        "%zero = s32[] constant(0)",
        f"%a = s32[] constant({limits[0]})",
        f"%b = s32[] constant({limits[1]})",
        f"%s = {state} tuple(%zero, %a)",
        f"%t = {state} tuple(%zero, %b)",
        f"%u = {state} call(%s), to_apply=%work",
        f"ROOT %v = {state} call(%t), to_apply=%work",
    ]
    given = f"%p = {state} parameter(0)"
    module = _module(
        test=[given, *split, "ROOT %less = pred[] compare(%i, %n), direction=LT"],
        body=[
            given,
            *split,
            "%one = s32[] constant(1)",
            "%next = s32[] add(%i, %one)",
            f"ROOT %out = {state} tuple(%next, %n)",
        ],
        work=[given, f"ROOT %w = {state} while(%p), condition=%test, body=%body"],
        main=entry,
    )
    assert _executions(module)["body"] == trips


@pytest.mark.parametrize(
    "branches",
    ["true_computation=%first, false_computation=%second", "branch_computations={%first, %second}"],
)
def test_a_branch_counts_with_its_own_operand(branches):
    """A loop in a branch has the limit that its own operand gives, not that of another branch."""
    state = "(s32[], s32[])"
    given = f"%p = {state} parameter(0)"
    split = [f"%{n} = s32[] get-tuple-element(%p), index={i}" for i, n in enumerate("in")]
    step = ["%one = s32[] constant(1)", "%j = s32[] add(%i, %one)"]
    test = [given, *split, "ROOT %less = pred[] compare(%i, %n), direction=LT"]
    body = [given, *split, *step, f"ROOT %out = {state} tuple(%j, %n)"]
    loop = f"ROOT %w = {state} while(%p), condition=%{{0}}_test, body=%{{0}}_body"
    entry = [
        "%q = pred[] parameter(0)",
        "%zero = s32[] constant(0)",
        "%five = s32[] constant(5)",
        "%seven = s32[] constant(7)",
        f"%s = {state} tuple(%zero, %five)",
        f"%t = {state} tuple(%zero, %seven)",
        f"ROOT %c = {state} conditional(%q, %s, %t), {branches}",
    ]
    module = _module(
        first_test=test,
        first_body=body,
        first=[given, loop.format("first")],
        second_test=test,
        second_body=body,
        second=[given, loop.format("second")],
        main=entry,
    )
    found = _executions(module)
    assert (found["first_body"], found["second_body"]) == (5, 7)


def test_unknown_counts_spread():
    """In a loop of unknown count all is unknown, and so is what is called there as well."""
    module = _module(
        work=[X],
        body=[X, _call("a", "work")],
        outer=[X, _loop("inner", "body", 3)],
        test=[X],
        main=[X, _call("a", "work"), _loop("w", "outer")],
    )
    found = visits(module)
    assert _executions(module) == {
        "main": 1, "work": None, "test": None, "outer": None, "body": None,
    }  # fmt: skip
    # The inner loop has a count of its own: it is not a second unknown one.
    assert found["outer"].unknown_loops == {"w"}
    assert found["body"].unknown_loops == frozenset()


def test_an_unknown_loop_in_one_that_never_runs():
    """Zero times anything is zero, the unknown included; the test of the outer one runs once."""
    found = _executions(
        _module(
            body=[X],
            outer=[X, _loop("inner", "body")],
            test=[X],
            outer_test=[X],
            main=[X, _loop("w", "outer", 0, "outer_test")],
        )
    )
    assert found == {"main": 1, "outer_test": 1, "outer": 0, "test": 0, "body": 0}


@pytest.mark.parametrize(
    "branches",
    ["true_computation=%yes, false_computation=%no", "branch_computations={%yes, %no}"],
)
def test_both_branches_are_conditional(branches):
    """Both branches run as often as the conditional, marked, together with all that they call."""
    module = _module(
        deep=[X],
        yes=[X, _call("a", "deep")],
        no=[X],
        shared=[X],
        main=[
            X,
            f"%c = f32[8]{{0}} conditional(%x, %x, %x), {branches}",
            _call("b", "shared"),
        ],
    )
    found = visits(module)
    assert _executions(module) == dict.fromkeys(["main", "yes", "deep", "no", "shared"], 1)
    assert {n for n, visit in found.items() if visit.conditional} == {"yes", "deep", "no"}


def test_what_also_runs_without_a_branch_is_not_conditional():
    """A computation with a way around the branch runs for certain, so it is not marked."""
    branch = "%c = f32[8]{0} conditional(%x, %x, %x), branch_computations={%work, %other}"
    module = _module(work=[X], other=[X], main=[X, branch, _call("a", "work")])
    found = visits(module)
    assert not found["work"].conditional
    assert found["other"].conditional
    assert found["work"].executions == 2


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("%f = f32[8]{0} fusion(%x), kind=kLoop, calls=%work", (True, False)),
        ("%f = ((f32[8]), f32[8]) async-start(%x), calls=%work", (False, True)),
        ("%f = ((f32[8]), f32[8]) call-start(%x), to_apply=%work", (False, True)),
        ("%f = ((f32[8]), f32[8]) fusion-start(%x), kind=kLoop, calls=%work", (True, True)),
        ("%f = f32[8]{0} call(%x), to_apply=%work", (False, False)),
    ],
)
def test_fusions_and_starts_are_told(line, flags):
    """What runs inside one operation, or beside others, is marked down to the last call."""
    module = _module(leaf=[X], work=[X, _call("a", "leaf")], main=[X, line])
    found = visits(module)
    for name in ("work", "leaf"):
        assert (found[name].in_fusion, found[name].is_async) == flags
    assert found["work"].caller.name == "f"


def test_the_end_of_an_asynchronous_call_is_no_second_one():
    """The update and the done name the computation again, which the start alone runs."""
    lines = [
        "%s = ((f32[8]), f32[8]) async-start(%x), calls=%work",
        "%u = ((f32[8]), f32[8]) async-update(%s), calls=%work",
        "%d = f32[8]{0} async-done(%u), calls=%work",
    ]
    assert _executions(_module(work=[X], main=[X, *lines])) == {"main": 1, "work": 1}


def test_names_in_strings_are_no_calls():
    """A scope that looks like a call calls nothing."""
    line = f'{_call("a", "work")}, metadata={{op_name="f, to_apply=%other/calls=%other"}}'
    assert [*visits(_module(work=[X], other=[X], main=[X, line]))] == ["main", "work"]


def test_names_that_are_nowhere_are_left_out():
    """Calls of computations that the text does not have are no computations."""
    assert [*visits(_module(main=[X, _call("a", "gone"), _loop("w", "gone", 3, "too")]))] == [
        "main"
    ]


def test_without_an_entry_nothing_runs():
    """A module without an entry, or without anything, has nothing that runs."""
    assert visits(_module(work=[X])) == {}
    assert visits(hlo_text.parse_module("")) == {}
    assert visits(hlo_text.parse_module("HloModule empty\n")) == {}


def test_deep_call_graphs():
    """Two thousand calls inside each other are followed to the last."""
    chain = {f"f{i}": [X, _call("a", f"f{i + 1}")] for i in range(2000)}
    found = _executions(_module(f2000=[X], **chain, main=[X, _call("a", "f0")]))
    assert (len(found), found["f2000"]) == (2002, 1)


def test_a_diamond_is_walked_once():
    """Forty levels of two calls each are 2**40 executions, of which none is walked by itself."""
    levels = {f"f{i}": [X, _call("a", f"f{i + 1}"), _call("b", f"f{i + 1}")] for i in range(40)}
    assert _executions(_module(f40=[X], **levels, main=[X, _call("a", "f0")]))["f40"] == 2**40


def test_many_loops_do_not_read_their_surroundings_anew(monkeypatch):
    """A computation with a thousand loops is opened once, not once for each."""
    opened = []

    class Reader(loops.Reader):
        def __init__(self, module, computation, *rest):
            opened.append(computation.name)
            super().__init__(module, computation, *rest)

    for module in (calls, loops):
        monkeypatch.setattr(module, "Reader", Reader)
    module = _module(body=[X], test=[X], main=[X, *[_loop(f"w{i}", "body") for i in range(1000)]])
    assert visits(module)["body"].unknown_loops == {f"w{i}" for i in range(1000)}
    assert opened.count("main") == 1


@pytest.mark.parametrize(
    "computations",
    [
        {"a": [X, _call("c", "a")], "main": [X, _call("c", "a")]},
        {"a": [X, _call("c", "b")], "b": [X, _call("c", "a")], "main": [X, _call("c", "a")]},
        {"main": [X, _call("c", "main"), _call("d", "main")]},
        {
            "test": [X],
            "a": [X, _loop("w", "b", 2), _call("c", "b")],
            "b": [X, _loop("w", "a", 3), _call("c", "a")],
            "main": [X, _call("c", "a"), _call("d", "b")],
        },
    ],
)
def test_circles_end(computations):
    """A text in which computations call themselves is walked to an end, each one once."""
    found = visits(_module(**computations))
    assert {*found} == {*computations}
