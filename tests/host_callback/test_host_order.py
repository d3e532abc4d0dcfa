"""The order of host functions: that of the program, with no data dependence and none dropped."""

import functools

from hypothesis import given, settings, strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from oracle import mesh_of, put
import pytest
from tapped import WAYS, Log, mainly, run, same

import spmd
from spmd import P, host_callback as hcb, pjit

I = np.int32

# One program
#
# Each takes a log and returns a function of one int32; beside it stands what a reader counts by
# hand that is called for the argument 3, and the result.


def straight(log):
    """Taps that nothing depends on, of values that do not depend on one another."""

    def fun(x):
        log.tap("a", x * 2)
        log.tap("b", x)
        log.tap("a", x + 1)
        return x * 5

    return fun


def dead(log):
    """Taps of dead values, of constants and of nothing."""

    def fun(x):
        dropped = log.tap("a", x * 2)
        log.tap("b", dropped + 1)
        log.tap("constant", I(7))
        log.tap("nothing", ())
        return I(1)

    return fun


def equal(log):
    """The same tap of the same value three times: nothing may merge them."""

    def fun(x):
        for _ in range(3):
            x = log.tap("a", x)
        return x

    return fun


def calls_between(log):
    """Calls with results, calls without, and taps."""

    def host(x):
        log.calls.append(("call", x, ()))
        return I(x + 10)

    def mute(x):
        log.calls.append(("mute", x, ()))

    def fun(x):
        log.tap("a", x)
        hcb.call(host, x, result_shape=I(0))  # not used
        log.tap("b", x)
        y = hcb.call(host, x + 1, result_shape=I(0))
        hcb.call(mute, x)
        log.tap("c", y)
        return y

    return fun


def nested(log):
    """Taps before, in and after functions that are jitted, called twice, and jitted again."""

    @jax.jit
    def inner(x):
        log.tap("in", x)
        return x + 1

    @jax.jit
    def outer(x):
        log.tap("before", x)
        y = inner(inner(x))
        log.tap("after", x)
        return y

    return lambda x: outer(outer(x))


def scanned(log):
    """A scan whose carry and outputs do not depend on its taps."""

    def step(c, i):
        log.tap("i", i)
        log.tap("c", c)
        return c + i, None

    def fun(x):
        log.tap("before", x)
        out, _ = lax.scan(step, x, jnp.arange(3, dtype=I))
        log.tap("after", x)
        return out

    return fun


def scanned_backwards(log):
    """A scan from the end, two steps of which are unrolled at a time."""

    def step(c, i):
        log.tap("i", i)
        return c, None

    return lambda x: lax.scan(step, x, jnp.arange(5, dtype=I), reverse=True, unroll=2)[0]


def scanned_never(log):
    """A scan of no step, and loops of none."""

    def fun(x):
        log.tap("before", x)
        x, _ = lax.scan(lambda c, i: (log.tap("never", c), i), x, jnp.zeros(0, I))
        x = lax.fori_loop(I(0), x - 3, lambda i, c: log.tap("never", c + i), x)
        x = lax.while_loop(lambda c: log.tap("p", c) < 0, lambda c: log.tap("never", c), x)
        log.tap("after", x)
        return x

    return fun


def while_both(log):
    """A while that taps in its predicate and in its body."""
    return lambda x: lax.while_loop(
        lambda c: log.tap("predicate", c) < 6, lambda c: log.tap("body", c) + 2, x
    )


def while_dead(log):
    """A while whose predicate and body tap what nothing uses."""

    def predicate(c):
        log.tap("predicate", c[0] * 10)
        return c[0] < 5

    def body(c):
        log.tap("body", c[1])
        return c[0] + 1, c[1] * 2

    return lambda x: lax.while_loop(predicate, body, (x, x))[0]


def fori(log):
    """A loop whose bound is known only when it runs, in one whose bound is known."""

    def inner(i, c):
        log.tap("inner", c)
        return c + i

    def outer(i, c):
        log.tap("outer", c)
        return lax.fori_loop(I(0), i, inner, c)

    return lambda x: lax.fori_loop(I(0), I(3), outer, x)


def branches(log):
    """Both sides of a cond, once each."""

    def one(x, side):
        return lax.cond(side, lambda x: log.tap("yes", x) + 1, lambda x: log.tap("no", x) * 2, x)

    return lambda x: one(one(x, x > 2), x < 2)


def one_sided(log):
    """A cond of which one side taps what it does not return, and the other does nothing."""

    def taps(x):
        log.tap("taken", x)
        return x

    return lambda x: lax.cond(x < 0, taps, lambda x: x, lax.cond(x > 0, taps, lambda x: x, x))


def switched(log):
    """A switch whose index runs from below the first branch to behind the last."""
    made = [functools.partial(lambda i, x: log.tap(f"branch {i}", x + i), I(i)) for i in range(3)]

    def step(c, i):
        return lax.switch(i, made, c), None

    return lambda x: lax.scan(step, x, jnp.arange(-2, 5, dtype=I))[0]


def deep(log):
    """A cond in a while in a scan."""

    def odd(c):
        return log.tap("odd", c) * 3 + 1

    def even(c):
        return log.tap("even", c) // 2

    def step(c, _):
        log.tap("start", c)
        end = lax.while_loop(lambda c: c > 1, lambda c: lax.cond(c % 2 == 1, odd, even, c), c)
        return c - 1, end

    return lambda x: lax.scan(step, x, None, length=2)[0]


def custom_rules(log):
    """Functions with derivatives of their own."""

    @jax.custom_jvp
    def first(x):
        return log.tap("jvp", x) + 1

    @jax.custom_vjp
    def second(x):
        return log.tap("vjp", x) + 1

    first.defjvp(lambda p, t: (first(*p), t[0]))
    second.defvjp(lambda x: (second(x), None), lambda _, ct: (ct,))
    return lambda x: second(first(jax.checkpoint(lambda x: log.tap("remat", x) + 1)(x)))


PROGRAMS = {
    straight: ([("a", 6), ("b", 3), ("a", 4)], 15),
    dead: ([("a", 6), ("b", 7), ("constant", 7), ("nothing", ())], 1),
    equal: ([("a", 3)] * 3, 3),
    calls_between: (
        [("a", 3), ("call", 3), ("b", 3), ("call", 4), ("mute", 3), ("c", 14)],
        14,
    ),
    nested: (
        [("before", 3), ("in", 3), ("in", 4), ("after", 3)]
        + [("before", 5), ("in", 5), ("in", 6), ("after", 5)],
        7,
    ),
    scanned: (
        [("before", 3), ("i", 0), ("c", 3), ("i", 1), ("c", 3), ("i", 2), ("c", 4), ("after", 3)],
        6,
    ),
    scanned_backwards: ([("i", 4), ("i", 3), ("i", 2), ("i", 1), ("i", 0)], 3),
    scanned_never: ([("before", 3), ("p", 3), ("after", 3)], 3),
    while_both: (
        [("predicate", 3), ("body", 3), ("predicate", 5), ("body", 5), ("predicate", 7)],
        7,
    ),
    while_dead: (
        [("predicate", 30), ("body", 3), ("predicate", 40), ("body", 6), ("predicate", 50)],
        5,
    ),
    fori: ([("outer", 3), ("outer", 3), ("inner", 3), ("outer", 3), ("inner", 3), ("inner", 3)], 4),
    branches: ([("yes", 3), ("no", 4)], 8),
    one_sided: ([("taken", 3)], 3),
    switched: (
        [("branch 0", 3)] * 3
        + [("branch 1", 4), ("branch 2", 6), ("branch 2", 8)]
        # the index 4 is that of the last branch too
        + [("branch 2", 10)],
        10,
    ),
    deep: (
        [("start", 3), ("odd", 3), ("even", 10), ("odd", 5), ("even", 16), ("even", 8)]
        + [("even", 4), ("even", 2), ("start", 2), ("even", 2)],
        1,
    ),
    custom_rules: ([("remat", 3), ("jvp", 4), ("vjp", 5)], 6),
}


@pytest.mark.parametrize("way", mainly(WAYS))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program_order(program, way):
    """One program calls the host as a hand count says, in that order, each time that it runs."""
    calls, result = PROGRAMS[program]
    log = Log()
    fun = WAYS[way](program(log))
    for _ in range(2):
        assert run(fun, jnp.asarray(3, I)) == result
        assert log.scalars() == calls


@pytest.mark.slow
def test_two_hundred_taps_of_independent_values():
    """The order holds where the compiler is free to compute the values in any other."""
    log = Log()
    x = np.arange(64, dtype=np.float32)

    @jax.jit
    def fun(x):
        for i in range(200):
            # Costs differ, from nothing to a matrix product.
            y = jnp.outer(x, x) @ x if i % 7 == 3 else x + i
            log.tap(i, y.sum() * 0 + i)
        return x

    run(fun, x)
    assert log.scalars() == [(i, i) for i in range(200)]


# Successive programs


def test_successive_programs_on_one_device():
    """Programs of one device call in the order in which they were started, unwaited for."""
    log = Log()
    small = jax.jit(lambda x: log.tap("small", x) + 1)
    large = jax.jit(lambda x: (log.tap("large", x), (jnp.ones((256, 256)) @ jnp.ones((256, 1)))))
    loop = jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: log.tap("loop", c), x))
    want = []
    for i in range(40):
        small(I(i)), large(I(i)), log.tap("eager", I(i)), loop(I(i))
        want += [("small", i), ("large", i), ("eager", i), ("loop", i), ("loop", i), ("loop", i)]
    assert log.scalars() == want


def test_programs_on_one_and_on_eight_devices_by_turns():
    """A device keeps the order of programs of its own and of programs of all devices."""
    log = Log()
    mesh = mesh_of({"a": 8})
    x = np.arange(8, dtype=I)
    alone = jax.jit(lambda i: log.tap("one", i))
    for all_of in (pjit(lambda x: log.tap("all", x), P("a"), P("a"), mesh=mesh),):
        want = []
        for i in range(12):
            alone(I(i))
            all_of(put(x + i, mesh, P("a")))
            log.tap("eager", I(i))
            want += [("one", i), ("all", (x + i).tolist()), ("eager", i)]
        assert log.scalars() == want


def test_programs_on_several_devices_keep_the_order_of_each():
    """Programs on different devices, from one thread: each device has the order of its own."""
    seen = {d: [] for d in jax.devices()}

    def host(x, transforms, *, device):
        seen[device].append(int(x))

    fun = jax.jit(lambda x: hcb.id_tap(host, x, tap_with_device=True))
    for i in range(64):
        fun(jax.device_put(I(i), jax.devices()[i * 5 % 8]))
    hcb.barrier_wait()
    at = {d: [i for i in range(64) if i * 5 % 8 == n] for n, d in enumerate(jax.devices())}
    assert seen == at


def test_calls_and_taps_of_successive_programs():
    """Calls, for which the device waits, do not overtake the taps of programs before them."""
    log = Log()

    def host(x):
        log.calls.append(("call", x, ()))
        return x

    def fun(x):
        log.tap("tap", x)
        return hcb.call(host, x, result_shape=I(0)) + 1

    fun = jax.jit(fun)
    x = jnp.asarray(0, I)
    for _ in range(30):
        x = fun(x)
    assert x == 30
    assert log.scalars() == [(n, i) for i in range(30) for n in ("tap", "call")]


# Per device


def per_device():
    """A tap that knows its device, and what it was called with by device."""
    seen = {}

    def tap(name, x):
        def host(x, transforms, *, device):
            seen.setdefault(device, []).append((name, x.tolist()))

        return hcb.id_tap(host, x, tap_with_device=True)

    return tap, seen


def by_shard_map(fun):
    """Each of eight devices computes one element of a vector."""
    mesh = mesh_of({"i": 8})
    one = lambda x: fun(x[0])[None]  # noqa: E731 - one expression
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("i"), out_specs=P("i")))


def by_pjit_shard_map(fun):
    """The same `shard_map` in a pjit."""
    mesh = mesh_of({"i": 8})
    one = lambda x: fun(x[0])[None]  # noqa: E731 - one expression
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    return pjit(mapped, P("i"), P("i"), mesh=mesh)


MAPS = {
    "pmap": lambda fun: jax.pmap(fun, axis_name="i"),
    "spmd.pmap": lambda fun: spmd.pmap(fun, axis_name="i"),
    "shard_map": by_shard_map,
    "pjit of shard_map": by_pjit_shard_map,
}


@pytest.mark.parametrize("way", MAPS)
def test_each_device_has_its_own_iterations_and_branches(way):
    """Each device reports the iterations and the branch that it executed, in program order."""
    tap, seen = per_device()

    def fun(x):
        tap("start", x)
        y = lax.while_loop(lambda c: tap("predicate", c) < 4, lambda c: tap("body", c) + 1, x)
        y = lax.cond(x % 2 == 0, lambda y: tap("even", y), lambda y: y, y)
        tap("end", x)
        return y

    x = np.arange(8, dtype=I)
    fun = MAPS[way](fun)
    for _ in range(2):
        same(run(fun, x), np.maximum(x, 4))
    hcb.barrier_wait()
    want = {}
    for i, device in enumerate(jax.devices()):
        counted = [(n, c) for c in range(i, 4) for n in ("predicate", "body")]
        ends = [("predicate", max(i, 4))] + [("even", max(i, 4))] * (i % 2 == 0)
        want[device] = ([("start", i)] + counted + ends + [("end", i)]) * 2
    assert seen == want


@pytest.mark.parametrize("way", MAPS)
def test_taps_between_collectives(way):
    """Taps before, between and after collectives keep the order of each device."""
    tap, seen = per_device()

    def fun(x):
        tap("before", x)
        total = lax.psum(x, "i")
        tap("total", total)
        step = lambda c, _: (lax.ppermute(tap("c", c), "i", [(i, -~i % 8) for i in range(8)]), None)  # noqa: E731 - one expression
        x, _ = lax.scan(step, x, None, length=3)
        tap("after", x)
        return x + total

    x = np.arange(8, dtype=I)
    same(run(MAPS[way](fun), x), np.roll(x, 3) + I(28))
    hcb.barrier_wait()
    for i, device in enumerate(jax.devices()):
        ring = [("c", (i - k) % 8) for k in range(3)]
        assert seen.pop(device) == [("before", i), ("total", 28), *ring, ("after", (i - 3) % 8)]
    assert not seen


# Random programs
#
# A program is a list of statements about one number between 0 and 96: data, which `build` makes a
# JAX function of and `interpret` runs in Python.

NUMBERS = st.integers(0, 96)
#: What a statement may do to the number: ``x * a + b``.
LINES = st.tuples(st.sampled_from([1, 2, 5, 96]), NUMBERS)
SIMPLE = st.one_of(
    st.tuples(st.just("tap"), NUMBERS, LINES),
    st.tuples(st.just("dead"), NUMBERS, LINES),
    st.tuples(st.just("call"), NUMBERS, LINES),
    st.tuples(st.just("set"), LINES),
)


def _compound(statements):
    block = st.lists(statements, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.just("scan"), st.integers(0, 3), block),
        st.tuples(st.just("while"), st.integers(1, 4), block),
        st.tuples(st.just("cond"), st.integers(2, 3), block, st.lists(statements, max_size=2)),
        st.tuples(st.just("switch"), st.integers(-1, 1), st.lists(block, min_size=1, max_size=3)),
        st.tuples(st.sampled_from(["jit", "remat"]), block),
    )


BLOCKS = st.lists(st.recursive(SIMPLE, _compound, max_leaves=8), min_size=1, max_size=4)


def _line(line, x):
    return (x * line[0] + line[1]) % 97


def interpret(block, x, log):
    """Runs a program in Python."""
    for kind, *rest in block:
        x = _INTERPRETED[kind](x, log, *rest)
    return x


def _interpret_tap(x, log, name, line):
    log.append((name, _line(line, x)))
    return x


def _interpret_call(x, log, name, line):
    log.append((-1 - name, _line(line, x)))
    return (_line(line, x) + name) % 97


def _interpret_scan(x, log, length, block):
    for i in range(length):
        x = interpret(block, (x + i) % 97, log)
    return x


def _interpret_while(x, log, bound, block):
    rounds = 0
    while (log.append(("predicate", x)), rounds < (x + bound) % 4)[1]:
        x, rounds = interpret(block, x, log), rounds + 1
    return x


def _interpret_switch(x, log, offset, blocks):
    return interpret(blocks[min(max(x % 4 + offset, 0), len(blocks) - 1)], x, log)


_INTERPRETED = {
    "tap": _interpret_tap,
    "dead": _interpret_tap,
    "call": _interpret_call,
    "set": lambda x, log, line: _line(line, x),
    "scan": _interpret_scan,
    "while": _interpret_while,
    "cond": lambda x, log, n, yes, no: interpret(no if x % n else yes, x, log),
    "switch": _interpret_switch,
    "jit": lambda x, log, block: interpret(block, x, log),
    "remat": lambda x, log, block: interpret(block, x, log),
}


class Builder:
    """Makes JAX functions of programs; `note(name, value, device)` is called on the host."""

    def __init__(self, note):
        self._note = note

    def build(self, block):
        """The function of a block."""

        def fun(x):
            for kind, *rest in block:
                x = getattr(self, f"_{kind}")(x, *rest)
            return x

        return fun

    @functools.cache  # noqa: B019 - a builder lives as long as one example
    def _host(self, name):
        return lambda x, transforms, device: self._note(name, int(x), device)

    @functools.cache  # noqa: B019 - as above
    def _answer(self, name):
        def host(x, device):
            self._note(-1 - name, int(x), device)
            return (x + I(name)) % I(97)

        return host

    def _tap(self, x, name, line):
        y = hcb.id_tap(self._host(name), _line(line, x), tap_with_device=True)
        return x + 0 * y

    def _dead(self, x, name, line):
        hcb.id_tap(self._host(name), _line(line, x), tap_with_device=True)
        return x

    def _call(self, x, name, line):
        answer = self._answer(name)
        return hcb.call(answer, _line(line, x), result_shape=I(0), call_with_device=True)

    def _set(self, x, line):
        return _line(line, x)

    def _scan(self, x, length, block):
        body = self.build(block)
        step = lambda x, i: (body((x + i) % 97), None)  # noqa: E731 - one expression
        return lax.scan(step, x, jnp.arange(length, dtype=I))[0]

    def _while(self, x, bound, block):
        body = self.build(block)

        def predicate(c):
            hcb.id_tap(self._host("predicate"), c[0], tap_with_device=True)
            return c[1] < (c[0] + bound) % 4

        rounds = x * 0  # varies over the devices of a shard_map as x does
        return lax.while_loop(predicate, lambda c: (body(c[0]), c[1] + 1), (x, rounds))[0]

    def _cond(self, x, n, yes, no):
        return lax.cond(x % n == 0, self.build(yes), self.build(no), x)

    def _switch(self, x, offset, blocks):
        return lax.switch(x % 4 + offset, [self.build(b) for b in blocks], x)

    def _jit(self, x, block):
        return jax.jit(self.build(block))(x)

    def _remat(self, x, block):
        return jax.checkpoint(self.build(block))(x)


def check_on_one(block, x, wrap):
    """Asserts that a program calls the host as Python says, twice in a row."""
    seen = []
    fun = wrap(Builder(lambda name, value, device: seen.append((name, value))).build(block))
    want = []
    results = [interpret(block, x, want) for x in (x, 96 - x)]
    got = [fun(jnp.asarray(x, I)) for x in (x, 96 - x)]
    hcb.barrier_wait()
    assert seen == want
    assert [int(g) for g in got] == results


def check_on_each(block, start, wrap):
    """Asserts the same of each of eight devices, all of which start with numbers of their own."""
    devices = jax.devices()
    seen, want = {d: [] for d in devices}, {d: [] for d in devices}
    fun = wrap(Builder(lambda name, value, device: seen[device].append((name, value))).build(block))
    x = (np.arange(8, dtype=I) * 11 + I(start)) % I(97)
    got = run(fun, x)
    hcb.barrier_wait()
    results = [interpret(block, int(v), want[d]) for v, d in zip(x, devices, strict=True)]
    assert seen == want
    assert got.tolist() == results


CHECKS = {
    **{way: functools.partial(check_on_one, wrap=wrap) for way, wrap in WAYS.items()},
    **{way: functools.partial(check_on_each, wrap=wrap) for way, wrap in MAPS.items()},
}


@pytest.mark.few(0)
@pytest.mark.parametrize("way", mainly(CHECKS))
def test_random_programs(way):
    """A random program of taps, calls and control flow calls the host as Python runs it."""

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(BLOCKS, NUMBERS)
    def check(block, start):
        CHECKS[way](block, start)

    check()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("way", CHECKS)
def test_many_random_programs(way):
    """As above, for programs that differ from run to run."""

    @settings(max_examples=40, deadline=None, database=None)
    @given(BLOCKS, NUMBERS)
    def check(block, start):
        CHECKS[way](block, start)

    check()


def test_the_receiver_is_stopped_between_programs():
    """The order holds over stops of the receiver, which wait for what is due."""
    log = Log()
    fun = jax.jit(lambda x: log.tap("t", x))
    for i in range(10):
        fun(I(i))
        if i % 3 == 2:
            hcb.stop_outfeed_receiver()
            assert [v.item() for _, v, _ in log.calls] == [*range(i + 1)]
    assert log.scalars() == [("t", i) for i in range(10)]


def test_permuted_mesh_and_another_caller(mesh):
    """The device that calls for a program on several keeps the order of its own programs too."""
    log = Log()
    order = (3, 1, 7, 5, 0, 2, 6, 4)
    mesh = mesh_of({"a": 2, "b": 4}, order)
    assert isinstance(mesh, spmd.Mesh)
    sixth = jax.devices()[order[6]]
    fun = pjit(lambda x: log.tap("all", x, device_index=6), P("a", "b"), mesh=mesh)
    alone = jax.jit(lambda x: log.tap("one", x))
    x = np.arange(16, dtype=I).reshape(4, 4)
    want = []
    for i in range(6):
        fun(x + i)
        alone(jax.device_put(I(i), sixth))
        want += [("all", (x + i).tolist()), ("one", i)]
    assert log.scalars() == want
