"""Trip counts that are worked out from conditions, against simulation and real compilers."""

import operator
import re

from hardware import require_libtpu
from hypothesis import example, given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from spmd.inspection.hlo import calls, loops, text as hlo_text

COMPARE = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
    "NE": operator.ne, "EQ": operator.eq,
}  # fmt: skip


# The formula


def _simulate(first, limit, step, direction):
    """The number of iterations, or None where a loop over small numbers does not end."""
    for trips in range(300):
        if not COMPARE[direction](first, limit):
            return trips
        first += step
    return None


SMALL = st.integers(-40, 40)


@pytest.mark.slow
@given(SMALL, SMALL, st.integers(-6, 6), st.sampled_from([*COMPARE]))
@settings(max_examples=400, deadline=None)
@example(0, 0, 0, "EQ")
@example(0, 12, 5, "NE")
@example(5, 5, 0, "LE")
def test_the_formula_agrees_with_simulation(first, limit, step, direction):
    """For every start, limit, step and direction the count is that of running the loop."""
    found = loops.count_trips(first, limit, step, direction)
    assert found == _simulate(first, limit, step, direction)


def test_huge_counts_are_exact():
    """Counts beyond what a float holds come out to the last digit."""
    assert loops.count_trips(0, 10**30 + 1, 1, "LT") == 10**30 + 1
    assert loops.count_trips(0, 10**30 + 1, 10**15, "LE") == 10**15 + 1


def test_an_unknown_direction_has_no_count():
    """A comparison that no compiler writes today is not guessed at."""
    assert loops.count_trips(0, 4, 1, "XX") is None


# Loops as text


def _text(condition, body, starts, *, types=None, before="", more=""):
    """A module whose entry runs one loop.

    `condition` and `body` are lines, the last of which is the root; they find elements of the
    state as %e0, %e1, and so on. `starts` are constants, or names of instructions in `before`.
    """
    types = types or ["s32[]"] * len(starts)
    state = f"({', '.join(types)})"
    elements = "".join(
        f"  %e{i} = {kind} get-tuple-element(%p), index={i}\n" for i, kind in enumerate(types)
    )

    def computation(name, result, lines):
        *others, root = [line.strip() for line in lines.strip().splitlines()]
        inside = "".join(f"  {line}\n" for line in others)
        head = f"%{name} (p: {state}) -> {result} {{\n  %p = {state} parameter(0)\n"
        return f"{head}{elements}{inside}  ROOT {root}\n}}\n\n"

    values, names = "", []
    for i, start in enumerate(starts):
        named = isinstance(start, str)
        values += "" if named else f"  %start{i} = {types[i]} constant({start})\n"
        names.append(start if named else f"%start{i}")
    return (
        f"HloModule m\n\n{more}"
        + computation("condition", "pred[]", condition)
        + computation("body", state, body)
        + f"ENTRY %main (x: f32[8]) -> {state} {{\n  %x = f32[8]{{0}} parameter(0)\n"
        + before
        + values
        + f"  %state = {state} tuple({', '.join(names)})\n"
        + f"  ROOT %loop = {state} while(%state), condition=%condition, body=%body\n}}\n"
    )


def _trips(text):
    found = calls.visits(hlo_text.parse_module(text))
    return found["body"].executions


def _counter(dtype, start, limit, step, direction, *, swapped=False, minus=False):
    a, b = ("%limit", "%e0") if swapped else ("%e0", "%limit")
    condition = f"""
        %limit = {dtype} constant({limit})
        %test = pred[] compare({a}, {b}), direction={direction}
    """
    body = f"""
        %step = {dtype} constant({step})
        %next = {dtype} {"subtract" if minus else "add"}(%e0, %step)
        %out = ({dtype}) tuple(%next)
    """
    return _text(condition, body, [start], types=[dtype])


def _run(dtype, start, limit, step, direction, swapped, minus):
    """Run the loop in integers that wrap; the count, and whether no value ever left the range."""
    low = 0 if dtype == "u8[]" else -128
    counter, clean = start, True
    for trips in range(257):  # there are 256 states: after as many it goes round
        pair = (limit, counter) if swapped else (counter, limit)
        if not COMPARE[direction](*pair):
            return trips, clean
        exact = counter - step if minus else counter + step
        counter = (exact - low) % 256 + low
        clean &= exact == counter
    return None, False


@pytest.mark.slow
@given(
    st.sampled_from(["s8[]", "u8[]"]),
    *[st.integers(0, 255)] * 3,
    st.sampled_from([*COMPARE]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=500, deadline=None)
@example("u8[]", 12, 0, 253, "GT", False, False)  # as compilers write 12, 9, 6, 3
@example("s8[]", 0, 120, 50, "LT", False, False)  # wraps to -106 and goes on
@example("u8[]", 10, 3, 20, "GT", False, True)
@example("s8[]", 0, 127, 1, "LE", False, False)  # never ends
@example("u8[]", 0, 0, 1, "GE", False, True)  # never ends
@example("u8[]", 1, 9, 2, "LT", True, False)
def test_integers_wrap_as_they_do_in_the_program(
    dtype, start, limit, step, direction, swapped, minus
):
    """A count is never wrong, and it is found wherever no value leaves the range of its type."""
    if dtype == "s8[]":
        start, limit, step = start - 128, limit - 128, step - 128
    trips, clean = _run(dtype, start, limit, step, direction, swapped, minus)
    text = _counter(dtype, start, limit, step, direction, swapped=swapped, minus=minus)
    found = _trips(text)
    assert found in (None, trips)
    # A step of half the range and more reads as one the other way, which is sound only there.
    small = step <= 127 if dtype == "u8[]" else step != -128
    if clean and small:
        assert found == trips


ADD_ONE = """
    %one = s32[] constant(1)
    %next = s32[] add(%e0, %one)
"""
BELOW = "%test = pred[] compare(%e0, %limit), direction=LT"
LIMIT = f"""
    %limit = s32[] constant(10)
    {BELOW}
"""

COUNTABLE = {
    "plain": (LIMIT, ADD_ONE + "%out = (s32[]) tuple(%next)", [3], 7),
    "negated": (
        """
        %limit = s32[] constant(10)
        %stop = pred[] compare(%e0, %limit), direction=GE
        %test = pred[] not(%stop)
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [3],
        7,
    ),
    "an offset in the test": (
        """
        %limit = s32[] constant(10)
        %three = s32[] constant(3)
        %ahead = s32[] add(%three, %e0)
        %test = pred[] compare(%ahead, %limit), direction=LT
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [0],
        7,
    ),
    "copies everywhere": (
        """
        %start-copy = (s32[], s32[], u32[]) copy-start(%e0)
        %there = s32[]{:S(6)} copy-done(%start-copy)
        %bits = s32[] bitcast(%there)
        %limit = s32[] constant(10)
        %test = pred[] compare(%bits, %limit), direction=LT
        """,
        ADD_ONE + "%again = s32[] copy(%next)\n%out = (s32[]) tuple(%again)",
        [3],
        7,
    ),
    "the limit and the step are carried": (
        "%test = pred[] compare(%e0, %e1), direction=LT",
        "%next = s32[] add(%e0, %e2)\n%out = (s32[], s32[], s32[]) tuple(%next, %e1, %e2)",
        [0, 10, 3],
        4,
    ),
    "the condition is decided": (
        """
        %a = s32[] constant(3)
        %b = s32[] constant(2)
        %test = pred[] compare(%a, %b), direction=LT
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [0],
        0,
    ),
    "two steps in one body": (
        LIMIT,
        ADD_ONE + "%more = s32[] add(%one, %next)\n%out = (s32[]) tuple(%more)",
        [0],
        5,
    ),
    "the test widens": (
        """
        %wide = s64[] convert(%e0)
        %limit = s64[] constant(10)
        %test = pred[] compare(%wide, %limit), direction=LT
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [3],
        7,
    ),
}


@pytest.mark.parametrize("name", COUNTABLE)
def test_a_counter_is_found_behind(name):
    """What stands between a counter and its test does not hide the count."""
    condition, body, starts, trips = COUNTABLE[name]
    assert _trips(_text(condition, body, starts)) == trips


TOGETHER = "%out = (s32[], s32[]) tuple(%next, %e1)"
# Each looks like a loop of 10: a reader that takes the next best constant counts it wrongly.
UNKNOWN = {
    "the limit moves": (
        "%test = pred[] compare(%e0, %e1), direction=LT",
        ADD_ONE + "%far = s32[] add(%e1, %one)\n%out = (s32[], s32[]) tuple(%next, %far)",
        [0, 10],
    ),
    "the limit starts at a value of the data": (
        "%test = pred[] compare(%e0, %e1), direction=LT",
        ADD_ONE + TOGETHER,
        [0, "%data"],
    ),
    "the counter starts at a value of the data": (
        LIMIT,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        ["%data"],
    ),
    "the step moves": (
        LIMIT,
        ADD_ONE + "%jump = s32[] add(%e0, %e1)\n%far = s32[] add(%e1, %one)\n"
        "%out = (s32[], s32[]) tuple(%jump, %far)",
        [0, 1],
    ),
    "the counter doubles": (LIMIT, "%next = s32[] add(%e0, %e0)\n%out = (s32[]) tuple(%next)", [1]),
    "two counters change places": (
        LIMIT,
        ADD_ONE + "%out = (s32[], s32[]) tuple(%e1, %next)",
        [0, 0],
    ),
    "one branch moves it": (
        LIMIT,
        ADD_ONE
        + "%odd = pred[] compare(%e1, %one), direction=EQ\n"
        + "%some = s32[] select(%odd, %next, %e0)\n%out = (s32[], s32[]) tuple(%some, %e1)",
        [0, "%data"],
    ),
    "the test has a second half": (
        """
        %limit = s32[] constant(10)
        %first = pred[] compare(%e0, %limit), direction=LT
        %second = pred[] compare(%e1, %limit), direction=LT
        %test = pred[] and(%first, %second)
        """,
        ADD_ONE + TOGETHER,
        [0, "%data"],
    ),
    "the counter goes down in the limit's place": (
        """
        %limit = s32[] constant(10)
        %left = s32[] subtract(%limit, %e0)
        %zero = s32[] constant(0)
        %test = pred[] compare(%left, %zero), direction=GT
        """,
        "%next = s32[] subtract(%e1, %e0)\n%out = (s32[], s32[]) tuple(%next, %e1)",
        [0, 1],
    ),
    "it never ends": (LIMIT, "%out = (s32[]) tuple(%e0)", [0]),
    "it never meets its end": (
        "%limit = s32[] constant(10)\n%test = pred[] compare(%e0, %limit), direction=NE",
        "%three = s32[] constant(3)\n%next = s32[] add(%e0, %three)\n%out = (s32[]) tuple(%next)",
        [0],
    ),
    "the test cuts bits off": (
        """
        %low = s8[] convert(%e0)
        %limit = s8[] constant(10)
        %test = pred[] compare(%low, %limit), direction=LT
        """,
        "%far = s32[] constant(300)\n%next = s32[] add(%e0, %far)\n%out = (s32[]) tuple(%next)",
        [0],
    ),
    "the step cuts bits off": (
        "%limit = s32[] constant(250)\n%test = pred[] compare(%e0, %limit), direction=LT",
        """
        %low = s8[] convert(%e0)
        %far = s8[] constant(100)
        %sum = s8[] add(%low, %far)
        %next = s32[] convert(%sum)
        %out = (s32[]) tuple(%next)
        """,
        [0],
    ),
    "the body cuts bits off the limit": (
        "%test = pred[] compare(%e0, %e1), direction=LT",
        ADD_ONE
        + "%low = s8[] convert(%e1)\n%cut = s32[] convert(%low)\n"
        + "%out = (s32[], s32[]) tuple(%next, %cut)",
        [0, 300],
    ),
    "the test is of other bits": (
        """
        %bits = u32[] bitcast-convert(%e0)
        %limit = u32[] constant(10)
        %test = pred[] compare(%bits, %limit), direction=LT
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [-5],
    ),
    "a comparison is no number": (
        """
        %limit = s32[] constant(10)
        %less = pred[] compare(%e0, %limit), direction=LT
        %number = s32[] convert(%less)
        %flipped = s32[] not(%number)
        %test = pred[] convert(%flipped)
        """,
        ADD_ONE + "%out = (s32[]) tuple(%next)",
        [0],
    ),
    "the state is not a tuple that the body makes": (LIMIT, "%out = (s32[]) copy(%p)", [0]),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_count_is_guessed_when(name):
    """A loop whose count the constants do not decide has none."""
    condition, body, starts = UNKNOWN[name]
    before = '  %data = s32[] custom-call(%x), custom_call_target="data"\n'
    assert _trips(_text(condition, body, starts, before=before)) is None


FUSED = """\
%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%b, %a), direction=LT
}

%both (a: s32[]) -> (s32[], s32[]) {
  %a = s32[] parameter(0)
  %two = s32[] constant(2)
  %sum = s32[] add(%two, %a)
  ROOT %pair = (s32[], s32[]) tuple(%two, %sum)
}

"""


def test_fusions_around_the_counter():
    """GPU and CPU wrap comparison and addition in fusions, whose parameters may change places."""
    condition = """
        %limit = s32[] constant(10)
        %test = pred[] fusion(%limit, %e0), kind=kLoop, calls=%less
    """
    body = """
        %pair = (s32[], s32[]) fusion(%e0), kind=kLoop, calls=%both
        %next = s32[] get-tuple-element(%pair), index=1
        %out = (s32[]) tuple(%next)
    """
    assert _trips(_text(condition, body, [0], more=FUSED)) == 5


def test_elements_behind_the_fifth_are_not_mixed_up():
    """In a long state every element keeps its place, also behind the comments XLA writes."""
    starts = [7, 7, 7, 7, 7, 0, 12, 3]
    state = f"({', '.join(['s32[]'] * 8)})"
    names = "%e0, %e1, %e2, %e3, %e4, /*index=5*/%next, %e6, %e7"
    body = f"%next = s32[] add(%e5, %e7)\n%out = {state} tuple({names})"
    text = _text("%test = pred[] compare(%e5, %e6), direction=LT", body, starts)
    text = text.replace("%start4, %start5", "%start4, /*index=5*/%start5")
    assert _trips(text) == 4


def test_a_printed_count_is_believed():
    """What the compiler prints is what it runs, whatever the condition says."""
    text = _counter("s32[]", 0, 10, 1, "LT").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    )
    assert _trips(text) == 3


def test_long_chains_do_not_exhaust_the_stack():
    """A counter that 5,000 additions move by one each is counted, and nothing overflows."""
    lines = ["%one = s32[] constant(1)", "%c0 = s32[] add(%e0, %one)"]
    lines += [f"%c{i} = s32[] add(%c{i - 1}, %one)" for i in range(1, 5_000)]
    body = "\n".join([*lines, "%out = (s32[]) tuple(%c4999)"])
    assert _trips(_text(LIMIT.replace("10", "25000"), body, [0])) == 5


def test_values_that_depend_on_themselves_are_unknown():
    """A text with circles in it ends without a count."""
    circle = "%a = s32[] add(%b, %e0)\n%b = s32[] copy(%a)\n%out = (s32[]) tuple(%b)"
    assert _trips(_text(LIMIT, circle, [0])) is None


def test_calls_that_call_themselves_are_unknown():
    """A computation that calls itself ends without a count."""
    more = """\
%self (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  ROOT %r = s32[] call(%a), to_apply=%self
}

"""
    body = "%next = s32[] call(%e0), to_apply=%self\n%out = (s32[]) tuple(%next)"
    assert _trips(_text(LIMIT, body, [0], more=more)) is None


def test_calls_that_double_are_not_followed_for_ever():
    """Forty levels of two calls each are a trillion paths, and none of them is walked."""
    levels = [
        f"%f{i} (a: s32[]) -> s32[] {{\n  %a = s32[] parameter(0)\n"
        f"  %l = s32[] call(%a), to_apply=%f{i + 1}\n  %r = s32[] call(%a), to_apply=%f{i + 1}\n"
        f"  ROOT %s = s32[] add(%l, %r)\n}}\n\n"
        for i in range(40)
    ]
    leaf = "%f40 (a: s32[]) -> s32[] {\n  ROOT %a = s32[] parameter(0)\n}\n\n"
    body = "%next = s32[] call(%e0), to_apply=%f0\n%out = (s32[]) tuple(%next)"
    assert _trips(_text(LIMIT, body, [0], more=leaf + "".join(levels))) is None


@pytest.mark.parametrize(
    "damage",
    [
        ("condition=%condition", "condition=%nowhere"),
        ("body=%body", "body=%nowhere"),
        ("while(%state)", "while()"),
        ("tuple(%start0)", "tuple()"),
        ("get-tuple-element(%p), index=0", "get-tuple-element(%p), index=9"),
        ("constant(10)", "constant({...})"),
        ("parameter(0)\n  %e0", "parameter(4)\n  %e0"),
    ],
)
def test_damaged_loops_have_no_count(damage):
    """A text that misses a part of the loop is read without a count and without a crash."""
    text = _counter("s32[]", 0, 10, 1, "LT")
    assert damage[0] in text
    found = calls.visits(hlo_text.parse_module(text.replace(*damage)))
    assert found["body"].executions is None if "body" in found else "nowhere" in damage[1]


# Loops of real compilers


def _work(x):
    return jnp.sin(x @ x)


def _while(start, test, move, dtype=jnp.int32):
    def run(x):
        state = jnp.asarray(start, dtype), x
        return lax.while_loop(lambda c: test(c[0]), lambda c: (move(c[0]), _work(c[1])), state)

    return run


def _scan(length, **options):
    def run(x):
        ws = jnp.broadcast_to(x, (length, 8, 8))
        return lax.scan(lambda c, w: (jnp.sin(c @ w), c[0]), x, ws, **options)

    return run


def _fori(low, high):
    return lambda x: lax.fori_loop(low, high, lambda i, c: _work(c) + i.astype(c.dtype), x)


def _nested(x):
    ws = jnp.broadcast_to(x, (3, 5, 8, 8))
    inner = _first(lambda c, w: jnp.sin(c @ w))
    return lax.scan(_first(lambda c, w: lax.scan(inner, c, w)[0]), x, ws)[0]


def _first(f):
    return lambda c, w: (f(c, w), None)


def _triangle(x):
    return lax.fori_loop(0, 4, lambda i, c: lax.fori_loop(0, i, lambda _, d: _work(d), c), x)


def _branches(x):
    def move(c):
        return lax.cond(c[1][0, 0] > 0, lambda i: i + 1, lambda i: i + 2, c[0]), _work(c[1])

    return lax.while_loop(lambda c: c[0] < 10, move, (jnp.int32(0), x))


def _moving_limit(x):
    state = jnp.int32(0), x, jnp.int32(10)
    return lax.while_loop(lambda c: c[0] < c[2], lambda c: (c[0] + 2, _work(c[1]), c[2] + 1), state)


def _in_branches(x):
    return lax.cond(x[0, 0] > 0, lambda y: _scan(5)(y)[0], lambda y: _scan(6)(y)[0], x)


# By name: the program, and how often the bodies of its loops run; none where there is no loop.
REAL = {
    "scan": (_scan(7), [7]),
    "no_turn": (_scan(0), []),
    "one_turn": (_scan(1), []),
    "reversed": (_scan(11, reverse=True), [11]),
    "unrolled": (_scan(12, unroll=4), [3]),
    "up": (_fori(3, 12), [9]),
    "from_below_zero": (_fori(-5, 6), [11]),
    "backwards": (_fori(7, 3), []),
    "down": (_while(10, lambda i: i > 0, lambda i: i - 1), [10]),
    "down_in_threes": (_while(10, lambda i: i >= 0, lambda i: i - 3), [4]),
    "not_equal": (_while(0, lambda i: i != 12, lambda i: i + 3), [4]),
    "less_or_equal": (_while(0, lambda i: i <= 12, lambda i: i + 5), [3]),
    "swapped": (_while(0, lambda i: jnp.int32(12) > i, lambda i: i + 5), [3]),
    "ahead": (_while(0, lambda i: i + 3 < 12, lambda i: i + 2), [5]),
    "negated": (_while(0, lambda i: ~(i >= 9), lambda i: i + 1), [9]),
    "unsigned": (_while(12, lambda i: i > 0, lambda i: i - 3, jnp.uint32), [4]),
    "bytes": (_while(0, lambda i: i < 200, lambda i: i + 7, jnp.uint8), [29]),
    "wrapping": (_while(0, lambda i: i < 120, lambda i: i + 50, jnp.int8), [None]),
    "doubling": (_while(1, lambda i: i < 100, lambda i: i * 2), [None]),
    "a_float": (_while(0, lambda i: i < 10, lambda i: i + 1, jnp.float32), [None]),
    "nested": (_nested, [3, 15]),
    "triangle": (_triangle, [4, None]),
    "data": (lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, c: _work(c), x), [None]),
    "gradient": (jax.grad(lambda x: _scan(7)(x)[0].sum()), [7, 7]),
    "in_branches": (_in_branches, [5, 6]),
    "one_branch_moves": (_branches, [None]),
    "moving_limit": (_moving_limit, [None]),
    "mapped": (lambda x: lax.map(lambda row: jnp.sin(row @ x), jnp.tile(x, (2, 1))), [16]),
}


def _lowered(device):
    def run(args):
        out = {}
        for name, (f, _) in REAL.items():
            with jax.named_scope(f"loop.{name}"):
                out[name] = f(args[name])
        return out

    place = jax.sharding.SingleDeviceSharding(device)
    args = {name: jax.ShapeDtypeStruct((8, 8), np.float32) for name in REAL}
    return jax.jit(run, in_shardings=place, out_shardings=place).lower(args)


def _bodies(text):
    """How often the body of each loop runs, by the scope in which the loop was written."""
    module = hlo_text.parse_module(text)
    visited = calls.visits(module)
    found = {name: [] for name in REAL}
    for name in visited:
        for one in module.computations[name].instructions:
            if one.opcode == "while":
                scope = re.search(r"loop\.(\w+)", one.op_name)[1]
                found[scope].append(visited[one.callees()["body"][0]].executions)
    return {name: sorted(trips, key=lambda n: (n is None, n)) for name, trips in found.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_loops_of_real_compilers(backend):
    """Each loop that JAX writes has the count that its Python says, without a printed one."""
    if backend == "tpu":
        require_libtpu()
    target = programs.tpu_target() if backend == "tpu" else programs.cpu_target()
    text = _lowered(target.mesh.devices.flat[0]).compile().as_text()
    assert ("known_trip_count" in text) == (backend == "cpu")
    found = _bodies(re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text))
    wanted = {name: trips for name, (_, trips) in REAL.items()}
    assert found == wanted
